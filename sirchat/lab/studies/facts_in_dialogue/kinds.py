"""Kinds of facts that a user may tell in a chat, read from `kinds.yaml`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

Values = Callable[[Random], str]


@dataclass(frozen=True)
class Kind:
    """One kind of fact: sentences that tell, ask for, answer and correct it.

    `{v}` stands for the value, drawn by `values`, and `{who}` for one of `who`. A kind without the
    sentence `corrected` is never corrected.
    """

    name: str
    told: tuple[str, ...]
    asked: tuple[str, ...]
    answer: str
    values: Values
    who: tuple[str, ...] = ("",)
    corrected: str = ""


_file = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
_LISTS: dict[str, list[str]] = _file["lists"]


_MINUTES = ("05", "10", "20", "25", "35", "40", "50", "55")


def _one(rng: Random, listed: str) -> str:
    return rng.choice(_LISTS[listed])


_FORMS: dict[str, Values] = {
    "time": lambda rng: f"{rng.randint(1, 12)}:{rng.choice(_MINUTES)}",
    "code": lambda rng: f"{_one(rng, 'word')}{rng.randint(10, 99)}",
    "street": lambda rng: f"{rng.randint(2, 98)} {_one(rng, 'street')}",
    "phone": lambda rng: f"{rng.randint(200, 989)}-{rng.randint(1000, 9999)}",
    "date": lambda rng: f"{_one(rng, 'month')} {rng.randint(2, 28)}",
    "full_name": lambda rng: f"{_one(rng, 'name')} {_one(rng, 'surname')}",
    "seat": lambda rng: f"{rng.randint(11, 48)}{rng.choice('ABCDEF')}",
    "order": lambda rng: f"{rng.choice('BDKRTX')}{rng.randint(1000, 9999)}",
}


def _values(written: str | dict[str, list[Any]]) -> Values:
    if isinstance(written, str):
        return _FORMS.get(written) or (lambda rng: _one(rng, written))
    ((form, arguments),) = written.items()
    if form == "number":
        return lambda rng: str(rng.randint(*arguments))
    if form == "one_of":
        return lambda rng: rng.choice(arguments)
    return lambda rng: "{}, {} and {}".format(*rng.sample(arguments, 3))


def _kind(entry: dict[str, Any]) -> Kind:
    who = entry.get("who", [""])
    return Kind(
        **entry
        | {
            "told": tuple(entry["told"]),
            "asked": tuple(entry["asked"]),
            "values": _values(entry["values"]),
            "who": tuple(_LISTS[who] if isinstance(who, str) else who),
        }
    )


KINDS = tuple(map(_kind, _file["kinds"]))
