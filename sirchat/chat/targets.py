"""Finds the tokens that a command names (some words, the last message, or a turn); erases text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sirchat.chat.conversation import Conversation
from sirchat.errors import UsageError, format_value
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger, Role
from sirchat.recall.passages import note_torn_sentences, sentences_of, texts_at
from sirchat.text.detokenizer import Texts, sentence_bounds, tokens_matching

Target = str | Positions  # what the user typed to name tokens, or their stream positions

_ERASED = "\0"  # each character that is erased from a text

# Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese: no blanks between words.
_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)


def positions_of(
    chat: Conversation, target: Target, among: Positions, around: int = 0
) -> Positions:
    """Positions [k], ascending and in `among` [n], of the tokens that a target names.

    A typed target is `last` (the last user turn), `turn N`, or a text, maybe quoted; it includes
    `around` neighbours of the same turn on each side. Raises UsageError if no token matches.
    """
    if not isinstance(target, str):
        return np.intersect1d(target, among)
    ledger, roles = chat.ledger, chat.state.roles
    said, positions = _matches(chat, target, roles, among)
    if not len(positions):
        evicted = _matches(chat, target, roles, np.arange(ledger.seen))[1]
        is_text = turn_of_target(target, roles) is None and not len(evicted)
        hint = _similar_words(target, _runs(ledger, chat.texts, said)) if is_text else ""
        raise UsageError(_why_nothing(target, roles, is_evicted=len(evicted) > 0), hint=hint)
    near = (positions[:, None] + np.arange(-around, around + 1)).clip(0, ledger.seen - 1)
    is_near = np.ones_like(near, bool)
    for column in (ledger.column("turn"), ledger.column("role")):  # a template has its own prompt
        is_near &= column[near] == column[positions][:, None]
    near = near[is_near]
    if around:  # the rest of a sentence with erased words says what nobody said
        near = near[~np.isin(near, ledger.torn) | np.isin(near, positions)]
    return np.intersect1d(near, said)


def tokens_to_erase(chat: Conversation, target: str) -> Positions:
    """Positions of the tokens, held or evicted, that `target` names.

    Empty if the model has not read the text, in an interrupted turn or an unread system prompt.
    Raises UsageError if nothing matches, or only text that the chat template adds to each chat.
    """
    try:
        positions = positions_of(chat, target, np.arange(chat.seen))
        own = template_prompt_positions(chat.ledger, chat.texts)[0]
        if np.isin(positions, own).all():
            where = "only in the system prompt that the model's chat template adds"
            what = format_value(without_quotes(target))
            raise UsageError(f"{what} is {where}: it would come back")
        return np.setdiff1d(positions, own)
    except UsageError:
        pattern = whole_words(without_quotes(target))
        unread = [f"{turn.text}\n{turn.thinking}" for turn in chat.turns]
        is_turn = turn_of_target(target, chat.state.roles) is not None
        if is_turn or not any(map(pattern.search, [chat.profile.system or "", *unread])):
            raise
        return np.zeros(0, np.int64)


def tokens_to_restore(chat: Conversation, target: Target, around: int) -> Positions:
    """Positions of the tokens to hold for the next reply, with those requested before.

    Words that are not adjacent name the passages that have them. The model's own text is left out
    if others said the same; if there is too much, only the newest tokens stay. Raises UsageError if
    nothing matches, or there is no room.
    """
    among = chat.engine.store.recallable()
    try:
        positions = positions_of(chat, target, among, around)
    except UsageError:
        if not isinstance(target, str) or turn_of_target(target, chat.state.roles) is not None:
            raise
        passages = chat.recall.passages_containing(target)
        whole = [one for one in passages if np.isin(one, among).all()]
        if not whole:
            raise
        positions = np.unique(np.concatenate(whole))
    positions = without_generated(chat, positions)
    room = chat.engine.choice.free_budget() // 2
    if not len(positions) or room < 1:
        raise UsageError("nothing is restored: it is no longer archived, or pins leave no room")
    before = np.intersect1d(np.asarray(chat.state.restored_by_user, np.int64), among)
    both = np.union1d(before, positions)
    return both if len(both) <= room else positions[max(0, len(positions) - room) :]


def without_generated(chat: Conversation, positions: Positions) -> Positions:
    """The positions of tokens that the model did not write; all if it wrote all of them."""
    not_generated = positions[~np.isin(chat.ledger.column("turn")[positions], chat.state.generated)]
    return not_generated if len(not_generated) else positions


def erase_target(chat: Conversation, target: str) -> tuple[int, str | None]:
    """Erase the tokens that `target` names, and their words or turn in the turns' texts.

    Returns the number of tokens, and the rest of the system prompt, or None. Raises UsageError if
    nothing matches.
    """
    ledger, system, positions = chat.ledger, chat.profile.system, tokens_to_erase(chat, target)
    turns = np.unique(ledger.column("turn")[positions]).tolist()
    said = (sentence for turn in turns for sentence, _ in sentences_of(ledger, chat.texts, turn))
    ends = np.fromiter((sentence[-1] for sentence in said), np.int64)
    chat.engine.erase(positions)
    ledger.flag(Flag.ANCHOR, np.intersect1d(ends, positions), True)  # they ended one
    note_torn_sentences(ledger, chat.texts)
    index = turn_of_target(target, chat.state.roles)
    if index is not None:
        turn = chat.turns[index]
        in_force = turn.role == "system" and turn.text == system
        turn.text, turn.thinking, turn.torn = "", "", ()
        return len(positions), None if in_force else system
    pattern = whole_words(without_quotes(target))
    for turn in chat.turns:
        marked = pattern.sub(lambda found: _ERASED * len(found[0]), turn.text)
        parts = (marked[start:end].strip() for start, end in pairwise(sentence_bounds(turn.text)))
        torn = (text for text in parts if _ERASED in text or text.startswith(turn.torn))
        left = (text.replace(_ERASED, "").strip() for text in torn)
        turn.torn = tuple(text for text in left if text)
        turn.text = pattern.sub("", turn.text)
        turn.thinking = pattern.sub("", turn.thinking)
    return len(positions), pattern.sub("", system) or None if system else system


def turn_of_target(target: str, roles: Sequence[str]) -> int | None:
    """The index of the turn `target`: `last` (-1 if there is none) or `turn N`; None for a text."""
    match = re.fullmatch(r"(?:last|turn +(\d+))", target.strip())
    if match is None:
        return None
    users = [index for index, role in enumerate(roles) if role == "user"]
    return int(match[1]) if match[1] else max(users, default=-1)


def whole_words(text: str) -> re.Pattern[str]:
    """A regular expression that finds `text` as whole words, ignoring case.

    In scripts without blanks between words, such as Chinese, the text is found anywhere.
    """
    if not text:
        return re.compile("(?!)")  # matches nothing
    before = r"(?<!\w)" if _ends_word(text[0]) else ""
    after = r"(?!\w)" if _ends_word(text[-1]) else ""
    return re.compile(before + re.escape(text) + after, re.IGNORECASE)


def without_quotes(target: str) -> str:
    """The text `target` without the double quotes around it, if any."""
    text = target.strip()
    is_quoted = len(text) > 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def template_prompt_positions(ledger: Ledger, texts: Texts) -> tuple[range, int]:
    """Positions of the text of a system prompt that the chat template itself adds, and its end.

    The end is the position at which the template's marks of the user's turn begin; 0 without one.
    """
    # This runs for each frame of the panel, and a first message may be very long.
    roles = ledger.column("role")[ledger.of_turn(0)]
    count = int(np.argmax(roles != Role.TEMPLATE)) if len(roles) else 0
    if not count or roles[count] != Role.USER:
        return range(0), 0
    ids = ledger.column("token_id")[:count].tolist()
    # The id that begins a turn, the first of all or the second, comes again: at the user's turn.
    begins = [index for index in range(2, count) if ids[index] in ids[:2]]
    if not begins:
        return range(0), 0
    end = begins[-1]
    if ids[2:end].count(ids[end]):  # several turns of the template: no one text
        return range(0), end
    marks = count - end  # ids before a turn's text: the same number in both turns
    start, stop = ids.index(ids[end]) + marks, end
    while stop > start and not texts(ids[stop - 1 : stop], [stop - 1])[0].strip():
        stop -= 1
    return range(start, max(start, stop - 1)), end  # without the mark that ends it


def _matches(
    chat: Conversation, target: str, roles: Sequence[str], among: Positions
) -> tuple[Positions, Positions]:
    """The unerased message tokens in `among`, and those of them that the target names."""
    ledger, texts = chat.ledger, chat.texts
    is_erased = (ledger.column("flags")[among] & Flag.ERASED).astype(bool)
    is_text, turn = ledger.column("role")[among] != Role.TEMPLATE, turn_of_target(target, roles)
    if turn is None:  # no turn has the template's own prompt
        is_text |= np.isin(among, template_prompt_positions(ledger, texts)[0])
    said = among[is_text & ~is_erased]
    if turn is not None:
        return said, said[ledger.column("turn")[said] == turn]
    if not (text := without_quotes(target)):
        raise UsageError("expected text, last, or turn N", hint="some words of the chat")
    pattern, runs = whole_words(text), _runs(ledger, texts, said)
    return said, said[np.concatenate([tokens_matching(pattern, run) for run in runs])]


def _why_nothing(target: str, roles: Sequence[str], *, is_evicted: bool) -> str:
    what, turn = without_quotes(target), turn_of_target(target, roles)
    if turn is not None and turn < 0:
        return "you have said nothing yet"
    if turn is not None and turn >= len(roles):
        return f"there is no turn {turn}: this chat has {len(roles)}, counted from 0"
    if is_evicted:
        return f"{format_value(what)} was evicted, and is no longer archived"
    if turn is not None:
        return f"turn {turn} was erased, or not read"
    beside = " side by side" if " " in what else ""
    return f"{format_value(what)}: these words are not in this chat{beside}"


def _similar_words(target: str, runs: Sequence[Sequence[str]]) -> str:
    """The hint `did you mean X?`: similar words that the chat has side by side; "" without any."""
    said, asked = "\n".join(map("".join, runs)), without_quotes(target)
    words = {word.casefold(): word for word in re.findall(r"\w{3,}", said)}

    def nearest(found: re.Match[str]) -> str:
        near = difflib.get_close_matches(found[0].casefold(), words, n=1, cutoff=0.75)
        return words[near[0]] if near else found[0]

    similar = re.sub(r"\w{3,}", nearest, asked)
    return f"did you mean {similar}?" if whole_words(similar).search(said) else ""


def _runs(ledger: Ledger, texts: Texts, said: Positions) -> list[list[str]]:
    """The texts of the tokens `said`, in runs of adjacent tokens."""
    pieces = texts_at(ledger, texts, said)
    breaks = (np.flatnonzero(np.diff(said) > 1) + 1).tolist()
    return [pieces[start:end] for start, end in pairwise([0, *breaks, len(pieces)])]


def _ends_word(character: str) -> bool:
    return bool(re.match(r"\w", character)) and not _WITHOUT_BLANKS.match(character)
