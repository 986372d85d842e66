"""The kinds of facts that the user of a synthetic dialogue may tell, read from `facts.yaml`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from sirchat.lab.synthetic.texts import WORDS, load

Draw = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class FactKind:
    """A kind of fact: how its value and subject are drawn, and templates of its messages.

    `acks` are replies to a told fact, `updates` correct it (empty: never corrected); `joins` says
    whether one message may tell it together with another fact.
    """

    key: str
    value: Draw
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    acks: tuple[str, ...]
    updates: tuple[str, ...] = ()
    subject: Draw | None = None
    weight: float = 1.0
    joins: bool = True


def made_up_word(rng: Random) -> str:
    """Make up a random word of two or three syllables that can be pronounced, in lower case."""
    syllables = rng.choice((2, 2, 3))
    word = "".join(
        rng.choice(WORDS["onsets"]) + rng.choice(WORDS["vowels"]) for _ in range(syllables)
    )
    return word + rng.choice(WORDS["codas"])


def item_list(items: list[str]) -> str:
    """Join the items of a list to one text, such as `a`, `a and b`, or `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _pick(pool: str) -> Draw:
    return lambda rng: rng.choice(WORDS[pool])


def _open_name(pool: str, known: str = "0.6") -> Draw:
    """Draws a name from the list with the probability `known`, else a made-up or a common word."""

    def draw(rng: Random) -> str:
        roll = rng.random()
        if roll < float(known):
            return rng.choice(WORDS[pool])
        return (made_up_word(rng) if roll < 0.85 else rng.choice(WORDS["common"])).capitalize()

    return draw


def _digits(count: str) -> Draw:
    return lambda rng: "".join(rng.choice("0123456789") for _ in range(int(count)))


def _secret(rng: Random) -> str:
    return rng.choice(WORDS["common"]) if rng.random() < 0.6 else made_up_word(rng)


def _date(rng: Random) -> str:
    return f"{rng.choice(WORDS['months'])} {rng.randint(1, 28)}"


def _age(rng: Random) -> str:
    return str(rng.randint(5, 99))


def _groceries(rng: Random) -> str:
    return item_list(rng.sample(WORDS["groceries"], rng.choice((1, 2, 2, 3, 3, 4))))


def _story(rng: Random) -> str:
    """The plot of a story, a deed and a place; its hero is the fact's subject."""
    return f"{rng.choice(WORDS['deeds'])} {rng.choice(WORDS['places'])}"


_DRAWS: dict[str, Draw] = {
    "secret": _secret, "date": _date, "age": _age, "groceries": _groceries, "story": _story
}  # fmt: skip
_POOLED: dict[str, Callable[..., Draw]] = {
    "pick": _pick, "open_name": _open_name, "digits": _digits
}  # fmt: skip


def _draw(written: str) -> Draw:
    """The function that `facts.yaml` writes as `date` or `open_name cities 0.75`."""
    name, *arguments = written.split()
    return _POOLED[name](*arguments) if arguments else _DRAWS[name]


def _kind(entry: dict[str, Any]) -> FactKind:
    entry = {name: tuple(one) if isinstance(one, list) else one for name, one in entry.items()}
    draws: dict[str, Any] = {
        name: _draw(entry[name]) for name in ("value", "subject") if name in entry
    }
    return FactKind(**entry | draws)


*_kinds, STORY = map(_kind, load("facts"))
KINDS: tuple[FactKind, ...] = tuple(_kinds)
