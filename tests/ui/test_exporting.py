"""`/export`: the chat as Markdown and JSON; no file is lost by it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from chatting import session
from sirchat.chat.session import Session
from sirchat.errors import UsageError
from sirchat.text.transcript import parse_transcript
from sirchat.ui.exporting import EXPORT_FORMATS, export_chat
from sirchat.ui.screen import Screen

REPLY = "# Hi\n\n**Anna** & <b>you</b>\n\n```py\nx < 1\n```\n![p](http://e.org/p.png)"


@pytest.fixture(autouse=True)
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


def refused(chat: Session, rest: str) -> str:
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    with pytest.raises(UsageError) as caught:
        exported(chat, rest)
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
    assert "the chat has no messages yet" in refused(session(), "md chat.md")
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
        assert said in refused(chat, rest)


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
    assert f"{path} exists (--force replaces it)" in refused(chat, f"{format} {path}")
    exported(chat, f"{format} {path} --force")
    assert path.read_text(encoding="utf-8") != "mine"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(Path().iterdir()) == [path]
