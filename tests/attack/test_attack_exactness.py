"""Random chats with packed weights, and the cache's type for them, as real models have them.

After each thing that a user does, all that the chat holds is compared with what its model has
computed: held and archived rows to the last bit, keys at their present positions in float64, the
ledger, the carried logits. The budget is checked after each forward pass. Half of the chats are
two: in one, tokens are guessed ahead; in the other they are computed one by one.

The model is the bundled one, as a forward pass of the real one takes fifty times as long. With
`SIRCHAT_ATTACK` it is the real one, as it is shipped, and reads single tokens by the step in C++;
with `SIRCHAT_ATTACK_MODEL=tiny` as well, it is the bundled one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from attacking import MANY, attack
from plain_model import load_model
from random_encoders import random_encoder
from shadow import WatchedModel, check, follow, logits_gap, shadow_of, watching
from sirchat.chat.rereading import copy_session
from sirchat.chat.retry import retry_with_settings
from sirchat.chat.session import Session
from sirchat.chat.state import GeneratedReply, last_generated_reply
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError
from sirchat.memory.ledger import Role
from sirchat.models.compiling import use_compiled
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave
from sirchat.saved.database import SUFFIX
from sirchat.saved.resume import resume_session
from sirchat.saved.store import SessionStore
from sirchat.ui.interrupt import InterruptFlag

IS_REAL = bool(MANY) and os.environ.get("SIRCHAT_ATTACK_MODEL") != "tiny"
pytestmark = [pytest.mark.real] * IS_REAL

SAYINGS = [
    "My name is Anna and I live in Oslo.",
    "The password is walnut 7431.",
    "Repeat: the harbour master keeps the third key, the harbour master keeps the third key.",
    "What is my name?",
    "What is the password?",
    "Where is the third key that the harbour master keeps?",
    "ok",
    "I had porridge for breakfast, and two mackerel that Ingrid caught at dawn off the cape. "
    "Then we walked to the lake, and from the lake back to the harbour, and so on, and so on.",
]
REPLIES = ["Nice to meet you.", "the harbour master keeps the third key", "I see.", "Yes. " * 20]
WORDS = ["Anna", "Oslo", "walnut", "key", "harbour", "last", "turn 1", "turn 2", "nowhere"]
# Policies that no rounding can make choose otherwise.
PLAIN = ["sink", "window", "random", "interval", "reservoir"]

POLICIES = [*PLAIN, "salience", "entropy", "h2o", "tova", "snapkv", "knorm", "keydiff",
            "full"]  # fmt: skip
RETRIEVERS = ["words", "meaning", "mips", "cosine", "cosine-pairwise"]

# Most by which a logit may differ where products are computed for another number of rows.
ROUNDING = 2.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LoadedModel]]:
    """The model twice: the first one is compiled, in large runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIRCHAT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 32)  # a short chat fills several
        plain = load_model("smollm2", device="cpu") if IS_REAL else small()
        quick = replace(plain)
        if MANY:
            use_compiled(quick, "auto")
        for one in (plain, quick):  # found out once, for all chats
            _ = one.cache_dtype, one.decode_step, one.exposes_attention(), one.row_bytes()
        with watching():
            yield [quick, plain]


def small() -> LoadedModel:
    """The bundled model packed in four bits, with an encoder of sentences."""
    model = load_model("tiny", device="cpu", quantize="int4")
    assert model.cache_dtype is torch.bfloat16
    return replace(model, encoder=random_encoder(model, (1,), 64))


class Stop:
    """Says from the nth call on that the turn is interrupted; never if n is 0."""

    def __init__(self, after: int) -> None:
        self._left = after or -1

    def __call__(self) -> bool:
        self._left -= self._left > 0
        return not self._left


