"""Makes a summary of the whole chat, of its own sentences, or written by the model."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.events import Delta, Event, Reading, TokenRow, TurnDone
from sirchat.chat.pinned_summary import summary_size, summary_turns
from sirchat.chat.session import Interrupted, Session
from sirchat.chat.words import split_words, word_text
from sirchat.errors import SettingError, UsageError
from sirchat.recall.word_index import STOP_WORDS, words_of
from sirchat.text.detokenizer import tokens_spelling

# The ways to make a summary, with their meaning; the first is the default.
WAYS = {
    "extract": "the most telling sentences of the chat, as they were said; takes little time",
    "model": "written by the model, which reads the chat again, a part at a time",
}

_LEAST = 8  # tokens of a summary's own text
_SHORT = 64  # tokens; a summary may have so many even if the chat is hardly longer

# A sentence ends with its line, or at `.!?…` before a blank, but not after `Mr.`.
_SENTENCE = re.compile(
    r"\S.*?(?:(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+|(?=\n)|$)"
)
_WORDS = 3  # number of a sentence's most surprising words that make its score
_REPEATED, _QUESTION, _USER, _NUMBER = 0.3, 0.5, 1.5, 2.0  # chosen on seed 1 of the study
_LENGTH = 4  # tokens that are added to a sentence's length

_QUERY = (
    "Summarize the following conversation in a few short sentences, with all names, numbers and "
    "decisions:"
)
_PART, _LEAST_PART = 1024, 256  # bounds of the number of tokens that the model reads at a time
_SHARE = 32  # each part's summary may have at least this many tokens


def make_summary(
    session: Session, way: str, interrupted: Interrupted = lambda: False
) -> Generator[Event, None, str]:
    """Make a summary of the whole chat, evicted text included, in one of `WAYS`.

    Yields events of progress; returns the text, empty if interrupted or if no sentence fits. It has
    at most a quarter of the budget and a third of the chat's tokens, but may always have 64.

    Raises UsageError if the chat has no messages, and SettingError if the budget is too small.
    """
    messages = [message for message in _messages(session) if message.text.strip()]
    if not messages:
        raise UsageError("there is nothing to summarize: the chat has no messages yet")
    most, frame = session.budget // 4, summary_size(session, "")
    if most < frame + _LEAST:
        raise SettingError(
            f"/summarize: with budget {session.budget} a summary may have {most} tokens, a quarter "
            f"of the budget; it needs at least {frame + _LEAST}",
            hint=f"/budget {4 * (frame + _LEAST)}",
        )
    size = sum(len(message.rows) for message in messages)
    most = min(most, frame + max(_SHORT, size // 3))
    if way == "extract":
        return _extract(session, messages, most)
    return (yield from _written(session, messages, most, interrupted))


@dataclass(frozen=True)
class _Message:
    """A message of the user or the model: its tokens, held or evicted, and their text."""

    role: str
    rows: list[TokenRow]
    text: str


def _messages(session: Session) -> list[_Message]:
    """All messages but summaries and their replies, without reasoning and erased words."""
    rows: dict[int, list[TokenRow]] = {}
    left_out = {"erased", "thinking"}
    skipped = {index + step for index in summary_turns(session) for step in (0, 1)}
    for row in session.tokens(range(session.seen)):
        is_said = row.role in ("user", "assistant") and left_out.isdisjoint(row.flags)
        if is_said and row.turn not in skipped:
            rows.setdefault(row.turn, []).append(row)
    said = (rows[turn] for turn in sorted(rows))
    return [_Message(it[0].role, it, "".join(row.text for row in it)) for it in said]


def _ends(rows: Sequence[TokenRow]) -> NDArray[np.int64]:
    """For each token, the index at which its text ends in the joined text of all."""
    return np.cumsum([len(row.text) for row in rows], dtype=np.int64)


@dataclass(frozen=True)
class _Sentence:
    """A sentence of the chat."""

    text: str
    size: int  # tokens
    weight: float  # factor of its score
    words: dict[str, float]  # in lower case, no stop words: surprisal in nats, doubled with digits

    def score(self, told: set[str]) -> float:
        """How much it adds to a summary that has the words `told`: surprisal by length."""
        values = (nats * (_REPEATED if word in told else 1) for word, nats in self.words.items())
        return self.weight * sum(nlargest(_WORDS, values)) / (self.size + _LENGTH)


def _extract(session: Session, messages: Sequence[_Message], most: int) -> str:
    """The sentences with the highest scores, in the chat's order, in at most `most` tokens."""
    distinct = dict[str, _Sentence]()
    for message in messages:
        for sentence in _sentences(message):
            distinct.setdefault(" ".join(words_of(sentence.text)), sentence)
    sentences = list(distinct.values())
    told, chosen, left = set[str](), list[int](), most - summary_size(session, "")
    queue = [(-sentence.score(told), at) for at, sentence in enumerate(sentences)]
    heapify(queue)
    while queue:
        _, at = heappop(queue)
        score = sentences[at].score(told)
        if not score or sentences[at].size > left:
            continue
        if queue and -score > queue[0][0]:  # the summary now has some of its words
            heappush(queue, (-score, at))
            continue
        chosen.append(at)
        told |= sentences[at].words.keys()
        left -= sentences[at].size
    while chosen:
        text = " ".join(sentences[at].text for at in sorted(chosen))
        if summary_size(session, text) <= most:
            return text
        chosen.pop()
    return ""


