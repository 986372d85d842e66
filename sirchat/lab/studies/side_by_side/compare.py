"""Data classes of a comparison of settings: a transcript in rounds, and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.events import Event, Evicted, Notice, Recalled, Restored, TurnDone
from sirchat.chat.panel_snapshot import HeldShare
from sirchat.chat.session import Session
from sirchat.chat.settings import updated_profile
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import format_setting
from sirchat.errors import ContextFullError, SettingError, TranscriptError, UndoError
from sirchat.lab.studies.report import setting_names
from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_values import Positions
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import PassResult
from sirchat.text.transcript import SettingsSwitch, TranscriptItem


@dataclass(frozen=True)
class Round:
    """A user turn and its reply in the transcript; `reply` is None if the transcript has none."""

    user: str
    reply: str | None
    switches: tuple[SettingsSwitch, ...] = ()  # the switches of settings before it


@dataclass(frozen=True)
class Rounds:
    """A whole transcript, as rounds of a user turn and its reply."""

    # the text of the system turn at the beginning; None if there is no such turn
    system: str | None
    rounds: tuple[Round, ...]  # the rounds, at least one
    notes: tuple[str, ...]  # messages about turns that are left out


def rounds_of(turns: Sequence[TranscriptItem], name: str) -> Rounds:
    """Make rounds of a transcript's turns: each user turn with the reply that follows it.

    Raises TranscriptError for an assistant turn that follows no user turn, and for a transcript
    without user turns.
    """
    system, rounds, notes, previous = None, list[Round](), list[str](), ""
    switches = list[SettingsSwitch]()
    for turn in turns:
        if isinstance(turn, SettingsSwitch):
            switches.append(turn)
            new = format_setting(turn.settings)
            notes.append(f"{name}, line {turn.line}: from here on, all but full have {new}")
        elif turn.role == "user":
            rounds.append(Round(turn.content, None, tuple(switches)))
            switches = []
        elif turn.role == "assistant":
            if previous != "user":
                raise TranscriptError(
                    f"{name}, line {turn.line}: an assistant turn must follow a user turn"
                )
            rounds[-1] = replace(rounds[-1], reply=turn.content)
        elif rounds:
            notes.append(
                f"{name}, line {turn.line}: a system turn after the first turn is left out"
            )
            continue  # the user turn before it may still get a reply
        else:
            system = turn.content
        previous = "" if isinstance(turn, SettingsSwitch) else turn.role
    if not rounds:
        raise TranscriptError(f"{name} has no user turn", hint="there is nothing to compare")
    return Rounds(system, tuple(rounds), tuple(notes))


# Start and end, in tokens read, of a time in which a token was held; an end of None: it still is
Span = tuple[int, int | None]


class HeldSpans:
    """The spans of time in which each token was held; `note` records an event's changes.

    Time is counted in tokens read.
    """

    def __init__(self) -> None:
        self._ended: dict[int, list[tuple[int, int]]] = {}
        self._since: dict[int, int | None] = {}  # only tokens ever evicted; None while evicted

    def note(self, event: Event) -> None:
        """Record the tokens that an event evicts or restores."""
        if isinstance(event, Evicted):
            self._evict(event.positions, event.seen)
        elif isinstance(event, Restored):
            self._restore(event.positions, event.seen)
        elif isinstance(event, Recalled):
            self._evict(event.released, event.seen)
            self._restore(event.positions, event.seen)

    def correct(self, held: Positions, seen: int) -> None:
        """Record which tokens are `held` after a round: of those that step aside no event tells."""
        is_held = np.isin(np.arange(seen), held)
        before_end = seen - 1  # they moved before the round's end, not for what is read next
        for spans in self._ended.values():
            if spans[-1][1] == seen:
                spans[-1] = spans[-1][0], before_end
        self._evict(np.flatnonzero(~is_held).tolist(), before_end)
        self._restore(np.flatnonzero(is_held).tolist(), before_end)

    def spans(self, seen: int) -> list[tuple[Span, ...]]:
        """The spans of time in which each of the first `seen` tokens was held, in stream order.

        Each token has at least one span.
        """
        return [self._of(position) for position in range(seen)]

    def _of(self, position: int) -> tuple[Span, ...]:
        since = self._since.get(position, position)
        now: tuple[Span, ...] = () if since is None else ((since, None),)
        return (*self._ended.get(position, ()), *now)

    def _evict(self, positions: Iterable[int], seen: int) -> None:
        for position in positions:
            since = self._since.get(position, position)
            if since is not None:
                self._ended.setdefault(position, []).append((since, seen))
            self._since[position] = None

    def _restore(self, positions: Iterable[int], seen: int) -> None:
        for position in positions:
            if self._since.get(position, position) is None:
                self._since[position] = seen


@dataclass(frozen=True)
class Answer:
    """The model's answer to a user turn."""

    text: str  # the answer
    ids: tuple[int, ...]  # id and text of each of the answer's tokens, except closing tokens
    tokens: tuple[str, ...]
    finish: str  # the reason why the answer ended; see `events.Finish`
    tokens_in: int  # number of prompt tokens read before the answer, and prefill time
    seconds_in: float
    seconds_out: float  # decode time


