"""Clients of one server: `python -m tests.many_clients --clients 4 -m smollm2`.

It starts `sirchat serve`, or uses the one at `--address`, and says how many tokens all clients got
per second while all were getting some, each in a conversation of its own. With `--minutes`, the
clients go on for so long, and `--leaving` of them leave in the middle of each reply: each complete
reply must be the one that a client alone gets, and the memory must not grow. With `--turns`, one
client sends the whole history each time, and its first tokens are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_STORIES = [f"Tell me a long story about {what}." for what in ("Rome", "bees", "a boat", "snow")]
_EARLY, _NEAR = 5, 4  # turns: the one to compare with, and how many around it
_PAUSE = 0.03  # seconds between two turns
_PARTS = 8  # of the time: after each, the memory is measured


def chunks(address: str, messages: list[dict[str, str]], **fields: Any) -> Generator[Any]:
    """The chunks of a streamed reply; none if the server has too many requests."""
    connection = HTTPConnection(address, timeout=300)
    body = {"messages": messages, "stream": True, "temperature": 0, **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    try:
        for line in response if response.status != 429 else ():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def text_of(chunk: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


class Clients:
    """What several clients got: when each got tokens, and the complete replies to each question."""

    def __init__(self, address: str, most: int) -> None:
        self._address, self._most = address, most
        self.times: dict[int, list[float]] = {}
        self.replies: dict[str, set[str]] = {}
        self.refused = self.left = self.complete = 0
        self._lock = threading.Lock()

    def ask(self, number: int, question: str, pieces: int = sys.maxsize) -> None:
        """Ask for a reply, and leave after so many pieces of it."""
        text, times = "", list[float]()
        messages = [{"role": "user", "content": question}]
        reply = chunks(self._address, messages, max_tokens=self._most)
        for chunk in reply:
            text += text_of(chunk)
            times.append(time.perf_counter())
            if len(times) > pieces:
                break
        reply.close()
        if not times:
            time.sleep(0.1)
        with self._lock:
            self.times[number] = times[1:]  # the first one has no text
            self.refused += not times
            self.left += len(times) > pieces
            if 0 < len(times) <= pieces:
                self.complete += 1
                self.replies.setdefault(question, set()).add(text)

    def run(self, count: int, leaving: int = 0, seconds: float = 0) -> None:
        """Let `count` clients ask, once, or for some seconds."""
        end = time.monotonic() + seconds

        def talk(number: int) -> None:
            draw = random.Random(number)
            while True:
                question = _STORIES[draw.randrange(len(_STORIES)) if seconds else number % 4]
                pieces = draw.randint(1, 20) if number < leaving else sys.maxsize
                self.ask(number, question, pieces)
                if time.monotonic() > end:
                    break

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together, while all of them were getting some."""
        start = max(times[0] for times in self.times.values())
        end = min(times[-1] for times in self.times.values())
        inside = sum(start < at <= end for times in self.times.values() for at in times)
        return inside / (end - start)


@contextmanager
def _serving(flags: list[str]) -> Iterator[tuple[str, int]]:
    """Context manager: a server; yields its address and its process id."""
    with (
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(
            [sys.executable, "-m", "sirchat", "serve", *flags, "--port", "0"],
            env=os.environ | {"SIRCHAT_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        yield urlsplit(server.stdout.readline().split()[4]).netloc, server.pid
        server.terminate()


def _soak(address: str, process: int, options: argparse.Namespace) -> str:
    def resident() -> float:  # MiB
        status = Path(f"/proc/{process}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    alone, together = Clients(address, options.tokens), Clients(address, options.tokens)
    for question in _STORIES:
        alone.ask(0, question)
    memory: list[float] = []
    seconds = 60 * options.minutes
    for part in range(1, _PARTS):
        threading.Timer(seconds * part / _PARTS, lambda: memory.append(resident())).start()
    together.run(options.clients, options.leaving, seconds)
    wrong = [text for text, replies in together.replies.items() if replies != alone.replies[text]]
    return (
        f"{together.complete} replies, {len(wrong)} questions with another reply than alone; "
        f"{together.left} left by their client, {together.refused} refused with 429; MiB each "
        f"{_PARTS}th of the time: {', '.join(f'{size:.0f}' for size in (*memory, resident()))}"
    )


def _resend(address: str, turns: int) -> str:
    messages: list[dict[str, str]] = []
    seconds = list[float]()  # to the first token
    for number in range(turns):
        messages.append({"role": "user", "content": f"Tell me about day {number} of the trip."})
        start, text, usage = time.perf_counter(), "", dict[str, Any]()
        for chunk in chunks(
            address, messages, max_tokens=16, stream_options={"include_usage": True}
        ):
            if text_of(chunk) and not text:
                seconds.append(time.perf_counter() - start)
            text += text_of(chunk)
            usage = chunk.get("usage") or usage
        messages.append({"role": "assistant", "content": text})
        time.sleep(_PAUSE)
    early, late = map(statistics.median, (seconds[_EARLY - _NEAR : _EARLY + _NEAR], seconds[-8:]))
    new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return (
        f"first token: {1000 * early:.1f} ms at turn {_EARLY}, {1000 * late:.1f} ms at {turns}; "
        f"tokens read at the last turn: {new} of {usage['prompt_tokens']}"
    )


def main() -> None:
    """Let the clients ask, and print what they got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4, help="how many at a time")
    parser.add_argument("--tokens", type=int, default=64, help="the most in a reply")
    parser.add_argument("--minutes", type=float, default=0, help="for which they go on")
    parser.add_argument("--leaving", type=int, default=0, help="clients that leave each reply")
    parser.add_argument("--turns", type=int, default=0, help="of one client")
    parser.add_argument("--address", default="", help="host and port of a server that runs")
    options, flags = parser.parse_known_args()

    def speed(address: str) -> str:
        clients = Clients(address, options.tokens)
        clients.run(options.clients)
        return f"{options.clients} clients: {clients.speed:.1f} tokens/s"

    if options.address:
        said = speed(options.address)
    elif options.turns:
        with _serving(flags) as (address, _):
            said = _resend(address, options.turns)
    elif options.minutes:
        with _serving(flags) as (address, process):
            said = _soak(address, process, options)
    else:  # else all but a few of many clients would wait
        with _serving([*flags, "--conversations", str(options.clients)]) as (address, _):
            said = speed(address)
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main()
