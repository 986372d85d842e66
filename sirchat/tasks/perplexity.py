"""Perplexity of long text under a budget (SirLLM, section 5.2, Figure 5).

The text is a file, read as it is in rounds of 64 tokens, or talk of the bundled model's world, read
as a chat. What a token costs is its surprisal, given what was held when it came. `full` reads on
beyond the length that the model was made for, as the paper's windows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

import numpy as np

from sirchat.detokenize import SentenceEnds
from sirchat.engine import Engine
from sirchat.errors import SettingError
from sirchat.memory.ledger import Role
from sirchat.model import LoadedModel
from sirchat.profile import Profile
from sirchat.records import Place
from sirchat.session import Session
from sirchat.settings import build_memory
from sirchat.tasks.journal import Record
from sirchat.tasks.report import Plot, Report, Table, Value
from sirchat.tasks.study import Cell, Grid, Held, mean
from sirchat.template import Template
from sirchat.training.dialogue import Dialogue, Mix

_POINTS = 100
_PIECE = 64
_TALK = Mix(tell=0.15, ask=0.12, repeat=0.02, quiz=0.15, untold=0.02)
_ROUNDS = 40


@dataclass(frozen=True)
class Perplexity(Grid):
    """The study; `limit` is tokens to read.

    Attributes:
        text: a UTF-8 file; None for made talk.

    Raises SettingError when the file can't be read.
    """

    text: str | None = None

    def __post_init__(self) -> None:
        if self.text is not None:
            _read(self.text)

    @property
    def name(self) -> str:
        """What it is called."""
        return "perplexity"

    def units(self) -> list[str]:
        """The one text."""
        return ["text"]

    def rounds(self, model: LoadedModel) -> Iterator[list[int]]:
        """The text's ids, round by round, `limit` in all or fewer."""
        left = self.limit
        for ids in self._talk(model) if self.text is None else self._pieces(model):
            yield ids[:left]
            left -= len(ids)
            if left <= 0:
                return

    def hold(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the text: the mean surprisal, in nats, of each hundredth of it."""
        model = session.model
        if cell.setting.policy == "full":
            model = replace(model, context_length=max(model.context_length, self.limit))
        found = read(model, session.profile, self.rounds(model))
        size = max(1, self.limit // _POINTS)
        parts = np.split(found, range(size, len(found), size))
        nats = [float(np.nanmean(part)) for part in parts if not np.isnan(part).all()]
        return {"nats": nats, "tokens": len(found)}

    def report(self, found: Mapping[str, Record]) -> Report:
        """The mean, how the end compares with the beginning, and the curve."""
        held = self.held(found)
        columns = ("setting", "nats a token", "second tenth", "last tenth", "last / second")
        points = {
            one.name: tuple(
                (float((at + 1) * max(1, self.limit // _POINTS)), nats)
                for at, nats in enumerate(one.all[0]["nats"])
            )
            for one in held
        }
        facts = (
            f"seed {self.seed}",
            f"{max((one['tokens'] for one in found.values()), default=0):,} tokens",
            f"text {self.text}" if self.text else "talk of the bundled model's world",
        )
        table = Table("Perplexity", columns, tuple(_row(one) for one in held))
        plot = Plot("perplexity", "tokens read", "nats a token", points)
        return Report(facts, (table,), (plot,), self.asked())

    def _talk(self, model: LoadedModel) -> Iterator[list[int]]:
        """Rounds of one conversation after another, as one chat."""
        template, first = Template(model.tokenizer), True
        for number in count():
            talk = Dialogue(Random(f"perplexity/{self.seed}/{number}"), _TALK)
            said = [one for one in talk.messages(_ROUNDS) if one.role != "system"]
            for user, reply in zip(said[::2], said[1::2], strict=False):
                asked = template.opening(user.text)[1] if first else template.user(user.text)
                yield [*asked.ids, *template.assistant(reply.text).ids, *template.closing]
                first = False

    def _pieces(self, model: LoadedModel) -> Iterator[list[int]]:
        ids: list[int] = model.tokenizer(_read(self.text or ""))["input_ids"]
        for start in range(0, len(ids), _PIECE):
            yield ids[start : start + _PIECE]


def read(model: LoadedModel, setting: Profile, rounds: Iterator[list[int]]) -> np.ndarray:
    """Surprisal, in nats, of each token [n] read under a setting; NaN of the very first."""
    engine = Engine(
        model,
        replace(build_memory(setting), archive=0, folder=None),  # nothing is to come back
        seed=setting.seed,
        ends_sentence=SentenceEnds(model.tokenizer),
    )
    for number, ids in enumerate(rounds):
        place = Place(number, number)
        for _ in engine.open_turn(len(ids), 0, place):
            pass
        for _ in engine.feed(ids, [Role.USER] * len(ids), place):
            pass
        engine.close_round()
    return np.array(engine.ledger.column("surprisal")[: engine.ledger.seen])


def _row(one: Held) -> tuple[Value, ...]:
    """Over several draws of the lots, means."""
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
