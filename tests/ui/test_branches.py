"""`/branch` and `/branches`: the same chat goes on in two ways, and both are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saved_chats import SAYINGS, Chat, refusal, resumed, saved
from sirchat.saved.session_list import list_sessions

pytestmark = pytest.mark.usefixtures("folder")


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
    assert len({saved.family for saved in list_sessions(folder).sessions}) == 1


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
    (saved,) = list_sessions(folder).sessions
    assert saved.turns == 4


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
