"""`/forget`: which tokens it erases, and the text that remains."""

from __future__ import annotations

import numpy as np

from sirchat.chat.conversation import Conversation
from sirchat.chat.snapshot import Positions, Texts
from sirchat.chat.targets import (
    positions_of,
    turn_of_target,
    whole_words,
    with_target_removed,
    without_quotes,
)
from sirchat.engine.engine import Engine
from sirchat.errors import UsageError


def tokens_to_erase(
    target: str, engine: Engine, texts: Texts, now: Conversation, system: str | None
) -> Positions:
    """Positions of the tokens that `target` means, held or not; `system` is the system prompt.

    Empty if the text was never read: of an interrupted turn, or of a system prompt before the first
    turn. Raises UsageError if nothing matches.
    """
    ledger, roles = engine.ledger, now.roles
    try:
        return positions_of(target, ledger, texts, roles, np.arange(ledger.seen))
    except UsageError:
        said = [system or "", *(turn.text for turn in now.turns)]
        is_text = turn_of_target(target, roles) is None
        if not is_text or not _occurs_in(without_quotes(target), said):
            raise
        return np.zeros(0, np.int64)


def erase_text(target: str, now: Conversation, system: str | None) -> str | None:
    """Remove what `target` means from every turn; returns what remains of the system prompt."""
    turn = turn_of_target(target, now.roles)
    if turn is not None:
        one = now.turns[turn]
        in_force = one.role == "system" and one.text == system
        one.text = ""
        return None if in_force else system
    for one in now.turns:
        one.text = with_target_removed(target, one.text)
    return with_target_removed(target, system) or None if system else system


def _occurs_in(text: str, said: list[str]) -> bool:
    return any(whole_words(text).search(one) for one in said)
