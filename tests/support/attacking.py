"""Runs a parser or a command on many random inputs, and says which of them hurt it.

Each input is made from a seed of its own, so that a failure can be had again:
`SIRCHAT_ATTACK_FROM=SEED SIRCHAT_ATTACK=1`. Without these variables each test tries a few.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import signal
import socket
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from sirchat.errors import SirchatError
from sirchat.memory.free_memory import trim_memory

SECONDS = 5.0  # most processor time that one input may take: a busy machine makes nothing slow

# Most seconds that one input may take by the clock, in which it may wait for something.
HANGS = 60.0

# Most bytes that the process may grow by while it reads one input; checked in large runs.
GROWTH = 200 * 2**20

MANY = int(os.environ.get("SIRCHAT_ATTACK", "0"))
FIRST = int(os.environ.get("SIRCHAT_ATTACK_FROM", "0"))
_MOST_SHOWN = 20  # different failures of one run

# Texts that parsers have failed at, or might.
ODD_TEXTS = [
    "", " ", "\0", "\x1b[31m", "\x9b2J", "\r", "\u2028", "\ufeff", "\ud800", "\udcff", "é" * 50,
    "\U0001f469\u200d\U0001f467", "<|en#d|>", "<|im_end|>", "</s>", "١٢٣", "0x1f", "1e999", "-1",
    "1" * 5000, "nan", ".inf", "null", "~", "true", "[" * 3000, "{" * 3000, "a" * 5000, "..",
    "../../etc/passwd", "/dev/zero", "%s%n", "{0}", "{{ 1 }}", "*a", "&a", "!!float ''", "'", '"',
    "\\", "--yes", "last", "turn 1", "turn 99999999999999999999", "auto", "none", "1,000", "-0",
    "5e-324", "1e308", str(2**63), str(10**30), "0.1.2", "a=b", "=", "a=1,b=2", "{a: 1}", "..a:b",
    "os:system", ":", "a:b", "x" * 300, "\u202e", "\t\t", "\n\n", "true\n", "# no",
]  # fmt: skip


# Values that readers of JSON have failed at, or might.
ODD_JSON: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 64, 4095, 2**31 - 1, 2**32, 10**9, 10**12, 2**63, 10**30,
    0.5, 1.5, 1e30, 1e308, float("nan"), float("inf"), "", "x", "user", [], [0], [-1], [0, 0],
    [10**12], [10**30], [1.5], ["a"], [None], [[1]], {}, {"a": 1}, {"": {}}, list(range(50)),
]  # fmt: skip

# What a terminal might obey, but line breaks and tabs.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class TooSlow(BaseException):
    """An input took more time than it may; no `except Exception` hides it."""


def attack(act: Callable[[Random], object], few: int = 1, seconds: float = SECONDS) -> None:
    """Call `act` with a random generator for each input, and fail with what went wrong.

    `few` inputs, or as many as `SIRCHAT_ATTACK` says. Allowed to come out are a return, and a
    SirchatError of one line without control characters; in `seconds` of processor time, and without
    growth of memory.
    """
    wrong: dict[str, str] = {}
    start = _resident()
    for seed in range(FIRST, FIRST + (MANY or few)):
        problem = _problem(act, Random(seed), seconds)
        if MANY and not problem and _resident() - start > GROWTH:
            gc.collect()
            trim_memory()  # what is only not given back yet has not grown
            if (grown := _resident() - start) > GROWTH:
                problem, start = f"{grown >> 20} MiB more memory", _resident()
        if problem:
            wrong.setdefault(problem, f"seed {seed}: {problem}")
        if len(wrong) == _MOST_SHOWN:
            break
    if wrong:
        pytest.fail("\n".join(wrong.values()), pytrace=False)


def apart(
    act: Callable[[Random], object], seconds: float, size: int = 2**30
) -> Callable[[Random], None]:
    """`act` in a process of its own, which native code may end, hold up or fill: for `attack`.

    It may take so many bytes more than this process, and print no traceback.
    """

    def act_apart(random: Random) -> None:
        with tempfile.TemporaryFile() as said:
            if (child := os.fork()) == 0:
                try:
                    os.dup2(said.fileno(), 2)
                    with Path("/proc/self/status").open() as status:
                        (used,) = (int(line.split()[1]) for line in status if "VmData" in line)
                    resource.setrlimit(resource.RLIMIT_DATA, (1024 * used + size,) * 2)
                    resource.setrlimit(resource.RLIMIT_CPU, (2 + int(seconds),) * 2)
                    problem = _problem(act, random, seconds)
                except BaseException as error:
                    problem = repr(error)
                os.write(2, f"problem: {problem}".encode(errors="replace"))
                os._exit(bool(problem))
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            shown = said.read().decode(errors="replace")
            if ended or "Traceback" in shown:
                raise ValueError(f"exit {ended}: {shown.rpartition('problem: ')[2][-300:]}")

    return act_apart


def refuse_odd_display(shown: str) -> None:
    """Raise ValueError for text with what a terminal could obey: controls but \\n and \\t."""
    if controls := {one for one in shown if unicodedata.category(one) == "Cc"} - {"\n", "\t"}:
        raise ValueError(f"shown unfiltered: {sorted(controls)!r}")


def odd_text(random: Random, most: int = 3) -> str:
    """Some of the `ODD_TEXTS`, or random characters."""
    if random.random() < 0.3:
        return "".join(
            chr(random.choice((random.randrange(128), random.randrange(0x11000))))
            for _ in range(random.randrange(12))
        )
    return "".join(random.choices(ODD_TEXTS, k=random.randint(1, most)))


def odd_json(random: Random, value: Any) -> Any:
    """A JSON value one part of which, at any depth, is another, or is not there."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return value | {key: odd_json(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.6:
        at = random.randrange(len(value))
        return [*value[:at], odd_json(random, value[at]), *value[at + 1 :]]
    made = random.choice([*ODD_JSON, odd_text(random, 1), value])
    for _ in range(random.choice((10, 400)) if random.random() < 0.05 else 0):
        made = [made] if random.random() < 0.5 else {"a": made}
    return made


