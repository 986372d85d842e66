"""Perplexity of long text under a budget (SirLLM, section 5.2, Figure 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TypeVar

import numpy as np

from sirchat.chat.session import Session
from sirchat.chat.settings import build_cache_settings, build_engine
from sirchat.config.profile import Profile
from sirchat.engine.types import TurnRef
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import load_dialogues
from sirchat.lab.studies.intervals import mean
from sirchat.lab.studies.reading import read as read_round
from sirchat.lab.studies.reading import read_data_text, whole_round
from sirchat.lab.studies.report import Record, Report, Table, Value
from sirchat.lab.studies.study import (
    ON_SCREEN,
    SAMPLING,
    WITHOUT_SESSION,
    Cell,
    Findings,
    Grid,
)
from sirchat.lab.synthetic.dialogue import Dialogue, Mix
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import plain_text_ids
from sirchat.text.template import Template

_POINTS = 100
_CHUNK = 64
_TALK = Mix(tell=0.15, ask=0.12, repeat=0.02, quiz=0.15, untold=0.02)
_ROUNDS = 40


@dataclass(frozen=True)
class Perplexity(Grid):
    """The perplexity study; `limit` is the number of tokens to read, not counting anchor tokens.

    Raises SettingError when a file can't be read, or if both `text` and `data` are given.
    """

    text: str | None = None  # path of a UTF-8 text; None to read dialogue
    # path of real conversations; None for synthetic dialogue, if `text` is None too
    data: str | None = None
    readings: int = 1  # number of readings, each from another start in the text

    extends = ("settings", "repeats")  # a reading depends on its length

    def __post_init__(self) -> None:
        if self.text is not None:
            read_data_text(self.text)
        if self.data is not None:
            if self.text is not None:
                raise SettingError(
                    "text and data can't both be given", hint="give only --text or only --data"
                )
            load_dialogues(Path(self.data))

    @property
    def without_effect(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the settings that change nothing in this study."""
        return (*ON_SCREEN, *SAMPLING) if self.data else WITHOUT_SESSION

    name = "perplexity"

    def units(self) -> list[str]:
        """The names of the readings of the text: their numbers as strings, from `0`."""
        return [str(number) for number in range(self.readings)]

    def rounds(self, model: LoadedModel, reading: int = 0) -> Iterator[list[int]]:
        """Yield the token ids of each round of one reading of the text.

        A reading has at most `limit` ids in all, not counting anchor tokens.
        """
        if self.text is None:
            left = self.limit
            for ids in self._talk(model, reading):
                yield (taken := _first(ids, left, model))
                left -= int(_is_text(taken, model).sum())
                if left <= 0:
                    return
        else:
            yield from self._chunks(model, reading)

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the text once; the record has the mean surprisal in each hundredth of the text.

        The surprisal is in nats per token.
        """
        if self.data is not None:
            return self._nats(self._read_talk(session, int(unit)))
        model = session.model
        rounds = list(self.rounds(model, int(unit)))
        if cell.setting.policy == "full":
            length = max(model.context_length, sum(map(len, rounds)))
            model = replace(model, context_length=length)
        found = read(model, session.profile, iter(rounds))
        return self._nats(found[_is_text([i for ids in rounds for i in ids], model)])

    def _nats(self, found: np.ndarray) -> Record:
        """The record of one reading: the mean surprisal in each hundredth of the text."""
        parts = np.array_split(found, max(1, min(_POINTS, len(found))))
        nats = [float(np.nanmean(part)) for part in parts if not np.isnan(part).all()]
        return {"nats": nats, "tokens": len(found)}

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table of the mean surprisal, by setting."""
        findings = self.findings(found)
        columns = ("setting", "nats a token", "second tenth", "last tenth", "last / second")
        several = f"{self.readings} readings, each from a later start in the text"
        header = (
            f"seed {self.seed}",
            f"{max((one['tokens'] for one in found.values()), default=0):,} tokens",
            f"text {self.text or self.data}" if self.text or self.data else "synthetic dialogue",
            *([several] if self.readings > 1 else []),
        )
        table = Table("Perplexity", columns, tuple(_row(one) for one in findings))
        return Report(header, (table,), self.parameters())

    def _read_talk(self, session: Session, reading: int) -> np.ndarray:
        """Read `limit` tokens of real talk in a session; returns their surprisals [n] in nats."""
        dialogues = load_dialogues(Path(self.data or ""))
        for talk in _rotated(dialogues, reading, self.readings):
            for user, reply in talk:
                read_round(session, user, reply)
                if session.seen >= self.limit:
                    return np.array(session.engine.save().rows["surprisal"][: self.limit])
        raise SettingError(
            f"data {self.data!r} has only {session.seen:,} tokens", hint="lower --limit"
        )

    def _talk(self, model: LoadedModel, reading: int) -> Iterator[list[int]]:
        """Yield the token ids of each round of synthetic conversations, read as one chat."""
        template, first, tokens = Template(model.tokenizer, model.anchors), True, 0
        conversations: list[list[tuple[str, str]]] = []
        while tokens < self.limit:
            seed = f"perplexity/{self.seed}/{len(conversations)}"
            conversations.append(conversation(seed, _ROUNDS))
            tokens += sum(len(whole_round(template, *pair).ids) for pair in conversations[-1])
        for rounds in _rotated(conversations, reading, self.readings):
            for user, reply in rounds:
                yield whole_round(template, user, reply, first=first).ids
                first = False

    def _chunks(self, model: LoadedModel, reading: int) -> Iterator[list[int]]:
        def encode(text: str, special: bool = False) -> list[int]:
            # Text that looks like a control token stays text.
            found = model.tokenizer(text, add_special_tokens=special, split_special_tokens=True)
            ids: list[int] = found["input_ids"]
            return ids

        begin = encode("", special=True)
        ids = begin + plain_text_ids(read_data_text(self.text or ""), model.anchors, encode)
        ids = _first(ids, self.limit, model)
        for start in _rotated(range(0, len(ids), _CHUNK), reading, self.readings):
            yield ids[start : start + _CHUNK]


