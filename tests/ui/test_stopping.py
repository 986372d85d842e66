"""Stopped turns, failed turns, and typing in a terminal: the conversation stays well-formed."""

from __future__ import annotations

import inspect
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import saved_chats
from chatting import babbler, session, tiny
from fake_terminal import FakeTerminal
from held_rows import state
from sirchat.chat.rereading import copy_session
from sirchat.chat.session import Session
from sirchat.chat.turn import never
from sirchat.memory.policies.by_surprisal import Salience
from sirchat.ui.commands import Commands
from sirchat.ui.interrupt import CHANGES, CtrlCGuard, InterruptFlag
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.turn_commands import Retry, retry
from terminal import Terminal, pager_into
from typed_chat import TypedChat

ESCAPE, ENTER, CTRL_C = "\x1b", "\r", "\x03"
_OF_CHANGES = ("sirchat.chat.session", "sirchat.engine.", "sirchat.memory.")
_GAUGE = r"━+─* {2}[\d,]+/1,024 held"


@pytest.fixture(scope="module")
def paged(home: Path) -> Path:
    """The file with the pager's last input."""
    return home / "paged"


@pytest.fixture(scope="module")
def opened(home: Path, paged: Path, endless: str) -> Iterator[Terminal]:
    """One chat for all tests here."""
    environ = {"PAGER": pager_into(paged), "SIRCHAT_BUDGET": "1024"}
    with Terminal("--model", endless, home=home, environ=environ) as chat:
        yield chat


@pytest.fixture
def chat(opened: Terminal) -> Terminal:
    """An empty chat whose replies are of three tokens."""
    for line in ("/budget 1024", "/set max_new_tokens 3", "/reset"):
        opened.ask(line)
    return opened


@pytest.fixture
def speaker(chat: Terminal) -> Terminal:
    """An empty chat whose replies go on and on."""
    chat.ask("/set max_new_tokens 100000")
    return chat


def _held(chat: Terminal, paged: Path) -> str:
    """The held tokens, one after the other."""
    chat.ask("/tokens")
    table = paged.read_text(encoding="utf-8") if "position" not in chat.shown else chat.shown
    table = re.sub(r"\x1b\[[\d;]*m", "", table)
    return "".join(re.findall(r'^ *\d+ +\d+ +\w+ +"(.*?)" +\d+ ', table, re.M))


@pytest.mark.slow
@pytest.mark.parametrize("key", [CTRL_C, ESCAPE], ids=["Ctrl-C", "Esc"])
def test_a_key_stops_a_reply_that_is_kept_and_the_panel_below_it_goes(
    speaker: Terminal, paged: Path, key: str
) -> None:
    speaker.begin_reply()
    speaker.wait_screen(rf"[a-z].*\n── salience · .*\n{_GAUGE}.*\nturns \S\S")
    assert " written, " not in speaker.shown
    assert speaker.screen.cursor.hidden
    speaker.send(key)
    speaker.wait("interrupted")
    speaker.wait_prompt()
    assert not re.search(_GAUGE, speaker.everything)
    assert not speaker.screen.cursor.hidden
    # The newest ones: on a busy machine a reply grows until its beginning is evicted.
    words = re.findall(r"[a-z]{4,}", speaker.shown.partition("interrupted")[0])[-20:]
    held = _held(speaker, paged)
    assert sum(word in held for word in words) > 5


@pytest.mark.slow
def test_other_keys_and_chords_do_not_stop_a_reply_and_wait_for_the_next_prompt(
    speaker: Terminal,
) -> None:
    speaker.ask("/set max_new_tokens 1500")
    speaker.begin_reply()
    for key in ("A", "B", "C", "D", "H", "F", "3~"):
        speaker.send(f"\x1b[{key}")
    for keys in ("1 zz", "\x1b\x7f", "2", "\x1bb", "\x1b\r", "\x1b[13;2u", "\x1b[27;2;13~"):
        speaker.send(keys)
        speaker.read(0.01)
    speaker.send("\x1b[1;9Z")
    speaker.wait_screen("(?m)^> 1 *\n\n\n  2$")
    assert " 1,500 written" in speaker.shown
    assert "stopped at the length limit" in " ".join(speaker.shown.split())
    assert "interrupted" not in speaker.shown
    assert "13;2" not in speaker.shown
    speaker.send(CTRL_C)


