"""A client that sends the whole history each time: `python -m tests.resend --turns 200`.

It starts `sirchat serve` and talks to it over HTTP. At the end a line says how long the first token
took at the beginning and at the end of the conversation, and how many tokens were read then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

_NEAR = 4  # turns on each side, over which the median is taken


def first_token(address: str, messages: list[dict[str, str]]) -> tuple[float, str, Any]:
    """Seconds until the first piece of the reply, its whole text, and the usage."""
    connection = HTTPConnection(address)
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    seconds, text, usage = 0.0, "", None
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        usage = chunk.get("usage") or usage
        piece = "".join(one["delta"].get("content", "") for one in chunk["choices"])
        if piece and not text:
            seconds = time.perf_counter() - start
        text += piece
    return seconds, text, usage


def main() -> None:
    """Talk, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200, help="the client's messages")
    parser.add_argument(
        "--early", type=int, default=5, help="the turn to compare the last one with"
    )
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between two turns")
    options, flags = parser.parse_known_args()
    flags = [*flags, "--port", "0", "--max-new-tokens", "16"]
    with (
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(
            [sys.executable, "-m", "sirchat", "serve", *flags],
            env=os.environ | {"SIRCHAT_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        address = urlsplit(server.stdout.readline().split()[4]).netloc
        messages: list[dict[str, str]] = []
        took, new = [], []
        for number in range(options.turns):
            messages.append({"role": "user", "content": f"Tell me about day {number} of the trip."})
            seconds, text, usage = first_token(address, messages)
            messages.append({"role": "assistant", "content": text})
            took.append(seconds)
            time.sleep(options.pause)
            new.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        server.terminate()
    early, late = took[max(0, options.early - _NEAR) : options.early + _NEAR], took[-2 * _NEAR :]
    for name, of in (("median", statistics.median), ("fastest", min)):
        before, after = 1000 * of(early), 1000 * of(late)
        sys.stdout.write(
            f"first token, {name}: {before:.1f} ms at turn {options.early}, {after:.1f} ms at turn "
            f"{options.turns}: {after / before:.2f} times as long\n"
        )
    sys.stdout.write(f"tokens read at the last turn: {new[-1]} of {usage['prompt_tokens']}\n")


if __name__ == "__main__":
    main()
