"""The points of a conversation to which it can return: before user turns, and in the last round."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from sirchat.chat.state import ConversationState
from sirchat.engine.engine import Engine
from sirchat.engine.types import EngineCheckpoint
from sirchat.memory.ledger import Placement, TokenVectors

_UNDO_DEPTH = 64  # user turns
_UNDO_STATE_BYTES = 1 << 28  # of all saved states of a hybrid model's recurrent layers


def undo_depth(has_archive: bool, state_bytes: int) -> int:
    """The number of user turns that can be undone; each saves `state_bytes` of recurrent layers."""
    if not has_archive:
        return 1
    return max(1, min(_UNDO_DEPTH, _UNDO_STATE_BYTES // max(1, state_bytes)))


@dataclass(frozen=True)
class UndoPoint:
    """The state of a chat at one moment, such as just before a user turn."""

    checkpoint: EngineCheckpoint
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
        seen, unpinned = self.checkpoint.cache.seen, now.unpinned_sentences
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
