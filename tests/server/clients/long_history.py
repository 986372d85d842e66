"""A history of 1 MB in 10,000 messages: `python -m tests.server.clients.long_history [-m MODEL]`.

Starts `sirchat serve`. Says when the first byte comes, how long others wait for their replies
meanwhile, how much memory is used beside that of a chat that reads the same, and how soon SIGTERM
ends it all, after `--seconds` in the middle of the history.
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

CHARACTERS = 100  # of a message
SETTINGS: dict[str, Any] = {"policy": "sink", "budget": 1024}


def ask(address: str, messages: list[dict[str, str]], **fields: Any) -> HTTPResponse:
    """The response to a request."""
    connection = HTTPConnection(address, timeout=600)
    body = json.dumps({"messages": messages, "max_tokens": 8, "temperature": 0, **fields})
    connection.request("POST", "/v1/chat/completions", body)
    return connection.getresponse()


def history(count: int) -> list[dict[str, str]]:
    """So many messages, the last one of the user if the number is odd."""
    words = "The sheep of the valley graze. " * 4
    return [
        {"role": ("user", "assistant")[n % 2], "content": f"{n} {words}"[:CHARACTERS]}
        for n in range(count)
    ]


def peak(process: int | str) -> float:
    """The most memory that a process has used, in MB."""
    status = Path(f"/proc/{process}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def read_in_chat(model: str, count: int) -> None:
    """Read the history in a chat of this process, and print its peak memory and seconds."""
    from sirchat.chat.session import Session
    from sirchat.config.profile import Profile
    from sirchat.models.load import load_model_of

    profile = Profile(model=model, **SETTINGS)
    session, begun = Session(load_model_of(profile), profile), time.monotonic()
    for message in history(count):
        is_user = message["role"] == "user"
        list((session.read_user if is_user else session.read_reply)(message["content"]))
    sys.stdout.write(f"{peak('self'):.0f} {time.monotonic() - begun:.1f}\n")


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("--messages", type=int, default=9_999)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--chat", action="store_true", help="only read in a chat")
    flags = parser.parse_args()
    if flags.chat:
        read_in_chat(flags.model, flags.messages)
        return
    asked = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sirchat", "serve", "-m", flags.model, "--no-save", *asked]
    command += ["--port", "0"]
    home = os.environ | {"SIRCHAT_HOME": tempfile.mkdtemp()}
    server = subprocess.Popen(command, env=home, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[4].removeprefix("http://").removesuffix("/v1")
    short = [{"role": "user", "content": "Hello."}]
    told: dict[str, Any] = {"first": None, "replied": None, "comments": 0, "end": None}
    begun = time.monotonic()

    def read_long() -> None:
        response = ask(address, history(flags.messages), stream=True)
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
    used = peak(server.pid)
    ended = time.monotonic()
    server.send_signal(signal.SIGTERM)
    code = server.wait()
    sys.stdout.write(
        f"{told}\n{len(waits)} replies for others: median {statistics.median(waits):.2f} s, "
        f"longest {max(waits):.2f} s\nmemory: {used:.0f} MB\n"
        f"SIGTERM ended it with {code} in {time.monotonic() - ended:.2f} s\n"
    )


if __name__ == "__main__":
    main()
