"""`/copy`: what it copies, with tools that stand in for the platform's."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from chatting import session
from fake_terminal import FakeTerminal
from sirchat.chat.session import Session
from sirchat.errors import UsageError
from sirchat.ui import exporting as clipboard
from sirchat.ui.exporting import copy_reply
from sirchat.ui.screen import Screen
from terminal import program

_ALLOWED = "allowed: code"
CODE = "Try this:\n```sh\necho one\n```\nor\n```sh\necho two\nls\n```\nDone."


class Tools:
    """A folder of clipboard tools, the only one on the PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, script: str = "") -> None:
        script = script or 'echo "$*" > "$0.args"; cat > "$0.got"'
        program(self._folder / name, f"PATH=/usr/bin:/bin\n{script}")

    def got(self, name: str) -> bytes:
        return (self._folder / f"{name}.got").read_bytes()

    def arguments(self, name: str) -> str:
        return (self._folder / f"{name}.args").read_text(encoding="utf-8").strip()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("WAYLAND_DISPLAY", "DISPLAY", "SSH_CONNECTION", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    return Tools(folder)


def said_by(*replies: str) -> Session:
    chat = session()
    for reply in replies:
        list(chat.read_user("Say it."))
        list(chat.read_reply(reply))
    return chat


@pytest.fixture
def chat() -> Session:
    return said_by("The first.", CODE, "The last.")


def copied(chat: Session, rest: str = "") -> str:
    """What `/copy` shows."""
    notes = io.StringIO()
    copy_reply(chat, Screen(io.StringIO(), notes), rest)
    return notes.getvalue().strip()


def refused(chat: Session, rest: str = "") -> str:
    with pytest.raises(UsageError) as caught:
        copied(chat, rest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "display", "arguments", "encoding"),
    [
        ("wl-copy", "WAYLAND_DISPLAY", "", "utf-8"),
        ("xclip", "DISPLAY", "-selection clipboard", "utf-8"),
        ("xsel", "DISPLAY", "--clipboard --input", "utf-8"),
        ("pbcopy", "", "", "utf-8"),
        ("clip.exe", "", "", "utf-16-le"),
        ("termux-clipboard-set", "", "", "utf-8"),
    ],
)
def test_the_last_reply_goes_to_the_tool_that_is_there(
    chat: Session,
    tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    display: str,
    arguments: str,
    encoding: str,
) -> None:
    tools.add(name)
    if display:
        assert "no program for the clipboard works here" in refused(chat)
        monkeypatch.setenv(display, ":0")
    assert copied(chat) == f"copied 9 characters with {name}"
    assert tools.got(name).decode(encoding) == "The last."
    assert tools.arguments(name) == arguments


@pytest.mark.parametrize(
    ("replies", "rest", "got"),
    [
        (["The first.", CODE, "The last."], "", "The last."),
        (["The first.", CODE], "code", "echo two\nls"),
        (["a\x1b[201~\x1b]52;c;eA==\x07b\x08c\ud800"], "", "abc\ufffd"),
        # code without the indent of what it stands in
        (
            ["```\none\n```\n1. so:\n\n   ```py\n   if x:\n       two\n   ```\n2. done"],
            "code",
            "if x:\n    two",
        ),
        (["> said\n> ~~~\n> three\n> ~~~\nend"], "code", "three"),
        (["Thus:\n\n    four\n      five\n\nend"], "code", "four\n  five"),
        (["````\n```\nx\n```\n````"], "code", "```\nx\n```"),
        (["```\none\n```\n```py\nopen"], "code", "open"),
    ],
)
def test_a_reply_or_its_last_code_is_copied(
    tools: Tools, replies: list[str], rest: str, got: str
) -> None:
    tools.add("pbcopy")
    assert copied(said_by(*replies), rest) == f"copied {len(got)} characters with pbcopy"
    assert tools.got("pbcopy").decode() == got


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        *((rest, _ALLOWED) for rest in ("all", "-1", "code 2", "--osc52", "3")),
        ("code", "the last reply has no code block"),
    ],
)
def test_what_can_not_be_copied_is_refused(
    chat: Session, tools: Tools, rest: str, said: str
) -> None:
    assert said in refused(chat, rest)
    assert "there is no reply yet" in refused(session())


@pytest.mark.parametrize("tool", ["", "pbcopy"])
def test_the_terminal_is_asked_only_where_no_tool_is(
    chat: Session, tools: Tools, terminal: FakeTerminal, tool: str
) -> None:
    if tool:
        tools.add(tool)
    notes = io.StringIO()
    copy_reply(chat, Screen(terminal, notes), "")
    assert terminal.getvalue() == "\x1b]52;c;VGhlIGxhc3Qu\x07" * (not tool)
    (line,) = notes.getvalue().splitlines()
    assert ("no program here can copy" in line) == (not tool)
    assert ("sent 9 characters to the terminal" in line) == (not tool)


@pytest.mark.parametrize(
    "script",
    [b"#!/bin/sh\nexit 3", b"#!/bin/sh\nexec /bin/sleep 60", b"\x7fELF no program"],
)
def test_a_tool_that_fails_gives_way_to_the_next(
    chat: Session, tools: Tools, monkeypatch: pytest.MonkeyPatch, script: bytes
) -> None:
    monkeypatch.setattr(clipboard, "_TOOL_SECONDS", 0.3)
    monkeypatch.setenv("DISPLAY", ":9")
    tools.add("xclip")
    (Path(os.environ["PATH"]) / "xclip").write_bytes(script)
    start = time.monotonic()
    assert "no program for the clipboard works here" in refused(chat)
    assert time.monotonic() - start < 10
    tools.add("xsel")
    assert copied(chat) == "copied 9 characters with xsel"


def test_a_tool_that_stays_in_the_background_is_not_waited_for(chat: Session, tools: Tools) -> None:
    tools.add("pbcopy", 'cat > "$0.got"; sleep 5 & exit 0')
    start = time.monotonic()
    assert "copied 9" in copied(chat)
    assert time.monotonic() - start < 3


def test_over_ssh_only_a_forwarded_display_is_used(
    chat: Session, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.add("pbcopy")
    tools.add("xclip")
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    assert "no program for the clipboard works here" in refused(chat)
    monkeypatch.setenv("DISPLAY", "localhost:10.0")
    assert copied(chat) == "copied 9 characters with xclip"