def _sentences(message: _Message) -> Iterator[_Sentence]:
    ends = _ends(message.rows)
    for match in _SENTENCE.finditer(message.text):
        rows = message.rows[tokens_spelling(ends, match.start(), match.end())]
        words = dict[str, float]()
        for word in split_words(rows):
            name = word_text(word).casefold()
            if name and name not in STOP_WORDS and name not in words:
                nats = math.fsum(row.surprisal or 0.0 for row in word)
                words[name] = nats * (_NUMBER if any(map(str.isdigit, name)) else 1)
        weight = _USER if message.role == "user" else 1.0
        is_question = match[0].endswith(("?", "？", '?"'))
        yield _Sentence(match[0], len(rows), weight * (_QUESTION if is_question else 1), words)


def _written(
    session: Session, messages: Sequence[_Message], most: int, interrupted: Interrupted
) -> Generator[Event, None, str]:
    """Let the model write a summary, in sessions of its own, one part of the chat at a time.

    As long as the parts' summaries have more than `most` tokens, it summarizes these in turn.
    """
    lines = [f"{message.role.capitalize()}: {message.text.strip()}" for message in messages]
    room = most - summary_size(session, "")
    while True:
        parts = list(_parts(session, lines))
        share = max(_SHARE, room // len(parts)) if len(parts) > 1 else room
        writer = _writer(session, share)
        done, total = 0, sum(size + share for _, size in parts)
        lines = []
        for part, size in parts:
            written, text = 0, ""
            yield Reading(done, total)
            writer.reset()
            for event in writer.ask(f"{_QUERY}\n\n{part}", interrupted):
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
        if len(parts) == 1 or summary_size(session, text) <= most:
            yield Reading(total, total)
            return text


def _writer(session: Session, reply_tokens: int) -> Session:
    """A new session with the same model, which evicts nothing; it has short replies."""
    updates = {"policy": "full", "policy_options": {}, "recall": "off"}
    updates |= {"evict": "when-full", "archive": "off"}
    return Session(
        session.model,
        session.profile.model_copy(update={**updates, "max_new_tokens": reply_tokens}),
    )


def _finished(session: Session, reply: TurnDone, most: int) -> str:
    """A reply's answer, cut after a sentence, or else a word, to `most` tokens."""
    text = reply.text.strip()
    ends = [match.end() for match in _SENTENCE.finditer(text)]
    if reply.finish == "length":
        ends = ends[:-1] or ends
    most += summary_size(session, "")
    while len(ends) > 1 and summary_size(session, text[: ends[-1]]) > most:
        ends.pop()
    text = text[: ends[-1]] if ends else ""
    while summary_size(session, text) > most:
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