@dataclass(frozen=True)
class RoundResult:
    """A finished round under one setting: a user turn, and the reply that followed it."""

    # the setting's own answer, even if the conversation continued with another reply
    answer: Answer
    reply: str  # the reply that the conversation continued with
    # index of the first token at which the answer differs from that of `full`; None if both answers
    # are the same, or `full` has no answer
    differs_at: int | None
    same: bool | None  # whether both answers are the same; None if `full` has no answer
    # mean KL divergence from `full`, in nats, over the round's tokens; None if not measured
    nats: float | None
    held: int  # number of tokens held after the round, and number of tokens read up to its end
    seen: int
    # for every turn up to this round, how many of the turn's tokens are held
    shares: tuple[HeldShare, ...]
    turns: tuple[int, ...]  # indices, in `shares`, of this round's turns
    cache_bytes: int  # memory of the cached keys and values


@dataclass(frozen=True)
class Token:
    """A token that a setting read."""

    id: int  # as in the session's events; surprisal in nats
    text: str
    turn: int
    role: str
    surprisal: float | None
    # KL divergence from `full` of the prediction of the next token, in nats; None if not measured
    nats: float | None
    held: tuple[Span, ...]  # the spans of time, in tokens read, in which the token was held


@dataclass(frozen=True)
class SettingResult:
    """The result of the whole conversation under one setting.

    If the session could not continue, there are fewer rounds than in the transcript.
    """

    name: str  # describes the setting in a few words
    setting: Profile
    rounds: tuple[RoundResult, ...]
    tokens: tuple[Token, ...]

    @property
    def nats(self) -> float | None:
        """Mean KL divergence from `full`, in nats, over the tokens for which it was measured.

        None if it was measured for no token.
        """
        known = [one.nats for one in self.tokens if one.nats is not None]
        return sum(known) / len(known) if known else None

    @property
    def same_answers(self) -> tuple[int, int]:
        """A pair: number of answers that equal those of `full`, and number of compared answers."""
        known = [one.same for one in self.rounds if one.same is not None]
        return sum(known), len(known)

    @property
    def read_speed(self) -> float:
        """Tokens per second while user turns are read (prefill)."""
        answers = [one.answer for one in self.rounds]
        return _rate(sum(a.tokens_in for a in answers), sum(a.seconds_in for a in answers))

    @property
    def answer_speed(self) -> float:
        """Tokens per second while answers are generated (decode)."""
        answers = [one.answer for one in self.rounds]
        return _rate(sum(len(a.ids) for a in answers), sum(a.seconds_out for a in answers))

    def kept(self, number: int) -> float | None:
        """Share of the tokens of round `number` (from 0) that are held after the last round.

        None if the round was not run.
        """
        if number >= len(self.rounds):
            return None
        shares = [self.rounds[-1].shares[turn] for turn in self.rounds[number].turns]
        return sum(one.held for one in shares) / max(1, sum(one.tokens for one in shares))


