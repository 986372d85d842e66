"""Questions that judge memory, drawn from the facts in `questions.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

from sirchat.lab.studies.facts_in_dialogue.dialogue import OPTIONS, AskedFact, Statement

# What is told for each type of question. The same conversations serve for the first two types.
TYPES = {
    "shared": "facts",
    "paraphrase": "facts",
    "corrected": "corrections",
    "listed": "lists",
    "two-step": "steps",
}
HALVES = ("a", "b", "all")

_LISTED = 3  # things in a list


def entries(told: str, half: str) -> list[dict[str, Any]]:
    """The kinds of facts in a half of those that can be told so; see `TYPES` and `HALVES`."""
    section = {"corrections": "facts", "lists": "lists_of_things"}.get(told, told)
    every: list[dict[str, Any]] = _file[section]
    return every if half == "all" else every[HALVES.index(half) :: 2]


def unrelated_messages(half: str) -> list[str]:
    """Messages of a half, or of both, that have to do with nothing that is told."""
    every: list[str] = _file["unrelated"]
    return every if half == "all" else every[HALVES.index(half) :: 2]


def values_of(entry: dict[str, Any], key: str = "values") -> list[str]:
    """All values, or with the key `names` all names, that a kind of fact may have."""
    written = entry[key]
    found: list[str] = _file["lists"][written] if isinstance(written, str) else written
    return found


def draw_fact(rng: Random, told: str, entry: dict[str, Any]) -> AskedFact:
    """Draw what is told of one kind of fact, and the four replies to the question for it."""
    if told == "lists":
        return _draw_list(rng, entry)
    options = rng.sample(values_of(entry), OPTIONS)
    value, other = options[:2]
    needed: tuple[int, ...]
    if told == "steps":
        name, other_name = rng.sample(values_of(entry, "names"), 2)
        statements = [
            _statement(rng, entry["first"], name, name),
            _statement(rng, entry["second"], value, name),
        ]
        # The same is told of another name, so that the second statement alone does not answer.
        at = rng.randrange(3)
        statements.insert(at, _statement(rng, entry["second"], other, other_name))
        needed = tuple(one for one in range(3) if one != at)
        asked = {"two-step": entry["asked"]}
    elif told == "corrections":
        statements = [
            _statement(rng, entry["told"], other),
            _statement(rng, [entry["corrected"]], value),
        ]
        needed, asked = (1,), {"corrected": entry["asked"]}
    else:
        statements, needed = [_statement(rng, entry["told"], value)], (0,)
        asked = {"shared": entry["shared"], "paraphrase": entry["asked"]}
    return _fact(rng, entry, statements, needed, asked, [(one,) for one in options])


def _draw_list(rng: Random, entry: dict[str, Any]) -> AskedFact:
    """Draw a list of three things; each wrong reply names one of them and two others."""
    things = rng.sample(values_of(entry), 2 * _LISTED + 1)
    listed, others = things[:_LISTED], things[_LISTED:]
    wordings = rng.sample(entry["told"], _LISTED)
    statements = [_statement(rng, [w], v) for w, v in zip(wordings, listed, strict=True)]
    options = [tuple(listed)]
    for kept in range(_LISTED):
        new = iter(rng.sample(others, _LISTED - 1))
        options.append(tuple(v if at == kept else next(new) for at, v in enumerate(listed)))
    return _fact(rng, entry, statements, (0, 1, 2), {"listed": entry["asked"]}, options)


def _fact(
    rng: Random,
    entry: dict[str, Any],
    statements: Sequence[Statement],
    needed: tuple[int, ...],
    asked: dict[str, str],
    options: Sequence[tuple[str, ...]],
) -> AskedFact:
    """The fact whose right reply names the first of `options`; the replies are shuffled."""
    order = rng.sample(range(OPTIONS), OPTIONS)
    named = ["{}, {} and {}".format(*one) if len(one) > 1 else one[0] for one in options]
    replies = tuple(entry["answer"].replace("{v}", named[at]) for at in order)
    return AskedFact(
        entry["name"], tuple(statements), needed, asked, options[0], replies, order.index(0)
    )


def _statement(rng: Random, wordings: Sequence[str], value: str, name: str = "") -> Statement:
    text = rng.choice(wordings).replace("{n}", name).replace("{v}", value)
    return Statement(text[0].upper() + text[1:], value)


_file = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text(encoding="utf-8"))