class Talk:
    """One chat, and what a user does in it; its replies are its own, or those of a `leader`."""

    def __init__(
        self, model: LoadedModel, profile: Profile, folder: Path, leader: Talk | None = None
    ) -> None:
        self.model, self.folder, self.leader = WatchedModel.of(model), folder, leader
        self.theta = float(model.module.config.rope_parameters["rope_theta"])
        self.reply: GeneratedReply | None = None
        self.left: list[tuple[Session, list[Any]]] = []  # chats that went on as branches
        self._use(Session(self.model, profile))

    def _use(self, chat: Session) -> None:
        self.chat = chat
        self.model.chats[:] = [chat]

    def do(self, name: str, *given: Any) -> str:
        """Do it; returns what was refused, if it was. What is refused has changed nothing."""
        before, did = digest(self.chat), getattr(self, name, None) or getattr(self.chat, name)
        try:
            did(*given)
        except SirchatError as error:
            if name in ("switch", "pin", "undo", "erase"):
                assert_same(digest(self.chat), before, f"refused {name}")
            return str(error)
        finally:
            self.check()
        return ""

    def check(self) -> None:
        check(self.chat, self.theta)
        found = logits_gap(self.chat, self.model)
        if found is not None:
            gap, is_plain = found
            most = 1e-4 if is_plain else ROUNDING
            assert gap <= most, f"logits differ by {gap}, in the same products: {is_plain}"

    def ask(self, text: str, stop: int = 0, attempt: int = 0) -> None:
        reply = self.leader.reply if self.leader else None
        list(self.chat.ask(text, Stop(stop), attempt=attempt, reply=reply))
        self.reply = last_generated_reply(self.chat.ledger, self.chat.turns)

    def read(self, text: str, reply: str) -> None:
        list(self.chat.read_user(text))
        list(self.chat.read_reply(reply))

    def retry(self, text: str | None = None) -> None:
        attempt = 0 if text else self.chat.state.attempt + 1
        if self.leader is None:
            list(self.chat.retry(text=text))
            self.reply = last_generated_reply(self.chat.ledger, self.chat.turns)
            return
        text = text or self.chat.undoable_message
        self.chat.undo(to_ask_again=True)
        self.ask(text, attempt=attempt)

    def retry_with_settings(self, updates: dict[str, Any]) -> None:
        list(retry_with_settings(self.chat, updates, lambda _: ""))

    def switch(self, updates: dict[str, Any]) -> None:
        self.chat.switch("/set", **updates)

    def there_and_back(self, updates: dict[str, Any]) -> None:
        """Settings changed and changed back, with nothing said in between."""
        self.read("ok", "I see.")  # so that these are the settings of the last forward pass
        own = {name: getattr(self.chat.profile, name) for name in updates}
        before = digest(self.chat)
        self.chat.switch("/set", **updates)
        self.check()
        self.chat.switch("/set", **own)
        if self.chat.profile.archive != "off" and self.chat.profile.archive_limit == "1GiB":
            assert_same(digest(self.chat), before, f"there and back {updates}")

    def said_and_undone(self, text: str) -> None:
        is_unread = bool(self.chat.turns) and not self.chat.seen  # it goes with the next message
        if self.chat.state.pending_ids or is_unread:  # ids are read first, and stay
            self.read("ok", "I see.")
        before = digest(self.chat)
        self.ask(text)
        self.check()
        self.chat.undo()
        assert_same(digest(self.chat), before, "said and undone")

    def look(self, target: str) -> None:
        """Ask for all that only shows; nothing changes."""
        before = digest(self.chat)
        self.model.chats.clear()  # the rows that are read to look are more than the budget
        self.chat.snapshot()
        with suppress(SirchatError):
            self.chat.why(target)
        if self.chat.turns and self.chat.turns[-1].role == "assistant":
            self.chat.attention_paid(len(self.chat.turns) - 1)
        if self.chat.engine.logits is not None:
            self.chat.score_continuations(["Yes.", "No, never."])
        self.model.chats[:] = [self.chat]
        assert_same(digest(self.chat), before, "look")

    def branch(self) -> None:
        """Go on with a copy; the chat itself stays as it is."""
        if not self.chat.seen:
            return
        before, other = digest(self.chat), copy_session(self.chat)
        assert other is not None
        assert_same(digest(other), before, "branch")
        follow(other, shadow_of(self.chat))
        self.left.append((self.chat, before))
        self._use(other)

    def resume(self) -> None:
        """Save, close, and go on in another session."""
        before, chat = digest(self.chat), self.chat
        saving = Autosave(chat, folder=self.folder)
        saving.save()
        if not saving.id:
            return
        path = self.folder / f"{saving.id}{SUFFIX}"
        saving.close()
        again = Session(self.model, chat.profile)
        with SessionStore.open(path) as store:
            head = store.state_record()
            assert head is not None
            has_rows = store.kv.load(head.fields["kv"]) is not None
            resume_session(again, store)
        path.unlink()
        computed = shadow_of(again).rows
        follow(again, shadow_of(chat))
        shadow_of(again).rows.update(computed)
        self._use(again)
        after = digest(again)
        assert has_rows == (chat.profile.save_kv != "off" and chat.seen > 0)
        if has_rows:
            assert_same(after, before, "resume")
        else:  # keys and values are computed anew, from the ids that are held
            assert_same(after[:2], before[:2], "resume")

    def fail(self, text: str, at: int) -> None:
        """Ctrl-C comes in the middle of a forward pass: of a search, a turn, or a reply."""
        self.model.fail_in[:] = [at]
        with suppress(KeyboardInterrupt):
            if self.leader is None and at % 2:
                list(self.chat.ask(text))
            else:
                self.read(text, "Yes.")
        self.model.fail_in.clear()

    def hurt(self, random: Random, text: str) -> None:
        """A third Ctrl-C comes at any moment; of forward passes, `fail` interrupts the middle."""
        started = time.perf_counter()
        copy = copy_session(self.chat)
        if copy is not None:
            follow(copy, shadow_of(self.chat))
            list(copy.ask(text))
        seconds = time.perf_counter() - started
        flag = InterruptFlag()
        flag._count = 2

        def ring(number: int, frame: FrameType | None) -> None:
            files, at = list[str](), frame
            while at is not None and at.f_code.co_name != "hurt":
                files.append(at.f_code.co_filename)
                at = at.f_back
            if files and not any(file.endswith("shadow.py") for file in files):
                flag._on_signal(number, frame)
            signal.setitimer(signal.ITIMER_REAL, 1e-3 if files else 0)  # the turn has just ended

        former = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + seconds * random.random())
            list(self.chat.ask(text))
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)

    def leave_off(self, text: str, at: int) -> None:
        """The caller takes no more events."""
        events = self.chat.ask(text)
        list(zip(range(at), events, strict=False))
        events.close()  # type: ignore[attr-defined]


