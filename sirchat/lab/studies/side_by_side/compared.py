"""Data classes of a comparison of settings: a transcript in rounds, and the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sirchat.chat.events import Event, Evicted, Recalled, Restored
from sirchat.chat.panel_snapshot import HeldShare
from sirchat.config.profile import Profile
from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn


@dataclass(frozen=True)
class Round:
    """A user turn and its reply in the transcript; `reply` is None if the transcript has none."""

    user: str
    reply: str | None


@dataclass(frozen=True)
class Rounds:
    """A whole transcript, as rounds of a user turn and its reply."""

    # the text of the system turn at the beginning; None if there is no such turn
    system: str | None
    rounds: tuple[Round, ...]  # the rounds, at least one
    notes: tuple[str, ...]  # messages about turns that are left out


def rounds_of(turns: Sequence[TranscriptTurn], name: str) -> Rounds:
    """Make rounds of a transcript's turns: each user turn with the reply that follows it.

    Raises TranscriptError for an assistant turn that follows no user turn, and for a transcript
    without user turns.
    """
    system, rounds, notes, previous = None, list[Round](), list[str](), ""
    for turn in turns:
        if turn.role == "user":
            rounds.append(Round(turn.content, None))
        elif turn.role == "assistant":
            if previous != "user":
                raise TranscriptError(
                    f"{name}, line {turn.line}: an assistant turn must follow a user turn"
                )
            rounds[-1] = Round(rounds[-1].user, turn.content)
        elif rounds:
            notes.append(
                f"{name}, line {turn.line}: a system turn after the first turn is left out"
            )
            continue  # the user turn before it may still get a reply
        else:
            system = turn.content
        previous = turn.role
    if not rounds:
        raise TranscriptError(f"{name} has no user turn", hint="there is nothing to compare")
    return Rounds(system, tuple(rounds), tuple(notes))


# A span of time in which a token was held: (start, end), counted in tokens read. The end is None if
# the token is still held
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

    `name` describes the setting in a few words. If the session could not continue, there are fewer
    rounds than in the transcript.
    """

    name: str
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
