"""What a comparison found: plain values, for the terminal, JSON and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sirchat.chat.snapshot import TurnShare
from sirchat.config.profile import Profile
from sirchat.tasks.side_by_side.held_spans import Span
from sirchat.tasks.side_by_side.rounds import Rounds


@dataclass(frozen=True)
class Answer:
    """What the model said to a user turn.

    Attributes:
        text: as it was said.
        ids, tokens: its tokens, without those that close it, and the text of each.
        finish: why it ended; see `events.Finish`.
        tokens_in, seconds_in: tokens read for it, and how long that took.
        seconds_out: how long it took to say.
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    finish: str
    tokens_in: int
    seconds_in: float
    seconds_out: float


@dataclass(frozen=True)
class RoundResult:
    """How a setting stands when a round is over: a user turn and the reply it went on with.

    Attributes:
        answer: the model's own, whether the conversation went on with it or not.
        reply: what the conversation went on with.
        differs_at: first token, counted from 0, at which the answer is not that of `full`; None
            where both are the same, or `full` has none.
        same: whether both are the same; None where `full` has none.
        nats: mean KL divergence over the round's tokens; None where it could not be measured.
        held, seen: tokens held now, of all that were read.
        shares: of every turn so far, how much is held.
        turns: the numbers, among `shares`, of this round's turns.
        cache_bytes: memory of keys and values.
    """

    answer: Answer
    reply: str
    differs_at: int | None
    same: bool | None
    nats: float | None
    held: int
    seen: int
    shares: tuple[TurnShare, ...]
    turns: tuple[int, ...]
    cache_bytes: int


@dataclass(frozen=True)
class Token:
    """A token of the stream that a setting read.

    `surprisal` is in nats, as in the events; `nats` is the KL divergence of what was foretold to
    come after it; `held` says when it was held.
    """

    id: int
    text: str
    turn: int
    role: str
    surprisal: float | None
    nats: float | None
    held: tuple[Span, ...]


@dataclass(frozen=True)
class SettingResult:
    """The whole conversation under one setting, `name` in a few words.

    It has fewer rounds than the transcript where the setting could not go on.
    """

    name: str
    setting: Profile
    rounds: tuple[RoundResult, ...]
    tokens: tuple[Token, ...]

    @property
    def nats(self) -> float | None:
        """Mean KL divergence over all tokens, where it could be measured."""
        known = [one.nats for one in self.tokens if one.nats is not None]
        return sum(known) / len(known) if known else None

    @property
    def same_answers(self) -> tuple[int, int]:
        """Answers that are those of `full`, and how many could be compared."""
        known = [one.same for one in self.rounds if one.same is not None]
        return sum(known), len(known)

    @property
    def read_speed(self) -> float:
        """Tokens a second while user turns are read."""
        answers = [one.answer for one in self.rounds]
        return _rate(sum(a.tokens_in for a in answers), sum(a.seconds_in for a in answers))

    @property
    def answer_speed(self) -> float:
        """Tokens a second while answers are generated."""
        answers = [one.answer for one in self.rounds]
        return _rate(sum(len(a.ids) for a in answers), sum(a.seconds_out for a in answers))

    def kept(self, number: int) -> float | None:
        """Share of a round's tokens that is held at the end; None for a round it never came to."""
        if number >= len(self.rounds):
            return None
        shares = [self.rounds[-1].shares[turn] for turn in self.rounds[number].turns]
        return sum(one.held for one in shares) / max(1, sum(one.tokens for one in shares))


@dataclass(frozen=True)
class Comparison:
    """One transcript under several settings, `full` first.

    Attributes:
        file: its name.
        transcript: what it says.
        own: whether each setting went on with its own answers.
        settings: one for each.
        notes: what the reader should know, in words.
    """

    file: str
    transcript: Rounds
    own: bool
    settings: tuple[SettingResult, ...]
    notes: tuple[str, ...]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part, counted from 0; None where they are the same."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)
