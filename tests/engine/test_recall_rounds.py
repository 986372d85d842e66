"""Rounds of random chats for which recall holds random rows, some of them in focus.

A slow model of the rules says what is held after each round: what was held before it and what was
said in it, as if recall had held nothing. All that is held or archived is compared, to the last
bit, with what was computed. `SIRCHAT_ATTACK` asks for more chats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from attacking import attack
from chatting import babbler
from held_rows import contents, same
from shadow import WatchedModel, check, follow, shadow_of, watching
from sirchat.chat.retry import retry_with_settings, settings_for_full
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.engine.eviction import Evictor
from sirchat.errors import SirchatError
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import ROW, Flag
from sirchat.recall.recall import NewTurn
from sirchat.saved.autosave import Autosave

SAYINGS = ["My name is Anna.", "ok", "Tell me a joke about the lake. " * 2, "Where is it? " * 9]
CHANGES: list[dict[str, Any]] = [
    *({"policy": name} for name in ("sink", "entropy", "reservoir", "anchor")),
    *({"budget": budget} for budget in (48, 64, 200)),
    *({"evict": when} for when in ("when-full", "before-turn", "between-turns")),
    *({"positions": "stream"}, {"positions": "cache"}, {"sinks": 0}, {"protect": False}),
    *({"recall": "off"}, {"recall": "mips"}, {"recall_n": 8}),
    *({"archive": "off", "recall": "off"}, {"archive": "ram"}, {"system": "Be a sailor."}),
]


class Chat:
    """A chat for whose turns recall holds what `random` draws; each step is checked."""

    def __init__(self, random: Random, folder: Path) -> None:
        self.random, self.model = random, WatchedModel.of(babbler())
        self.theta = float(self.model.module.config.rope_parameters["rope_theta"])
        policy = random.choice(["sink", "entropy"])
        self.autosave: Autosave | None = None
        self.use(Session(self.model, Profile(policy=policy, budget=random.choice((64, 80)),
            recent=0, recall="mips", max_new_tokens=6, decay=1.0)))  # fmt: skip
        self.autosave = Autosave(self.chat, folder=folder)

    def use(self, chat: Session) -> None:
        if self.autosave is not None:
            self.autosave.replace_session(chat)
        self.chat, self.recalls, self.ended = chat, True, False
        self.before: Positions | None = None  # what was held when recall began
        self.model.chats[:] = [chat]
        chat.recall.restore_for_turn = self.recall  # type: ignore[method-assign, assignment]

    def recall(self, turn: NewTurn, *_: object) -> None:
        """Hold some of all that can be held, before a turn is read."""
        evictor, random = self.chat.engine.evictor, self.random
        among, room = self.chat.engine.store.reachable(), evictor.recall_room(len(turn.ids))
        self.start, self.ended, self.before = self.chat.seen, False, None
        if not (self.recalls and room and random.random() < 0.8):
            return
        chosen = drawn(random, among.tolist(), random.randint(0, room))
        scores = np.array([random.random() for _ in chosen])
        self.before = self.chat.ledger.held_positions.copy()
        focused = random.random() < 0.4
        evictor.begin_recall(chosen, incoming=len(turn.ids), focused=focused, scores=scores)
        assert np.isin(chosen, self.chat.ledger.held_positions).all()
        self.ended = not self.chat.engine.store.has_recall

    def room_made(self, was_plain: bool) -> None:
        """Room was made: while recall holds anything, all of the current message is held."""
        self.ended |= not was_plain and not self.chat.engine.store.has_recall
        if self.chat.engine.store.has_recall and self.start < self.chat.seen:
            gone = self.chat.ledger.column("flags")[self.start :] & (Flag.ERASED | Flag.EXCLUDED)
            current = self.start + np.flatnonzero(gone == 0)
            if self.chat.profile.policy != "anchor":
                assert np.isin(current, self.chat.ledger.held_positions).all(), (
                    "the message was evicted"
                )

    def check(self) -> None:
        check(self.chat, self.theta)

    def check_round(self) -> None:
        """What is held after a round is what the rules say."""
        chat, choice = self.chat, self.chat.engine.choice
        assert not self.chat.engine.store.has_recall
        self.check()
        if self.before is None or self.ended or chat.profile.policy not in ("sink", "entropy"):
            return
        own = [*self.before.tolist(), *range(self.start, chat.seen)]
        wanted = kept(chat, own, choice.divide_budget().hard_bound)
        assert chat.ledger.held_positions.tolist() == wanted

    def do(self, name: str, *given: Any) -> None:
        with suppress(SirchatError):
            getattr(self, name)(*given)
        self.check()

    def say(self, text: str) -> None:
        list(self.chat.read_user(text))
        self.check()
        list(self.chat.read_reply("Nice to meet you."))
        self.check_round()

    def ask(self, text: str) -> None:
        list(self.chat.ask(text))
        self.check_round()

    def ask_and_undo(self, text: str) -> None:
        """A chat that asked and undid is as one that never asked."""
        if self.chat.state.in_round:
            return
        before = digest(self.chat)
        list(self.chat.ask(text))
        self.chat.undo()
        assert digest_is(self.chat, before), "not as before"

    def undo(self) -> None:
        self.chat.undo()

    def fail(self, text: str, at: int) -> None:
        """Ctrl-C comes within a forward pass: nothing stays aside."""
        self.model.fail_in[:] = [at]
        with suppress(KeyboardInterrupt):
            list(self.chat.ask(text))
        self.model.fail_in.clear()
        assert not self.chat.engine.store.placement.has_recall

    def leave_off(self, text: str, at: int) -> None:
        """The caller takes no more events."""
        events = self.chat.ask(text)
        list(zip(range(at), events, strict=False))
        events.close()  # type: ignore[attr-defined]
        assert not self.chat.engine.store.placement.has_recall

    def switch(self, updates: dict[str, Any]) -> None:
        self.chat.switch("/set", **updates)

    def pin(self, target: str, pinned: bool) -> None:
        self.chat.pin(target, pinned)

    def erase(self, target: str) -> None:
        self.chat.erase(target)

    def resume(self) -> None:
        """Another session goes on with what is saved of this one, plain also within a round."""
        again, held = Session(self.model, self.chat.profile), self.chat.engine.save().held
        again.load(
            self.chat.engine.save(), self.chat.state, self.chat.engine.store.copy_key_values()
        )
        follow(again, shadow_of(self.chat))
        self.use(again)
        assert not again.engine.store.placement.has_recall
        assert again.ledger.held_positions.tolist() == held.tolist()

    def retry(self, text: str, is_full: bool) -> None:
        """Another reply under other settings, or with all that was evicted, then the usual ones."""
        self.ask(text)
        updates = settings_for_full(self.chat)[0] if is_full else {"temperature": 1.0}
        list(retry_with_settings(self.chat, updates, lambda _: ""))
        self.check_round()

    def save(self) -> None:
        """The file has what is held when the round is over; saving changes nothing."""
        assert self.autosave is not None
        before, held = digest(self.chat), self.chat.engine.save().held
        self.autosave.save()
        assert digest_is(self.chat, before), "changed by saving"
        if (store := self.autosave._store) is not None:
            head = store.state_record()
            assert head is not None
            assert head.held.tolist() == held.tolist()
            assert (
                store.rows(ROW)["token_id"].tolist()
                == self.chat.engine.save().rows["token_id"].tolist()
            )

    def within(self, text: str, name: str, *given: Any) -> None:
        """Between a message and its reply, something else is done."""
        list(self.chat.read_user(text))
        before, own = digest(self.chat), self.chat.profile
        self.do(name, *given)
        if name == "switch" and self.chat.profile.archive == own.archive == "ram":
            changed = {key: getattr(own, key) for key in given[0]}
            if "system" not in changed:
                self.chat.switch("/set", **changed)
                assert digest_is(self.chat, before), f"there and back: {given}"
        self.before = None
        list(self.chat.read_reply("I see."))
        assert not self.chat.engine.store.placement.has_recall


def drawn(random: Random, among: list[int], count: int) -> Positions:
    """At most `count` of the positions `among`, ascending."""
    return np.sort(np.asarray(random.sample(among, min(count, len(among))), np.int64))


def kept(chat: Session, own: list[int], most: int) -> list[int]:
    """Which of the rows at the positions `own` a policy keeps, by its paper."""
    ledger, division = chat.ledger, chat.engine.choice.divide_budget()
    rounds, pinned = ledger.column("round"), set(ledger.pinned_positions.tolist())
    surprisal = ledger.surprisal_of(np.arange(ledger.seen))

    def rank(at: int) -> tuple[Any, ...]:
        is_new = rounds[at] == chat.state.round and at >= ledger.seen - division.protected
        fixed = at < division.sinks or at in pinned or (is_new and chat.profile.protect)
        return fixed, surprisal[at] if chat.profile.policy == "entropy" else 0, at

    return sorted(sorted(own, key=rank)[-most:])


def digest(chat: Session) -> tuple[Any, ...]:
    rows, engine = chat.ledger.rows(), chat.engine
    columns = [rows[name].tolist() for name in ("token_id", "round", "flags", "state")]
    return columns, engine.store.placement, contents(engine) if engine.cache.length else []


def digest_is(chat: Session, before: tuple[Any, ...]) -> bool:
    columns, selection, rows = digest(chat)
    pairs = zip(vars(selection).values(), vars(before[1]).values(), strict=True)
    is_same = all(map(np.array_equal, *zip(*pairs, strict=True)))
    return is_same and columns == before[0] and same(rows, before[2])


@pytest.fixture
def made_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Chat]]:
    """The chat that is told when room was made."""
    chats, usual = list[Chat](), Evictor.make_room

    def make_room(self: Evictor, count: int, *given: Any) -> Any:
        was_plain = not self._store.has_recall
        evicted = usual(self, count, *given)
        if chats and chats[-1].chat.engine.evictor is self:
            assert self._cache.length + count <= self._choice.divide_budget().hard_bound
            chats[-1].room_made(was_plain)
        return evicted

    monkeypatch.setattr(Evictor, "make_room", make_room)
    with watching():
        yield chats


@pytest.mark.slow
def test_recall_holds_what_it_wants_for_a_round_and_leaves_no_trace(
    made_room: list[Chat], tmp_path: Path
) -> None:
    def talk(random: Random) -> None:
        chat = Chat(random, tmp_path)
        made_room[:] = [chat]
        for text in SAYINGS[:3]:
            chat.say(text)
        for _ in range(8):
            text, updates = random.choice(SAYINGS), random.choice(CHANGES)
            target, at = random.choice(["Anna", "joke", "turn 2", "last"]), random.randint(1, 6)
            pins = [("pin", target, True), ("pin", target, False)]
            switch = ("switch", updates)
            saves = [("resume",), ("save",)]
            simple: Any = random.choice([switch, *saves, *saves, *pins, ("erase", target)])
            usual: list[tuple[Any, ...]] = [*[("say", text), ("ask", text)] * 3,
                ("ask_and_undo", text), ("retry", text, at > 3), ("undo",), ("fail", text, at),
                ("leave_off", text, at), simple, simple, ("within", text, *simple)]  # fmt: skip
            chat.do(*random.choice(usual))

    attack(talk, 6, seconds=60)
