"""Makes a summary of the whole chat, and lets the model read it as a pinned turn.

The summary has sentences of the chat, or is written by the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.events import Delta, Event, Notice, Reading, TokenRow, TurnDone
from sirchat.chat.session import Interrupted, Session
from sirchat.chat.turn import CLOSE, OPEN, FinalAnswer
from sirchat.chat.words import spelled, split_words
from sirchat.errors import SettingError, UsageError
from sirchat.recall.terms import STOP_WORDS, words_of
from sirchat.text.detokenizer import tokens_spelling

WAYS = {
    "extract": "the most telling sentences of the chat, as they were said; takes little time",
    "model": "written by the model, which reads the chat again, a part at a time",
}
"""The ways to make a summary, with their meaning; the first is the default."""

PREFIX = "Summary of our conversation so far, by the assistant: "  # begins every summary
_ANSWER = "Noted."  # the reply to a summary
_LEAST = 8  # tokens of a summary's own text
_SHORT = 64  # tokens; a summary may have so many even if the chat is hardly longer


def summary(
    session: Session, way: str, interrupted: Interrupted = lambda: False
) -> Generator[Event, None, str]:
    """Make a summary of the whole chat, including text that is no longer in the cache.

    The session does not change. `way` is a key of `WAYS`. Yields events of progress, and returns
    the text of the summary; the text is empty if `interrupted` returned true, or if no sentence
    fits. A summary takes at most a quarter of the budget. In a short chat it is shorter: its text
    has at most a third of the chat's tokens, but may always have 64. Raises UsageError if the chat
    has no messages yet, and SettingError if the budget is too small.
    """
    said = [turn for turn in _said(session) if turn.text.strip()]
    if not said:
        raise UsageError("there is nothing to summarize: the chat has no messages yet")
    most, own = session.budget // 4, _size(session, "")
    if most < own + _LEAST:
        raise SettingError(
            f"/summarize: with budget {session.budget} a summary may have {most} tokens, a quarter "
            f"of the budget; it needs at least {own + _LEAST}",
            hint=f"/budget {4 * (own + _LEAST)}",
        )
    size = sum(len(turn.rows) for turn in said)
    most = min(most, own + max(_SHORT, size // 3))
    if way == "extract":
        return _extract(session, said, most)
    return (yield from _written(session, said, most, interrupted))


def pin_summary(session: Session, text: str) -> Iterator[Event]:
    """Let the session read the summary `text` as a pinned user turn; yields the events.

    Earlier summaries are unpinned. One `undo` removes the new turn, and pins the earlier summary
    again. Raises SettingError, changing nothing, if the pins would leave too little room.
    """
    index, held = len(session.turns), session.snapshot().rows
    former = {row.turn for row in held if "pinned" in row.flags} & set(_summaries(session))
    freed = sum(row.turn in former and "pinned" in row.flags for row in held)
    more = _size(session, text) - freed
    session.limits.check_pins(np.asarray([row.position for row in held], np.int64), more)
    yield from _quietly(session.read_user(PREFIX + text))
    session.turns[index].is_summary = True
    try:
        yield from _quietly(session.read_reply(_ANSWER))
        for turn in sorted(former):
            session.pin(f"turn {turn}", pinned=False)
        pinned = session.pin(f"turn {index}")
    except BaseException:
        session.undo()
        raise
    yield from (event for event in pinned if isinstance(event, Notice))
    replaced = "; the former summary is no longer pinned" * bool(former)
    yield Notice(f"the summary is turn {index}, which is now pinned{replaced}; /undo removes it")


def pin_last_summary(session: Session) -> None:
    """Pin the last summary of the chat, if there is one.

    This is to be called after a later summary was undone: that one had unpinned this one.
    """
    if indices := _summaries(session):
        with suppress(UsageError):  # it is no longer archived, or other pins take the room
            session.pin(f"turn {indices[-1]}")


def _summaries(session: Session) -> list[int]:
    return [index for index, turn in enumerate(session.turns) if turn.is_summary]


def _quietly(events: Iterator[Event]) -> Iterator[Event]:
    """The same events without `TurnDone`: a summary is not shown as a message."""
    return (event for event in events if not isinstance(event, TurnDone))


def _size(session: Session, text: str) -> int:
    """How many tokens a summary with this text takes in the cache, where they are pinned."""
    start, end = session.template.user(PREFIX + text).content
    return end - start


@dataclass(frozen=True)
class _Said:
    """One message of the user or the model: its tokens, held or evicted, and their text."""

    role: str
    rows: list[TokenRow]
    text: str


def _said(session: Session) -> list[_Said]:
    """All messages of the user and the model, in order; reasoning and erased words are left out.

    Earlier summaries, and the replies to them, are left out, too.
    """
    rows: dict[int, list[TokenRow]] = {}
    summaries = set(_summaries(session))
    made = summaries | {at + 1 for at in summaries}
    for row in session.tokens(range(session.seen)):
        if row.role in ("user", "assistant") and row.turn not in made and "erased" not in row.flags:
            rows.setdefault(row.turn, []).append(row)
    return [_without_reasoning(rows[turn]) for turn in sorted(rows)]


def _without_reasoning(rows: list[TokenRow]) -> _Said:
    role, text = rows[0].role, _text(rows)
    if role == "assistant" and (end := text.rfind(CLOSE)) >= 0:
        rows = rows[tokens_spelling(_ends(rows), end, end + len(CLOSE)).stop :]
    elif role == "assistant" and text.lstrip().startswith(OPEN):  # cut off
        rows = []
    return _Said(role, rows, _text(rows))


def _text(rows: Sequence[TokenRow]) -> str:
    return "".join(row.text for row in rows)


def _ends(rows: Sequence[TokenRow]) -> NDArray[np.int64]:
    """For each row (token), the index at which its text ends in the joined text of all rows."""
    return np.cumsum([len(row.text) for row in rows], dtype=np.int64)


_SENTENCE = re.compile(
    r"\S.*?(?:(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+|(?=\n)|$)"
)
"""Finds sentences; each ends with its line, or at `.!?…` before a blank, but not after `Mr.`."""

_WORDS = 3  # number of a sentence's most surprising words that make its score
_REPEATED, _QUESTION, _USER, _NUMBER = 0.3, 0.5, 1.5, 2.0  # chosen on seed 1 of the study
_LENGTH = 4  # tokens that are added to a sentence's length


@dataclass(frozen=True)
class _Sentence:
    """A sentence of the chat.

    Attributes:
        text: the sentence itself.
        size: its length in tokens.
        weight: factor by which its score is multiplied.
        words: for each of its words, in lower case, the sum of its tokens' surprisals, in nats;
            doubled for a word with digits. Stop words are left out.
    """

    text: str
    size: int
    weight: float
    words: dict[str, float]

    def score(self, told: set[str]) -> float:
        """The sentence's score: how much its most surprising words would add to a summary.

        It is the summed surprisal of its three most surprising words, divided by its length, times
        `weight`. Words in `told`, which the summary already has, count less.
        """
        values = (nats * (_REPEATED if word in told else 1) for word, nats in self.words.items())
        return self.weight * sum(nlargest(_WORDS, values)) / (self.size + _LENGTH)


def _extract(session: Session, said: Sequence[_Said], most: int) -> str:
    """A summary of at most `most` tokens, made of sentences of the chat, in the chat's order.

    The sentences with the highest scores are chosen. A sentence's score is the surprisal of its
    three most surprising words, divided by its length in tokens. Numbers and the user's sentences
    count more; questions, and words that the summary already has, count less; stop words do not
    count. The text is empty if no sentence fits.
    """
    sentences = dict[str, _Sentence]()
    for turn in said:
        for one in _sentences(turn):
            sentences.setdefault(" ".join(words_of(one.text)), one)
    found = list(sentences.values())
    told, chosen, left = set[str](), list[int](), most - _size(session, "")
    queue = [(-one.score(told), at) for at, one in enumerate(found)]
    heapify(queue)
    while queue:
        _, at = heappop(queue)
        score = found[at].score(told)
        if not score or found[at].size > left:
            continue
        if queue and -score > queue[0][0]:  # the summary now has some of its words
            heappush(queue, (-score, at))
            continue
        chosen.append(at)
        told |= found[at].words.keys()
        left -= found[at].size
    while chosen:
        text = " ".join(found[at].text for at in sorted(chosen))
        if _size(session, text) <= most:
            return text
        chosen.pop()
    return ""


def _sentences(turn: _Said) -> Iterator[_Sentence]:
    ends = _ends(turn.rows)
    for match in _SENTENCE.finditer(turn.text):
        rows = turn.rows[tokens_spelling(ends, match.start(), match.end())]
        words = dict[str, float]()
        for word in split_words(rows):
            name = spelled(word).casefold()
            if name and name not in STOP_WORDS and name not in words:
                nats = math.fsum(row.surprisal or 0.0 for row in word)
                words[name] = nats * (_NUMBER if any(map(str.isdigit, name)) else 1)
        weight = _USER if turn.role == "user" else 1.0
        is_question = match[0].endswith(("?", "？", '?"'))
        yield _Sentence(match[0], len(rows), weight * (_QUESTION if is_question else 1), words)


_QUERY = (
    "Summarize the following conversation in a few short sentences, with all names, numbers and "
    "decisions:"
)
_PART, _LEAST_PART = 1024, 256  # bounds of the number of tokens that the model reads at a time
_SHARE = 32  # each part's summary may have at least this many tokens


def _written(
    session: Session, said: Sequence[_Said], most: int, interrupted: Interrupted
) -> Generator[Event, None, str]:
    """Let the model write a summary, in a session of its own, one part of the chat at a time.

    If the summaries of the parts have more than `most` tokens together, the model summarizes these
    summaries in the same way, until the result fits. Yields events of progress, and returns the
    text of the summary; it is empty if `interrupted` returned true.
    """
    lines = [f"{turn.role.capitalize()}: {turn.text.strip()}" for turn in said]
    room = most - _size(session, "")
    while True:
        parts = list(_parts(session, lines))
        share = max(_SHARE, room // len(parts)) if len(parts) > 1 else room
        reader = _reader(session, share)
        done, total = 0, sum(size + share for _, size in parts)
        lines = []
        for part, size in parts:
            written, text = 0, ""
            yield Reading(done, total)
            reader.reset()
            for event in reader.ask(f"{_QUERY}\n\n{part}", interrupted):
                if isinstance(event, Reading):
                    yield Reading(done + size * event.done // event.total, total)
                elif isinstance(event, Delta):
                    written += 1
                    yield Reading(done + size + min(written, share), total)
                elif isinstance(event, TurnDone) and event.role == "assistant":
                    text = _finished(session, event, share)
            if interrupted():
                return ""
            done += size + share
            lines.append(text)
        text = " ".join(filter(None, lines))
        if len(parts) == 1 or _size(session, text) <= most:
            yield Reading(total, total)
            return text


def _reader(session: Session, reply_tokens: int) -> Session:
    """A new session with the same model, in which the model writes a summary.

    It evicts nothing, and a reply has at most `reply_tokens` tokens.
    """
    updates = {"policy": "full", "policy_options": {}, "recall": "off"}
    updates |= {"evict": "when-full", "archive": "off"}
    return Session(
        session.model,
        session.profile.model_copy(update={**updates, "max_new_tokens": reply_tokens}),
    )


def _finished(session: Session, reply: TurnDone, most: int) -> str:
    """A reply's text without reasoning, cut after the last sentence that fits in `most` tokens.

    If even the first sentence is too long, the text is cut between two words.
    """
    answer = FinalAnswer(is_open=session.template.opens_reasoning)
    text = (answer.push(reply.text) + answer.end()).strip()
    ends = [match.end() for match in _SENTENCE.finditer(text)]
    if reply.finish == "length":
        ends = ends[:-1] or ends
    most += _size(session, "")
    while len(ends) > 1 and _size(session, text[: ends[-1]]) > most:
        ends.pop()
    text = text[: ends[-1]] if ends else ""
    while _size(session, text) > most:
        text = text.rpartition(" ")[0]
    return text


def _parts(session: Session, lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Join lines to parts that fit in the model's context; yields each part and its token count."""
    most = min(_PART, max(_LEAST_PART, session.model.context_length // 2))
    part, total = "", 0
    for line in lines:
        for piece, size in _pieces(session, line, most):
            if part and total + size > most:
                yield part, total
                part, total = "", 0
            part, total = f"{part}\n{piece}".strip(), total + size
    yield part, total


def _pieces(session: Session, text: str, most: int) -> Iterator[tuple[str, int]]:
    """Cut a text into pieces of at most `most` tokens; yields each piece and its token count."""
    size = len(session.template.as_text(text)) + 1  # and a line break
    if size <= most:
        yield text, size
        return
    middle = len(text) // 2
    cut = max(text.rfind(" ", 0, middle), text.rfind("\n", 0, middle)) + 1 or middle
    for half in (text[:cut], text[cut:]):
        yield from _pieces(session, half.strip(), most)
