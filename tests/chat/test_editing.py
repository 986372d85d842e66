"""A conversation with turns that left and others between: as it stands then, without reading again.

The slow way to the same tokens is a new session that reads the messages as they are then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chatting import ids_of, session, tell, tiny
from shadow import rotated
from sirchat.chat.editing import KeptTurn, ReadTurns, can_edit, edit
from sirchat.chat.session import Session
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.store import SessionStore

WORDS = "Anna Rome green violin harbour baker Tuesday lunch my name is the city river"
MANY = int(os.environ.get("SIRCHAT_ATTACK", "4"))
POLICIES = ("full", "salience", "entropy", "sink", "reservoir", "h2o")

Message = tuple[str, str]


def text(draw: Random) -> str:
    return " ".join(draw.choices(WORDS.split(), k=draw.randint(2, 12))).capitalize() + "."


def rounds(draw: Random, count: int) -> list[Message]:
    return [(role, text(draw)) for _ in range(count) for role in ("user", "assistant")]


def read(chat: Session, messages: list[Message], following: str | None = None) -> Iterator[Any]:
    roles = [role for role, _ in messages[1:]] + [following]
    for (role, said), after in zip(messages, roles, strict=True):
        yield from (
            chat.read_user(said, next_role=after) if role == "user" else chat.read_reply(said)
        )


def told(messages: list[Message], **settings: Any) -> Session:
    chat = session(**settings)
    list(read(chat, messages))
    return chat


def first_written(chat: Session) -> dict[int, tuple[int, Tensor]]:
    """Where each token's keys were written, and its keys and values, by stream position."""
    rows = chat.engine.store.copy_key_values()
    assert rows is not None
    of_all = torch.stack(rows.tensors, 0)  # [2 L, H, n, D]
    at = zip(rows.positions.tolist(), rows.written_at.tolist(), strict=True)
    return {position: (where, of_all[:, :, n].clone()) for n, (position, where) in enumerate(at)}


def check_cache(chat: Session) -> None:
    """Each held key is the one first written, turned to its slot."""
    written, held = first_written(chat), chat.ledger.held_positions.tolist()
    assert held == sorted(held)
    assert len(held) == chat.engine.cache.length <= chat.budget
    places, rows = zip(*(written[position] for position in held), strict=True)
    theta = tiny().module.config.rope_parameters["rope_theta"]
    keys = torch.stack([row[0] for row in rows], 1)  # [H, n, D]
    wanted = rotated(keys, np.asarray(places), np.arange(len(held)), theta)
    found = chat.engine.cache.layer_keys(0)[0]
    torch.testing.assert_close(found.double(), wanted, atol=5e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MANY))
def test_what_stays_is_not_read_and_all_stands_in_order(number: int) -> None:
    draw = Random(number)
    policy, budget = draw.choice(POLICIES), draw.choice([64, 96, 256])
    settings = {"policy": policy, "budget": 2048 if policy == "full" else budget}
    before = rounds(draw, draw.randint(2, 7))
    chat = told(before, **settings)
    old, ids = first_written(chat), np.asarray(ids_of(chat))
    count = len(before) // 2
    kept = sorted(draw.sample(range(1, count), draw.randint(1, count - 1)))  # numbers of rounds
    out = [n for n in range(1, kept[-1]) if n not in kept and draw.random() < 0.5]
    parts: list[KeptTurn | ReadTurns] = []
    after, stays = list[Message](), list[Any]()  # messages, and the rows of those that were read
    for n in range(kept[-1] + 1):
        if n and draw.random() < 0.4:
            new = rounds(draw, draw.randint(1, 2))
            parts.append(ReadTurns(partial(read, chat, new, "user")))
            after += new
            stays += [None] * len(new)
        if n == 0 or n in kept or n in out:
            for turn in (2 * n, 2 * n + 1):
                rows = chat.ledger.of_turn(turn)
                parts.append(KeptTurn(turn, rows, is_left_out=n in out))
                after.append(before[turn])
                stays.append(rows)
    seen = chat.seen
    list(edit(chat, parts))
    now_written = first_written(chat)
    slow = told(after, policy="full", budget=2048)
    assert ids_of(chat) == ids_of(slow)
    assert [turn.text for turn in chat.turns] == [said for _, said in after]
    for name in ("turn", "round", "role"):
        assert (chat.ledger.column(name) == slow.ledger.column(name)).all()
    for turn, rows in enumerate(stays):
        for was, now in zip(
            rows if rows is not None else (), chat.ledger.of_turn(turn), strict=False
        ):
            assert ids[was] == chat.ledger.column("token_id")[now]
            if now == chat.seen - 1 and seen - 1 not in rows:
                continue  # the last one, whose logits nobody had
            assert now_written[now][0] == old[was][0]
            assert (now_written[now][1] == old[was][1]).all()
    left_out = {turn for turn in range(len(after)) if chat.turns[turn].is_left_out}
    assert not left_out & set(chat.ledger.column("turn")[chat.ledger.held_positions].tolist())
    if policy != "full":
        assert chat.resident <= chat.budget
    check_cache(chat)
    goes_on_as_any_other(chat, draw)