def digest(chat: Session) -> list[Any]:
    """All that what comes next depends on."""
    engine, ledger = chat.engine, chat.ledger
    held, cache = ledger.held_positions.copy(), engine.cache
    layers = range(len(cache.row_layers) if cache.length else 0)
    return [
        (chat.seen, held.tolist(), [(turn.role, turn.text) for turn in chat.turns]),
        (ledger.column("flags")[held].tolist(), ledger.log_decay, chat.state.pending_ids),
        [cache.layer_keys(at).clone() for at in layers],
        [cache.layer_values(at).clone() for at in layers],
        [] if engine.logits is None else [engine.logits],
        ledger.attention.totals(held, ledger.log_decay).tolist(),
    ]


def assert_same(now: list[Any], before: list[Any], what: str) -> None:
    for number, (one, other) in enumerate(zip(now, before, strict=True)):
        if one and isinstance(one[0], torch.Tensor):
            same = len(one) == len(other) and all(map(torch.equal, one, other))
        else:
            same = one == other
        assert same, f"{what}: part {number} is not as before: {_shown(one)} / {_shown(other)}"


def _shown(part: Any) -> str:
    return "" if isinstance(part, list) else repr(part)[-60:]


def first_profile(random: Random, plain: bool) -> Profile:
    policy = random.choice(PLAIN if plain else POLICIES[:-1])
    recall = random.choice(["off", *_retrievers(plain)])
    return Profile(
        policy=policy, budget=random.choice((64, 80, 112)), recent=random.choice((0, 8, 24)),
        sinks=random.choice((1, 4)), decay=random.choice((1.0, 0.7)),
        max_new_tokens=random.choice((1, 4, 6)), seed=1, recall=recall,
        recall_n=random.choice(("auto", 12)),
        recall_weight="none" if plain else random.choice(("none", "surprisal")),
        archive=random.choice(("ram", "disk")), evict=random.choice(("when-full", "before-turn")),
        protect=random.random() < 0.8, save_kv=random.choice(("on", "off")),
        temperature=0.0 if plain else random.choice((0.0, 0.9)),
    )  # fmt: skip


def _retrievers(plain: bool) -> list[str]:
    return ["words"] if plain else RETRIEVERS


def change(random: Random, plain: bool) -> dict[str, Any]:
    """Settings that a user changes."""
    policy = random.choice(PLAIN if plain else POLICIES)
    some: list[dict[str, Any]] = [
        {"policy": policy, "policy_options": {}},
        {"policy": policy, "policy_options": {}, "budget": random.choice((64, 96, 160))},
        {"budget": random.choice((20, 48, 64, 96, 160))},
        {"recall": random.choice(_retrievers(plain))},
        {"recall": "off"},
        {"recall": "mips", "recall_query": "recent"},
        {"recall_n": random.choice(("auto", 4, 40))},
        {"sinks": random.choice((0, 1, 4))},
        {"recent": random.choice((0, 8, 24))},
        {"positions": random.choice(("cache", "stream"))},
        {"evict": random.choice(("when-full", "before-turn", "between-turns"))},
        {"attention": random.choice(("on", "auto"))},
        {"decay": random.choice((1.0, 0.5))},
    ]  # fmt: skip
    return random.choice(some)


