"""A conversation of a million tokens with live commands: `python -m tests.soak --tokens 1000000`.

After every event the cache must be within the budget. Each hundred thousand tokens a line says how
fast reading was and how much memory, how many descriptors and threads the process has. At the end
the conversation and a new one read the same words in turn, several times, and their speeds are
compared: the machine's own changes are in both. `--recall words --archive disk --save` adds what a
chat does beside; recall's search takes longer as there is more to search, so that speeds are only
shown then.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sirchat import Profile, Session, load_model
from sirchat.errors import SirchatError
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave

_POLICIES = ("salience", "entropy", "sink", "window", "random", "reservoir", "knorm", "keydiff")
_WORDS = (  # noqa: SIM905
    "Anna Rome green violin harbour baker 4711 Tuesday meeting lunch the a of my is was and but "
    "we they he she it saw told bought forgot where why when tomorrow yesterday again"
).split()
_BYTES_A_ROW = 200  # of the ledger (56), the turns' texts, and Python's own share
_SLACK = 100 * 2**20
_PAIRS = 7


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(3, 120))) + "."


def _command(chat: Session, draw: random.Random) -> None:
    """One of the things that a user does between two messages."""
    match draw.randrange(8):
        case 0 | 1:
            chat.switch("soak", policy=draw.choice(_POLICIES))
        case 2 | 3:
            chat.switch("soak", budget=draw.choice((64, 128, 256, 512)))
        case 4:
            chat.switch("soak", decay=draw.choice((1.0, 0.9, 0.5, "auto")))
        case 5 | 6:
            chat.pin("last")
            chat.pin("last", pinned=False)
        case _:
            chat.undo()


def _turns(chat: Session, draw: random.Random) -> Iterator[Iterable[object]]:
    """The events of one round."""
    if draw.random() < 0.05:
        yield chat.ask(_sentence(draw))
        return
    yield chat.read_user(_sentence(draw))
    yield chat.read_reply(_sentence(draw))


def _check(chat: Session) -> None:
    if chat.resident > chat.budget:
        sys.exit(f"{chat.resident} tokens are held under a budget of {chat.budget}")


def _resident_bytes() -> int:
    """Memory of this process that no file backs: maps of the archive's files do not count."""
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="ascii").splitlines() if status.exists() else ():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _open() -> tuple[int, int]:
    """How many descriptors and threads the process has."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0, threading.active_count()


class Soak:
    """A conversation, and what was done with it; it is saved after every round if `saves`."""

    def __init__(self, model: LoadedModel, profile: Profile, saves: bool) -> None:
        self._profile = profile
        self.chat = Session(model, self._profile)
        self._saving = Autosave(self.chat) if saves else None
        self.commands = self.refused = 0

    def read(self, tokens: int, draw: random.Random) -> float:
        """Go on for so many tokens; tokens a second of processor time."""
        start, begun = self.chat.seen, time.process_time()
        while self.chat.seen < start + tokens:
            for events in _turns(self.chat, draw):
                for _ in events:
                    _check(self.chat)
            if draw.random() < 0.2:
                self.commands += 1
                try:
                    _command(self.chat, draw)
                except SirchatError:
                    self.refused += 1
                _check(self.chat)
            if self._saving is not None:
                self._saving.update()
        return (self.chat.seen - start) / (time.process_time() - begun)

    def as_at_first(self) -> None:
        """Go back to the settings of the beginning."""
        own = self._profile
        self.chat.switch("soak", policy=own.policy, budget=own.budget, decay=own.decay)


def _compared(old: Soak, new: Soak, tokens: int) -> float:
    """Speed of an old conversation over a new one's: the median of pairs in turn."""
    new.read(tokens, random.Random("first"))
    ratios = []
    for number in range(_PAIRS):
        speeds = []
        for one in (old, new) if number % 2 else (new, old):
            one.as_at_first()
            speeds.append(one.read(tokens, random.Random(str(number))))
        ratios.append(speeds[0] / speeds[1] if number % 2 else speeds[1] / speeds[0])
    return statistics.median(ratios)


def main() -> None:
    """Run it, and leave with 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100_000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--pair-tokens", type=int, default=8_000, help="to compare speeds")
    parser.add_argument("--recall", default="off", help="a retriever")
    parser.add_argument("--archive", default="ram", choices=("ram", "disk"))
    parser.add_argument("--save", action="store_true", help="save the chat after every round")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["SIRCHAT_HOME"] = home
        _run(asked)


def _run(asked: argparse.Namespace) -> None:
    profile = Profile(
        budget=256, max_new_tokens=20, archive_limit="8MiB" if asked.archive == "ram" else "64GiB",
        seed=asked.seed, recall=asked.recall, archive=asked.archive,
    )  # fmt: skip
    draw, model = random.Random(asked.seed), load_model(asked.model)
    soak, resident, opened = Soak(model, profile, asked.save), list[int](), list[tuple[int, int]]()
    while soak.chat.seen < asked.tokens:
        speed = soak.read(asked.every, draw)
        gc.collect()
        resident.append(_resident_bytes())
        opened.append(_open())
        print(  # noqa: T201
            f"{soak.chat.seen:,} tokens: {speed:,.0f} a processor second, "
            f"{resident[-1] / 2**20:,.0f} MiB, {opened[-1][0]} descriptors, "
            f"{opened[-1][1]} threads; {soak.commands} commands, {soak.refused} refused",
            flush=True,
        )
    grown, allowed = resident[-1] - resident[0], _SLACK + _BYTES_A_ROW * soak.chat.seen
    print(f"memory: {grown / 2**20:,.0f} MiB more, allowed {allowed / 2**20:,.0f}")  # noqa: T201
    ratio = _compared(soak, Soak(model, profile, asked.save), asked.pair_tokens)
    print(f"speed over that of a new conversation: {ratio:.3f}")  # noqa: T201
    is_slower = asked.recall == "off" and ratio < 1 / 1.05
    if grown > allowed or is_slower or opened[-1] != opened[0]:
        sys.exit(1)


if __name__ == "__main__":
    main()
