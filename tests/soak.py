"""A conversation of a million tokens with live commands: `python -m tests.soak --tokens 1000000`.

After every event the cache must be within the budget. Each hundred thousand tokens a line says how
fast reading was and how much memory the process has; at the end they are compared. The last of them
have the words and commands of the first, so that their speeds can be. Recall stays off: its search
takes longer as there is more to search.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from sirchat import Profile, Session, load_model
from sirchat.errors import SirchatError

_POLICIES = ("salience", "entropy", "sink", "window", "random", "reservoir", "knorm", "keydiff")
_WORDS = (  # noqa: SIM905
    "Anna Rome green violin harbour baker 4711 Tuesday meeting lunch the a of my is was and but "
    "we they he she it saw told bought forgot where why when tomorrow yesterday again"
).split()
_BYTES_A_ROW = 200  # of the ledger (56), the turns' texts, and Python's own share
_SLACK = 100 * 2**20


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


def main() -> None:
    """Run it, and leave with 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100_000)
    asked = parser.parse_args()
    draw, last = random.Random(asked.seed), asked.tokens // asked.every - 1
    profile = Profile(budget=256, max_new_tokens=20, archive_limit="8MiB", seed=asked.seed)
    chat = Session(load_model("tiny"), profile)
    found: list[tuple[float, int]] = []
    commands, refused, begun, start = 0, 0, 0, time.process_time()
    while chat.seen < asked.tokens:
        for events in _turns(chat, draw):
            for _ in events:
                _check(chat)
        if draw.random() < 0.2:
            commands += 1
            with suppress(SirchatError):
                refused += 1
                _command(chat, draw)
                refused -= 1
            _check(chat)
        if chat.seen >= (len(found) + 1) * asked.every:
            gc.collect()
            seconds = time.process_time() - start
            found.append(((chat.seen - begun) / seconds, _resident_bytes()))
            print(  # noqa: T201
                f"{chat.seen:,} tokens: {found[-1][0]:,.0f} a processor second, "
                f"{found[-1][1] / 2**20:,.0f} MiB; {commands} commands, {refused} refused",
                flush=True,
            )
            if len(found) == last:
                draw.seed(asked.seed)
                chat.switch(
                    "soak", policy=profile.policy, budget=profile.budget, decay=profile.decay
                )
            begun, start = chat.seen, time.process_time()
    grown = found[-1][1] - found[0][1]
    allowed = _SLACK + _BYTES_A_ROW * chat.seen
    print(f"speed at the end over the beginning: {found[-1][0] / found[0][0]:.2f}")  # noqa: T201
    print(f"memory: {grown / 2**20:,.0f} MiB more, allowed {allowed / 2**20:,.0f}")  # noqa: T201
    if grown > allowed:
        sys.exit(1)


if __name__ == "__main__":
    main()