@pytest.mark.slow
def test_what_is_typed_ahead_is_in_the_next_prompt_and_not_in_the_reply(speaker: Terminal) -> None:
    speaker.begin_reply()
    speaker.send("/budget 64\r")
    speaker.paste("/reset\nzzqq")
    speaker.read_on()
    assert b"zzqq" not in speaker.raw[-6000:]
    speaker.send(ESCAPE)
    speaker.wait("budget: 1024 -> 64")
    speaker.wait_screen("> //reset\n  zzqq")
    assert speaker.everything.count("zzqq") == 1
    speaker.send(CTRL_C)


def test_the_third_ctrl_c_ends_a_forward_pass_at_once_but_no_move_of_tokens() -> None:
    press = compile("import signal; signal.raise_signal(signal.SIGINT)", "press", "exec")

    def call_from(module: str) -> None:
        exec(press, {"__name__": module})

    with InterruptFlag() as flag:
        for _ in range(4):
            call_from("sirchat.memory.cache")
        assert flag()
        for module in (
            "sirchat.models.model",
            "sirchat.memory.policies.by_position",
            "outside",
            "sirchat",
        ):
            with pytest.raises(KeyboardInterrupt):
                call_from(module)
        call_from("sirchat.engine.reader")
    assert all(callable(getattr(Session, name)) for name in CHANGES)