@dataclass(frozen=True)
class Comparison:
    """The results of one transcript under several settings, `full` first."""

    file: str  # the transcript's name
    transcript: Rounds  # the transcript's rounds
    own: bool  # whether each setting continued with its own answers
    settings: tuple[SettingResult, ...]  # one result for each setting
    notes: tuple[str, ...]  # messages for the reader


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token id in which two answers differ; None if the answers are the same.

    If one answer is the beginning of the other, the index is the shorter answer's length.
    """
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)


def compare(
    model: LoadedModel,
    settings: Sequence[Profile],
    transcript: Rounds,
    *,
    file: str = "transcript",
    own: bool = False,
    advance: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Run a transcript under every setting, one round after the other; returns the results.

    Raises SettingError for a setting, or a switch, that does not fit the model or system prompt.
    """
    if transcript.system is not None:
        where = f"{file}, system turn"
        settings = [changed_profile(one, where, system=transcript.system) for one in settings]
    named = zip(settings, setting_names(settings), strict=True)
    sessions = [
        ComparedSession(model, one, name, is_reference=not at)
        for at, (one, name) in enumerate(named)
    ]
    for compared in sessions:
        compared.check_switches(transcript, file)
    done = 0
    while done < len(transcript.rounds) and not stopped():
        _run_round(sessions, transcript.rounds[done], own, advance)
        done += 1
    notes = dict.fromkeys(chain(transcript.notes, *(compared.notes for compared in sessions)))
    if done < len(transcript.rounds):
        notes[f"stopped after {done} of {len(transcript.rounds)} user turns"] = None
    transcript = replace(transcript, rounds=transcript.rounds[:done])
    found = tuple(one.result() for one in sessions)
    return Comparison(file, transcript, own, found, tuple(notes))


def _run_round(
    sessions: Sequence[ComparedSession], round: Round, own: bool, advance: Callable[[], None]
) -> None:
    """Run one round under `full`, then under the other settings, from the largest budget down."""
    reference, reply = ReferenceRound(), round.reply
    for compared in sorted(sessions, key=lambda compared: compared.rank):
        with compared.ends_on_error(reference):
            for switch in round.switches if compared.is_open else ():
                compared.switch(switch)
        if compared.is_open and own:
            compared.continue_with_answer(round.user, reference)
        elif compared.is_open:
            reply = compared.continue_with_reply(round.user, reply, reference)
        advance()


# The log-probabilities [V] of the token that follows, by the stream position of each token
Predictions = dict[int, Tensor]


@dataclass
class ReferenceRound:
    """The answer and the predictions of `full` in the current round, for comparison.

    Both are None if the session of `full` has ended, for example because its context was full.
    """

    answer: Answer | None = None
    predictions: Predictions | None = None


