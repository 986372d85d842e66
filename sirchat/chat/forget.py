"""What `/forget` erases: which tokens, and what is left of what was said."""

from __future__ import annotations

import numpy as np

from sirchat.chat.conversation import Conversation
from sirchat.chat.snapshot import Positions, Texts
from sirchat.chat.targets import positions_of, turn_meant, unquoted, without
from sirchat.engine.engine import Engine
from sirchat.errors import UsageError


def tokens_to_erase(
    target: str, engine: Engine, texts: Texts, now: Conversation, system: str | None
) -> Positions:
    """The tokens that `target` means, held or not; `system` is the system prompt that is set.

    None of them where a text was said and not read: of a turn that was interrupted, or of a system
    prompt before the first turn. Raises UsageError where nothing is meant.
    """
    ledger, roles = engine.ledger, now.roles
    try:
        return positions_of(target, ledger, texts, roles, np.arange(ledger.seen))
    except UsageError:
        said = [system or "", *(turn.text for turn in now.turns)]
        if turn_meant(target, roles) is not None or not _stands_in(unquoted(target), said):
            raise
        return np.zeros(0, np.int64)


def erase_text(target: str, now: Conversation, system: str | None) -> str | None:
    """Take what `target` means out of every turn; returns what is left of the system prompt."""
    turn = turn_meant(target, now.roles)
    if turn is not None:
        one = now.turns[turn]
        in_force = one.role == "system" and one.text == system
        one.text = ""
        return None if in_force else system
    for one in now.turns:
        one.text = without(target, one.text)
    return without(target, system) or None if system else system


def _stands_in(text: str, said: list[str]) -> bool:
    return bool(text) and any(text.lower() in one.lower() for one in said)
