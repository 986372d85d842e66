"""Splits tokens into words, finds evicted words, and finds the tokens that a command names."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.conversation import Conversation
from sirchat.chat.events import TokenRow
from sirchat.engine.engine import Engine
from sirchat.errors import UsageError, format_value
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.memory.segments import Positions
from sirchat.text.detokenizer import Texts, tokens_matching

if TYPE_CHECKING:
    from sirchat.chat.session import Session

_MARKS = string.punctuation + string.whitespace + "…“”‘’«»–—"

STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about after all also am an and any are as at be been but by can could did do does for "
        "from get go had has have he her here hers him his how i if in into is it its just let "
        "like me more my no not now of off on one or our out over please she should so some tell "
        "than that the their them then there these they this those to too up us very was we were "
        "what when where which who why will with would yes you your",
    )
)
"""English words that tell little by themselves, in lower case."""

_LONGEST = 16
"""A word is cut after this many tokens, because some scripts have no blanks between words."""

_REACH = 5
"""To find the whole word of a token, this many tokens on each side of the token are read."""


def is_mark(text: str) -> bool:
    """Whether a text has nothing but punctuation and blanks."""
    return not text.strip(_MARKS)


def spelled(word: Sequence[TokenRow]) -> str:
    """The text of a word, given as its tokens, without the punctuation and blanks around it."""
    return "".join(row.text for row in word).strip(_MARKS)


def split_words(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """Split tokens, in stream order, into words; yields the tokens of each word.

    A new word begins at a blank, after a stream position that is missing in `rows`, and at the
    start of each turn. A wide (East Asian) character is a word of its own. The blank before a word
    and the punctuation around it belong to the word.
    """
    word: list[TokenRow] = []
    for row in rows:
        if word and (len(word) == _LONGEST or _is_apart(word[-1], row)):
            yield word
            word = []
        word.append(row)
    if word:
        yield word


def _is_apart(before: TokenRow, row: TokenRow) -> bool:
    """Whether a new word begins at the token `row`, which follows the token `before`."""
    if row.position != before.position + 1 or row.turn != before.turn:
        return True
    left, right = before.text, row.text
    if left.isspace():  # a blank belongs to the word after it
        return False
    if right[:1].isspace() or left[-1:].isspace():
        return True
    return _is_wide(left[-1:]) or _is_wide(right[:1])


def _is_wide(char: str) -> bool:
    return not char.isascii() and east_asian_width(char) in "WF"


def around(positions: Collection[int], seen: int) -> list[int]:
    """These stream positions and up to `_REACH` positions on each side of each, ascending.

    The stream has `seen` tokens.
    """
    near = {at + step for at in positions for step in range(-_REACH, _REACH + 1)}
    return sorted(at for at in near if 0 <= at < seen)


def words_at(
    positions: Collection[int], rows: Sequence[TokenRow], known: Collection[str] = ()
) -> tuple[str, ...]:
    """The words of `rows` that have a token at one of these positions, the most surprising first.

    Each word is named once. Tokens that are only punctuation do not count. The words in `known`, in
    lower case, are left out.
    """
    wanted = set(positions)
    found: dict[str, float] = {}
    for word in split_words(rows):
        text = spelled(word)
        gone = any(row.position in wanted and not is_mark(row.text) for row in word)
        if gone and text.casefold() not in known:
            least = -math.inf
            found[text] = max(found.get(text, least), *(row.surprisal or least for row in word))
    return tuple(sorted(found, key=lambda text: -found[text]))


def words_of(rows: Sequence[TokenRow]) -> set[str]:
    """The words of these tokens, in lower case; tokens of the chat template are left out."""
    return {spelled(word).casefold() for word in split_words(said(rows))}


def said(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The tokens that belong to messages; tokens of the chat template are left out."""
    return [row for row in rows if row.role != "template"]


_LATEST = 8
"""The function `latest_words` finds the words of this many tokens."""


@dataclass(frozen=True)
class EvictedText:
    """A turn of which some tokens are not in the cache.

    Attributes:
        index, role: the turn's index, and who wrote it.
        tokens: number of the turn's tokens, without those of the chat template.
        held: how many of these tokens are in the cache.
        words: the words that have an evicted token, the most surprising first; a word that is still
            in the cache at another place is left out.
    """

    index: int
    role: str
    tokens: int
    held: int
    words: tuple[str, ...]


def evicted_turns(session: Session) -> Iterator[EvictedText]:
    """Yield a record of each turn of which some tokens are not in the cache, in order."""
    snapshot = session.snapshot()
    held = {row.position for row in snapshot.rows}
    known = words_of(snapshot.rows)
    start = 0
    for turn in snapshot.turns:
        span, start = range(start, start + turn.tokens), start + turn.tokens
        if turn.held == turn.tokens:
            continue
        rows = said(session.tokens(span))
        gone = [row.position for row in rows if row.position not in held]
        if gone:
            words = words_at(gone, rows, known)
            yield EvictedText(turn.index, turn.role, len(rows), len(rows) - len(gone), words)


def evicted_words(session: Session, positions: Collection[int]) -> tuple[str, ...]:
    """The words of the user's messages that were evicted with the tokens at these positions.

    The most surprising word comes first. Words that are still in the cache at another place,
    English stop words, and words that most of the user's messages have, are left out.
    """
    rows = [row for row in session.tokens(sorted(positions)) if row.role == "user"]
    if not rows:
        return ()
    held = session.snapshot().rows
    present = {row.position for row in held}
    gone = [row.position for row in rows if row.position not in present]
    # Whole words: the rest of a word may have been evicted before.
    near = session.tokens(around(gone, session.seen))
    whole = [row for row in near if row.role == "user"]
    return words_at(gone, whole, words_of(held) | STOP_WORDS | _common_words(session))


def _common_words(session: Session) -> set[str]:
    """The words, in lower case, that more than half of the user's last messages contain.

    The last `_RECENT` messages are searched. Empty if the user wrote fewer than `_FEW` messages.
    """
    said = [turn.text for turn in session.turns if turn.role == "user"][-_RECENT:]
    if len(said) < _FEW:
        return set()
    counts = Counter(word for text in said for word in set(_spelled_words(text)))
    return {word for word, count in counts.items() if 2 * count > len(said)}


def _spelled_words(text: str) -> Iterator[str]:
    return (word.strip(_MARKS).casefold() for word in text.split())


_FEW, _RECENT = 4, 64
"""`_common_words` needs at least `_FEW` user messages, and searches the last `_RECENT` of them."""


def latest_words(
    session: Session, positions: Sequence[int], held: Sequence[TokenRow]
) -> tuple[str, ...]:
    """A few words, of the user or the model, that have tokens at these ascending positions.

    The most surprising word comes first. Words that occur in the held tokens `held` are left out.
    This function takes much less time than `evicted_words`, which returns all words.
    """
    rows = [row for row in said(session.tokens(positions)) if not is_mark(row.text)]
    best = nlargest(_LATEST, rows, key=lambda row: row.surprisal or 0.0)
    at = [row.position for row in best]
    whole = said(session.tokens(around(at, session.seen))) if at else []
    return words_at(at, whole, words_of(held))


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
    target: str, engine: Engine, texts: Texts, now: Conversation, system: str | None
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


def erase_text(target: str, now: Conversation, system: str | None) -> str | None:
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
