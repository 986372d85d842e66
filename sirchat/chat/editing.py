"""Changes the past of a conversation: removes turns, and inserts others between those that stay.

The tokens that stay are not read again. Their keys and values, from when they were first read,
depend on the text before them at that time. Only their positions change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from sirchat.chat.events import Event
from sirchat.chat.session import Session
from sirchat.chat.state import SystemPrompt, Turn, UndoHistory
from sirchat.memory.key_values import Positions

_ROUND_STARTERS = ("user", "tool")  # roles of the turns that begin a round
_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class KeptTurn:
    """The turn with this number stays, with the tokens at the stream positions `rows`."""

    turn: int
    rows: Positions
    is_left_out: bool = False  # whether they are evicted, and only recall may restore them


@dataclass(frozen=True)
class ReadTurns:
    """Turns that `read` reads, as if nothing stood after them."""

    read: Callable[[], Iterable[Event]]
    joins: bool = False  # whether the first turn continues the kept turn before it
    joins_next: bool = False  # whether the kept turn after it continues the last turn


@dataclass(frozen=True)
class _PlacedTurn:
    turn: Turn
    rows: Positions
    header: list[int] | None = None  # as in `ConversationState`, after this turn


def can_edit(session: Session) -> bool:
    """Whether turns can be removed and inserted: all layers have rows, and no token gets lost."""
    settings, cache = session.engine.settings, session.engine.cache
    has_rows = not (cache.has_state or cache.absolute_positions)
    return has_rows and settings.archive > 0 and not settings.policy.compacts_at_anchors


def edit(session: Session, parts: Sequence[KeptTurn | ReadTurns]) -> Iterator[Event]:
    """Change the conversation to `parts`, in order; all other turns are forgotten.

    The last part is a whole reply that stays. If the iteration fails or ends early, the
    conversation can't go on.
    """
    engine, state, last = session.engine, session.state, parts[-1]
    engine.evictor.end_recall()
    session.recall.update()
    is_end = isinstance(last, KeptTurn) and last.turn == len(session.turns) - 1
    logits, round_end = engine.logits, (state.in_round, state.reply_header, state.pending_ids)
    with engine.store.without_limit():  # what is set aside is nowhere else
        placed, done = _keep(session, [part for part in parts if isinstance(part, KeptTurn)]), 0
        for part in parts:
            if isinstance(part, ReadTurns):
                placed, done = yield from _read_between(session, placed, done, part)
            else:
                done += 1
    if is_end:
        engine.reader.set_logits(logits)
        state.in_round, state.reply_header, state.pending_ids = round_end
    else:
        engine.reader.read_last_again()
        state.in_round, state.reply_header, state.pending_ids = False, None, []


def _keep(session: Session, parts: Sequence[KeptTurn]) -> list[_PlacedTurn]:
    """Forget all turns but `parts`, and evict those that are left out."""
    state, ledger, placed = session.state, session.ledger, list[_PlacedTurn]()
    given = session.template.followed_by(session.template.user_turn("a"), "assistant").header
    for part in parts:
        turn = session.turns[part.turn]
        if part.is_left_out and not turn.is_left_out:
            turn.is_left_out, state.saved_turns = True, min(state.saved_turns, part.turn)
        placed.append(_PlacedTurn(turn, part.rows, _header_after(session, part.turn, given)))
    out = np.concatenate([_NO_POSITIONS, *(one.rows for one in placed if one.turn.is_left_out)])
    new = np.setdiff1d(out, ledger.left_out)
    if len(new):
        session.engine.evictor.evict_until_recalled(new)
    return _arrange(session, placed, is_changed=len(new) > 0)


def _read_between(
    session: Session, placed: list[_PlacedTurn], done: int, part: ReadTurns
) -> Generator[Event, None, tuple[list[_PlacedTurn], int]]:
    """Read turns after the first `done` placed ones; returns all, and how many up to the new."""
    engine, state, ledger = session.engine, session.state, session.ledger
    start, seen, count = sum(len(one.rows) for one in placed[:done]), ledger.seen, len(placed)
    held = ledger.held_positions[ledger.held_positions >= start].copy()
    said = [one for one in placed[:done] if not one.turn.is_left_out]
    state.in_round = bool(said) and said[-1].turn.role in _ROUND_STARTERS
    state.reply_header, state.pending_ids = said[-1].header if said else None, []
    engine.reader.set_logits(None)  # what was likely after the turn before, nobody has kept
    with engine.evictor.without_tokens_from(start):
        yield from part.read()
        session.recall.update()  # without words, whose index those after them would need again
    turns = enumerate(session.turns[count:], count)
    new = [_PlacedTurn(turn, ledger.of_turn(number)) for number, turn in turns]
    before, after = placed[:done], placed[done:]
    if part.joins:
        rows = np.concatenate([before.pop().rows, new[0].rows])
        new[0] = _PlacedTurn(new[0].turn, rows)
    if part.joins_next:
        new[-1] = _PlacedTurn(new[-1].turn, np.concatenate([new[-1].rows, after.pop(0).rows]))
    held += ledger.seen - seen
    placed = _arrange(session, [*before, *new, *after])
    engine.evictor.hold(held)
    return placed, len(before) + len(new) - part.joins_next


def _arrange(
    session: Session, placed: Sequence[_PlacedTurn], *, is_changed: bool = False
) -> list[_PlacedTurn]:
    """Put the turns into this order, and forget all others; returns their new places."""
    # Afterwards no turn can be undone, unless nothing has moved and `is_changed` is False.
    state, before, sizes = session.state, session.turns, [len(one.rows) for one in placed]
    order = np.concatenate([_NO_POSITIONS, *(one.rows for one in placed)])
    turns = [one.turn for one in placed]
    rounds = [*accumulate((turn.role in _ROUND_STARTERS for turn in turns), initial=0)][1:]
    is_changed |= not np.array_equal(order, np.arange(session.seen))
    columns = (np.arange(len(placed)), np.asarray(rounds, np.int64))
    rank = session.engine.reorder(order, *(np.repeat(column, sizes) for column in columns))
    session.recall.passage_search.reorder(session.ledger, rank)
    session.recall.undo()
    bounds = [0, *accumulate(sizes)]
    number_of = {id(turn): number for number, turn in enumerate(turns)}
    now = [number_of.get(id(turn), -1) for turn in before]
    state.unpinned_sentences = frozenset(
        (now[turn], text) for turn, text in state.unpinned_sentences if now[turn] >= 0
    )
    is_same = [turn is old for turn, old in zip(turns, before, strict=False)]
    state.saved_turns = min(state.saved_turns, [*is_same, False].index(False))
    state.last_reply_stats.index = max(0, now[state.last_reply_stats.index])
    of_system = rank[state.system.positions.start] if state.system.positions else -1
    if of_system >= 0:
        number = int(session.ledger.column("turn")[of_system])
        state.system = replace(state.system, positions=range(bounds[number], bounds[number + 1]))
    else:
        state.system = SystemPrompt()
    state.set_turns(turns)
    state.round = rounds[-1] if rounds else 0
    session.history = UndoHistory(() if is_changed else session.history.messages)
    return [
        _PlacedTurn(one.turn, np.arange(start, end), one.header)
        for one, (start, end) in zip(placed, pairwise(bounds), strict=True)
    ]


def _header_after(session: Session, turn: int, given: list[int] | None) -> list[int] | None:
    """The ids of the next reply's header that end this turn; see `TurnIds.header`."""
    # `given`: the header ids before a reply that was given, not generated
    later = (session.turns[number] for number in range(turn + 1, len(session.turns)))
    following = next((one for one in later if not one.is_left_out), None)
    if following is None or session.turns[turn].role not in _ROUND_STARTERS:
        return session.state.reply_header if following is None else None
    if following.role in _ROUND_STARTERS:
        return []
    return given if following.finish == "read" else None
