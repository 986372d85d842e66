"""Many clients of one server: `python -m tests.many_clients --clients 4 -m smollm2`.

It starts `sirchat serve`, or uses the one at `--address`. Each client asks for one reply after the
other, each in a new conversation. At the end a line says how many tokens all of them got per
second, in the time in which all were getting some. With `--minutes`, the clients go on for so long,
and `--leaving` of them leave in the middle of each reply: each complete reply must be the one that
a client alone gets, and the memory must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

_STORIES = [f"Tell me a long story about {what}." for what in ("Rome", "bees", "a boat", "snow")]


class Clients:
    """What several clients got.

    Attributes:
        times: for each client, when it got a token.
        replies: the complete replies to each question.
        refused: how many requests got status 429.
    """

    def __init__(self, address: str, most: int) -> None:
        self._address, self._most = address, most
        self.times: dict[int, list[float]] = {}
        self.replies: dict[str, set[str]] = {}
        self.refused = self.left = self.complete = 0
        self._lock = threading.Lock()

    def ask(self, number: int, question: str, pieces: int = sys.maxsize) -> None:
        """Ask for a reply, and leave after so many pieces of it."""
        connection = HTTPConnection(self._address, timeout=300)
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": self._most}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response, text, times = connection.getresponse(), "", list[float]()
        if response.status == 429:
            connection.close()
            with self._lock:
                self.refused += 1
            time.sleep(0.1)
            return
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                text += "".join(one["delta"].get("content") or "" for one in choices)
                times.append(time.perf_counter())
            if len(times) > pieces:
                break
        connection.close()
        with self._lock:
            self.times[number] = times[1:]  # the first one has no text
            if len(times) > pieces:
                self.left += 1
            else:
                self.complete += 1
                self.replies.setdefault(question, set()).add(text)

    def run(self, count: int, leaving: int, seconds: float) -> None:
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
        for one in threads:
            one.start()
        for one in threads:
            one.join()

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
    with tempfile.TemporaryDirectory() as home:
        server = subprocess.Popen(
            [sys.executable, "-m", "sirchat", "serve", *flags, "--port", "0"],
            env=os.environ | {"SIRCHAT_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
        )
        with server:
            assert server.stdout is not None
            yield urlsplit(server.stdout.readline().split()[4]).netloc, server.pid
            server.terminate()


def _resident(process: int) -> float:
    """Memory of a process, in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _soak(address: str, process: int, options: argparse.Namespace) -> None:
    alone, together = Clients(address, options.tokens), Clients(address, options.tokens)
    for question in _STORIES:
        alone.ask(0, question)
    memory = [0.0, 0.0]
    timer = threading.Timer(10, lambda: memory.insert(0, _resident(process)))
    timer.start()
    together.run(options.clients, options.leaving, 60 * options.minutes)
    memory[1] = _resident(process)
    wrong = [one for one, found in together.replies.items() if found != alone.replies[one]]
    sys.stdout.write(
        f"{together.complete} replies, {len(wrong)} questions with another reply than alone; "
        f"{together.left} left by their client, {together.refused} refused with 429; memory "
        f"{memory[0]:.0f} MiB after 10 s, {memory[1]:.0f} MiB at the end\n"
    )


def main() -> None:
    """Let the clients ask, and print what they got."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4, help="how many at a time")
    parser.add_argument("--tokens", type=int, default=64, help="the most in a reply")
    parser.add_argument("--minutes", type=float, default=0, help="for which they go on")
    parser.add_argument("--leaving", type=int, default=0, help="clients that leave each reply")
    parser.add_argument("--address", default="", help="host and port of a server that runs")
    options, flags = parser.parse_known_args()
    if options.address:
        clients = Clients(options.address, options.tokens)
        clients.run(options.clients, 0, 0)
        sys.stdout.write(f"{options.clients} clients: {clients.speed:.1f} tokens/s\n")
        return
    if not options.minutes:  # else all but a few of many clients wait
        flags = [*flags, "--conversations", str(options.clients)]
    with _serving(flags) as (address, process):
        if options.minutes:
            _soak(address, process, options)
        else:
            clients = Clients(address, options.tokens)
            clients.run(options.clients, 0, 0)
            sys.stdout.write(f"{options.clients} clients: {clients.speed:.1f} tokens/s\n")


if __name__ == "__main__":
    main()
