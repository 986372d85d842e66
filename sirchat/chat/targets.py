"""Finds the tokens that a command names: some words, the last message, or a turn; erases text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.state import ConversationState
from sirchat.engine.engine import Engine
from sirchat.errors import UsageError, format_value
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.memory.segments import Positions
from sirchat.text.detokenizer import Texts, tokens_matching

_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese: no blanks between words."""


Target = str | Positions
"""What the user typed to name tokens, or the stream positions of tokens."""


def positions_of(
    target: Target,
    ledger: Ledger,
    texts: Texts,
    roles: Sequence[str],
    among: Positions,
    around: int = 0,
) -> Positions:
    """Find the tokens that a target names; returns their stream positions [k], ascending.

    A target that the user typed is `last` (the last user turn), `turn N` (the turn with index N),
    or a text; anything in quotes is a text. A text is searched in every turn, as whole words,
    ignoring case. Tokens of the chat template never match.

    Args:
        target: what the user typed, or stream positions; for positions, the result may be empty.
        ledger: the table of all tokens.
        texts: returns the text of each token id.
        roles: role of each turn.
        among: positions [n] of the tokens that may be returned.
        around: this many tokens before and after each found token are returned, too, if they belong
            to the same turn.

    Raises:
        UsageError: nothing matches what the user typed.
    """
    if not isinstance(target, str):
        return np.intersect1d(target, among)
    is_erased = (ledger.column("flags")[among] & Flag.ERASED).astype(bool)
    said = among[(ledger.column("role")[among] != Role.TEMPLATE) & ~is_erased]
    turn = turn_of_target(target, roles)
    if turn is None:
        positions = _occurrences(without_quotes(target), ledger, texts, said)
    else:
        positions = said[ledger.column("turn")[said] == turn]
    if not len(positions):
        what = format_value(without_quotes(target))
        if len(among) < ledger.seen and _is_anywhere(target, ledger, texts, roles):
            raise UsageError(f"{what} was evicted, and is no longer archived")
        raise UsageError(f"{what}: these words are not in this chat")
    return _with_neighbours(positions, said, ledger.column("turn"), around)


def _is_anywhere(target: str, ledger: Ledger, texts: Texts, roles: Sequence[str]) -> bool:
    """Whether any tokens of the chat, even lost ones, match the target, a text or a turn."""
    try:
        return bool(len(positions_of(target, ledger, texts, roles, np.arange(ledger.seen))))
    except UsageError:
        return False


def _with_neighbours(
    positions: Positions, said: Positions, turns: NDArray[np.integer[Any]], around: int
) -> Positions:
    near = (positions[:, None] + np.arange(-around, around + 1)).clip(0, len(turns) - 1)
    near = near[turns[near] == turns[positions][:, None]]
    return np.intersect1d(near, said)


def _occurrences(text: str, ledger: Ledger, texts: Texts, said: Positions) -> Positions:
    """Find every occurrence of `text` in the tokens at the stream positions `said`.

    Returns the positions of the tokens of all occurrences. If `said` lacks one of the tokens of an
    occurrence, this occurrence does not count.
    """
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
    """Remove every occurrence of the words `target` from `text`, and return the result."""
    return whole_words(without_quotes(target)).sub("", text)


def whole_words(text: str) -> re.Pattern[str]:
    """A regular expression that finds `text` as whole words, ignoring case.

    In scripts without blanks between words, such as Chinese, the text is found anywhere.
    """
    if not text:
        return re.compile("(?!)")  # matches nothing
    before = r"(?<!\w)" if _ends_word(text[0]) else ""
    after = r"(?!\w)" if _ends_word(text[-1]) else ""
    return re.compile(before + re.escape(text) + after, re.IGNORECASE)


def _ends_word(character: str) -> bool:
    return bool(re.match(r"\w", character)) and not _WITHOUT_BLANKS.match(character)


def turn_of_target(target: str, roles: Sequence[str]) -> int | None:
    """The index of the turn that `target` (`last` or `turn N`) names.

    Returns None if `target` is a text, and -1 if it is `last` but there is no user turn.
    """
    found = re.fullmatch(r"(?:last|turn +(\d+))", target.strip())
    if found is None:
        return None
    users = [n for n, role in enumerate(roles) if role == "user"]
    return int(found[1]) if found[1] else max(users, default=-1)


def without_quotes(target: str) -> str:
    """The text `target` without the double quotes around it; unchanged if it has none."""
    text = target.strip()
    quoted = len(text) > 2 and text[0] == text[-1] == '"'
    return text[1:-1] if quoted else text


def tokens_to_erase(
    target: str, engine: Engine, texts: Texts, now: ConversationState, system: str | None
) -> Positions:
    """Stream positions of the tokens, held or evicted, that `target` (a text or a turn) names.

    `system` is the system prompt. The result is empty if the chat has the text, but the model did
    not read it: the text is in an interrupted turn, or in a system prompt before the first turn.
    Raises UsageError if nothing matches.
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


def erase_text(target: str, now: ConversationState, system: str | None) -> str | None:
    """Erase certain words, or a whole turn, from the stored texts of the turns.

    `target` names them. Words are erased from the system prompt `system`, too. Returns what is left
    of the system prompt, or None if nothing is left.
    """
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
