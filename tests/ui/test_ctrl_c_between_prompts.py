"""Ctrl-C between two prompts, at every line of the chat loop that runs there: the chat goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import chatting
from sirchat.chat.session import Session
from sirchat.ui import prompt, repl, startup, typed_input
from sirchat.ui.screen import Screen
from sirchat.ui.typed_line import InputLine

_FILES = {module.__file__ for module in (prompt, repl, startup, typed_input)}
_MOST = 400  # lines of the chat loop that run between two prompts, at most


class _Keyboard:
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> _Keyboard:
        return self

    def __exit__(self, *_: object) -> None: ...

    def pass_keys_to_prompt(self) -> None: ...

    def set_bracketed_paste(self, on: bool) -> None: ...

    def escape_pressed(self) -> bool:
        return False


class _Presses:
    """Stands for a prompt: in round N, Ctrl-C comes at the Nth line that runs after `read`."""

    def __init__(self, answer: Callable[[], InputLine | None], *, once: int | None = None) -> None:
        self._answer, self._once = answer, once
        self.rounds = self._left = 0
        self.has_ended = False  # the last round had fewer lines

    ask_for_key = edit = set_editing_mode = str

    def redraw(self) -> None: ...

    def set_completer(self, *_: object) -> None: ...

    def set_toolbar(self, *_: object) -> None: ...

    def set_header(self, *_: object) -> None: ...

    def read(self, *_: object, **__: object) -> InputLine | None:
        sys.settrace(None)
        if self._left > 0 or self.rounds == _MOST or (self._once and self.rounds):
            self.has_ended = True
            return None
        self.rounds += 1
        self._left = self.rounds if self._once is None else self._once
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in _FILES:
                frame.f_trace = self._trace
            frame = frame.f_back
        return self._answer()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def _press_ctrl_c() -> InputLine | None:
    raise KeyboardInterrupt


@pytest.fixture
def chat_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Session]:
    session = chatting.session(chatting.babbler(), save=False, max_new_tokens=1)
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    monkeypatch.setattr(typed_input, "Keyboard", _Keyboard)

    def run(presses: _Presses) -> Session:
        monkeypatch.setattr(typed_input, "Prompt", lambda *_, **__: presses)
        try:
            startup.chat(lambda _: session, session.profile, Screen(is_quiet=True))
        finally:
            sys.settrace(None)  # of a press whose moment did not come
        return session

    return run


@pytest.mark.parametrize(
    "answer",
    [_press_ctrl_c, lambda: InputLine("/nothing", is_command=True)],
    ids=["Ctrl-C", "command"],
)
def test_ctrl_c_at_any_moment_between_two_prompts_does_not_end_the_chat(
    chat_with: Callable[..., Session], answer: Callable[[], InputLine | None]
) -> None:
    presses = _Presses(answer)
    chat_with(presses)
    assert presses.has_ended
    assert 5 < presses.rounds < _MOST


def test_a_message_that_was_entered_is_in_the_conversation_whenever_ctrl_c_comes(
    chat_with: Callable[..., Session],
) -> None:
    presses = _Presses(lambda: InputLine("Hello.", is_command=False))
    turns = chat_with(presses).turns
    assert presses.has_ended
    lost = presses.rounds - sum(turn.role == "user" for turn in turns)
    assert lost <= 6  # moments, before the chat has looked at what was entered


def test_ctrl_c_at_any_moment_of_leaving_lets_the_chat_end_in_order(
    chat_with: Callable[..., Session],
) -> None:
    raised = []
    for moment in range(1, 40):
        try:
            chat_with(_Presses(lambda: None, once=moment))
        except KeyboardInterrupt:
            raised.append(moment)
    assert len(raised) <= 2  # the last lines, after the chat
    assert min(raised, default=40) > 10
