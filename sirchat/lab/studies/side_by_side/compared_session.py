"""The session of one setting in a comparison: answers, their cost, and the tokens held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from sirchat.chat.events import Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import ContextFullError, UndoError
from sirchat.lab.studies.side_by_side.agreement import Agreement, Predictions, recording
from sirchat.lab.studies.side_by_side.compared import (
    Answer,
    RoundResult,
    SettingResult,
    Token,
    first_difference,
)
from sirchat.lab.studies.side_by_side.held_spans import HeldSpans
from sirchat.memory.cache import BoundedCache
from sirchat.models.model import LoadedModel

OnLogits = Callable[[int, Tensor], None]
"""Called with the stream position of the first of m tokens, and their logits [m, V]."""


@dataclass
class ReferenceRound:
    """Answer and predictions of `full` in the current round; None once `full` has ended."""

    answer: Answer | None = None
    predictions: Predictions | None = None


class ComparedSession:
    """Runs a transcript under one setting, round by round.

    Args:
        model: the model, which all compared sessions share.
        setting: the profile.
        name: the setting in a few words.
        is_reference: whether this is `full`, which the others are compared with.

    Attributes:
        is_open: whether it continues: false once the context is full, or a turn can't be undone.
        notes: messages for the reader.
    """

    def __init__(
        self, model: LoadedModel, setting: Profile, name: str, *, is_reference: bool
    ) -> None:
        self._on_logits: OnLogits | None = None
        self._cache: BoundedCache | None = None
        self._session = Session(recording(model, self._on_pass), setting)
        self._setting, self._name, self._is_reference = setting, name, is_reference
        self._spans = HeldSpans()
        self._nats: dict[int, float] = {}
        self._rounds: list[RoundResult] = []
        self.is_open = True
        self.notes: list[str] = []
        self._note(self._session.start())

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key: the reference first, then the largest budget first."""
        return not self._is_reference, -self._session.budget

    def continue_with_answer(self, user: str, reference: ReferenceRound) -> None:
        """Answer a user turn, and continue with that answer."""
        with self._ends_on_error(reference):
            answer, events = self._ask(user)
            self._note(events)
            self._finish(answer, answer.text, range(0), reference)

    def continue_with_reply(
        self, user: str, reply: str | None, reference: ReferenceRound
    ) -> str | None:
        """Answer a user turn, undo that, and continue with `reply`, or with the answer if None.

        Returns the text that it continued with, or `reply` if this session ends here.
        """
        with self._ends_on_error(reference):
            answer, _ = self._ask(user)
            self._undo()
            text = answer.text if reply is None else reply
            self._finish(answer, text, self._read(user, text, reference), reference)
            return text
        return reply

    def result(self) -> SettingResult:
        """The result, up to the last finished round."""
        seen = self._rounds[-1].seen if self._rounds else 0
        rows, spans = self._session.tokens(range(seen)), self._spans.spans(seen)
        tokens = tuple(
            Token(row.id, row.text, row.turn, row.role, row.surprisal, self._nats.get(at), held)
            for at, (row, held) in enumerate(zip(rows, spans, strict=True))
        )
        return SettingResult(self._name, self._setting, tuple(self._rounds), tokens)

    def _ask(self, user: str) -> tuple[Answer, list[Event]]:
        """Answer a user turn; returns the answer and all events."""
        events = list(self._session.ask(user))
        *read, reply = [event for event in events if isinstance(event, TurnDone)]
        start = self._session.seen - reply.tokens_in - reply.tokens_out
        rows = self._session.tokens(range(start, start + reply.tokens_out))
        answer = Answer(
            text=reply.text,
            ids=tuple(row.id for row in rows),
            tokens=tuple(row.text for row in rows),
            finish=reply.finish,
            tokens_in=sum(one.tokens_in for one in read),
            seconds_in=sum(one.seconds_prefill for one in read),
            seconds_out=reply.seconds_decode,
        )
        return answer, events

    def _undo(self) -> None:
        try:
            self._session.undo()
        except UndoError as error:
            hint = "raise --archive-limit, or use --continue, which takes nothing back"
            raise UndoError(str(error), hint=hint) from None

    def _read(self, user: str, reply: str, reference: ReferenceRound) -> range:
        """Read a round, and record its predictions or compare them with the reference.

        Returns the positions read, or an empty range if there is nothing to compare with.
        """
        start, agreement = self._session.seen, None
        if self._is_reference:
            reference.predictions = Predictions(start)
            self._on_logits = reference.predictions.add
        elif reference.predictions is not None:
            agreement = Agreement(reference.predictions)
            self._on_logits = agreement.add
        try:
            self._note(chain(self._session.read_user(user), self._session.read_reply(reply)))
        finally:
            self._on_logits = None
        read = range(start, self._session.seen)
        if self._is_reference:
            self._nats |= dict.fromkeys(read, 0.0)
        elif agreement is not None:
            self._nats |= agreement.nats
        return read if reference.predictions is not None else range(0)

    def _finish(
        self, answer: Answer, reply: str, measured: range, reference: ReferenceRound
    ) -> None:
        """Record a finished round; the KL divergence was `measured` at these positions."""
        if self._is_reference:
            reference.answer = answer
        expected = reference.answer
        differs_at = first_difference(expected.ids, answer.ids) if expected else None
        turns = len(self._session.turns)
        self._rounds.append(
            RoundResult(
                answer=answer,
                reply=reply,
                differs_at=differs_at,
                same=differs_at is None if expected else None,
                nats=_mean([self._nats[at] for at in measured]),
                held=self._session.resident,
                seen=self._session.seen,
                shares=self._session.snapshot(strongest=0).turns,
                turns=(turns - 2, turns - 1),
                cache_bytes=self._cache.nbytes if self._cache is not None else 0,
            )
        )

    @contextmanager
    def _ends_on_error(self, reference: ReferenceRound) -> Iterator[None]:
        """End this session, not the whole comparison, if it can't continue."""
        try:
            yield
        except (ContextFullError, UndoError) as error:
            self.is_open = False
            where = f"{self._name} ends before user turn {len(self._rounds) + 1}"
            why = error.args[0] if isinstance(error, ContextFullError) else str(error)
            self.notes.append(f"{where}: {why}")
            if self._is_reference:
                reference.answer = reference.predictions = None
                self.notes[-1] += "; from there on nothing is compared with it"

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            self._spans.note(event)
            if isinstance(event, Notice):
                self.notes.append(f"{self._name}: {event.text}")

    def _on_pass(self, logits: Tensor, cache: BoundedCache) -> None:
        self._cache = cache
        if self._on_logits is not None:
            self._on_logits(self._session.seen, logits)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
