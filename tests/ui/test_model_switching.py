"""`/model`: another model goes on with the chat, and a failure changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chatting import save_babbler, tiny
from saved_chats import SAYINGS, Chat, completions
from sirchat.chat.rereading import read_again
from sirchat.chat.session import Session
from sirchat.errors import ModelError, SettingError
from sirchat.saved.session_list import list_sessions
from sirchat.saved.store import SessionStore


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def chat_of(*sayings: str, **settings: Any) -> Chat:
    chat = Chat(tiny(), **settings)
    chat.say(*sayings)
    return chat


def models_saved(folder: Path) -> list[str]:
    return [saved.model for saved in list_sessions(folder).sessions]


def test_the_other_model_has_read_the_text_under_the_present_settings() -> None:
    chat = chat_of(*SAYINGS[:3], policy="sink", budget=80)
    turns = list(chat.session.turns)
    shown = chat.do("/model tiny-anchor")
    now = chat.session
    assert now.model.name == now.profile.model == "tiny-anchor"
    assert [(turn.role, turn.text) for turn in now.turns] == [
        (turn.role, turn.text) for turn in turns
    ]
    assert (now.profile.policy, now.budget) == ("sink", 80)
    assert (
        f"the model is now tiny-anchor; it read {now.seen:,} tokens, "
        f"the cache holds {now.resident}/80" in shown
    )
    straight = Session(now.model, now.profile)
    read_again(straight, turns)
    assert now.snapshot().rows == straight.snapshot().rows


def test_the_former_model_reads_the_chat_again_and_undo_takes_messages_back(folder: Path) -> None:
    chat = chat_of(*SAYINGS[:2], archive="ram")
    assert "model is already tiny" in chat.do("/model tiny")
    assert "model is tiny; other models here: tiny-anchor" in chat.do("/model")
    texts = list(chat.texts)
    assert "/model tiny goes back" in chat.do("/model tiny-anchor")
    chat.do("/policy sink")
    chat.do("/model tiny")
    assert chat.texts == texts
    assert chat.session.profile.policy == "sink"
    assert models_saved(folder) == ["tiny"]
    for count in (1, 0):
        chat.do("/undo")
        assert len(chat.texts) == count


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "does not exist"),
        ("nowhere.gguf", "does not exist"),
        ("broken.gguf", "not a valid GGUF file"),
        *((f"Ctrl-C {step}", "") for step in ("load_model_of", "read_again")),
    ],
)
def test_a_model_that_cannot_be_loaded_leaves_the_chat_as_it_was(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    chat = chat_of(SAYINGS[0])
    before, turns = chat.session, list(chat.session.turns)
    with monkeypatch.context() as broken:
        if not said:
            broken.setattr(f"sirchat.ui.switching.{name.split()[1]}", interrupted)
        with pytest.raises((ModelError, KeyboardInterrupt), match=said or None) as caught:
            chat.do(f"/model {name if said else 'tiny-anchor'}")
    assert "\n" not in str(caught.value)
    assert chat.session is before
    assert chat.session.turns == turns
    chat.say(SAYINGS[1])
    assert models_saved(folder) == ["tiny"]


def test_settings_that_followed_the_model_follow_the_other_one(tmp_path: Path) -> None:
    babbling = str(save_babbler(tmp_path / "babbler"))  # with twice the context of tiny
    chat = chat_of(SAYINGS[0], budget=512, temperature=0.7)
    chat.do(f"/model {babbling}")
    assert (chat.session.budget, chat.session.profile.temperature) == (512, 0.7)
    chat = chat_of(SAYINGS[0], budget=1024)
    chat.do(f"/model {babbling}")
    assert chat.session.budget == 2048
    assert chat.session.profile.temperature > 0
    chat.do("/budget 4000")
    above = "budget 4000 is above the context length of tiny-anchor"
    with pytest.raises(SettingError, match=above):
        chat.do("/model tiny-anchor")
    assert chat.session.model.name == babbling


def test_what_has_set_the_sampling_follows_the_model_too(tmp_path: Path) -> None:
    plain = str(save_babbler(tmp_path / "plain"))
    drawing = save_babbler(tmp_path / "drawing")
    said = '{"do_sample": true, "temperature": 0.6, "top_k": 20}'
    (drawing / "generation_config.json").write_text(said)
    chat = chat_of(SAYINGS[0], budget=1024)
    chat.do(f"/model {drawing}")
    assert chat.do("/set top_k").startswith("top_k is 20 (model): ")
    chat.do(f"/model {plain}")
    assert re.search(r"(?m)^ +temperature +0\.2 \(default\)", chat.do("/set"))  # without a star
    chat.do("/set temperature 0.9")
    chat.do(f"/model {drawing}")
    assert re.search(r"(?m)^\* +temperature +0\.9 \(/set\)", chat.do("/set"))


def test_names_are_completed(tmp_path: Path) -> None:
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    save_babbler(models / "babbler")
    (models / "broken.gguf").touch()
    names = completions("/model ")
    assert {"tiny", "tiny-anchor", "babbler"} <= set(names)
    assert "broken.gguf" not in names
    assert completions("/model tiny-") == ["tiny-anchor"]


# --- saved chats


def test_the_saved_chat_goes_on_in_the_same_file_as_one_of_the_other_model(folder: Path) -> None:
    chat = chat_of(*SAYINGS[:2])
    chat.do("/save trip")
    ident = list_sessions(folder).sessions[0].id
    chat.do("/model tiny-anchor")
    (saved,) = list_sessions(folder).sessions
    assert (saved.id, saved.name, saved.model) == (ident, "trip", "tiny-anchor")
    chat.say(SAYINGS[2])
    chat.saved_chat.close()
    (saved,) = list_sessions(folder).sessions
    assert saved.turns == 6
    with SessionStore.open(saved.path) as store:
        head = store.state_record()
        assert head is not None
        assert head.fields["profile"]["model"] == "tiny-anchor"
        assert [turn.text for turn in store.turns()] == [turn.text for turn in chat.session.turns]


def test_where_writing_failed_save_writes_all_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no room")

    chat = chat_of(*SAYINGS[:2])
    with monkeypatch.context() as broken:
        broken.setattr(SessionStore, "append", full)
        assert "not saved now" in chat.do("/model tiny-anchor")
    assert models_saved(folder) == ["tiny"]
    chat.say(SAYINGS[2])
    chat.do("/save")
    assert models_saved(folder) == ["tiny-anchor"]
