"""Perplexity of long text under a budget (SirLLM, section 5.2, Figure 5).

The text is a file, read as it is in rounds of 64 tokens, or talk of the bundled model's world, read
as a chat. What a token costs is its surprisal, given what was held when it came. `full` reads on
beyond the length that the model was made for, as the paper's windows do.

Where text is harder at one place than at another, several readings even it out: each begins further
into the same text and ends with what was left out, so that every part is read at every place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.models.model import LoadedModel
from sirchat.tasks.reading import open_engine, read_ids, whole_round
from sirchat.tasks.report import Plot, Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Cell, Findings, Grid, mean
from sirchat.text.template import Template
from sirchat.world.dialogue import Dialogue, Mix

_POINTS = 100
_CHUNK = 64
_TALK = Mix(tell=0.15, ask=0.12, repeat=0.02, quiz=0.15, untold=0.02)
_ROUNDS = 40


@dataclass(frozen=True)
class Perplexity(Grid):
    """The study; `limit` is tokens to read.

    Attributes:
        text: a UTF-8 file; None for made talk.
        readings: how often the text is read, each time from further on.

    Raises SettingError when the file can't be read.
    """

    text: str | None = None
    readings: int = 1

    def __post_init__(self) -> None:
        if self.text is not None:
            _read(self.text)

    @property
    def name(self) -> str:
        """What it is called."""
        return "perplexity"

    def units(self) -> list[str]:
        """Readings, by number."""
        return [str(number) for number in range(self.readings)]

    def rounds(self, model: LoadedModel, reading: int = 0) -> Iterator[list[int]]:
        """The text's ids as one reading has them, round by round, `limit` in all or fewer."""
        left = self.limit
        for ids in (
            self._talk(model, reading) if self.text is None else self._chunks(model, reading)
        ):
            yield ids[:left]
            left -= len(ids)
            if left <= 0:
                return

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the text: the mean surprisal, in nats, of each hundredth of it."""
        model = session.model
        if cell.setting.policy == "full":
            model = replace(model, context_length=max(model.context_length, self.limit))
        found = read(model, session.profile, self.rounds(model, int(unit)))
        size = max(1, self.limit // _POINTS)
        parts = np.split(found, range(size, len(found), size))
        nats = [float(np.nanmean(part)) for part in parts if not np.isnan(part).all()]
        return {"nats": nats, "tokens": len(found)}

    def report(self, found: Mapping[str, Record]) -> Report:
        """The mean, how the end compares with the beginning, and the curve."""
        held = self.findings(found)
        columns = ("setting", "nats a token", "second tenth", "last tenth", "last / second")
        size = max(1, self.limit // _POINTS)
        points = {
            one.name: tuple(
                (float((at + 1) * size), float(np.mean(nats)))
                for at, nats in enumerate(zip(*(each["nats"] for each in one.all), strict=True))
            )
            for one in held
        }
        facts = (
            f"seed {self.seed}",
            f"{max((one['tokens'] for one in found.values()), default=0):,} tokens",
            f"text {self.text}" if self.text else "talk of the bundled model's world",
            *([f"{self.readings} readings, each from further on"] if self.readings > 1 else []),
        )
        table = Table("Perplexity", columns, tuple(_row(one) for one in held))
        plot = Plot("perplexity", "tokens read", "nats a token", points)
        return Report(facts, (table,), (plot,), self.parameters())

    def _talk(self, model: LoadedModel, reading: int) -> Iterator[list[int]]:
        """Rounds of one conversation after another, as one chat."""
        template, first, tokens = Template(model.tokenizer, model.anchors), True, 0
        talks: list[list[tuple[str, str]]] = []
        while tokens < self.limit:
            talks.append(conversation(f"perplexity/{self.seed}/{len(talks)}", _ROUNDS))
            tokens += sum(len(round_ids(template, *pair)) for pair in talks[-1])
        for talk_rounds in _rotated(talks, reading, self.readings):
            for user, reply in talk_rounds:
                yield round_ids(template, user, reply, first=first)
                first = False

    def _chunks(self, model: LoadedModel, reading: int) -> Iterator[list[int]]:
        ids: list[int] = model.tokenizer(_read(self.text or ""))["input_ids"]
        starts = range(0, min(len(ids), self.limit), _CHUNK)
        for start in _rotated(starts, reading, self.readings):
            yield ids[start : start + _CHUNK]


T = TypeVar("T")


def _rotated(parts: Sequence[T], reading: int, readings: int) -> list[T]:
    """All parts, from where a reading begins; then those before."""
    start = reading * len(parts) // readings
    return [*parts[start:], *parts[:start]]


def conversation(seed: str, rounds: int) -> list[tuple[str, str]]:
    """A conversation in the bundled model's world: what is said, and the replies."""
    messages = Dialogue(Random(seed), _TALK).messages(rounds)
    said = [one.text for one in messages if one.role != "system"]
    return list(zip(said[::2], said[1::2], strict=False))


def round_ids(template: Template, user: str, reply: str, *, first: bool = False) -> list[int]:
    """A round of a chat, as it is read."""
    return whole_round(template, user, reply, first=first).ids


def read(model: LoadedModel, setting: Profile, rounds: Iterator[list[int]]) -> np.ndarray:
    """Surprisal, in nats, of each token [n] read under a setting; NaN of the very first."""
    engine = open_engine(model, setting)
    for number, ids in enumerate(rounds, 1):
        read_ids(engine, ids, number)
        engine.close_round()
    return np.array(engine.ledger.column("surprisal")[: engine.ledger.seen])


def _row(one: Findings) -> tuple[Value, ...]:
    """Over several readings and draws of the lots, means."""
    draws = [each["nats"] for each in one.all]
    tenth = max(1, len(draws[0]) // 10)
    second = np.mean([nats[tenth : 2 * tenth] or nats for nats in draws])
    last = np.mean([nats[-tenth:] for nats in draws])
    whole = mean([float(np.mean(nats)) for nats in draws])
    return one.name, whole, float(second), float(last), float(last / second)


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"text {path!r} can't be read: {error}") from None
