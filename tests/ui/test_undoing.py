"""`/undo`, `/edit`, `/retry`, also after a resume; `/branch`: a chat goes on in two ways."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler, fail_reading
from fake_terminal import FakeTerminal
from saved_chats import SAYINGS, SMALL, Chat, refusal, resumed, saved
from sirchat.paths import sessions_dir
from sirchat.saved.session_list import list_sessions
from sirchat.ui.screen import Screen
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
    typed.ask("/policy full")
    program(editor, 'yes word | head -5000 | tr "\\n" " " > "$1"')
    refused = " ".join(typed.ask("/edit").split())
    assert "context is full" in refused
    assert "are replaced" not in refused
    typed.ask("/undo")
    assert "undone: My name is Berta." in typed.ask("/undo")
    assert "My name is Berta." in typed.history.lines()


def test_retry_takes_no_settings_and_says_how_a_reply_can_differ(typed: TypedChat) -> None:
    shown = " ".join(typed.ask("/retry").split())
    assert "the reply is the same: with temperature 0 it can't differ; try /set temp" in shown
    assert "temperature 0.9, and then /retry" in typed.ask("/retry --temperature 0.9")
    typed.ask("/set temperature 0.9")
    assert "can't differ" not in typed.ask("/retry")


def test_undo_and_branch_say_which_instruction_has_no_room_any_more() -> None:
    chat = Chat(budget=512)
    chat.say(f"Always use {'the word fox and ' * 8}the word sea.", "Hello.", "Well?")
    chat.do("/budget 96")
    for line in ("/undo", "/branch other 1"):
        shown = chat.do(line)
        assert "is no longer pinned, as instructions have a quarter of the budget" in shown
    assert len(chat.texts) == 1


def test_retry_and_edit_after_a_resume_and_a_summary(typed: TypedChat) -> None:
    typed.ask("/save anna")
    for line, name in (("/retry", "Anna"), ("/edit My name is Berta.", "Berta")):
        typed.ask("/reset")
        typed.ask("/load anna")
        assert "the summary is turn 2" in typed.press("/summarize\rk")
        assert "were read again" in " ".join(typed.ask(line).split())
        assert name in typed.ask("What is my name?")
        assert "4 messages" in typed.ask("/stats")
        typed.ask("/undo")


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


@pytest.mark.parametrize("line", ["/load trunk", "/undo", "/branch other 1"])
def test_ctrl_c_once_another_session_is_saved_goes_on_with_that_session(
    line: str, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gone_on().saved_chat.close()
    with TypedChat(terminal, babbler(), **SMALL) as typed:
        if line == "/load trunk":
            typed.ask("Hello.")
        else:
            typed.ask("/load trunk")
        usual = Screen.note

        def note(self: Screen, text: str) -> None:
            usual(self, text)
            if text.startswith(("this chat is session", "undone")):
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Screen, "note", note)
        assert "stopped" in typed.ask(line)
        typed.ask(SAYINGS[4])
    said = SAYINGS[: 3 if line == "/load trunk" else 2]
    name = "other" if line == "/branch other 1" else "trunk"
    again, _ = resumed(sessions_dir(), name)
    assert [turn.text for turn in again.turns if turn.role == "user"] == [*said, SAYINGS[4]]


# --- /branch and /branches


def test_an_interrupt_while_a_branch_is_read_anew_leaves_the_chat_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = _gone_on()
    before = chat.session.snapshot()
    with monkeypatch.context() as patch:
        fail_reading(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            chat.do("/branch other 1")
    assert (chat.texts, chat.session.snapshot()) == (SAYINGS[:3], before)
    chat.saved_chat.save()
    assert [one.name for one in list_sessions(folder).sessions] == ["trunk"]
    assert "the chat was read again" in chat.do("/branch other 1")
    chat.say(SAYINGS[3])
    assert chat.texts == [*SAYINGS[:2], SAYINGS[3]]
    chat.saved_chat.close()
    assert [len(resumed(folder, name)[0].turns) for name in ("trunk", "other")] == [6, 6]


def test_a_branch_goes_on_by_itself_and_the_chat_stays_as_it_was(folder: Path) -> None:
    chat = Chat()
    chat.say(*SAYINGS[:3])
    seen, turns = chat.session.seen, list(chat.session.turns)
    chat.do("/save trunk")
    shown = chat.do("/branch other way")
    assert 'called "other way"' in shown
    assert '/load "trunk" goes back to it' in shown
    chat.say(SAYINGS[3])
    assert chat.texts == SAYINGS[:4]
    chat.do("/load trunk")
    assert (chat.session.seen, chat.session.turns) == (seen, turns)
    chat.say(SAYINGS[4])
    assert chat.do("/switch other way").startswith("/switch is now called /load\n")
    assert chat.texts == SAYINGS[:4]
    chat.saved_chat.close()
    assert resumed(folder, "trunk")[0].turns != chat.session.turns
    resumed(folder, "other way", rebuild=True)
    assert len({one.family for one in list_sessions(folder).sessions}) == 1


def test_branches_lists_this_chat_and_those_of_it_alone(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    assert "/branch NAME makes one" in chat.do("/branches")
    (first,) = list_sessions(folder).sessions
    assert f"/load {first.id} goes back to it" in chat.do("/branch one")
    chat.do("/branch two")  # of a branch: the same family
    listed = chat.do("/branches")
    assert listed.count("(this chat)") == 1
    assert listed.endswith("/load ID or /load NAME goes on with another\n")
    other = Chat()
    other.say(SAYINGS[1])
    other.do("/save elsewhere")
    other.saved_chat.close()
    assert chat.do("/branches") == listed
    assert "elsewhere" not in listed
    assert listed.count(" 2 messages  ") == 3
    chat.say(SAYINGS[1])
    chat.do(f"/load {first.id}")
    assert chat.texts == SAYINGS[:1]


def test_a_branch_begins_some_messages_ago_and_has_a_memory_of_its_own() -> None:
    chat, straight = Chat(), Chat(save=False)
    chat.say(*SAYINGS[:3])
    straight.say(SAYINGS[0], SAYINGS[3])
    chat.do("/branch other 2")
    assert chat.texts == SAYINGS[:1]
    chat.say(SAYINGS[3])
    assert chat.session.snapshot().rows == straight.session.snapshot().rows
    assert chat.session.turns == straight.session.turns


def test_what_can_not_be_branched_is_said_in_one_line_and_nothing_changes(folder: Path) -> None:
    chat = Chat(save=False)
    chat.say(*SAYINGS[:2])
    assert "/save saves this chat" in refusal(chat, "/branch one")
    chat.do("/save trunk")
    assert "/branch needs NAME" in refusal(chat, "/branch")
    assert "only 2 of your messages can be taken back, not 3" in refusal(chat, "/branch one 3")
    assert 'is called "trunk"; allowed' in refusal(chat, "/branch trunk")
    assert len(list_sessions(folder).sessions) == 1
    assert chat.texts == SAYINGS[:2]


def test_where_the_branch_can_not_be_written_the_chat_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("sirchat.saved.store.SessionStore.copy_to", full)
    with pytest.raises(OSError, match="no space"):
        chat.do("/branch one")
    monkeypatch.undo()
    monkeypatch.setenv("SIRCHAT_HOME", str(folder.parents[1]))
    chat.say(SAYINGS[1])
    (one,) = list_sessions(folder).sessions
    assert one.turns == 4


def test_a_chat_that_is_only_looked_at_is_no_newer_and_not_the_last(folder: Path) -> None:
    saved(folder, "looked at")
    saved(folder, "written to")
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))
    last, first = sorted(list_sessions(folder).sessions, key=lambda chat: chat.name, reverse=True)
    os.utime(last.path, (10**9 + 60, 10**9 + 60))
    chat = Chat()
    chat.do("/load looked at")
    chat.saved_chat.close()
    assert list_sessions(folder).sessions[0].name == "written to"
    assert first.path.stat().st_mtime == 10**9
    assert resumed(folder, first.id)[1], "keys and values are still those of its state"
    chat = Chat()
    chat.do("/load looked at")
    chat.say(SAYINGS[2])
    chat.saved_chat.close()
    assert list_sessions(folder).sessions[0].name == "looked at"
