"""Random conversations, the same every time, with all that their users see.

Each session draws its settings and about a dozen actions: ask, read a transcript's reply, switch
settings, pin, undo, retry, evict, recall, ask why, draw the panels, save and resume. Half of the
sessions use the slash commands, half call `Session`.
"""

from __future__ import annotations

import io
import random
import re
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console, RenderableType

from chatting import tiny
from drawing import NONE
from plain_model import load_model
from sirchat.chat.events import Event, to_json
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.store import SessionStore
from sirchat.ui.commands import Commands
from sirchat.ui.panel import draw_compact_panel, draw_full_panel
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_token_ranks, draw_tokens
from sirchat.ui.typed_input import MemoryHistory

SESSIONS = 60

POLICIES: list[tuple[str, dict[str, Any]]] = [
    *(("entropy", {}), ("salience", {}), ("salience", {"user_weight": 2})),
    *((one, {}) for one in ("h2o", "tova", "snapkv", "sink", "window", "random", "interval")),
    *(("reservoir", {}), ("reservoir", {"sample": 20}), ("anchor", {"lazy": True})),
    *(("anchor", {}), ("full", {})),
]
SAYINGS = [
    "My name is Anna.",
    "I live in Oslo.",
    "Tell me a joke.",
    "My favourite colour is green.",
    "What is my name?",
    "The password is walnut 7431.",
    "Where do I live?",
    "I had porridge for breakfast, and two mackerel that Ingrid caught at dawn off the cape.",
    "Repeat after me: the harbour master keeps the third key.",
    "Good night.",
    "What is the password?",
    "ok",
]
REPLIES = ["Nice to meet you.", "I see.", "That is a fine place to live, I am sure of it.", "Yes."]
TARGETS = ["Anna", "Oslo", "last", "turn 1", "green", "walnut", "mackerel", "nowhere"]
# Where two tokens have nearly the same score, processors order them otherwise.
_SEEDS = {11: 111, 31: 131, 46: 146}
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
_VOLATILE = ("seconds", "seconds_prefill", "seconds_decode", "version", "device")


@cache
def exact() -> LoadedModel:
    """The bundled model in float64, less sure of itself: no two processors rank tokens otherwise.

    Where a model is nearly certain, surprisal is rounding noise.
    """
    module = load_model("tiny", device="cpu", for_hub=True).module
    copy = type(module)(module.config).double().eval()
    copy.load_state_dict({name: w.double() for name, w in module.state_dict().items()})
    with torch.no_grad():
        copy.model.norm.weight.mul_(0.4)
    copy.generation_config = module.generation_config
    return wrap_model("tiny", copy, tiny().tokenizer)


def play(number: int) -> list[dict[str, Any]]:
    """All that session `number` shows, action by action."""
    draw = random.Random(_SEEDS.get(number, number))
    with tempfile.TemporaryDirectory() as folder:
        running = _RunningSession(draw, number, Path(folder))
        done = [running.say("My name is Anna and I live in Oslo.")]
        for _ in range(draw.randint(10, 14)):
            done.append(running.act())
        return [*done, running.look()]


def _settings(draw: random.Random, number: int) -> dict[str, Any]:
    policy, options = POLICIES[number % len(POLICIES)]
    recall = draw.choice(["off", "off", "mips", "cosine"])
    return {
        "policy": policy,
        "policy_options": options,
        "budget": draw.choice([40, 48, 64, 96]),
        "sinks": draw.choice([1, 4]),
        "recent": draw.choice([0, 8, 16]),
        "decay": draw.choice([1.0, 0.9, 0.7, 0.5]),
        "system": draw.choice([None, "You are a ship's cook."]),
        "temperature": draw.choice([0.0, 0.0, 0.9]),
        "recall": recall,
        "recall_n": 24,
        "attention": draw.choice(["auto", "on"]),
        "protect": draw.random() < 0.8,
        "evict": draw.choice(["when-full", "when-full", "before-turn"]),
        "max_new_tokens": 14,
        "save_kv": draw.choice(["on", "off"]),
    }


