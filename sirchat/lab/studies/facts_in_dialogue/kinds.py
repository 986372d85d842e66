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


def _time(rng: Random) -> str:
    return f"{rng.randint(1, 12)}:{rng.choice(('05', '10', '20', '25', '35', '40', '50', '55'))}"


def _code(rng: Random) -> str:
    return f"{rng.choice(_LISTS['word'])}{rng.randint(10, 99)}"


def _street(rng: Random) -> str:
    return f"{rng.randint(2, 98)} {rng.choice(_LISTS['street'])}"


def _phone(rng: Random) -> str:
    return f"{rng.randint(200, 989)}-{rng.randint(1000, 9999)}"


def _date(rng: Random) -> str:
    return f"{rng.choice(_LISTS['month'])} {rng.randint(2, 28)}"


def _full_name(rng: Random) -> str:
    return f"{rng.choice(_LISTS['name'])} {rng.choice(_LISTS['surname'])}"


def _seat(rng: Random) -> str:
    return f"{rng.randint(11, 48)}{rng.choice('ABCDEF')}"


def _order(rng: Random) -> str:
    return f"{rng.choice('BDKRTX')}{rng.randint(1000, 9999)}"


_FORMS: dict[str, Values] = {
    "time": _time, "code": _code, "street": _street, "phone": _phone, "date": _date,
    "full_name": _full_name, "seat": _seat, "order": _order,
}  # fmt: skip


def _values(written: str | dict[str, list[Any]]) -> Values:
    if isinstance(written, str):
        return _FORMS.get(written) or (lambda rng: rng.choice(_LISTS[written]))
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