def mutated(random: Random, data: bytes, most: int = 4) -> bytes:
    """`data` with some bytes flipped, cut, swapped, repeated, or replaced by odd ones."""
    changed = bytearray(data)
    for _ in range(random.randint(1, most)):
        at, end = sorted(random.randrange(len(changed) + 1) for _ in range(2))
        end = min(end, at + random.choice((1, 4, 8, 64, 4096)))
        match random.randrange(7):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << random.randrange(8)
            case 1 if changed:
                changed[min(at, len(changed) - 1)] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                changed[at:end] = random.choice((b"\0", b"\xff")) * (end - at)
            case 3:
                del changed[at:end]
            case 4:
                changed[at:at] = changed[at:end]
            case 5:
                other = random.randrange(len(changed) + 1)
                changed[at:end] = changed[other : other + end - at]
            case _:
                del changed[at if random.random() < 0.2 else len(changed) :]
    return bytes(changed)


_SPARSE = 10 * 2**30  # bytes
_FOREIGN = 65534  # a user


def _socket(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_RDONLY)  # a socket's path may be short only
    listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)
    listener.close()


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_SPARSE)


def _circle(path: Path) -> None:
    path.symlink_to(path.with_name(f"{path.name}.other"))
    path.with_name(f"{path.name}.other").symlink_to(path)


def _linked_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


# What may stand in the place of a file, and how it is made.
THINGS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "huge": _huge,
    "circle": _circle,
    "link to itself as a folder": _linked_to("."),
    "broken link": _linked_to("nowhere"),
    "zero": _linked_to("/dev/zero"),
    "random": _linked_to("/dev/urandom"),
    "full": _linked_to("/dev/full"),
    "memory": _linked_to("/proc/self/mem"),
}


def harm(random: Random, place: Path) -> str:
    """Change a file or folder, forbid it, give it away, or put another thing there; says what."""
    kind = random.choice(
        [
            "remove",
            "empty",
            "forbid",
            "forbid",
            "give away",
            *THINGS,
            *["change"] * 8 * place.is_file(),
        ]
    )
    if kind == "forbid":
        place.chmod(random.choice((0, 0o100, 0o200, 0o400, 0o500)))
    elif kind == "give away" and os.geteuid() == 0:
        os.chown(place, _FOREIGN, _FOREIGN)
    elif kind == "give away":
        place.chmod(0o777)
    elif kind == "change":
        rewrite(place, mutated(random, place.read_bytes()))
    else:
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        if kind != "remove":
            THINGS.get(kind, Path.touch)(place)
    return f"{kind} {place.name}"


def rewrite(path: Path, data: bytes) -> None:
    """Put another file, which is the user's alone, in the place of this one."""
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)


def _problem(act: Callable[[Random], object], random: Random, seconds: float) -> str:
    """What is wrong with an input; empty if nothing is."""
    started = time.process_time()
    try:
        with _alarm(seconds):
            act(random)
    except SirchatError as error:
        text = str(error)
        try:
            text.encode()
            refuse_odd_display(text)
        except ValueError as odd:
            return f"message {text[:200]!r}: {odd}"
        if "\n" in text or len(text) > 2000:
            return f"a long message: {text[:300]!r}"
    except TooSlow:
        return "takes too long"
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        place = next(
            (
                one
                for one in reversed(traceback.extract_tb(error.__traceback__))
                if "/sirchat/" in one.filename
            ),
            last,
        )
        return f"{type(error).__name__} at {place.filename}:{place.lineno}: {str(error)[:2000]!r}"
    return "takes too long" if time.process_time() - started > seconds else ""


@contextmanager
def _alarm(most: float) -> Iterator[None]:
    """Raise TooSlow if the block takes more processor time than `most`, or too long by the clock.

    That is `HANGS`, or more in the same ratio to `SECONDS`.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    clocks = (
        (signal.ITIMER_PROF, signal.SIGPROF, most),
        (signal.ITIMER_REAL, signal.SIGALRM, HANGS / SECONDS * most),
    )
    before = [signal.signal(number, ring) for _, number, _ in clocks]
    try:
        for clock, _, seconds in clocks:
            signal.setitimer(clock, seconds)
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def _resident() -> int:
    """The most bytes of memory that this process has had, or has, if the system says only that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
