"""A summary of the whole chat: its most informative statements, as they were said, pinned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest
from itertools import pairwise

import numpy as np

from sirchat.chat.corrections import denied_words
from sirchat.chat.events import Event, Notice, TokenRow, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.statements import StatedFact
from sirchat.chat.token_rows import split_words, word_text
from sirchat.errors import SettingError, UndoError, UsageError, format_value
from sirchat.recall.word_index import STOP_WORDS, is_greeting, words_of
from sirchat.text.detokenizer import sentence_bounds, tokens_spelling

PREFIX = "Summary of our conversation so far, by the assistant: "  # begins every summary
_ANSWER = "Noted."  # the reply to a summary
_MIN_TEXT_TOKENS = 8  # tokens of a summary's own text
_ALWAYS_ALLOWED_TOKENS = 64  # of a summary, even if the chat is hardly longer

_SCORED_WORDS = 3  # number of a sentence's most surprising words that make its score
# Factors of a sentence's score, chosen on seed 1 of the study
_REPEATED_WEIGHT, _USER_WEIGHT, _NUMBER_WEIGHT = 0.3, 1.5, 2.0
_MAX_NAMED_FACTS = 6  # most facts that are named as left out, the newest ones
_EXTRA_LENGTH = 4  # tokens that are added to a sentence's length


def summary_size(session: Session, text: str) -> int:
    """Number of pinned tokens in the cache that a summary with this text takes."""
    start, end = session.template.user_turn(PREFIX + text).content
    return end - start


def summary_cost(session: Session, text: str) -> tuple[int, int]:
    """Number of tokens that a kept summary adds, and of those that are evicted for it."""
    template = session.template
    asked = template.followed_by(template.user_turn(PREFIX + text), "assistant")
    said = template.assistant_turn(_ANSWER, asked.header)
    closing = template.closing if said.closing is None else said.closing
    added = len(session.state.pending_ids) + len(asked.ids) + len(said.ids) + len(closing)
    return added, max(0, session.resident + added - session.budget)


def summary_turns(session: Session) -> list[int]:
    return [index for index, turn in enumerate(session.turns) if turn.is_summary]


def pin_summary(session: Session, text: str) -> Iterator[Event]:
    """Let the session read the summary `text` as a pinned user turn; unpin earlier summaries.

    One `undo` undoes this. Raises SettingError, changing nothing, if the pins would leave too
    little room.
    """
    index, held = len(session.turns), session.snapshot().rows
    former = {row.turn for row in held if "pinned" in row.flags} & set(summary_turns(session))
    freed = sum(row.turn in former and "pinned" in row.flags for row in held)
    more = summary_size(session, text) - freed
    session.engine.choice.check_pins(more, session.ledger.held_positions)
    points = session.history.messages
    try:
        yield from _unshown(session.read_user(PREFIX + text, next_role="assistant"))
        session.turns[index].is_summary = True
        session.recall.nothing_restored_reason = ""  # it is about the user's messages
        yield from _unshown(session.read_reply(_ANSWER))
        for turn in sorted(former):
            session.pin(f"turn {turn}", pinned=False)
        pinned = session.pin(f"turn {index}")
    except BaseException:
        if session.history.messages is not points:
            session.undo()
        raise
    yield from (event for event in pinned if isinstance(event, Notice))
    replaced = "; the former summary is no longer pinned" if former else ""
    yield Notice(f"the summary is turn {index}, which is now pinned{replaced}; /undo removes it")


def last_user_message(session: Session) -> str:
    """The text of the user's last message that is no summary; UndoError if there is none."""
    try:
        return session.asked_point().text
    except UndoError:  # in a resumed chat, for example
        said = [turn.text for turn in session.turns if turn.role == "user" and not turn.is_summary]
        if not said:
            raise
        return said[-1]


def _unshown(events: Iterator[Event]) -> Iterator[Event]:
    """The events except `TurnDone`, because a summary is not shown as a message."""
    return (event for event in events if not isinstance(event, TurnDone))


