"""`/save` and `/load`: a chat is saved, another one is loaded, and neither is lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from chatting import babbler, tiny
from command import run
from fake_terminal import FakeTerminal
from saved_chats import SAYINGS, Chat, completions, refusal, resumed, saved
from session_files import printed
from sirchat.chat.session import Session
from sirchat.cli.chat import _open_saved_file
from sirchat.errors import SessionError
from sirchat.saved.autosave import Autosave
from sirchat.saved.keys_values import KeysAndValues
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.interrupt import CtrlCGuard
from terminal import Terminal
from typed_chat import TypedChat

pytestmark = pytest.mark.usefixtures("folder")


def opens_elsewhere(path: Path) -> bool:
    """Whether another process can write a session."""
    code = "try: SessionStore.open(path)\nexcept SirchatError: print('refused')"
    return not printed(code, path)


# --- /save


def test_save_says_the_id_and_keeps_keys_and_values_until_something_changes(folder: Path) -> None:
    chat = Chat()
    chat.say(*SAYINGS[:2])
    shown = chat.do("/save")
    (listed,) = list_sessions(folder).sessions
    assert listed.id in shown
    assert "with keys and values" in shown
    chat.do("/stats")  # saved after it, as after every line
    chat.crash()
    assert resumed(folder, listed.id)[1]
    chat = Chat(save_kv="off")
    chat.say(SAYINGS[0])
    assert "without keys and values" in chat.do("/save")
    assert len(list(folder.glob("*.safetensors"))) == 1


def test_a_chat_that_was_not_saved_is_from_now_on_with_all_that_was_said(folder: Path) -> None:
    chat = Chat(save=False)
    assert "the chat is still empty" in chat.do("/save trip")
    assert not folder.exists()
    chat.say(SAYINGS[0])
    assert [listed.name for listed in list_sessions(folder).sessions] == ["trip"]
    chat = Chat(save=False)
    chat.say(*SAYINGS[:2])
    chat.do("/save")
    chat.say(SAYINGS[2])
    chat.saved_chat.close()
    again, _ = resumed(folder, "last")
    assert again.turns == chat.session.turns
    assert again.profile.save


def test_a_saved_chat_alone_is_not_called_no_saved_session(folder: Path) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    assert "there is no other saved session than this chat in " in refusal(chat, "/load last")


@pytest.mark.slow
def test_load_lists_the_newest_first_and_last_is_the_last_of_the_others(folder: Path) -> None:
    chat = Chat()
    assert "there are no saved chats" in chat.do("/load")
    assert "no saved session" in refusal(chat, "/load last")
    old, new = saved(folder, "old"), saved(folder, "new")
    assert re.search(rf"(?s){new}.*{old}", chat.do("/load"))
    chat.say(SAYINGS[3])
    assert "(this chat)" in chat.do("/load")
    assert not opens_elsewhere(list_sessions(folder).sessions[0].path)
    assert chat.texts == SAYINGS[3:4]
    with SessionStore.open(find_session(folder, old)):
        assert "in use by another process" in refusal(chat, f"/load {old}")
    assert new in chat.do("/load last")
    assert "is this chat, which is already open" in chat.do("/load new")
    assert chat.texts == SAYINGS[:2]


# --- leaving


@pytest.mark.slow
def test_leaving_says_how_to_come_back_and_resume_does(tmp_path: Path) -> None:
    with Terminal(home=tmp_path, columns=60) as chat:
        chat.ask("My name is Anna.")
        chat.say("/exit")
        assert chat.ended() == 0
        match = re.search(r"^to continue this chat: sirchat --resume=(20\S+)$", chat.text, re.M)
        assert match
    with Terminal("--resume", match[1], home=tmp_path, columns=60) as chat:
        assert "Anna" in chat.ask("What is my name?")
        chat.ask("/save my trip")
        chat.ask("/reset")
        chat.ask("My name is Peter.")
        assert "goes on after 4 messages" in " ".join(chat.ask("/load my trip").split())
        assert "Anna" in chat.ask("What is my name?")
        assert chat.leave() == 0
        assert chat.text.endswith("to continue this chat: sirchat --resume='my trip'")
    assert run("sessions", "show", "my trip").stdout.count("USER:") == 3


@pytest.mark.parametrize(
    ("lines", "save", "is_quiet"),
    [([], True, False), (["Hi."], False, False), (["Hi."], True, True), (["Hi."], True, False)],
)
def test_leaving_says_nothing_where_nothing_is_kept_or_quiet_is_wanted(
    terminal: FakeTerminal, lines: list[str], save: bool, is_quiet: bool
) -> None:
    with TypedChat(terminal, babbler(), max_new_tokens=2, save=save) as chat:
        chat.screen.is_quiet = is_quiet
        for line in lines:
            chat.ask(line)
        terminal.clear()
        chat.chat.saved_chat.print_resume_command()
    assert ("--resume" in terminal.getvalue()) == (bool(lines) and save and not is_quiet)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_where_the_file_was_removed_save_begins_another(folder: Path, is_noticed: bool) -> None:
    chat = Chat()
    chat.say(SAYINGS[0])
    (listed,) = list_sessions(folder).sessions
    listed.path.unlink()
    if is_noticed:
        chat.say(SAYINGS[1])
    shown = chat.do("/save")
    assert f"cannot write {listed.id}; continuing in a new file" in shown
    chat.say(SAYINGS[2])
    chat.saved_chat.close()
    assert resumed(folder, "last")[0].turns == chat.session.turns


# --- /load


def test_load_goes_on_as_resume_does_and_saves_what_was_left(folder: Path) -> None:
    ident = saved(folder, policy="sink", budget=80)
    chat = Chat()
    chat.say(SAYINGS[3])
    (left,) = {listed.id for listed in list_sessions(folder).sessions} - {ident}
    again = resumed(folder, ident)[0]
    chat.do(f"/load {ident}")
    assert chat.do("/set temperature").startswith("temperature is 0.0 (saved chat): ")
    assert chat.session.profile == again.profile
    assert chat.session.snapshot().rows == again.snapshot().rows
    assert resumed(folder, left)[1], "keys and values of the chat that was left"
    chat.say(SAYINGS[4])
    list(again.ask(SAYINGS[4]))
    assert chat.session.turns == again.turns
    chat.saved_chat.close()
    assert resumed(folder, ident)[0].turns == again.turns


def test_a_chat_that_is_not_to_be_saved_stays_so_until_it_is_asked_for(folder: Path) -> None:
    ident = saved(folder)
    path = find_session(folder, ident)
    before = path.read_bytes()
    chat = Chat(save=False)
    chat.say(SAYINGS[3])
    assert "not saved" in chat.do(f"/load {ident}")
    chat.say(SAYINGS[4])
    assert len(list_sessions(folder).sessions) == 1
    chat.saved_chat.close()
    assert path.read_bytes() == before
    chat = Chat(save=False)
    chat.do(f"/load {ident}")
    chat.say(SAYINGS[4])
    assert ident in chat.do("/save")
    chat.saved_chat.close()
    assert resumed(folder, ident)[0].turns == chat.session.turns


def test_one_of_another_model_is_refused_and_the_chat_goes_on(folder: Path) -> None:
    ident = saved(folder, budget=3000)  # invalid for the other model, which is named even so
    chat = Chat(tiny())
    chat.say("Hello!")
    before, profile = chat.session.turns[:], chat.session.profile
    shown = refusal(chat, f"/load {ident}")
    assert f"sirchat --resume {ident} --model babbler" in shown
    assert (chat.session.turns, chat.session.profile) == (before, profile)
    assert opens_elsewhere(find_session(folder, ident))
    chat.say("What is my name?")
    chat.saved_chat.close()
    assert list_sessions(folder).sessions[0].turns == 4


@pytest.mark.slow
@pytest.mark.parametrize("step", ["resume_session", "check_model", "saved_profile"])
def test_a_failure_in_the_middle_loses_neither_chat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ident = saved(folder)
    chat = Chat()
    chat.say(SAYINGS[3])
    present = chat.session
    with monkeypatch.context() as broken:
        broken.setattr(f"sirchat.ui.saved_chat.{step}", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.do(f"/load {ident}")
    assert chat.session is present
    assert opens_elsewhere(find_session(folder, ident))
    chat.say(SAYINGS[4])
    chat.do(f"/load {ident}")
    assert chat.texts == SAYINGS[:2]
    chat.saved_chat.close()
    assert {listed.turns for listed in list_sessions(folder).sessions} == {4}


@pytest.mark.parametrize("line", ["/load trunk", "/branch other 1"])
def test_ctrl_c_while_another_file_is_taken_up_leaves_it_whole(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, "trunk")
    chat = Chat()
    chat.say(*SAYINGS[2:4])
    usual = Autosave.close_without_saving

    def close(self: Autosave) -> None:
        signal.raise_signal(signal.SIGINT)
        usual(self)

    monkeypatch.setattr(Autosave, "close_without_saving", close)
    with CtrlCGuard() as guard, guard.interruptible():
        chat.do(line)
    monkeypatch.setattr(Autosave, "close_without_saving", usual)
    chat.say(SAYINGS[4])
    chat.saved_chat.close()
    before = SAYINGS[:2] if "load" in line else SAYINGS[2:3]
    assert chat.texts == [*before, SAYINGS[4]]
    again, _ = resumed(folder, line.split()[1])
    assert [turn.text for turn in again.turns if turn.role == "user"] == chat.texts


@pytest.mark.parametrize("step", [(SessionStore, "append"), (KeysAndValues, "save")])
def test_a_chat_that_cannot_be_saved_is_not_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str]
) -> None:
    ident = saved(folder)
    chat = Chat()
    chat.say(SAYINGS[2])
    with monkeypatch.context() as full:
        full.setattr(*step, _full)
        chat.say(SAYINGS[3])
        shown = refusal(chat, f"/load {ident}")
        assert "nothing is loaded" in shown
        assert "/reset" in shown
        assert chat.texts == SAYINGS[2:4]
        chat.do("/reset")
        chat.do(f"/load {ident}")
        assert chat.texts == SAYINGS[:2]


def test_a_system_prompt_that_came_with_resume_is_saved(folder: Path) -> None:
    ident = saved(folder)
    with SessionStore.open(find_session(folder, ident)) as store:
        again = Session(babbler(), saved_profile(store))
        resume_session(again, store)
        list(again.switch("--resume", system="Be brief."))
        Autosave(again, store).save()
    assert resumed(folder, ident)[0].turns == again.turns


def test_files_that_settings_name_are_found_from_other_folders(
    folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_home)
    (own_home / "rows.json").write_text('{"type": "object"}', encoding="utf-8")
    chat = Chat()
    for model, named in (("./models", own_home / "models"), ("smollm2", "smollm2")):
        (own_home / model).mkdir()
        changed = {"model": model, "json_schema": "rows.json"}
        chat.session.note_profile(chat.session.profile.model_copy(update=changed))
        chat.say("Hello.")
        with SessionStore.read(find_session(folder, "last", may_be_open=True)) as store:
            profile = saved_profile(store)
        assert profile.model == str(named)
        assert profile.json_schema == str(own_home / "rows.json")
        assert profile.recall_encoder == "auto"


def test_an_encoder_that_a_flag_names_again_is_the_one_of_the_saved_chat(
    folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_home)
    (own_home / "own").mkdir()
    chat = Chat()
    chat.session.note_profile(chat.session.profile.model_copy(update={"recall_encoder": "own"}))
    chat.say("Hello.")
    chat.saved_chat.close()
    profile, store, later = _open_saved_file("last", {"recall_encoder": "own"}, ())
    assert store is not None
    store.close()
    assert profile.recall_encoder == str(own_home / "own")
    assert not later  # it can't change in a chat
    _, store, later = _open_saved_file("last", {"recall_encoder": "other"}, ())
    assert store is not None
    store.close()
    assert later == {"recall_encoder": "other"}


def test_names_and_ids_are_completed_but_not_those_that_cannot_be_loaded(folder: Path) -> None:
    ident, other = saved(folder, "my trip"), saved(folder)
    assert completions("/load ") == ["last", "my trip", other, ident]
    assert completions("/load my t") == ["my trip"]
    assert completions("/load my  t") == []  # it would replace less than what is typed
    with SessionStore.open(find_session(folder, ident)):
        assert completions("/load ") == ["last", other]


def _full(*_: object) -> None:
    raise SessionError("no room")


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
