"""Which tokens a command means: some words, a turn, or the last user turn; and erasing them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.conversation import Conversation
from sirchat.chat.snapshot import Positions, Texts
from sirchat.engine.engine import Engine
from sirchat.errors import UsageError, format_value
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.text.detokenizer import tokens_matching

_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese."""


def positions_of(
    target: str,
    ledger: Ledger,
    texts: Texts,
    roles: Sequence[str],
    among: Positions,
    around: int = 0,
) -> Positions:
    """Positions [k], ascending, of the tokens that `target` means, among the positions [n] given.

    `last` is the last user turn, `turn N` any turn. Everything else, and whatever is in quotes, is
    a text, which is searched everywhere, as whole words and ignoring case. Tokens of the chat
    template never match.

    Args:
        target: what the user typed.
        ledger: of the conversation.
        texts: gives the text of each token.
        roles: of the turns.
        among: candidates.
        around: so many tokens before and after, of the same turn, belong to what is meant, too.

    Raises:
        UsageError: nothing matches.
    """
    is_erased = (ledger.column("flags")[among] & Flag.ERASED).astype(bool)
    said = among[(ledger.column("role")[among] != Role.TEMPLATE) & ~is_erased]
    turn = turn_of_target(target, roles)
    if turn is None:
        positions = _occurrences(without_quotes(target), ledger, texts, said)
    else:
        positions = said[ledger.column("turn")[said] == turn]
    if not len(positions):
        text = without_quotes(target)
        raise UsageError(f"{format_value(text)} is nowhere in what can be remembered")
    return _with_neighbours(positions, said, ledger.column("turn"), around)


def _with_neighbours(
    positions: Positions, said: Positions, turns: NDArray[np.integer[Any]], around: int
) -> Positions:
    near = (positions[:, None] + np.arange(-around, around + 1)).clip(0, len(turns) - 1)
    near = near[turns[near] == turns[positions][:, None]]
    return np.intersect1d(near, said)


def _occurrences(text: str, ledger: Ledger, texts: Texts, said: Positions) -> Positions:
    """The tokens of every occurrence of `text` within runs of neighbouring tokens."""
    if not text:
        raise UsageError("expected text, last, or turn N", hint="some words of the chat")
    at = said.tolist()
    pieces = texts(ledger.column("token_id")[said].tolist(), at)
    chosen = np.zeros(len(at), bool)
    breaks = np.flatnonzero(np.diff(said) > 1) + 1
    for run in np.split(np.arange(len(at)), breaks):
        parts = [pieces[i] for i in run.tolist()]
        chosen[run] = tokens_matching(whole_words(text), parts)
    return said[chosen]


def with_target_removed(target: str, text: str) -> str:
    """`text` without the occurrences of `target`, which is a text too."""
    return whole_words(without_quotes(target)).sub("", text)


def whole_words(text: str) -> re.Pattern[str]:
    """Finds a text where it is no part of a longer word, ignoring case.

    Scripts that put no blanks between words have no such parts.
    """
    if not text:
        return re.compile("(?!)")  # nothing
    before = r"(?<!\w)" if _ends_word(text[0]) else ""
    after = r"(?!\w)" if _ends_word(text[-1]) else ""
    return re.compile(before + re.escape(text) + after, re.IGNORECASE)


def _ends_word(character: str) -> bool:
    return bool(re.match(r"\w", character)) and not _WITHOUT_BLANKS.match(character)


def turn_of_target(target: str, roles: Sequence[str]) -> int | None:
    """The turn that `target` means; None if it is a text; -1 for a `last` that does not exist."""
    found = re.fullmatch(r"(?:last|turn +(\d+))", target.strip())
    if found is None:
        return None
    users = [n for n, role in enumerate(roles) if role == "user"]
    return int(found[1]) if found[1] else max(users, default=-1)


def without_quotes(target: str) -> str:
    """A text without the quotes around it, if any."""
    text = target.strip()
    quoted = len(text) > 2 and text[0] == text[-1] == '"'
    return text[1:-1] if quoted else text


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
