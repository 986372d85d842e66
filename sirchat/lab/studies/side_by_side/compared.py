"""The results of a comparison as plain values, for the terminal, JSON and the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sirchat.chat.snapshot import TurnShare
from sirchat.config.profile import Profile
from sirchat.lab.studies.side_by_side.held_spans import Span
from sirchat.lab.studies.side_by_side.rounds import Rounds


@dataclass(frozen=True)
class Answer:
    """The model's answer to a user turn.

    Attributes:
        text: the answer.
        ids, tokens: id and text of each of its tokens, without the closing ones.
        finish: why it ended; see `events.Finish`.
        tokens_in, seconds_in: number of prompt tokens read for it, and prefill time.
        seconds_out: decode time.
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
    """A finished round under one setting: a user turn and the reply that it continued with.

    Attributes:
        answer: the setting's own answer, whether the conversation continued with it or not.
        reply: the reply that the conversation continued with.
        differs_at: index of the first token at which the answer differs from that of `full`; None
            if both are the same, or `full` has none.
        same: whether both answers are the same; None if `full` has none.
        nats: mean KL divergence over the round's tokens; None if it was not measured.
        held, seen: number of tokens held after the round, and read so far.
        shares: for every turn so far, how many of its tokens are held.
        turns: indices, in `shares`, of this round's turns.
        cache_bytes: memory of the cached keys and values.
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
    """A token that a setting read.

    Attributes:
        id, text, turn, role, surprisal: as in the events; surprisal in nats.
        nats: KL divergence of the distribution of the next token, None if it was not measured.
        held: the spans of the stream in which the token was held.
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
    """The whole conversation under one setting; `name` describes the setting in a few words.

    It has fewer rounds than the transcript if the setting could not continue.
    """

    name: str
    setting: Profile
    rounds: tuple[RoundResult, ...]
    tokens: tuple[Token, ...]

    @property
    def nats(self) -> float | None:
        """Mean KL divergence over all tokens for which it was measured; None without any."""
        known = [one.nats for one in self.tokens if one.nats is not None]
        return sum(known) / len(known) if known else None

    @property
    def same_answers(self) -> tuple[int, int]:
        """Number of answers that equal those of `full`, and number of compared answers."""
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
        """Share of a round's tokens that is held at the end; None for a round that was not run."""
        if number >= len(self.rounds):
            return None
        shares = [self.rounds[-1].shares[turn] for turn in self.rounds[number].turns]
        return sum(one.held for one in shares) / max(1, sum(one.tokens for one in shares))


@dataclass(frozen=True)
class Comparison:
    """One transcript under several settings, `full` first.

    Attributes:
        file: the transcript's name.
        transcript: its rounds.
        own: whether each setting continued with its own answers.
        settings: one result for each setting.
        notes: messages for the reader.
    """

    file: str
    transcript: Rounds
    own: bool
    settings: tuple[SettingResult, ...]
    notes: tuple[str, ...]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first id at which two answers differ; None if they are the same."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)