T = TypeVar("T")


def _rotated(parts: Sequence[T], reading: int, readings: int) -> list[T]:
    """The parts of a text in the order in which one of several readings takes them."""
    start = reading * len(parts) // readings
    return [*parts[start:], *parts[:start]]


def _is_text(ids: Sequence[int], model: LoadedModel) -> np.ndarray:
    """A mask [n], bool, over token ids: false for inserted anchor tokens, true for all text."""
    anchor = None if model.anchors is None else model.anchors.token_id
    return np.array([one != anchor for one in ids], bool)


def _first(ids: list[int], count: int, model: LoadedModel) -> list[int]:
    """The beginning of `ids` that has `count` ids, not counting anchor tokens."""
    return ids[: int(np.searchsorted(_is_text(ids, model).cumsum(), count, side="right"))]


def conversation(seed: str, rounds: int) -> list[tuple[str, str]]:
    """A synthetic conversation, as a list of (user message, reply), one for each round."""
    messages = Dialogue(Random(seed), _TALK).messages(rounds)
    texts = [one.text for one in messages if one.role != "system"]
    return list(zip(texts[::2], texts[1::2], strict=False))


def read(model: LoadedModel, setting: Profile, rounds: Iterator[list[int]]) -> np.ndarray:
    """Read rounds of token ids under a setting; returns the surprisals [n] of all tokens, in nats.

    Nothing that is evicted is archived. The surprisal of the first token is NaN.
    """
    settings = replace(build_cache_settings(setting), archive=0, folder=None)
    engine = build_engine(model, settings, setting.seed)
    for number, ids in enumerate(rounds, 1):
        turn = TurnRef(number, number)
        list(engine.evictor.make_room_for_turn(len(ids), 0, turn))
        list(engine.prefill(ids, [Role.USER] * len(ids), turn))
        engine.decay_at_round_end()
    return np.array(engine.ledger.column("surprisal")[: engine.ledger.seen])


def _row(one: Findings) -> tuple[Value, ...]:
    """The table row of one setting: means of the surprisal over all readings and seeds.

    The interval is over readings or, with one, over seeds.
    """
    readings = [each["nats"] for each in one.records]
    tenth = max(1, len(readings[0]) // 10)
    second = np.mean([nats[tenth : 2 * tenth] or nats for nats in readings])
    last = np.mean([nats[-tenth:] for nats in readings])
    groups = one.by_unit if len(one.by_unit) > 1 else one.by_seed
    overall = mean([fmean(fmean(each["nats"]) for each in group) for group in groups])
    return one.name, overall, float(second), float(last), float(last / second)


@dataclass(frozen=True)
class Context(Grid):
    """The study of perplexity by context length; `limit` is the number of conversations.

    Raises SettingError for lengths that do not ascend.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)  # context lengths in tokens, ascending

    without_effect = WITHOUT_SESSION

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] < 2 or sorted(set(self.lengths)) != [*self.lengths]:
            shown = ",".join(map(str, self.lengths))
            raise SettingError(f"lengths is {shown}, must be ascending numbers, each at least 2")

    name = "context"

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read a conversation; the record has two numbers for each context length."""
        model = session.model  # a length may exceed the context that the model was trained for
        model = replace(model, context_length=max(model.context_length, self.lengths[-1]))
        rounds = list(self._rounds(model, unit))
        nats = read(model, session.profile, iter(rounds))
        counts = ~np.isnan(nats) & _is_text([one for each in rounds for one in each], model)
        up_to = [counts[:length] for length in self.lengths]
        return {
            "nats": [float(nats[: len(one)][one].sum()) for one in up_to],
            "tokens": [int(one.sum()) for one in up_to],
        }

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table of the perplexity at each context length, by setting."""
        findings = self.findings(found)
        rows: list[tuple[Value, ...]] = [(one.name, *self._perplexities(one)) for one in findings]
        columns = ("setting", *(f"{length:,} tokens" for length in self.lengths))
        header = (f"seed {self.seed}", f"{self.limit} conversations")
        return Report(
            header, (Table("Perplexity by context", columns, tuple(rows)),), self.parameters()
        )

    def _rounds(self, model: LoadedModel, unit: str) -> Iterator[list[int]]:
        """Yield the token ids of each round, up to the longest of the context lengths in all."""
        template, left = Template(model.tokenizer, model.anchors), self.lengths[-1]
        for number, (user, reply) in enumerate(
            conversation(f"context/{self.seed}/{unit}", left // 8)
        ):
            ids = whole_round(template, user, reply, first=not number).ids[:left]
            yield ids
            left -= len(ids)
            if not left:
                return

    def _perplexities(self, findings: Findings) -> list[float]:
        nats = np.sum([one["nats"] for one in findings.records], axis=0)
        tokens = np.sum([one["tokens"] for one in findings.records], axis=0)
        return [math.exp(each) for each in nats / tokens]