@contextmanager
def ctrl_c_at(
    moment: int, modules: tuple[str, ...], *, after: tuple[str, ...] = ()
) -> Iterator[list[int]]:
    """Ctrl-C comes at this line that runs in `modules`, from 0; yields the numbers of all lines.

    With `after`, lines count from the first call of one of these functions on.
    """
    lines, is_begun = list[int](), not after

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal is_begun
        is_begun |= frame.f_code.co_name in after
        if not is_begun or not frame.f_globals.get("__name__", "").startswith(modules):
            return None
        if event == "line":
            if len(lines) == moment:
                signal.raise_signal(signal.SIGINT)
            lines.append(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


@pytest.mark.parametrize(
    ("line", "budget"),
    [
        *(("/undo", 96), ("/undo", 48), ('/pin "3 some"', 96), ("/unpin turn 4", 96)),
        *(("/erase some --yes", 96), ('/recall "0 some"', 96)),
    ],
)
def test_ctrl_c_at_any_moment_of_a_change_leaves_all_as_before_or_as_after(
    line: str, budget: int, own_home: Path
) -> None:
    chat = saved_chats.Chat(save=False, policy="salience")
    chat.say(*saved_chats.SAYINGS)
    chat.session.pin("turn 4")
    chat.session.switch("/budget", budget=budget)
    before, moments = state(chat.session), 0

    def run(moment: int) -> Session:
        """Run the command in a copy of the chat; Ctrl-C comes at this line of code, from 0."""
        nonlocal moments
        copy = copy_session(chat.session)
        assert copy is not None
        commands = Commands(copy, chat.screen, chat.history, SavedChat(copy, chat.screen))
        with (
            CtrlCGuard() as guard,
            suppress(KeyboardInterrupt),
            guard.interruptible(),
            ctrl_c_at(moment, _OF_CHANGES) as lines,
        ):
            commands.run(line)
        moments = len(lines)
        return copy

    after = state(run(-1))
    assert before != after
    for moment in range(0, moments, max(1, moments // 40)):
        copy = run(moment)
        assert state(copy) in (before, after)
        assert len(copy.turns) == len(chat.session.turns) - 2 * (
            line == "/undo" and state(copy) == after
        )


def test_three_ctrl_c_while_the_policy_chooses_after_retry_full_leave_the_chat_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chats = [session(tiny(), policy="salience", budget=64, max_new_tokens=8) for _ in "ab"]
    for text in saved_chats.SAYINGS:
        for chat in chats:
            list(chat.ask(text))
    press = compile("for _ in '123': raise_signal(2)", "press", "exec")
    usual, pressed = Salience.keep, list[str]()

    def keep(self: Salience, *given: Any) -> Any:
        if any(frame.function == "trial" for frame in inspect.stack(0)):
            pressed.append("")
            names = {"__name__": "sirchat.memory.policies.any", "raise_signal": signal.raise_signal}
            exec(press, names)
        return usual(self, *given)

    list(retry(chats[0], Retry(full=True), never))
    monkeypatch.setattr(Salience, "keep", keep)
    with InterruptFlag(), suppress(KeyboardInterrupt):
        list(retry(chats[1], Retry(full=True), never))
    assert pressed
    assert state(chats[0]) == state(chats[1])
    assert chats[0].turns == chats[1].turns


@pytest.mark.parametrize("line", ["/undo", "/load trunk"])
def test_ctrl_c_at_any_moment_of_reading_a_chat_again_stops_it(line: str, own_home: Path) -> None:
    chat = saved_chats.Chat(save_kv="off")
    chat.say(*saved_chats.SAYINGS[:2])
    chat.do("/save trunk")
    chat.saved_chat.close()
    chat = saved_chats.Chat(save_kv="off")
    chat.say(saved_chats.SAYINGS[0])
    if line == "/undo":
        chat.do("/load trunk")
    before, reading = state(chat.session), ("read_again", "resume_session")

    def is_stopped(moment: int) -> bool:
        """Run the command; Ctrl-C comes at this line of engine or memory, from 0."""
        with CtrlCGuard() as guard, guard.interruptible():
            try:
                with ctrl_c_at(moment, _OF_CHANGES[1:], after=reading):
                    chat.commands.run(line)
            except KeyboardInterrupt:
                return True
        return False

    for moment in range(0, 200, 10):
        assert is_stopped(moment)
        assert state(chat.session) == before
    assert chat.saved_chat.session is chat.session


def test_an_error_in_a_turn_is_one_line_and_keeps_the_conversation(
    terminal: FakeTerminal, own_home: Path
) -> None:
    with TypedChat(terminal, babbler(), max_new_tokens=3) as chat:
        chat.ask("Hello.")
        chat.ask("/policy full")
        seen = chat.session.seen
        shown = chat.press("海" * 1600, "\r")
        assert shown.split("海")[-1].strip().startswith("sirchat: ")
        assert chat.session.seen == seen
        assert "3 written" in chat.ask("Hello again.")
        assert chat.press(CTRL_C).count("Ctrl-D or /exit leaves") == 1


def test_ctrl_c_while_a_long_message_is_read_stops_the_reading(chat: Terminal) -> None:
    chat.wait_prompt()
    text = " ".join(f"word{i}" for i in range(8000))
    chat.paste(text)
    chat.wait_screen("word7999")
    chat.submit(ENTER)
    chat.wait_screen(r"reading [█▏▎▍▌▋▊▉]* +[\d,]+ of [\d,]{6} tokens")
    chat.send(CTRL_C)
    chat.wait_prompt()
    read = re.search(r"([\d,]+) tokens read, 0 written, .*interrupted", chat.text, re.DOTALL)
    assert read
    assert int(read[1].replace(",", "")) < 30_000  # of 38,895
    assert "reading" not in chat.text
    assert "3 written" in chat.ask("Hello.")


def test_a_signal_during_a_search_leaves_a_prompt_that_works(chat: Terminal) -> None:
    chat.ask("about something")
    chat.send("\x12ab")
    chat.wait_screen("I-search backward.*ab")
    chat.child.kill(2)
    chat.wait("leaves")
    chat.wait_prompt()
    assert "tokens read" in chat.ask("Hello.")
