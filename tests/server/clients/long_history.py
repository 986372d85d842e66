"""A history of 1 MB in 10,000 messages: `python -m tests.server.clients.long_history [-m MODEL]`.

Starts `sirchat serve`. Says when the first byte comes, how long others wait for their replies
meanwhile, how much memory is used beside that of a short chat, and how soon SIGTERM ends it all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

MESSAGES, CHARACTERS = 9_999, 100


def ask(address: str, messages: list[dict[str, str]], **fields: Any) -> HTTPResponse:
    """The response to a request."""
    connection = HTTPConnection(address, timeout=600)
    body = json.dumps({"messages": messages, "max_tokens": 8, "temperature": 0, **fields})
    connection.request("POST", "/v1/chat/completions", body)
    return connection.getresponse()


def peak(process: subprocess.Popen[str]) -> float:
    """The most memory that a process has used, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=60)
    flags = parser.parse_args()
    asked = ["--policy", "sink", "--budget", "1024", "--port", "0", "--no-save"]
    command = [sys.executable, "-m", "sirchat", "serve", "-m", flags.model, *asked]
    home = os.environ | {"SIRCHAT_HOME": tempfile.mkdtemp()}
    server = subprocess.Popen(command, env=home, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[4].removeprefix("http://").removesuffix("/v1")
    short = [{"role": "user", "content": "Hello."}]
    chat = [{"role": "user", "content": ("Sheep graze. " * 400)}]  # longer than the budget
    ask(address, chat).read()
    before = peak(server)
    words = "The sheep of the valley graze. " * 4
    long = [
        {"role": ("user", "assistant")[n % 2], "content": f"{n} {words}"[:CHARACTERS]}
        for n in range(MESSAGES)
    ]
    told: dict[str, Any] = {"first": None, "replied": None, "comments": 0, "end": None}
    begun = time.monotonic()

    def read_long() -> None:
        response = ask(address, long, stream=True)
        for line in response:
            told["first"] = told["first"] or time.monotonic() - begun
            told["comments"] += line.startswith(b":")
            if line.startswith(b"data: {"):
                said = json.loads(line.removeprefix(b"data: "))
                if "error" in said or said["choices"][0]["finish_reason"]:
                    told["replied"] = time.monotonic() - begun
                    told["end"] = said.get("error") or said["choices"][0]["finish_reason"]

    threading.Thread(target=read_long, daemon=True).start()
    waits = []
    while time.monotonic() - begun < flags.seconds and not told["replied"]:
        one = time.monotonic()
        ask(address, short).read()
        waits.append(time.monotonic() - one)
        time.sleep(0.2)
    used = peak(server)
    ended = time.monotonic()
    server.send_signal(signal.SIGTERM)
    code = server.wait()
    print_ = sys.stdout.write
    print_(f"{told}\n")
    print_(
        f"others' replies: median {statistics.median(waits):.2f} s, longest {max(waits):.2f} s\n"
    )
    print_(f"memory: {before:.0f} MB, then {used:.0f} MB: {used / before:.2f}\n")
    print_(f"SIGTERM ended it with {code} in {time.monotonic() - ended:.2f} s\n")


if __name__ == "__main__":
    main()
