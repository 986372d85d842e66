"""The state of a conversation beside the engine's: turns, rounds, pending ids, costs, undo."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from sirchat.chat.events import Finish
from sirchat.engine.records import EngineCheckpoint

UNDO_DEPTH = 64
"""Number of user turns that can be undone; without an archive only one can."""


@dataclass
class TurnStats:
    """What one turn cost so far."""

    index: int
    role: str
    tokens_in: int = 0
    tokens_out: int = 0
    evicted: int = 0
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0
    finish: Finish = "read"


@dataclass
class Turn:
    """One message: who spoke, the text, and why it ended."""

    role: str
    text: str = ""
    finish: Finish = "read"


@dataclass
class Conversation:
    """The state of a session, without its engine's state.

    Attributes:
        turns: all messages; the last one may be incomplete.
        round: number of user turns so far.
        in_round: whether the reply to the last user turn is not yet complete.
        system: stream positions of the current system prompt.
        prompt: text of the current system prompt.
        reply: cost of the current reply, or of the last one.
        pending_ids: closing ids to read before the next turn, to keep the conversation well-formed.
        totals: costs of the whole conversation.
        attempt: number of retries of the last turn.
        repinned: if the chat was read anew, how many of the tokens that the user had pinned were
            pinned again, and how many were not.
    """

    turns: list[Turn] = field(default_factory=list)
    round: int = 0
    in_round: bool = False
    system: range = range(0)
    prompt: str | None = None
    reply: TurnStats = field(default_factory=lambda: TurnStats(0, ""))
    pending_ids: list[int] = field(default_factory=list)
    totals: TurnStats = field(default_factory=lambda: TurnStats(0, ""))
    attempt: int = 0
    repinned: tuple[int, int] = (0, 0)

    @property
    def roles(self) -> list[str]:
        """The role (system, user or assistant) of each turn, in order."""
        return [turn.role for turn in self.turns]

    @property
    def last(self) -> int:
        """Index of the last turn; 0 if there is none yet."""
        return max(0, len(self.turns) - 1)

    def begin(self, role: str) -> TurnStats:
        """Begin a turn of this role; returns the record of its costs, all of them 0."""
        stats = TurnStats(len(self.turns), role)
        self.turns.append(Turn(role))
        return stats

    def finish(self, stats: TurnStats, text: str) -> None:
        """Store the text of a turn, and add its cost to the totals."""
        self.turns[stats.index] = Turn(stats.role, text, stats.finish)
        self.totals.tokens_out += stats.tokens_out
        self.totals.seconds_prefill += stats.seconds_prefill
        self.totals.seconds_decode += stats.seconds_decode


@dataclass(frozen=True)
class UndoPoint:
    """The state at the beginning of a user turn with this `text`, for undo.

    `pin_system` and `budget` are the settings at that time. Of the turns only their number is
    kept, because earlier turns never change.
    """

    checkpoint: EngineCheckpoint
    state: Conversation
    turns: int
    text: str
    pin_system: bool
    budget: int

    @staticmethod
    def of(
        now: Conversation, checkpoint: EngineCheckpoint, text: str, pin_system: bool, budget: int
    ) -> UndoPoint:
        """An undo point for the present state."""
        turns = now.turns
        now.turns = []
        try:
            return UndoPoint(checkpoint, deepcopy(now), len(turns), text, pin_system, budget)
        finally:
            now.turns = turns

    def conversation(self, now: Conversation) -> Conversation:
        """The conversation at this undo point; `now` is the present one, whose turns are used."""
        return replace(self.state, turns=now.turns[: self.turns])
