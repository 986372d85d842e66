"""`/export` writes the chat and loses no file; `/copy`, with tools that stand in."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chatting import session
from fake_terminal import FakeTerminal
from sirchat.chat.session import Session
from sirchat.errors import UsageError
from sirchat.text.transcript import parse_transcript
from sirchat.ui import exporting
from sirchat.ui.exporting import EXPORT_FORMATS, copy_reply, export_chat
from sirchat.ui.screen import Screen
from terminal import program

pytestmark = pytest.mark.usefixtures("folder")

CODE = "Try this:\n```sh\necho one\n```\nor\n```sh\necho two\nls\n```\nDone."
REPLY = "# Hi\n\n**Anna** & <b>you</b>\n\n```py\nx < 1\n```\n![p](http://e.org/p.png)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def chat() -> Session:
    chat = session(system="Be kind.", save=False)
    list(chat.read_user("I am <i>Anna</i>.\n  \x1b]0;x\x07Who are you?"))
    list(chat.read_reply(REPLY))
    return chat


def exported(chat: Session, rest: str) -> str:
    """What `/export` says."""
    notes = io.StringIO()
    export_chat(chat, Screen(io.StringIO(), notes), rest)
    return notes.getvalue().strip()


def refused(command: Callable[[Session, str], str], chat: Session, rest: str = "") -> str:
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    with pytest.raises(UsageError) as caught:
        command(chat, rest)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before
    return str(caught.value)


def test_markdown_has_a_heading_for_each_turn(chat: Session) -> None:
    assert exported(chat, "md chat.md") == "the chat as Markdown was written to chat.md"
    assert Path("chat.md").read_text(encoding="utf-8") == (
        "## System\n\nBe kind.\n\n"
        f"## You\n\nI am <i>Anna</i>.\n  Who are you?\n\n## Model\n\n{REPLY}\n"
    )


def said_by(*turns: tuple[str, str]) -> Session:
    chat = session(save=False)
    for text, reply in turns:
        list(chat.read_user(text))
        list(chat.read_reply(reply))
    return chat


def test_a_reply_that_leaves_code_open_is_code_as_a_whole() -> None:
    exported(said_by(("a", "So:\n~~~~py\nx = 1"), ("Go on.", "Done, `y`.")), "md open.md")
    text = Path("open.md").read_text(encoding="utf-8")
    assert "    ~~~~py\n    x = 1\n\n## You\n\nGo on.\n\n## Model\n\nDone, `y`.\n" in text


def test_reasoning_is_exported_apart_in_json_and_not_at_all_otherwise() -> None:
    chat = said_by(("Is it?", "<think>Why?</think>Yes."))
    for form, meaning in EXPORT_FORMATS.items():
        assert exported(chat, f"{form} chat.{form}") == f"{meaning} was written to chat.{form}"
    message = json.loads(Path("chat.json").read_bytes())["messages"][-1]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Why?"}
    assert Path("chat.md").read_text(encoding="utf-8").endswith("## Model\n\nYes.\n")


def test_names_may_have_spaces_and_a_tilde_and_what_is_wrong_costs_one_line(
    chat: Session, folder: Path
) -> None:
    exported(chat, 'md "~/my chat.md"')
    exported(chat, "--force md ~/b.md")
    assert sorted(path.name for path in folder.iterdir()) == ["b.md", "my chat.md"]
    assert "the chat has no messages yet" in refused(exported, session(), "md chat.md")
    (folder / "dir").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    for rest, said in (
        ("md no/chat.md", "No such file or directory"),
        ("md dir --force", "dir is a folder (give the name of a file in it)"),
        ('md ""', "expected the name of one file"),
        ("md pipe --force", "pipe is not a regular file and can't be replaced"),
        ("md dangling", "dangling is not a regular file"),
        (f"md {'x' * 300}", "can't be written"),
        ("md a\0b", "can't be written"),
        ("md", "expected the name of one file"),
        ("md my chat.md", "expected the name of one file"),
        ("html chat.html", "allowed: md, json (/export md FILE)"),
    ):
        assert said in refused(exported, chat, rest)


def test_json_is_the_whole_text_and_can_be_replayed(chat: Session) -> None:
    exported(chat, "json chat.json")
    data = Path("chat.json").read_bytes()
    turns = parse_transcript(data, "chat.json")
    assert [(turn.role, turn.content) for turn in turns] == [
        (turn.role, turn.text) for turn in chat.turns
    ]
    assert json.loads(data)["model"] == "tiny"


@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_files_are_private_and_are_never_replaced_unless_it_is_asked_for(
    chat: Session, format: str
) -> None:
    path = Path(f"a.{format}")
    exported(chat, f"{format} {path}")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("mine", encoding="utf-8")
    path.chmod(0o644)
    assert f"{path} exists (--force replaces it)" in refused(exported, chat, f"{format} {path}")
    exported(chat, f"{format} {path} --force")
    assert path.read_text(encoding="utf-8") != "mine"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(Path().iterdir()) == [path]


# --- /copy


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


def copied(chat: Session, rest: str = "") -> str:
    """What `/copy` shows."""
    notes = io.StringIO()
    copy_reply(chat, Screen(io.StringIO(), notes), rest)
    return notes.getvalue().strip()


@pytest.fixture(scope="module")
def last() -> Session:
    return said_by(("Say it.", CODE), ("Say it.", "The last."))


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
    last: Session,
    tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    display: str,
    arguments: str,
    encoding: str,
) -> None:
    tools.add(name)
    if display:
        assert "no program for the clipboard works here" in refused(copied, last)
        monkeypatch.setenv(display, ":0")
    assert copied(last) == f"copied 9 characters with {name}"
    assert tools.got(name).decode(encoding) == "The last."
    assert tools.arguments(name) == arguments


@pytest.mark.parametrize(
    ("reply", "rest", "got"),
    [
        (CODE, "code", "echo two\nls"),
        ("a\x1b[201~\x1b]52;c;eA==\x07b\x08c\ud800", "", "abc\ufffd"),
        # code without the indent of what it stands in
        ("1. so:\n\n   ```py\n   if x:\n       two\n   ```\n2. done", "code", "if x:\n    two"),
        ("```\none\n```\n```py\nopen", "code", "open"),
    ],
)
def test_a_reply_or_its_last_code_is_copied(tools: Tools, reply: str, rest: str, got: str) -> None:
    tools.add("pbcopy")
    assert copied(said_by(("Say it.", reply)), rest) == f"copied {len(got)} characters with pbcopy"
    assert tools.got("pbcopy").decode() == got


def test_what_can_not_be_copied_is_refused(last: Session, tools: Tools) -> None:
    for rest in ("all", "code 2", "--osc52", "3"):
        assert "allowed: code" in refused(copied, last, rest)
    assert "the last reply has no code block" in refused(copied, last, "code")
    assert "there is no reply yet" in refused(copied, session())


@pytest.mark.parametrize("tool", ["", "pbcopy"])
def test_the_terminal_is_asked_only_where_no_tool_is(
    last: Session, tools: Tools, terminal: FakeTerminal, tool: str
) -> None:
    if tool:
        tools.add(tool)
    notes = io.StringIO()
    copy_reply(last, Screen(terminal, notes), "")
    assert terminal.getvalue() == "\x1b]52;c;VGhlIGxhc3Qu\x07" * (not tool)
    (line,) = notes.getvalue().splitlines()
    assert ("no program here can copy" in line) == (not tool)
    assert ("sent 9 characters to the terminal" in line) == (not tool)


@pytest.mark.parametrize(
    "script",
    [b"#!/bin/sh\nexit 3", b"#!/bin/sh\nexec /bin/sleep 60", b"\x7fELF no program"],
)
def test_a_tool_that_fails_gives_way_to_the_next(
    last: Session, tools: Tools, monkeypatch: pytest.MonkeyPatch, script: bytes
) -> None:
    monkeypatch.setattr(exporting, "_TOOL_SECONDS", 0.3)
    monkeypatch.setenv("DISPLAY", ":9")
    tools.add("xclip")
    (Path(os.environ["PATH"]) / "xclip").write_bytes(script)
    start = time.monotonic()
    assert "no program for the clipboard works here" in refused(copied, last)
    assert time.monotonic() - start < 10
    tools.add("xsel")
    assert copied(last) == "copied 9 characters with xsel"


def test_a_tool_that_stays_in_the_background_is_not_waited_for(last: Session, tools: Tools) -> None:
    tools.add("pbcopy", 'cat > "$0.got"; sleep 5 & exit 0')
    start = time.monotonic()
    assert "copied 9" in copied(last)
    assert time.monotonic() - start < 3


def test_over_ssh_only_a_forwarded_display_is_used(
    last: Session, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.add("pbcopy")
    tools.add("xclip")
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    assert "no program for the clipboard works here" in refused(copied, last)
    monkeypatch.setenv("DISPLAY", "localhost:10.0")
    assert copied(last) == "copied 9 characters with xclip"
