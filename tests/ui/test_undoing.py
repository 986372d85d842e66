"""`/undo` at the prompt: pins stay, and after a resume the chat is read anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_terminal import FakeTerminal
from saved_chats import SAYINGS, Chat, refusal, resumed
from sirchat.saved.session_list import list_sessions
from terminal import program
from typed_chat import TypedChat

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


def test_undo_of_nothing_is_refused_and_what_was_erased_is_not_read_anew() -> None:
    chat = Chat()
    assert "no message to undo" in refusal(chat, "/undo")
    chat.say("The code is 7351.", SAYINGS[1])
    chat.do('/erase "7351"')
    chat.do("/erase --yes")
    assert "were read again" in chat.do("/undo")
    assert chat.texts == ["The code is ."]
    chat.do("/undo")
    assert "no message to undo" in refusal(chat, "/undo")


# --- /edit and /retry


@pytest.fixture
def typed(
    terminal: FakeTerminal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TypedChat]:
    """A chat at a prompt, in which a name was told."""
    monkeypatch.setenv("EDITOR", "")
    monkeypatch.setenv("VISUAL", "")
    with TypedChat(terminal, max_new_tokens=40) as typed:
        assert "no message to undo" in typed.ask("/edit")
        typed.ask("My name is Anna.")
        yield typed


def test_the_last_message_is_changed_in_the_editor(
    typed: TypedChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, editor = tmp_path / "kept", tmp_path / "editor"
    monkeypatch.setenv("EDITOR", program(editor, "true"))
    assert "the message is unchanged; /retry generates another reply" in typed.ask("/edit")
    program(editor, "exit 3")
    assert "failed with exit code 3" in " ".join(typed.ask("/edit").split())
    editor.unlink()
    assert "can't be started: No such file" in " ".join(typed.ask("/edit").split())
    program(editor, f'stat -c %a "$1" > {kept}; sed -i s/Anna/Berta/ "$1"')
    shown = " ".join(typed.ask("/edit").split())
    assert "your last message and its reply are replaced by what follows" in shown
    assert "tok/s" in shown
    assert "Berta" in typed.ask("What is my name?")
    assert kept.read_text().strip() == "600"
    typed.ask("/undo")
    assert "undone: My name is Berta." in typed.ask("/undo")
    assert "My name is Berta." in typed.history.lines()


def test_retry_takes_no_settings_and_says_how_a_reply_can_differ(typed: TypedChat) -> None:
    shown = " ".join(typed.ask("/retry").split())
    assert "the reply is the same: with temperature 0 it can't differ; try /set temp" in shown
    assert "temperature 0.9, and then /retry" in typed.ask("/retry --temperature 0.9")
    typed.ask("/set temperature 0.9")
    assert "can't differ" not in typed.ask("/retry")


def test_retry_and_edit_right_after_a_resume(typed: TypedChat) -> None:
    typed.ask("/save anna")
    for line, name in (("/retry", "Anna"), ("/edit My name is Berta.", "Berta")):
        typed.ask("/reset")
        typed.ask("/load anna")
        assert "were read again" in " ".join(typed.ask(line).split())
        assert name in typed.ask("What is my name?")
        assert "4 messages" in typed.ask("/stats")
        typed.ask("/undo")


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