class _RunningSession:
    """One running session and its random draws."""

    def __init__(self, draw: random.Random, number: int, folder: Path) -> None:
        self._draw, self._folder = draw, folder
        self._typed = number % 2 == 1
        profile = Profile(**_settings(draw, number))
        self.session = Session(exact(), profile, rows_in_events=True)
        self._actions = [
            *(7 * [self.talk]),
            *(4 * [self.switch]),
            *(self.read, self.pin, self.pin, self.undo, self.retry, self.erase),
            *(self.look, self.why, self.resume, self.reset_recall),
        ]

    def act(self) -> dict[str, Any]:
        return self._draw.choice(self._actions)()

    def say(self, text: str) -> dict[str, Any]:
        return self._events(f"say {text}", lambda: self.session.ask(text))

    def talk(self) -> dict[str, Any]:
        return self.say(self._draw.choice(SAYINGS))

    def read(self) -> dict[str, Any]:
        user, reply = self._draw.choice(SAYINGS), self._draw.choice(REPLIES)

        def both() -> Iterable[Event]:
            yield from self.session.read_user(user)
            yield from self.session.read_reply(reply)

        return self._events(f"read {user} {reply}", both)

    def switch(self) -> dict[str, Any]:
        name, value = self._change()
        if name == "policy":
            policy, options = value
            words = " ".join(f"{key}={option}" for key, option in options.items())
            updates = {"policy": policy, "policy_options": options}
            return self._either(f"/policy {policy} {words}", updates)
        typed = "none" if value is None else value
        return self._either(f"/set {name} {typed}", {name: value})

    def _change(self) -> tuple[str, Any]:
        draw = self._draw
        return draw.choice(
            [
                ("policy", draw.choice(POLICIES)),
                ("policy", draw.choice(POLICIES)),
                ("budget", draw.choice([40, 56, 80, 160])),
                ("decay", draw.choice([1.0, 0.8, 0.6])),
                ("recent", draw.choice([0, 4, 24])),
                ("sinks", draw.choice([0, 2, 4])),
                ("protect", draw.choice([True, False])),
                ("evict", draw.choice(["when-full", "before-turn"])),
                ("system", draw.choice([None, "Speak like a sailor."])),
            ]
        )

    def reset_recall(self) -> dict[str, Any]:
        measure = self._draw.choice(["off", "mips", "cosine"])
        return self._either(f"/recall {measure}", {"recall": measure})

    def pin(self) -> dict[str, Any]:
        target, pinned = self._draw.choice(TARGETS), self._draw.random() < 0.7
        if self._typed:
            return self._command(f"/{'pin' if pinned else 'unpin'} {target}")
        return self._events(f"pin {pinned} {target}", lambda: self.session.pin(target, pinned))

    def undo(self) -> dict[str, Any]:
        if self._typed:
            return self._command("/undo")
        return self._events("undo", self.session.undo)

    def retry(self) -> dict[str, Any]:
        return self._events("retry", self.session.retry)

    def erase(self) -> dict[str, Any]:
        target = self._draw.choice(TARGETS)
        if self._typed:
            return self._command(f"/erase --yes {target}")
        return self._events(f"erase {target}", lambda: self.session.erase(target))

    def why(self) -> dict[str, Any]:
        target = self._draw.choice(TARGETS)
        try:
            shown = drawn(draw_token_ranks(self.session.why(target), NONE, 140), 140)
        except SirchatError as error:
            shown = str(error)
        return {"did": f"why {target}", "shown": shown}

    def look(self) -> dict[str, Any]:
        """Both panels, and the tables of tokens."""
        whole, session = self.session.snapshot(), self.session
        shown = [
            draw_full_panel(whole, NONE, 120),
            draw_full_panel(whole, NONE, 70),
            draw_compact_panel(session.snapshot(strongest=30), NONE, 100),
            draw_tokens(whole.rows, NONE),
        ]
        lines = "\n".join(drawn(one, 120) for one in shown).splitlines()
        kept = [line for line in lines if "tok/s" not in line]
        return {"did": "look", "shown": "\n".join(kept)}

    def resume(self) -> dict[str, Any]:
        """Save, close, and resume as another session."""
        saving = Autosave(self.session)
        saving.save()
        path = None if saving._store is None else saving._store.path
        saving.close()
        if path is None:
            return {"did": "resume", "shown": "nothing"}
        store = SessionStore.open(path)
        session = Session(exact(), self.session.profile, rows_in_events=True)
        resume_session(session, store)
        self.session = session
        store.close()
        return {"did": "resume", "shown": f"{session.seen} seen, {session.resident} held"}

    def _either(self, line: str, updates: dict[str, Any]) -> dict[str, Any]:
        if self._typed:
            return self._command(line)
        return self._events(line, lambda: self.session.switch("/set", **updates))

    def _command(self, line: str) -> dict[str, Any]:
        out = io.StringIO()
        screen = Screen(out, out, theme="none")
        history = MemoryHistory()
        saved_chat = SimpleNamespace(
            branches_containing=lambda text: [],
            drop_revealing_name=lambda text, is_whole_turn: False,
            save=lambda: None,
            replace_session=partial(setattr, self, "session"),  # an undo read all anew
            outdated_file=None,
        )
        try:
            commands = Commands(self.session, screen, cast(Any, history), cast(Any, saved_chat))
            commands.run(line)
        except SirchatError as error:
            out.write(str(error))
        return {"did": line, "shown": out.getvalue()}

    def _events(self, did: str, happens: Any) -> dict[str, Any]:
        events: list[dict[str, Any]] = []
        error = ""
        try:
            for event in happens():
                if event.kind:
                    events.append(_without(to_json(event)))
        except SirchatError as failure:
            error = str(failure)
        return {"did": did, "events": events, "error": error}


def _without(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _VOLATILE}


def drawn(what: RenderableType, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, _environ={})
    console.print(what)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def condensed(actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without the held tokens of every turn but the last: enough to compare two runs."""
    turns = [event for action in actions for event in action.get("events", [])]
    last = next((event for event in reversed(turns) if event["event"] == "turn"), None)
    return [
        {
            **action,
            "events": [
                event if event is last else {k: v for k, v in event.items() if k != "tokens"}
                for event in action.get("events", [])
            ],
        }
        for action in actions
    ]


def check_same(recorded: Any, now: Any, where: str = "") -> None:
    """Equal, but for what another processor may round otherwise in a number."""
    if isinstance(recorded, dict):
        assert recorded.keys() == now.keys(), where
        for key, value in recorded.items():
            check_same(value, now[key], f"{where} {recorded.get('did', '')} {key}")
    elif isinstance(recorded, list):
        assert len(recorded) == len(now), where
        for at, (one, other) in enumerate(zip(recorded, now, strict=True)):
            check_same(one, other, f"{where} {at}")
    elif isinstance(recorded, float):
        assert recorded == pytest.approx(now, rel=1e-3, abs=1e-3), where
    elif isinstance(recorded, str):
        assert _NUMBER.sub("#", recorded) == _NUMBER.sub("#", now), where
        for one, other in zip(_numbers(recorded), _numbers(now), strict=True):
            assert one == pytest.approx(other, rel=2e-2, abs=0.011), where
    else:
        assert recorded == now, where


@cache
def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]