def make_summary(session: Session, facts: list[StatedFact]) -> str:
    """A summary of the whole chat, without corrected `facts`; empty if no sentence fits.

    It has at most a quarter of the budget and a third of the chat's tokens, but may always have 64
    tokens. Raises UsageError if the chat is empty, and SettingError if the budget is too small.
    """
    messages = [message for message in _messages(session) if message.text.strip()]
    if not messages:
        raise UsageError("there is nothing to summarize: the chat has no messages yet")
    most, frame = session.budget // 4, summary_size(session, "")
    if most < frame + _MIN_TEXT_TOKENS:
        raise SettingError(
            f"/summarize: with budget {session.budget} a summary may have {most} tokens, a quarter "
            f"of the budget; it needs at least {frame + _MIN_TEXT_TOKENS}",
            hint=f"/budget {4 * (frame + _MIN_TEXT_TOKENS)}",
        )
    size = sum(len(message.rows) for message in messages)
    most = min(most, frame + max(_ALWAYS_ALLOWED_TOKENS, size // 3))
    return _extract(session, messages, facts, most)


def omitted_facts(facts: Sequence[StatedFact], summary: str) -> Iterator[Notice]:
    """A notice that names the rules and facts that are not in a summary, if any."""
    named = list[str]()
    for one in facts:
        if one.text in summary + one.newer_text:
            continue
        corrected = " (corrected in part)" if one.is_newer_in_part else " (corrected)"
        named.append(format_value(one.text) + (corrected if one.newer_text else ""))
    more = f" and {len(named) - _MAX_NAMED_FACTS} more" if len(named) > _MAX_NAMED_FACTS else ""
    if named:
        listed = ", ".join(named[-_MAX_NAMED_FACTS:]) + more
        yield Notice(f"the summary leaves out, of what you told: {listed}")


@dataclass(frozen=True)
class _Message:
    """A message of the user or the model: its tokens, held or evicted, and their text."""

    role: str
    rows: list[TokenRow]
    text: str


def _messages(session: Session) -> list[_Message]:
    """All messages but summaries, without reasoning and sentences with erased words."""
    rows: dict[int, list[TokenRow]] = {}
    torn = set(session.ledger.torn.tolist())
    left_out = {"erased", "thinking"}
    skipped = {index + step for index in summary_turns(session) for step in (0, 1)}
    for row in session.tokens(range(session.seen)):
        is_said = row.role in ("user", "assistant") and left_out.isdisjoint(row.flags)
        if is_said and row.turn not in skipped and row.position not in torn:
            rows.setdefault(row.turn, []).append(row)
    said = (rows[turn] for turn in sorted(rows))
    return [_Message(it[0].role, it, "".join(row.text for row in it)) for it in said]


@dataclass(frozen=True)
class _Sentence:
    text: str
    size: int  # tokens
    weight: float  # factor of its score
    words: dict[str, float]  # in lower case, no stop words: surprisal in nats, doubled with digits

    def score(self, summary_words: set[str]) -> float:
        """Surprisal by length, where words that the summary already has count less."""
        repeated, words = _REPEATED_WEIGHT, self.words.items()
        values = (nats * (repeated if word in summary_words else 1) for word, nats in words)
        return self.weight * sum(nlargest(_SCORED_WORDS, values)) / (self.size + _EXTRA_LENGTH)


def _extract(session: Session, messages: list[_Message], facts: list[StatedFact], most: int) -> str:
    """The sentences with the highest scores, in the chat's order, in at most `most` tokens."""
    distinct = dict[str, _Sentence]()
    pairs = [
        (words_of(one.text), {*words_of(one.newer_text)} - denied_words(one.newer_text))
        for one in facts
        if one.newer_text
    ]
    corrected = [(said, {*said} - STOP_WORDS, {*said} - STOP_WORDS - now) for said, now in pairs]
    for message in messages:
        for sentence in _sentences(message):
            has = words_of(sentence.text)
            if not any(_repeats(message.role, has, *fact) for fact in corrected):
                distinct.setdefault(" ".join(has), sentence)
    sentences = list(distinct.values())
    summary_words, chosen, room = set[str](), list[int](), most - summary_size(session, "")
    queue = [(-sentence.score(summary_words), index) for index, sentence in enumerate(sentences)]
    heapify(queue)
    while queue:
        _, index = heappop(queue)
        score = sentences[index].score(summary_words)
        if not score or sentences[index].size > room:
            continue
        if queue and -score > queue[0][0]:  # the summary now has some of its words
            heappush(queue, (-score, index))
            continue
        chosen.append(index)
        summary_words |= sentences[index].words.keys()
        room -= sentences[index].size
    while chosen:
        text = " ".join(sentences[index].text for index in sorted(chosen))
        if summary_size(session, text) <= most:
            return text
        chosen.pop()
    return ""


def _repeats(role: str, has: list[str], old: list[str], words: set[str], lost: set[str]) -> bool:
    """Whether a sentence of the words `has` is a corrected fact, or repeats one."""
    # The correction took the words `lost` from the fact's `words`. A sentence of the model repeats
    # the fact if it has one of `lost` and, if these are several, another of `words`.
    is_near = has == old if role == "user" else len(words.intersection(has)) >= min(2, len(lost))
    return is_near and not lost.isdisjoint(has)


def _sentences(message: _Message) -> Iterator[_Sentence]:
    ends = np.cumsum([len(row.text) for row in message.rows], dtype=np.int64)
    for start, end in pairwise(sentence_bounds(message.text)):
        text = message.text[start:end].strip()
        # Questions, greetings and the marks around a file's text tell nothing.
        if not text or "?" in text or "？" in text or is_greeting(text) or text.startswith("```"):
            continue
        start = message.text.index(text, start)
        rows = message.rows[tokens_spelling(ends, start, start + len(text))]
        words = dict[str, float]()
        for word in split_words(rows):
            name = word_text(word).casefold()
            if name and name not in STOP_WORDS and name not in words:
                nats = math.fsum(row.surprisal or 0.0 for row in word)
                words[name] = nats * (_NUMBER_WEIGHT if any(map(str.isdigit, name)) else 1)
        weight = _USER_WEIGHT if message.role == "user" else 1.0
        yield _Sentence(text, len(rows), weight, words)