class ComparedSession:
    """Runs a transcript under one setting, round by round."""

    def __init__(
        self, model: LoadedModel, setting: Profile, name: str, *, is_reference: bool
    ) -> None:
        self._compared: Predictions | None = None  # of `full`, while a final round is read
        self._cache: BoundedCache | None = None
        self._session = Session(recording(model, self._on_pass), setting)
        self._setting, self._name, self._is_reference = setting, name, is_reference
        self._spans = HeldSpans()
        self._nats: dict[int, float] = {}
        self._rounds: list[RoundResult] = []
        self.is_open = True
        self.notes: list[str] = []
        self._note(self._session.opening_events())

    @property
    def rank(self) -> tuple[bool, int]:
        """A sort key that puts the reference first, then the other sessions by falling budget."""
        return not self._is_reference, -self._session.budget

    def check_switches(self, transcript: Rounds, file: str) -> None:
        """Raise SettingError for a switch that does not fit this setting, or the model."""
        profile = self._session.profile
        for switch in chain.from_iterable(one.switches for one in transcript.rounds):
            source = f"{file}, line {switch.line}, under {self._name}"
            profile = updated_profile(profile, self._session.model, source, self._new(switch))

    def switch(self, switch: SettingsSwitch) -> None:
        """Change settings from now on; the reference keeps its policy."""
        self._note(self._session.switch(f"transcript, line {switch.line}", **self._new(switch)))

    def continue_with_answer(self, user: str, reference: ReferenceRound) -> None:
        """Let the model answer a user turn; both turn and answer stay in the conversation."""
        with self.ends_on_error(reference):
            answer, events = self._ask(user)
            self._note(events)
            self._finish(answer, answer.text, range(0), reference)

    def continue_with_reply(
        self, user: str, reply: str | None, reference: ReferenceRound
    ) -> str | None:
        """Let the model answer a user turn, undo both, then read the turn with the final reply."""
        with self.ends_on_error(reference):
            answer, _ = self._ask(user)
            self._undo()
            text = answer.text if reply is None else reply
            self._finish(answer, text, self._read(user, text, reference), reference)
            return text
        return reply

    def result(self) -> SettingResult:
        """The result of this setting, up to its last finished round."""
        seen = self._rounds[-1].seen if self._rounds else 0
        rows, spans = self._session.tokens(range(seen)), self._spans.spans(seen)
        tokens = tuple(
            Token(row.id, row.text, row.turn, row.role, row.surprisal, self._nats.get(at), held)
            for at, (row, held) in enumerate(zip(rows, spans, strict=True))
        )
        return SettingResult(self._name, self._setting, tuple(self._rounds), tokens)

    def _new(self, switch: SettingsSwitch) -> dict[str, Any]:
        """The settings that a switch changes here."""
        kept = ("policy", "policy_options") if self._is_reference else ()
        return {**switch.settings, **{key: getattr(self._setting, key) for key in kept}}

    def _ask(self, user: str) -> tuple[Answer, list[Event]]:
        """Let the model answer a user turn; returns the answer and all events."""
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
            hint = "raise --archive-limit, or use --continue, which needs no undo"
            raise UndoError(str(error), hint=hint) from None

    def _read(self, user: str, reply: str, reference: ReferenceRound) -> range:
        """Read a round; returns its positions, or none if there is nothing to compare with.

        The reference session records its predictions in `reference`; others are compared with them.
        """
        start = self._session.seen
        if self._is_reference:
            reference.predictions = {}
        self._compared = reference.predictions
        try:
            asked = self._session.read_user(user, next_role="assistant")
            self._note(chain(asked, self._session.read_reply(reply)))
        finally:
            self._compared = None
        return range(start, self._session.seen if reference.predictions is not None else start)

    def _finish(
        self, answer: Answer, reply: str, measured: range, reference: ReferenceRound
    ) -> None:
        """Add the result of a finished round to this session's results."""
        if self._is_reference:
            reference.answer = answer
        expected = reference.answer
        differs_at = first_difference(expected.ids, answer.ids) if expected else None
        turns = len(self._session.turns)
        self._spans.correct(self._session.ledger.held_positions, self._session.seen)
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
    def ends_on_error(self, reference: ReferenceRound) -> Iterator[None]:
        """Context manager: a full context, a failed undo or switch within it ends this session."""
        try:
            yield
        except (ContextFullError, UndoError, SettingError) as error:
            if isinstance(error, SettingError) and not self._rounds:
                raise  # nothing is lost
            self.is_open = False
            where = f"{self._name} ends before user turn {len(self._rounds) + 1}"
            why = error.args[0] if isinstance(error, ContextFullError) else str(error)
            self.notes.append(f"{where}: {why}")
            if self._is_reference:
                reference.answer = reference.predictions = None
                self.notes[-1] += f"; later turns are not compared with {self._name}"

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            self._spans.note(event)
            if isinstance(event, Notice):
                self.notes.append(f"{self._name}: {event.text}")

    def _on_pass(self, logits: Tensor, cache: BoundedCache) -> None:
        self._cache = cache
        if self._compared is None:
            return
        read = range(self._session.seen, self._session.seen + len(logits))
        if self._is_reference:
            self._compared |= zip(read, torch.log_softmax(logits, -1), strict=True)
            self._nats |= dict.fromkeys(read, 0.0)
        else:
            expected = torch.stack([self._compared[at] for at in read])
            self._nats |= zip(read, divergence(expected, logits).tolist(), strict=True)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# A function that is called after a forward pass, with the logits [m, V] and the cache
OnPass = Callable[[Tensor, BoundedCache], None]


@dataclass(frozen=True, kw_only=True)
class RecordingModel(LoadedModel):
    """A model that calls `on_pass`, with logits and cache, after every forward pass."""

    on_pass: OnPass

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        """Run the model's forward pass, and call `on_pass` with its logits; returns the logits."""
        logits = super().forward(ids, cache, **how)
        self.on_pass(logits, cache)
        return logits

    def read(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        """Run `forward`; returns the surprisals of the ids, and the last token's logits."""
        return PassResult.of_logits(self.forward(ids, cache, **how), ids)


def recording(model: LoadedModel, on_pass: OnPass) -> RecordingModel:
    """A copy of the model, with shared weights, that calls `on_pass` after every forward pass."""
    parts = {field.name: getattr(model, field.name) for field in fields(LoadedModel)}
    return RecordingModel(**parts, on_pass=on_pass)


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """The KL divergence [m], in nats, of m predictions from those of a reference; at least 0.

    `reference` has log-probabilities [m, V]; `logits` [m, V] are compared with it.
    """
    other = torch.log_softmax(logits, -1)
    terms = reference.exp() * (reference - other)
    # A token that is impossible in both distributions has a logit of -inf, and must not give NaN.
    return terms.nan_to_num(nan=0.0).sum(-1).clamp_min(0.0)
