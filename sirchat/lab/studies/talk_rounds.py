"""Long conversations as rounds of a chat, and which tokens of the chat belong to which message.

Whoever speaks first is the user, whoever else speaks gives the replies. Messages of the same side
in a row make one turn, a line each. Every message begins with its speaker's name, because questions
name people. The first turn of a session begins with its date, since questions ask for dates. A
session is a whole number of rounds: if a reply comes first, the user's turn is the date alone; if
the user has the last word, the reply is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.conversation import Turn
from sirchat.chat.events import TokenRow
from sirchat.chat.session import Session
from sirchat.chat.settings import build_cache_settings, build_engine
from sirchat.engine.engine import Engine
from sirchat.lab.studies.asking import read
from sirchat.lab.studies.long_talk import LongTalk, TalkSession
from sirchat.lab.studies.reading import followed_by_reply, read_ids
from sirchat.text.detokenizer import tokens_spelling

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Side:
    """The text of one turn, and where each message is in it: (id, first character, end)."""

    text: str = ""
    messages: tuple[tuple[str, int, int], ...] = ()


class TalkRound(NamedTuple):
    """A user turn and its reply."""

    user: Side
    reply: Side


@dataclass
class _Draft:
    """A turn that grows line by line."""

    text: str = ""
    messages: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.text += ("\n" if self.text else "") + line

    def done(self) -> Side:
        return Side(self.text, tuple(self.messages))


def rounds_of(talk: LongTalk) -> list[TalkRound]:
    """The rounds of a conversation, in order."""
    return [one for session in talk.sessions for one in _rounds(session, talk.speakers[0])]


def _rounds(session: TalkSession, user: str) -> Iterator[TalkRound]:
    sides = [_Draft(f"({session.date})")]
    for is_user, turns in groupby(session.turns, lambda turn: turn.speaker == user):
        if is_user != (len(sides) % 2 == 1):  # the other side begins
            sides.append(_Draft())
        for turn in turns:
            sides[-1].add(f"{turn.speaker}: {turn.text}")
            end = len(sides[-1].text)
            sides[-1].messages.append((turn.id, end - len(turn.text), end))
    done = [one.done() for one in sides] + [Side()] * (len(sides) % 2)
    for at in range(0, len(done), 2):
        yield TalkRound(done[at], done[at + 1])


def read_talk(session: Session, talk: LongTalk) -> dict[str, Positions]:
    """Read a whole conversation; returns the stream positions of each message's tokens, by its id.

    After the first round, each is read in one piece, user and reply together, which takes a third
    of the time; nothing is recalled while reading. The session then continues as if the rounds had
    been read one by one, except that turns before it can't be undone. Names and dates are not among
    the tokens of a message.

    Raises ContextFullError under a policy that evicts nothing, if the conversation does not fit.
    """
    first, *rest = rounds_of(talk)
    read(session, first.user.text, first.reply.text)
    begins = len(session.turns) - 2  # a system prompt may come first
    if rest:
        _read_on(session, rest)
    said: dict[int, list[TokenRow]] = {}
    for row in session.tokens(range(session.seen)):
        if row.role in ("user", "assistant"):
            said.setdefault(row.turn, []).append(row)
    found: dict[str, Positions] = {}
    for number, side in enumerate((side for one in (first, *rest) for side in one), begins):
        found |= message_positions(side, said.get(number, []))
    return found


def _read_on(session: Session, rounds: Sequence[TalkRound]) -> None:
    """Read further rounds in an engine of their own, and let the session take over its state."""
    engine, template, now = _continued(session), session.template, session.conversation
    turns, bounds = list(now.turns), [session.seen]
    for number, (user, reply) in enumerate(rounds, now.round + 1):
        asked = template.user(user.text)
        whole = followed_by_reply(template, asked, reply.text)
        bounds += [bounds[-1] + len(asked.ids), bounds[-1] + len(whole.ids)]
        turns += [Turn("user", user.text), Turn("assistant", reply.text)]
        read_ids(engine, whole.ids, number, roles=whole.roles)
        engine.close_round()
    saved = engine.save()
    for number, (start, end) in enumerate(pairwise(bounds), len(now.turns)):
        saved.rows["turn"][start:end] = number  # the engine took each round for one turn
    attention = engine.ledger.attention.checkpoint(engine.store.reachable())
    now = replace(now, turns=turns, round=now.round + len(rounds))
    session.load(saved, now, engine.store.rows(), attention)


def _continued(session: Session) -> Engine:
    """An engine in the state of the session's own."""
    settings = replace(build_cache_settings(session.profile), folder=None)
    engine = build_engine(session.model, settings, session.profile.seed)
    attention = session.attention(np.arange(session.seen))
    engine.load(session.save(), session.rows(), session.model.device, attention)
    return engine


def message_positions(side: Side, rows: list[TokenRow]) -> dict[str, Positions]:
    """The positions of each message of a turn whose text is spelled by these tokens, in order.

    A token with parts of two messages belongs to both. Where a tokenizer changes the text, so that
    a message is not found in it, all tokens of the turn count as that message.
    """
    text = "".join(row.text for row in rows)
    at = np.array([row.position for row in rows], np.int64)
    ends = np.cumsum([len(row.text) for row in rows])
    found, cursor = dict[str, Positions](), 0
    for name, first, end in side.messages:
        start = text.find(side.text[first:end], cursor)
        if start < 0:
            found[name] = at
            continue
        cursor = start + end - first
        found[name] = at[tokens_spelling(ends, start, cursor)]
    return found
