"""`/undo` at the prompt: pins made since go, too, and after a resume the chat is read anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chatting import answer
from saved_chats import SAYINGS, Chat, refusal, resumed
from sirchat.errors import SirchatError, UndoError
from sirchat.saved.session_list import list_sessions
from sirchat.ui.turn_commands import Retry, make_undoable, retry, sampling_settings
from terminal import Terminal, program

pytestmark = pytest.mark.usefixtures("folder")


def _gone_on(**settings: Any) -> Chat:
    """A chat that was saved after `SAYINGS[:3]`, left, and taken up again."""
    chat = Chat(**settings)
    chat.say(*SAYINGS[:3])
    chat.do("/save trunk")
    chat.saved_chat.close()
    chat = Chat(**settings)
    chat.do("/load trunk")
    return chat


@pytest.mark.parametrize("archive", ["ram", "off"])
def test_after_a_resume_the_chat_before_the_last_message_is_read_anew(
    folder: Path, archive: str
) -> None:
    chat, straight = _gone_on(archive=archive), Chat(save=False, archive=archive)
    straight.say(*SAYINGS[:2])
    replies = [turn.text for turn in straight.session.turns if turn.role == "assistant"]
    shown = chat.do("/undo")
    assert (
        f"undone: {SAYINGS[2]}; {chat.session.seen:,} tokens of earlier messages were read again"
        in shown
    )
    assert chat.texts == SAYINGS[:2]
    assert [turn.text for turn in chat.session.turns if turn.role == "assistant"] == replies
    assert "were read again" not in chat.do("/undo")  # these turns were read in this run
    assert chat.texts == SAYINGS[:1]
    chat.say(SAYINGS[4])
    chat.saved_chat.close()
    again, _ = resumed(folder, "trunk")
    assert [turn.text for turn in again.turns if turn.role == "user"] == [SAYINGS[0], SAYINGS[4]]
    assert len(list_sessions(folder).sessions) == 1


def test_where_nothing_was_said_there_is_nothing_to_undo() -> None:
    assert "no message to undo" in refusal(Chat(), "/undo")
    chat = Chat()
    chat.say(SAYINGS[0])
    chat.do("/undo")
    assert "no message to undo" in refusal(chat, "/undo")


def test_an_interrupt_while_the_chat_is_read_anew_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = _gone_on()
    before = chat.session.snapshot()

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sirchat.chat.rereading.read_again", stops)
    with pytest.raises(KeyboardInterrupt):
        chat.do("/undo")
    assert (chat.texts, chat.session.snapshot()) == (SAYINGS[:3], before)


def test_what_was_erased_is_not_read_anew() -> None:
    chat = Chat()
    chat.say("The code is 7351.", SAYINGS[1])
    chat.do('/erase "7351"')
    chat.do("/erase --yes")
    assert "were read again" in chat.do("/undo")
    assert chat.texts == ["The code is ."]


def test_after_a_resume_a_message_of_this_run_is_undone_exactly() -> None:
    chat = _gone_on()
    before = chat.session.snapshot().rows
    chat.say(SAYINGS[3])
    assert "were read again" not in chat.do("/undo")
    assert chat.session.snapshot().rows == before
    assert answer(list(chat.session.ask(SAYINGS[3])))


def test_after_a_resume_the_last_message_can_be_answered_again_or_changed(folder: Path) -> None:
    chat = _gone_on(temperature=0.0)
    with pytest.raises(UndoError):
        _ = chat.session.last_said
    session = make_undoable(chat.session, chat.screen, chat.saved_chat)
    assert f"{session.seen:,} tokens of earlier messages were read again" in chat.out.getvalue()
    before = [(turn.role, turn.text) for turn in chat.session.turns]
    assert [(turn.role, turn.text) for turn in session.turns] == before
    assert make_undoable(session, chat.screen, chat.saved_chat) is session
    list(retry(session, Retry({}), lambda: False))
    assert [(turn.role, turn.text) for turn in session.turns] == before, "at temperature 0"
    list(session.retry(text=SAYINGS[4]))
    chat.saved_chat.close()
    again, _ = resumed(folder, "trunk")
    said = [turn.text for turn in again.turns if turn.role == "user"]
    assert said == [*SAYINGS[:2], SAYINGS[4]]


@pytest.mark.slow
def test_retry_and_edit_right_after_a_resume(tmp_path: Path) -> None:
    with Terminal(home=tmp_path) as chat:
        chat.ask("My name is Anna.")
        assert chat.leave() == 0
    for command, name in (("/retry", "Anna"), ("/edit My name is Berta.", "Berta")):
        with Terminal("--resume", home=tmp_path) as chat:
            assert "were read again" in " ".join(chat.ask(command).split())
            assert name in chat.ask("What is my name?")
            assert "4 messages" in chat.ask("/stats")
            chat.ask("/undo")
            assert chat.leave() == 0


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 160])
def test_undo_at_the_prompt(tmp_path: Path, columns: int) -> None:
    flags = ("--policy", "sink", "--budget", "48")
    with Terminal(*flags, home=tmp_path, columns=columns) as chat:
        chat.ask("My name is Anna.")
        chat.ask("My cat is called Luna.")
        chat.ask("Tell me a joke.")
        before = chat.ask("/tokens")
        chat.ask("What is the capital of Italy?")
        assert "of them restored" in " ".join(chat.ask('/recall "Anna"').split())
        assert "pinned" in chat.ask("/tokens")
        assert "undone: What is the capital of Italy?" in " ".join(chat.ask("/undo").split())
        assert chat.ask("/tokens") == before
        assert chat.leave() == 0
    with Terminal("--resume", "last", home=tmp_path, columns=columns) as chat:
        shown = " ".join(chat.ask("/undo").split())
        assert re.search(
            r"undone: Tell me a joke\.; \d+ tokens of earlier messages were read again", shown
        )
        assert "Tell me a joke" not in chat.ask("/panel")
        assert "undone: My cat is called Luna." in " ".join(chat.ask("/undo").split())
        assert chat.leave() == 0


# --- /edit and /retry


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
    return {"VISUAL": "", "EDITOR": program(folder / "editor", script)}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 160])
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
