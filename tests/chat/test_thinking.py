"""A reply's reasoning, between `<think>` tags, is evicted with the reply's end, if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatting import session, tiny
from sirchat.chat.events import Evicted
from sirchat.chat.reasoning import FinalAnswer
from sirchat.chat.session import Session
from sirchat.memory.ledger import Role
from sirchat.paths import sessions_dir
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore

THOUGHT = "<think>She is called Anna, so I greet her.</think>"


def _chat(reply: str, **settings: Any) -> tuple[Session, list[Evicted]]:
    chat = session(tiny(), budget=256, **settings)
    list(chat.read_user("My name is Anna."))
    events = list(chat.read_reply(reply))
    return chat, [event for event in events if isinstance(event, Evicted)]


def _held(chat: Session, turn: int = 1) -> str:
    rows = chat.snapshot().rows
    return "".join(row.text for row in rows if row.turn == turn and row.role == "assistant")


@pytest.mark.parametrize(
    ("reply", "stays"),
    [
        (f"{THOUGHT}Hello, Anna.", "Hello, Anna."),
        (f"Well. {THOUGHT} Hello.{THOUGHT}", "Well.  Hello."),
        ("the template opened it </think>Hello.", "Hello."),
        ("<think>never closed", "<think>never closed"),
        ("no thought, Anna", "no thought, Anna"),
    ],
)
def test_reasoning_is_evicted_and_the_rest_stays(reply: str, stays: str) -> None:
    chat, evicted = _chat(reply, evict_thinking=True)
    assert _held(chat).strip() == stays.strip()
    assert bool(evicted) == (stays != reply)
    assert chat.turns[1].text == reply


def test_reasoning_stays_by_default() -> None:
    chat, evicted = _chat(f"{THOUGHT}Hello.")
    assert _held(chat).strip() == f"{THOUGHT}Hello."
    assert not evicted


def test_no_switch_restores_evicted_reasoning_and_undo_takes_back_the_turn() -> None:
    chat, _ = _chat(f"{THOUGHT}Hello.", evict_thinking=True)
    chat.switch("/policy", policy="sink", budget=512)
    assert "called" not in _held(chat)
    list(chat.read_user("And now?"))
    list(chat.read_reply(f"{THOUGHT}Now this."))
    chat.undo()
    assert _held(chat).strip() == "Hello."
    chat.undo()
    assert chat.seen == 0


def test_tokens_of_the_template_stay() -> None:
    plain, _ = _chat("Hello.")
    chat, _ = _chat(f"{THOUGHT}Hello.", evict_thinking=True)
    template = [row.text for row in chat.snapshot().rows if row.role == Role.TEMPLATE.name.lower()]
    assert template == [r.text for r in plain.snapshot().rows if r.role == "template"]


def test_reasoning_stays_evicted_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    chat, _ = _chat(f"{THOUGHT}Hello.", evict_thinking=True)
    saving = Autosave(chat)
    saving.update()
    saving.close()
    again = session(tiny(), budget=256, evict_thinking=True)
    with SessionStore.open(find_session(sessions_dir(), "last")) as store:
        resume_session(again, store)
    again.switch("/budget", budget=300)
    assert _held(again) == _held(chat)
    assert "called" not in _held(again)


@pytest.mark.parametrize(
    ("reply", "is_open", "answer"),
    [
        (f"{THOUGHT}\n\nHello,\n\n<think>.", False, "Hello,\n\n<think>."),
        (f"\n {THOUGHT}Hello.", False, "Hello."),
        ("so he is</think>\nHello.", True, "Hello."),
        ("Hello, <think>a</think>.", False, "Hello, <think>a</think>."),
        ("\n\nHello.", False, "\n\nHello."),
        ("<thin", False, "<thin"),
        ("<think>cut off", False, ""),
        ("cut off", True, ""),
        ("", False, ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_streamed_answer_is_the_reply_without_its_reasoning(
    reply: str, is_open: bool, answer: str, size: int
) -> None:
    it = FinalAnswer(is_open=is_open)
    pieces = [it.push(reply[at : at + size]) for at in range(0, len(reply), size)]
    assert "".join([*pieces, it.end()]) == answer
    assert it.has_thought == (is_open or reply.strip().startswith("<think>"))
    if size == 1 and not it.has_thought and reply.startswith("Hello"):
        assert pieces == list(reply)  # nothing is held back
