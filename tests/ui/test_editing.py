"""`/edit` and `/retry`: the last message is said in other words, or answered once more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chatting import answer, babbler, session
from sirchat.chat.events import Undone
from sirchat.errors import SirchatError, UndoError
from sirchat.ui.turn_commands import sampling_settings
from terminal import Terminal

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 8}


def test_other_words_take_the_place_of_the_last_message() -> None:
    chat, straight = session(babbler(), **SMALL), session(babbler(), **SMALL)
    list(chat.ask("one " * 30))
    list(chat.ask("two " * 30))
    events = list(chat.retry(text="three " * 30))
    assert [event.text for event in events if isinstance(event, Undone)] == ["two " * 30]
    list(straight.ask("one " * 30))
    said = answer(list(straight.ask("three " * 30)))
    assert answer(events) == said
    assert chat.turns == straight.turns
    assert chat.snapshot().rows == straight.snapshot().rows


def test_where_nothing_was_said_nothing_is_edited() -> None:
    with pytest.raises(UndoError, match="no message"):
        _ = session(babbler(), **SMALL).last_said


def test_flags_of_a_retry() -> None:
    assert sampling_settings("") == {}
    assert sampling_settings("--temperature 0.9 --top-p=0.5") == {"temperature": 0.9, "top_p": 0.5}
    for words in ("0.9", "--temperature", "--budget 9", "--temprature 1"):
        with pytest.raises(SirchatError) as caught:
            sampling_settings(words)
        assert "\n" not in str(caught.value)
    with pytest.raises(SirchatError, match="--temperature"):
        sampling_settings("--temprature 1")


def _editor(folder: Path, script: str) -> dict[str, str]:
    path = folder / "editor"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return {"VISUAL": "", "EDITOR": str(path)}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100, 160])
def test_the_last_message_is_changed_in_the_editor(tmp_path: Path, columns: int) -> None:
    kept = tmp_path / "kept"
    editor = _editor(tmp_path, f'stat -c %a "$1" > {kept}; sed -i s/Anna/Berta/ "$1"')
    with Terminal(home=tmp_path, columns=columns, environ=editor) as chat:
        chat.ask("My name is Anna.")
        shown = chat.ask("/edit")
        assert "tok/s" in shown
        assert "your last message and its reply are replaced by what follows" in " ".join(
            shown.split()
        )
        assert "Berta" in chat.ask("What is my name?")
        assert kept.read_text().strip() == "600"
        chat.ask("/undo")
        assert "undone: My name is Berta." in chat.ask("/undo")
        assert chat.leave() == 0
    history = next(tmp_path.rglob("history")).read_text()
    assert "My name is Berta." in history


@pytest.mark.slow
def test_an_editor_that_changes_nothing_or_fails_costs_one_line(tmp_path: Path) -> None:
    with Terminal(home=tmp_path, environ=_editor(tmp_path, "true")) as chat:
        assert "no message to undo" in chat.ask("/edit")
        chat.ask("My name is Anna.")
        assert "the message is unchanged; /retry generates another reply" in chat.ask("/edit")
        (tmp_path / "editor").write_text("#!/bin/sh\nexit 3\n")
        assert re.search(
            r"editor '.*' failed with exit code 3", " ".join(chat.ask("/edit").split())
        )
        (tmp_path / "editor").unlink()
        assert "can't be started: No such file" in " ".join(chat.ask("/edit").split())
        assert "Anna" in chat.ask("What is my name?")
        assert chat.leave() == 0


@pytest.mark.slow
def test_without_an_editor_the_prompt_holds_the_last_message(tmp_path: Path) -> None:
    none = {"VISUAL": "", "EDITOR": ""}
    with Terminal(home=tmp_path, environ=none) as chat:
        chat.ask("My name is Anna.")
        chat.say("/edit")
        chat.wait_screen(r"edit> My name is Anna\.")
        chat.send("\x7f" * 5 + "Berta.\r")
        chat.wait_prompt()
        assert "Berta" in chat.ask("What is my name?")
        chat.say("/edit")
        chat.until(lambda: chat.lines[chat.screen.cursor.y] == "edit> What is my name?")
        chat.send("\x03")
        chat.wait(r"the message is unchanged")
        chat.wait_prompt()
        assert "tokens read" in chat.ask("/stats")  # a command again
        assert chat.leave() == 0


@pytest.mark.slow
def test_settings_of_a_retry_are_for_one_reply(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.ask("My name is Anna.")
        assert "the reply will be the same" in chat.ask("/retry")
        shown = chat.ask("/retry --temperature 0.9 --top-p 0.9")
        assert "undone" not in shown
        assert "the same" not in shown
        assert "the last reply is replaced by this one" in shown
        assert "temperature is 0" in chat.ask("/set temperature").replace("0.0", "0")
        assert "--temperature" in chat.ask("/retry --heat 3")
        assert "/retry: temperature" in chat.ask("/retry --temperature hot")
        assert chat.leave() == 0