def more_changes(random: Random) -> dict[str, Any]:
    """Those that can't be changed back without a trace."""
    return random.choice([
        {"archive": random.choice(("off", "ram", "disk"))},
        {"archive_limit": random.choice(("2MiB", "1GiB"))},
        {"system": random.choice((None, "You are a ship's cook."))},
        {"pin_system": random.choice((False, True))},
    ])  # fmt: skip


def act(random: Random, plain: bool) -> tuple[Any, ...]:
    """What a user does next: the name of a method of `Talk` or `Session`, and its arguments."""
    text, target = random.choice(SAYINGS), random.choice(WORDS)
    updates = change(random, plain)
    usual: list[tuple[Any, ...]] = [
        *[("ask", text, random.choice((0, 0, 1, 2, 5)))] * 8,
        *[("read", text, random.choice(REPLIES))] * 4,
        *[("switch", updates)] * 4,
        *[("there_and_back", updates), ("said_and_undone", text)] * 2,
        *[("pin", target), ("pin", target, False), ("undo",), ("undo",), ("erase", target)],
        *[("retry",), ("retry", text), ("branch",), ("resume",), ("resume",), ("look", target)],
        ("fail", text, 2 * random.randint(1, 3)),
    ]
    alone: list[tuple[Any, ...]] = [
        *[("switch", more_changes(random))] * 3,
        ("fail", text, random.randint(1, 7)),
        ("retry_with_settings", updates),
        ("leave_off", text, random.randint(0, 6)),
    ]
    return random.choice(usual if plain else [*usual, *alone])


def compare(one: Session, other: Session) -> None:
    """Two chats in which the same was said, up to rounding."""
    ledgers = [chat.ledger for chat in (one, other)]
    for name in ("token_id", "turn", "round", "role", "flags", "state"):
        a, b = (ledger.column(name) for ledger in ledgers)
        assert a.tolist() == b.tolist(), f"the two differ in {name}"
    held = [ledger.held_positions.tolist() for ledger in ledgers]
    assert held[0] == held[1], "others are held"
    logits = [chat.engine.logits for chat in (one, other)]
    if logits[0] is not None and logits[1] is not None:
        gap = float((logits[0] - logits[1]).abs().max())
        assert gap <= ROUNDING, f"the two differ by {gap} in logits"
    for at in np.flatnonzero(ledgers[1].column("role") == Role.ASSISTANT).tolist():
        token = shadow_of(other).tokens[at]
        if other.turns[token.turn].finish != "read":
            assert token.behind <= ROUNDING, f"a token is {token.behind} less likely"


def test_two_chats_are_the_same_whether_or_not_tokens_are_guessed(
    models: list[LoadedModel], tmp_path: Path
) -> None:
    def talk(random: Random) -> None:
        profile = first_profile(random, plain=True)
        quick = Talk(models[0], profile, tmp_path)
        off = profile.model_copy(update={"lookup": False})
        slow = Talk(models[1], off, tmp_path, leader=quick)
        for _ in range(random.randint(5, 9)):
            what = act(random, plain=True)
            refused = [one.do(*what) for one in (quick, slow)]
            assert refused[0] == refused[1], f"{what}: {refused}"
            compare(quick.chat, slow.chat)
        _check_branches(quick)

    attack(talk, seconds=60)


def test_a_chat_holds_exactly_what_was_read(models: list[LoadedModel], tmp_path: Path) -> None:
    def talk(random: Random) -> None:
        one = Talk(models[1], first_profile(random, plain=False), tmp_path)
        for _ in range(random.randint(6, 12)):
            one.do(*act(random, plain=False))
        _check_branches(one)

    attack(talk, seconds=60)


def test_an_interrupt_at_any_instruction_leaves_a_chat_that_goes_on_exactly(
    models: list[LoadedModel], tmp_path: Path
) -> None:
    def talk(random: Random) -> None:
        one = Talk(models[1], first_profile(random, plain=False), tmp_path)
        for _ in range(3):
            one.do("ask", random.choice(SAYINGS))
        before = [(turn.role, turn.text) for turn in one.chat.turns]
        one.do("hurt", random, random.choice(SAYINGS))
        assert [(turn.role, turn.text) for turn in one.chat.turns][: len(before)] == before
        one.do("ask", "What is my name?")
        assert one.chat.turns[-2].text == "What is my name?"
        one.do("undo")
        one.do("resume")
        one.do("ask", "ok")

    attack(talk, seconds=60)


def _check_branches(talk: Talk) -> None:
    for chat, before in talk.left:
        assert_same(digest(chat), before, "a chat that was left for its branch")
