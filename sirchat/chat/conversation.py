"""The part of a conversation's state outside the engine: turns, token counts, undo points."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from sirchat.chat.events import Finish
from sirchat.engine.records import EngineCheckpoint

UNDO_DEPTH = 64
"""The most user turns that can be undone; if the archive is off, only the last one can be."""

UNDO_STATE_BYTES = 1 << 28
"""The most bytes for the recurrent states that a hybrid model needs to undo turns."""


def undo_depth(has_archive: bool, state_bytes: int) -> int:
    """The number of user turns that can be undone: 1 if there is no archive, else at most 64.

    It is less than 64 if a hybrid model's recurrent state is large: one state takes `state_bytes`
    bytes (0 without such a state), and all saved states together take at most `UNDO_STATE_BYTES`.
    """
    if not has_archive:
        return 1
    return max(1, min(UNDO_DEPTH, UNDO_STATE_BYTES // max(1, state_bytes)))


@dataclass
class TurnStats:
    """Counts of one turn so far: tokens read, generated and evicted, and the time in seconds."""

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
    """One message: the role that wrote it, its text, and the reason why it ended."""

    role: str
    text: str = ""
    finish: Finish = "read"


@dataclass
class Conversation:
    """The state of a conversation, except its tokens and cache, which the engine has.

    Attributes:
        turns: all messages; the last one may be incomplete.
        round: number of user turns so far.
        in_round: true until the reply to the last user turn is complete.
        system: stream positions of the current system prompt.
        prompt: text of the current system prompt.
        reply: counts of tokens and seconds of the current reply, or of the last one.
        pending_ids: ids of the chat template that must follow a turn that was cut off; they are
            read before the next turn.
        totals: number of generated tokens, and seconds, of the whole conversation.
        attempt: number of retries of the last turn.
        repinned: two numbers, for a chat that was read anew: how many of the tokens that the user
            had pinned are pinned again, and how many are not.
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
        """Begin a turn of this role; returns its counts of tokens and seconds, all 0 at first."""
        stats = TurnStats(len(self.turns), role)
        self.turns.append(Turn(role))
        return stats

    def finish(self, stats: TurnStats, text: str) -> None:
        """Store the text of a turn, and add its tokens and seconds to the totals."""
        self.turns[stats.index] = Turn(stats.role, text, stats.finish)
        self.totals.tokens_out += stats.tokens_out
        self.totals.seconds_prefill += stats.seconds_prefill
        self.totals.seconds_decode += stats.seconds_decode


@dataclass(frozen=True)
class UndoPoint:
    """The state just before a user turn, to which undo returns; `text` is that turn's message.

    `pin_system` and `budget` are the settings at that time. `turns` is the number of earlier turns;
    the turns themselves are not copied, because they never change.
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
        """Make an undo point of the present state: `now`, and the engine's `checkpoint`."""
        turns = now.turns
        now.turns = []
        try:
            return UndoPoint(checkpoint, deepcopy(now), len(turns), text, pin_system, budget)
        finally:
            now.turns = turns

    def conversation(self, now: Conversation) -> Conversation:
        """The conversation as it was at this undo point; its turns are taken from `now`."""
        return replace(self.state, turns=now.turns[: self.turns])
