"""The state of a conversation beside the engine's, and the points to which it can return."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Final

from sirchat.chat.events import Finish
from sirchat.engine.engine import Engine
from sirchat.memory.key_value_store import Checkpoint
from sirchat.memory.ledger import Ledger, Placement, Role, TokenVectors

UNFINISHED: Final = ("length", "loop", "interrupt")  # how a reply ends that can go on
_UNDO_DEPTH = 64  # user turns
_UNDO_STATE_BYTES = 1 << 28  # of all saved states of a hybrid model's recurrent layers


@dataclass
class TurnStats:
    """Counts of one turn's tokens and seconds, which increase until the turn is complete."""

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
    text: str = ""  # without reasoning
    finish: Finish = "read"
    is_summary: bool = False  # a user turn that `/summarize` added
    thinking: str = ""  # the reasoning of a reply
    time: int | None = field(default=None, compare=False)  # UNIX seconds when it began, if known
    is_left_out: bool = False  # the conversation no longer has it, but recall may
    torn: tuple[str, ...] = ()  # what is left of the sentences from which words were erased


@dataclass(frozen=True)
class GeneratedReply:
    """A reply that the model generated: its token ids, and the reason why it ended."""

    ids: tuple[int, ...]
    finish: Finish | None  # None: the model is to continue the reply after these ids


def last_generated_reply(ledger: Ledger, turns: Sequence[Turn]) -> GeneratedReply | None:
    """The last turn before summaries, if the model wrote it; else None."""
    last = len(turns) - 1
    while last > 0 and turns[last - 1].is_summary:
        last -= 2
    if last < 0 or turns[last].role != "assistant":
        return None
    said = ledger.of_turn(last, Role.ASSISTANT)
    return GeneratedReply(tuple(ledger.column("token_id")[said].tolist()), turns[last].finish)


@dataclass(frozen=True)
class SystemPrompt:
    """The system prompt in force: the stream positions of its tokens, and its text."""

    positions: range = range(0)
    text: str | None = None


@dataclass(frozen=True)
class RetriedMessage:
    """What is kept of a message that was undone to be answered again."""

    text: str = ""
    # Indices within the message, as more or less may stand before it when it is read again.
    pinned_tokens: tuple[int, ...] = ()
    torn: tuple[str, ...] = ()  # as `Turn.torn`


@dataclass
class ConversationState:
    """The state of a conversation, without tokens and KV cache, which the engine stores."""

    turns: list[Turn] = field(default_factory=list)  # the last may be incomplete
    saved_turns: int = 0  # the first turns, so many, are saved as they are; set by whoever saves
    round: int = 0  # number of user turns so far
    in_round: bool = False  # until the reply to the last user turn is complete
    system: SystemPrompt = SystemPrompt()
    tools_json: str = ""  # the tools that the model was told of
    # Positions of the beginnings of tools' results, pinned until the next reply is complete.
    result_pins: list[int] = field(default_factory=list)
    # Positions of tokens that the user has restored until the next reply is complete.
    restored_by_user: list[int] = field(default_factory=list)
    last_reply_stats: TurnStats = field(default_factory=lambda: TurnStats(0, ""))
    # If a turn was cut off: the template's ids that must follow it, read before the next turn.
    pending_ids: list[int] = field(default_factory=list)
    reply_header: list[int] | None = None  # of the last user turn: `TurnIds.header`
    totals: TurnStats = field(default_factory=lambda: TurnStats(0, ""))  # generated tokens, seconds
    attempt: int = 0  # number of retries of the last turn
    # After the text was read again: of the tokens that the user had pinned, how many are pinned
    # again, and how many are not.
    repinned: tuple[int, int] = (0, 0)
    # Set by `Session.undo`, taken by `Session.read_question`
    retried: RetriedMessage = RetriedMessage()
    # Turn and text of each sentence of the user's that the user unpinned: no rule there is pinned
    # again when the message is answered again.
    unpinned_sentences: frozenset[tuple[int, str]] = frozenset()
    # Numbers of the turns that the model wrote itself, and of those with a call that was answered
    generated: array[int] = field(init=False, default_factory=lambda: array("q"))
    calling: list[int] = field(init=False, default_factory=list)
    tool_turns: int = field(init=False, default=0)  # how many turns tools have returned

    def __post_init__(self) -> None:
        self.set_turns(self.turns)

    def set_turns(self, turns: list[Turn]) -> None:
        self.turns, self.generated, self.calling, self.tool_turns = [], array("q"), [], 0
        for turn in turns:
            self._append(turn)
            self.set_finish(len(self.turns) - 1, turn.finish)

    @property
    def roles(self) -> list[str]:
        """The role of each turn; `summary` for a summary and the answer to it."""
        roles = [turn.role for turn in self.turns]
        for index in [index for index, turn in enumerate(self.turns) if turn.is_summary]:
            roles[index : index + 2] = ["summary"] * len(roles[index : index + 2])
        return roles

    @property
    def last_turn(self) -> int:
        return max(0, len(self.turns) - 1)

    def begin(self, role: str) -> TurnStats:
        """Append an empty turn of `role`; returns its counts, which the caller increases."""
        stats = TurnStats(len(self.turns), role)
        self._append(Turn(role, time=int(time.time())))
        return stats

    def finish(self, stats: TurnStats, text: str, thinking: str = "") -> None:
        """End the turn that has the counts `stats`: store its text, and add to the totals."""
        turn = self.turns[stats.index]
        turn.text, turn.thinking = text, thinking
        self.saved_turns = min(self.saved_turns, stats.index)
        self.set_finish(stats.index, stats.finish)
        self.totals.tokens_out += stats.tokens_out
        self.totals.seconds_prefill += stats.seconds_prefill
        self.totals.seconds_decode += stats.seconds_decode

    def set_finish(self, index: int, finish: Finish) -> None:
        """Record why a turn ended; a reply that was not `read` counts as the model's own."""
        self.turns[index].finish = finish
        is_own = self.turns[index].role == "assistant" and finish != "read"
        if is_own and index not in self.generated[-1:]:  # a reply that goes on is there already
            self.generated.append(index)

    def _append(self, turn: Turn) -> None:
        if turn.role == "tool":
            self.tool_turns += 1
            if self.turns and self.turns[-1].role == "assistant":
                self.calling.append(len(self.turns) - 1)
        self.turns.append(turn)