def goes_on_as_any_other(chat: Session, draw: Random) -> None:
    held, turns = chat.ledger.held_positions.copy(), len(chat.turns)
    tell(chat, text(draw))
    check_cache(chat)
    chat.undo()
    assert (chat.ledger.held_positions == held).all()
    assert len(chat.turns) == turns
    chat.switch("test", policy="entropy", budget=64)
    check_cache(chat)
    out = [turn for turn, one in enumerate(chat.turns) if one.is_left_out]
    assert not np.isin(chat.ledger.column("turn")[chat.ledger.held_positions], out).any()


def test_nothing_changes_if_all_turns_stay() -> None:
    chat = told(rounds(Random(1), 4), policy="salience", budget=64)
    before, held = first_written(chat), chat.ledger.held_positions.tolist()
    logits, points = chat.engine.logits, len(chat.history.messages)
    list(edit(chat, [KeptTurn(turn, chat.ledger.of_turn(turn)) for turn in range(len(chat.turns))]))
    assert chat.ledger.held_positions.tolist() == held
    assert chat.engine.logits is logits
    assert len(chat.history.messages) == points
    after = first_written(chat)
    assert all((after[at][1] == row).all() for at, (_, row) in before.items())


def test_passages_of_what_stays_are_found_and_no_others() -> None:
    """The index of words and passages follows the tokens, also those of the last reply."""
    chat = session(policy="salience", budget=256, recall="words")
    facts = [
        f"The password of the {place} is {word}."
        for place, word in zip(
            ("harbour", "bakery", "station", "tower"),
            ("walnut", "copper", "lantern", "thimble"),
            strict=True,
        )
    ]
    messages = [one for fact in facts for one in (("user", fact), ("assistant", f"I know: {fact}"))]
    list(read(chat, messages))
    new = [("user", "The password of the lake is marble."), ("assistant", "I see.")]
    parts: list[KeptTurn | ReadTurns] = [
        KeptTurn(turn, chat.ledger.of_turn(turn)) for turn in (0, 1, 4, 5, 6, 7)
    ]
    parts.insert(2, ReadTurns(partial(read, chat, new, "user")))
    list(edit(chat, parts))
    chat.recall.update()
    passages, ledger = chat.recall.passage_search.passages, chat.ledger
    fresh = told([*messages[:2], *new, *messages[4:]], policy="full", recall="words")
    fresh.recall.update()
    assert (passages.rows == fresh.recall.passage_search.passages.rows).all()
    assert passages.texts(ledger) == fresh.recall.passage_search.passages.texts(fresh.ledger)
    for words in ("lake marble", "tower thimble", "bakery copper"):
        assert chat.recall.passage_search.by_words((words,)).tolist() == pytest.approx(
            fresh.recall.passage_search.by_words((words,)).tolist()
        )


@pytest.mark.parametrize("save_kv", ["on", "off"])
def test_an_edited_chat_is_saved_as_it_is(own_home: Path, save_kv: str) -> None:
    draw = Random(3)
    chat = session(policy="salience", budget=96, save_kv=save_kv)
    saving = Autosave(chat)
    list(read(chat, rounds(draw, 6)))
    saving.save()
    new = rounds(draw, 1)
    parts: list[KeptTurn | ReadTurns] = [
        KeptTurn(turn, chat.ledger.of_turn(turn), is_left_out=turn in (2, 3)) for turn in range(12)
    ]
    parts.insert(6, ReadTurns(partial(read, chat, new, "user")))
    list(edit(chat, parts))
    tell(chat, "And then?")
    saving.close()
    with SessionStore.open(own_home / "data" / "sessions" / f"{saving.id}.sqlite") as store:
        again = session(policy="salience", budget=96, save_kv=save_kv)
        resume_session(again, store)
    assert ids_of(again) == ids_of(chat)
    assert [vars(turn) for turn in again.turns] == [vars(turn) for turn in chat.turns]
    assert (again.ledger.left_out == chat.ledger.left_out).all()
    assert (again.ledger.held_positions == chat.ledger.held_positions).all()


def test_a_chat_whose_tokens_can_be_lost_is_not_edited() -> None:
    assert can_edit(session())
    assert not can_edit(session(archive="off"))
    assert not can_edit(session(positions="stream"))
