"""The state of a conversation that the engine does not store: turns, counts, undo points."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from sirchat.chat.events import Finish
from sirchat.engine.types import EngineCheckpoint
from sirchat.memory.ledger import Ledger, Role

UNDO_DEPTH = 64
"""The most user turns that can be undone; without an archive, only the last user turn can be."""

UNDO_STATE_BYTES = 1 << 28
"""The most bytes that all saved states of a hybrid model's recurrent layers take, for undo."""


def undo_depth(has_archive: bool, state_bytes: int) -> int:
    """The number of user turns that can be undone: 1 without an archive, else from 1 to 64.

    For each of these turns, the state of a hybrid model's recurrent layers is saved. One saved
    state takes `state_bytes` bytes (0 if no layer is recurrent), and the number of turns is chosen
    so that all saved states together take at most `UNDO_STATE_BYTES`.
    """
    if not has_archive:
        return 1
    return max(1, min(UNDO_DEPTH, UNDO_STATE_BYTES // max(1, state_bytes)))


@dataclass
class TurnStats:
    """Counts of one turn: its tokens read, generated and evicted, and its time in seconds.

    They increase until the turn is complete. `finish` is the reason why the turn ended.
    """

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
    """One message: the role that wrote it, its text, and the reason why it ended.

    `is_summary` marks a summary: a user turn that `/summarize` added.
    """

    role: str
    text: str = ""
    finish: Finish = "read"
    is_summary: bool = False


@dataclass
class ConversationState:
    """The state of a conversation, but not its tokens and KV cache: the engine stores those.

    Attributes:
        turns: all messages in order; the last message may be incomplete.
        round: number of user turns so far.
        in_round: true until the reply to the last user turn is complete.
        system: stream positions of the current system prompt.
        prompt: text of the current system prompt.
        reply: counts of tokens and seconds of the current reply; between replies, of the last
            reply.
        pending_ids: if a turn was cut off, the token ids of the chat template that must follow it.
            The engine reads these ids before the next turn.
        totals: number of generated tokens, and seconds, of the whole conversation.
        attempt: number of retries of the last turn.
        repinned: two numbers, for a chat whose text was read again from the start: how many of the
            tokens that the user had pinned are pinned again, and how many are not.
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
        """Index of the last turn in `turns`; 0 if there is no turn yet."""
        return max(0, len(self.turns) - 1)

    def begin(self, role: str) -> TurnStats:
        """Append a turn, empty at first, which `role` writes.

        Returns the counts of its tokens and seconds; all are 0, and the caller increases them.
        """
        stats = TurnStats(len(self.turns), role)
        self.turns.append(Turn(role))
        return stats

    def finish(self, stats: TurnStats, text: str) -> None:
        """End the turn that has the counts `stats`: store its `text`, and add to the totals.

        The turn's generated tokens and its seconds are added to `totals`.
        """
        self.turns[stats.index] = Turn(stats.role, text, stats.finish)
        self.totals.tokens_out += stats.tokens_out
        self.totals.seconds_prefill += stats.seconds_prefill
        self.totals.seconds_decode += stats.seconds_decode


@dataclass(frozen=True)
class UndoPoint:
    """The state of a chat just before a user turn; undoing this turn restores the state.

    Attributes:
        checkpoint: the state of the engine.
        state: the state of the conversation, with an empty list of turns.
        turns: number of earlier turns. Their text is not copied, because it never changes.
        text: the message of the user turn.
        pin_system, budget: these settings, as they were before the turn.
    """

    checkpoint: EngineCheckpoint
    state: ConversationState
    turns: int
    text: str
    pin_system: bool
    budget: int

    @staticmethod
    def of(
        now: ConversationState,
        checkpoint: EngineCheckpoint,
        text: str,
        pin_system: bool,
        budget: int,
    ) -> UndoPoint:
        """Make an undo point of the present state, before the user turn `text` is read.

        `now` is the conversation, and `checkpoint` is the engine's state. `pin_system` and `budget`
        are the present settings.
        """
        turns = now.turns
        now.turns = []
        try:
            return UndoPoint(checkpoint, deepcopy(now), len(turns), text, pin_system, budget)
        finally:
            now.turns = turns

    def conversation(self, now: ConversationState) -> ConversationState:
        """The conversation as it was at this undo point.

        Its turns are the first turns of `now`, which is the present conversation.
        """
        return replace(self.state, turns=now.turns[: self.turns])


@dataclass(frozen=True)
class Reply:
    """A reply that the model generated: its token ids, and the reason why it ended."""

    ids: tuple[int, ...]
    finish: Finish


def reply_at_end(ledger: Ledger, turns: Sequence[Turn]) -> Reply | None:
    """The last turn as a `Reply`; None if there is no turn, or if its role is not `assistant`.

    The token ids of the reply are taken from the `ledger`.
    """
    if not turns or turns[-1].role != "assistant":
        return None
    is_said = ledger.column("role") == Role.ASSISTANT
    said = is_said & (ledger.column("turn") == len(turns) - 1)
    return Reply(tuple(ledger.column("token_id")[said].tolist()), turns[-1].finish)
