"""A conversation of a million tokens with live commands: `python -m tests.soak --tokens 1000000`.

After every event the cache must be within the budget. Each hundred thousand tokens a line says how
fast reading was and how much memory the process has. At the end the conversation and a new one read
the same words in turn, several times, and their speeds are compared: the machine's own changes are
in both. Recall stays off: its search takes longer as there is more to search.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sirchat import Profile, Session, load_model
from sirchat.errors import SirchatError
from sirchat.models.model import LoadedModel

_POLICIES = ("salience", "entropy", "sink", "window", "random", "reservoir", "knorm", "keydiff")
_WORDS = (  # noqa: SIM905
    "Anna Rome green violin harbour baker 4711 Tuesday meeting lunch the a of my is was and but "
    "we they he she it saw told bought forgot where why when tomorrow yesterday again"
).split()
_BYTES_A_ROW = 200  # of the ledger (56), the turns' texts, and Python's own share
_SLACK = 100 * 2**20
_PAIRS, _PAIR_TOKENS = 7, 8_000


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
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Soak:
    """A conversation, and what was done with it."""

    def __init__(self, model: LoadedModel, seed: int) -> None:
        self._profile = Profile(budget=256, max_new_tokens=20, archive_limit="8MiB", seed=seed)
        self.chat = Session(model, self._profile)
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
        return (self.chat.seen - start) / (time.process_time() - begun)

    def as_at_first(self) -> None:
        """Go back to the settings of the beginning."""
        own = self._profile
        self.chat.switch("soak", policy=own.policy, budget=own.budget, decay=own.decay)


def _compared(old: Soak, new: Soak) -> float:
    """Speed of an old conversation over a new one's: the median of pairs in turn."""
    new.read(_PAIR_TOKENS, random.Random("first"))
    ratios = []
    for number in range(_PAIRS):
        speeds = []
        for one in (old, new) if number % 2 else (new, old):
            one.as_at_first()
            speeds.append(one.read(_PAIR_TOKENS, random.Random(str(number))))
        ratios.append(speeds[0] / speeds[1] if number % 2 else speeds[1] / speeds[0])
    return statistics.median(ratios)


def main() -> None:
    """Run it, and leave with 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100_000)
    asked = parser.parse_args()
    draw, model = random.Random(asked.seed), load_model("tiny")
    soak, resident = Soak(model, asked.seed), list[int]()
    while soak.chat.seen < asked.tokens:
        speed = soak.read(asked.every, draw)
        gc.collect()
        resident.append(_resident_bytes())
        print(  # noqa: T201
            f"{soak.chat.seen:,} tokens: {speed:,.0f} a processor second, "
            f"{resident[-1] / 2**20:,.0f} MiB; {soak.commands} commands, {soak.refused} refused",
            flush=True,
        )
    grown, allowed = resident[-1] - resident[0], _SLACK + _BYTES_A_ROW * soak.chat.seen
    print(f"memory: {grown / 2**20:,.0f} MiB more, allowed {allowed / 2**20:,.0f}")  # noqa: T201
    ratio = _compared(soak, Soak(model, asked.seed))
    print(f"speed over that of a new conversation: {ratio:.3f}")  # noqa: T201
    if grown > allowed or ratio < 1 / 1.05:
        sys.exit(1)


if __name__ == "__main__":
    main()