def undo_depth(has_archive: bool, state_bytes: int) -> int:
    """The number of user turns that can be undone; each saves `state_bytes` of recurrent layers."""
    if not has_archive:
        return 1
    return max(1, min(_UNDO_DEPTH, _UNDO_STATE_BYTES // max(1, state_bytes)))


@dataclass(frozen=True)
class UndoPoint:
    """The state of a chat at one moment, such as just before a user turn."""

    checkpoint: Checkpoint
    state: ConversationState  # without turns: their text never changes, so it is not copied
    turns: int  # number of earlier turns
    text: str = ""  # the message of the user turn that is read next
    pin_system: bool = False  # the setting
    vectors: TokenVectors | None = None  # of the round's passages, at a point within a round

    @staticmethod
    def now(
        state: ConversationState, engine: Engine, text: str = "", pin_system: bool = False
    ) -> UndoPoint:
        copied = deepcopy(replace(state, turns=[]))
        return UndoPoint(engine.checkpoint(), copied, len(state.turns), text, pin_system)

    @staticmethod
    def in_round(state: ConversationState, engine: Engine) -> UndoPoint:
        """The current state, while a reply is generated."""
        vectors = deepcopy(engine.ledger.token_vectors)
        return replace(UndoPoint.now(state, engine), vectors=vectors)

    def restored_state(
        self, now: ConversationState, *, to_ask_again: bool = False
    ) -> ConversationState:
        """The conversation's state at this point, with the first turns of `now`.

        Tokens that the user has restored since then stay requested, and sentences that the user
        unpinned stay unpinned; those of later turns only `to_ask_again`.
        """
        seen, unpinned = self.checkpoint.seen, now.unpinned_sentences
        if not to_ask_again:
            unpinned = frozenset(one for one in unpinned if one[0] < self.turns)
        restored = {position for position in now.restored_by_user if position < seen}
        return replace(
            self.state,
            turns=now.turns[: self.turns],
            saved_turns=min(now.saved_turns, self.turns),
            unpinned_sentences=unpinned,
            restored_by_user=sorted(restored.union(self.state.restored_by_user)),
        )


@dataclass
class UndoHistory:
    """The points of one chat, and where its last reply ended."""

    messages: Sequence[UndoPoint] = ()  # before each undoable user turn, oldest first
    before_reply: UndoPoint | None = None
    # Before the end of the reply's round, if the reply was cut and can go on
    before_end: UndoPoint | None = None
    reply_placement: Placement | None = None  # where the tokens were at the reply's end
    reply_seen: int = -1  # tokens read by then
