"""Finds the parts of a chat's text that the user pinned, and pins them when it is read again.

They are found by their place in the text, because another model has other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sirchat.chat.session import Session
from sirchat.chat.words import said
from sirchat.memory.key_values import Positions
from sirchat.text.detokenizer import tokens_spelling


@dataclass(frozen=True)
class PinnedText:
    """A part of a turn's text that the user pinned: its characters from `start` to `end` - 1.

    Blanks are not counted, because chat templates and tokenizers may change them.
    """

    turn: int  # its index
    start: int
    end: int


def own_pins(session: Session) -> Positions:
    """Positions of the tokens that the user pinned, not of what `pin_system` pins."""
    pinned, prompt = session.ledger.pinned_positions, session.state.system
    if not session.profile.pin_system:
        return pinned
    return pinned[(pinned < prompt.start) | (pinned >= prompt.stop)]


def pinned_text(session: Session, pinned: Positions | None = None) -> list[PinnedText]:
    """The parts of the text that the tokens at `pinned` spell; by default, those of `own_pins`."""
    at = own_pins(session) if pinned is None else pinned
    parts = []
    for index in np.unique(session.ledger.column("turn")[at]).tolist():
        turn = _SpelledTurn.of(session, index)
        is_pinned = np.isin(turn.positions, at)
        edges = np.flatnonzero(np.diff(is_pinned, prepend=False, append=False))
        for begin, end in turn.bounds[edges].reshape(-1, 2).tolist():
            start = _counterpart(turn.spelled[begin:end], turn.spelled, begin, turn.text)
            if begin < end and start >= 0:
                parts.append(PinnedText(index, start, start + end - begin))
    return parts


def pin_again(session: Session, index: int, parts: Sequence[PinnedText]) -> int:
    """Pin these parts of the text of turn `index`, which was just read again.

    Returns how many of the user's pinned tokens are lost: the turn lacks their text, or the cache
    has no more room for pins.
    """
    if not parts:
        return 0
    turn = _SpelledTurn.of(session, index)
    positions = [turn.positions_of(part) for part in parts]
    missing = [part for part, at in zip(parts, positions, strict=True) if not len(at)]
    texts = [turn.text[part.start : part.end] for part in missing]
    lost = sum(len(session.template.as_text(text)) for text in texts)
    return lost + pin_newest(session, np.union1d(own_pins(session), np.concatenate(positions)))


def pin_newest(session: Session, pins: Positions, more: int = 0) -> int:
    """Pin the tokens at the positions `pins`, and unpin all others that the user pinned.

    If there is no room for all of them and `more` other pins, only the newest are pinned. Returns
    how many are not.
    """
    division, ledger, before = session.divide(), session.ledger, own_pins(session)
    after = pins
    if division.most_pins is not None:
        costly = pins[pins >= division.sinks]
        others = np.setdiff1d(ledger.pinned_positions, before)
        others = np.intersect1d(others, ledger.held_positions)
        room = max(0, division.most_pins - int((others >= division.sinks).sum()) - more)
        after = np.setdiff1d(pins, costly[: max(0, len(costly) - room)])
    for positions, pinned in (
        (np.setdiff1d(before, after), False),
        (np.setdiff1d(after, before), True),
    ):
        if len(positions):
            session.pin(positions, pinned)
    return len(pins) - len(own_pins(session))


def pins_note(session: Session) -> str:
    """A line for the user: how many tokens were pinned again after the text was read again.

    It is empty if the user had pinned nothing.
    """
    again, lost = session.state.repinned
    if not again + lost:
        return ""
    many = "token that you had pinned is" if again == 1 else "tokens that you had pinned are"
    left = f"; {lost:,} are not, as pins take at most half of the budget" if lost else ""
    return f"{again:,} {many} pinned again{left}"


@dataclass(frozen=True, eq=False)
class _SpelledTurn:
    """One turn's tokens, without those of the chat template, and its text, both without blanks."""

    positions: Positions  # [n] of the tokens
    bounds: Positions  # [n + 1], where each token begins in `spelled`, and its length
    spelled: str  # the text of the tokens
    text: str  # the turn's text; it differs if words were erased from only one of the two

    @staticmethod
    def of(session: Session, index: int) -> _SpelledTurn:
        at = np.flatnonzero(session.ledger.column("turn") == index)
        rows = said(session.tokens(at.tolist()))
        pieces = ["".join(row.text.split()) for row in rows]
        return _SpelledTurn(
            np.asarray([row.position for row in rows], np.int64),
            np.cumsum([0, *map(len, pieces)], dtype=np.int64),
            "".join(pieces),
            "".join(session.turns[index].text.split()),
        )

    def positions_of(self, part: PinnedText) -> Positions:
        """Positions of the tokens that spell this part; empty if the turn's tokens lack it."""
        text = self.text[part.start : part.end]
        start = _counterpart(text, self.text, part.start, self.spelled)
        if not text or start < 0:
            return self.positions[:0]
        return self.positions[tokens_spelling(self.bounds[1:], start, start + len(text))]


def _counterpart(part: str, text: str, at: int, other: str) -> int:
    """The index in the similar text `other` of `part`, which `text` has at index `at`; or -1.

    If it occurs several times, the first in `text` corresponds to the first in `other`, and so on.
    """
    if text == other:
        return at
    here, there = text.find(part), other.find(part)
    while 0 <= here < at and (following := other.find(part, there + 1)) >= 0:
        here, there = text.find(part, here + 1), following
    return there
