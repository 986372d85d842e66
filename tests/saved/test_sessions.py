"""Chats are saved and resumed in the same state."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import held_rows
import saved_chats
from attacking import MANY
from chatting import babbler, random_model, session, tiny
from sirchat.chat.session import Session
from sirchat.chat.summary import PREFIX, pin_summary
from sirchat.cli.sessions import sessions_list
from sirchat.config.profile import Profile
from sirchat.errors import SessionError
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import model_fingerprint, saved_profile
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.lists import format_bytes

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 10, "decay": 0.9}
MESSAGES = [f"{n} some words and {n * n} more of them " * 3 for n in range(12)]
POLICIES = ["entropy", "reservoir", "snapkv", *(["random", "salience"] if MANY else [])]
pytestmark = pytest.mark.usefixtures("folder")


def talk(chat: Session, saving: Autosave | None, messages: list[str]) -> None:
    for text in messages:
        list(chat.ask(text))
        if saving:
            saving.save()


def saved(messages: list[str], model: LoadedModel | None = None, **settings: Any) -> Session:
    """A chat with these messages, saved and closed."""
    chat = session(model or babbler(), **{**SMALL, **settings})
    saving = Autosave(chat)
    talk(chat, saving, messages)
    saving.close()
    return chat


def reopened(
    folder: Path, model: LoadedModel, /, *, rebuild: bool = False, **changes: Any
) -> tuple[Session, SessionStore]:
    """The last chat, resumed under changed settings, and its open file."""
    store = SessionStore.open(find_session(folder, "last"))
    chat = Session(model, saved_profile(store).model_copy(update=changes))
    try:
        resume_session(chat, store, rebuild=rebuild)
    except SessionError:
        store.close()
        raise
    return chat, store


def resumed(folder: Path, model: LoadedModel) -> Session:
    chat, store = reopened(folder, model)
    store.close()
    return chat


def state(chat: Session) -> dict[str, Any]:
    """Everything that the next turn depends on, and everything shown except times."""
    rows = chat.engine.store.copy_key_values()
    assert rows is not None
    kept = [rows.positions.tolist(), rows.written_at.tolist(), *(t.tolist() for t in rows.tensors)]
    names = "rows", "counts", "logits", "turns", "shares", "profile", "kept"
    said = chat.turns, chat.snapshot().turns, chat.profile
    return dict(zip(names, (*held_rows.state(chat), *said, kept), strict=True))


def in_bfloat16() -> LoadedModel:
    model = babbler()
    module = random_model(len(model.tokenizer)).to(torch.bfloat16)
    return wrap_model("babbler", module, model.tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "dtype"), [*((name, "float32") for name in POLICIES), ("salience", "bfloat16")]
)
def test_six_turns_equal_three_and_three_with_a_resume_between(
    folder: Path, policy: str, dtype: str
) -> None:
    model = babbler() if dtype == "float32" else in_bfloat16()
    options: dict[str, Any] = {"window": 16} if policy == "snapkv" else {}
    profile = Profile(
        policy=policy, policy_options=options, system="You are brief.", temperature=1.0, **SMALL
    )
    straight, first = Session(model, profile), Session(model, profile)
    saving = Autosave(first)
    for chat, saves in ((straight, None), (first, saving)):
        talk(chat, saves, MESSAGES[:3])
        list(chat.pin("turn 3"))
        list(chat.pin("turn 3", pinned=False))
    saving.close()
    second, store = reopened(folder, model)
    assert state(second) == state(straight)
    for chat in (straight, second):
        talk(chat, None, MESSAGES[3:6])
    store.close()
    assert state(second) == state(straight)


@pytest.mark.slow
def test_a_resumed_chat_recalls_the_same_rows(folder: Path) -> None:
    settings = {**SMALL, "recall": "cosine", "recall_n": 12}
    straight, first = session(babbler(), **settings), session(babbler(), **settings)
    saving = Autosave(first)
    talk(straight, None, MESSAGES[:8])
    talk(first, saving, MESSAGES[:5])
    assert first.recall.scores
    saving.close()
    second, store = reopened(folder, babbler())
    assert not second.recall.scores, "between rounds nothing is recalled"
    talk(second, None, MESSAGES[5:8])
    store.close()
    assert state(second) == state(straight)


def test_pins_and_settings_are_as_they_were_and_closing_saves_the_rest(folder: Path) -> None:
    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    talk(chat, saving, MESSAGES[:2])
    talk(chat, None, MESSAGES[2:3])
    list(chat.pin("turn 2"))
    list(chat.switch("/policy", policy="sink", budget=120))
    saving.close()
    again = resumed(folder, babbler())
    assert again.profile == chat.profile
    assert state(again) == state(chat)


def test_undone_turns_are_not_on_disk_and_the_new_ones_are(folder: Path) -> None:
    chat = session(babbler(), temperature=1.0, **SMALL)
    saving = Autosave(chat)
    talk(chat, saving, MESSAGES[:4])
    list(chat.undo())
    list(chat.undo())
    saving.save()
    assert b"3 some words and 9" not in b"".join(p.read_bytes() for p in folder.iterdir())
    talk(chat, saving, ["something else"])
    list(chat.retry())
    saving.save()
    saving.close()
    again = resumed(folder, babbler())
    assert state(again) == state(chat)
    said = [turn.text for turn in again.turns if turn.role == "user"]
    assert said == [*MESSAGES[:2], "something else"]


def test_a_reset_begins_another_session_and_one_without_turns_is_not_saved(folder: Path) -> None:
    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    saving.save()
    assert not folder.exists() or not list(folder.iterdir())
    talk(chat, saving, MESSAGES[:2])
    chat.reset()
    saving.save()
    talk(chat, saving, MESSAGES[2:3])
    saving.close()
    found = list_sessions(folder).sessions
    assert sorted(one.turns for one in found) == [2, 4]


@pytest.mark.parametrize("settings", [{"save_kv": "off"}, {"archive": "off"}])
def test_without_keys_and_values_the_held_tokens_are_read_again(
    folder: Path, settings: dict[str, Any]
) -> None:
    chat = saved(MESSAGES[:6], policy="entropy", **settings)
    again = resumed(folder, babbler())
    assert again.snapshot().rows == chat.snapshot().rows
    assert again.turns == chat.turns
    kept = {path.suffix for path in folder.iterdir()}
    assert (".safetensors" in kept) == ("save_kv" not in settings)
    list(again.ask("and on"))
    assert again.resident <= 96


def test_the_whole_text_can_be_read_again(folder: Path) -> None:
    chat = saved(MESSAGES[:6])
    again, store = reopened(folder, babbler(), rebuild=True, budget=2000)
    assert [(t.role, t.text) for t in again.turns] == [(t.role, t.text) for t in chat.turns]
    assert again.resident == again.seen
    saving = Autosave(again, store)
    talk(again, saving, MESSAGES[6:7])
    saving.close()
    third = resumed(folder, babbler())
    assert state(third) == state(again)


def test_a_session_is_of_one_model_and_dtype_and_read_again_by_another_that_models(
    folder: Path,
) -> None:
    saved(MESSAGES[:2], policy="entropy")
    with pytest.raises(SessionError, match=r"--model babbler.*--rebuild"):
        resumed(folder, tiny())
    with pytest.raises(SessionError, match=r"--dtype float32.*--rebuild"):
        resumed(folder, in_bfloat16())
    again, store = reopened(folder, tiny(), rebuild=True, model="tiny")
    store.close()
    third = resumed(folder, tiny())
    assert third.snapshot().rows == again.snapshot().rows
    with pytest.raises(SessionError, match="--model tiny"):
        resumed(folder, babbler())


def test_an_older_chat_knows_its_model_by_the_path_that_was_typed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").touch()
    with monkeypatch.context() as older:
        older.setattr("sirchat.saved.saved_state.name_or_absolute_path", str)
        saving = Autosave(chat := session(replace(babbler(), name="own"), **SMALL))
        talk(chat, saving, MESSAGES[:2])
        saving.close()
    with pytest.raises(SessionError, match=r"has dtype float32.*--dtype float32"):
        resumed(folder, replace(in_bfloat16(), name="own"))


def test_of_too_many_keys_and_values_the_oldest_archived_are_not_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    talk(chat, saving, MESSAGES[:6])
    rows = chat.engine.store.copy_key_values()
    assert rows is not None
    assert len(rows) > chat.resident
    monkeypatch.setattr("sirchat.saved.autosave.AUTO_KV_BYTES", 100 * rows.nbytes // len(rows))
    saving.close()
    again = resumed(folder, babbler())
    kept = again.engine.store.copy_key_values()
    assert kept is not None
    held = chat.engine.save().held
    archived = np.setdiff1d(rows.positions, held)
    assert kept.positions.tolist() == sorted([*held, *archived[len(held) - 100 :]])
    assert again.snapshot().rows == chat.snapshot().rows
    for each in (chat, again):
        list(each.ask("and on"))
    assert again.turns == chat.turns


def test_past_the_limit_of_all_chats_the_oldest_keys_and_values_go_and_no_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for said, age in (("one", 3), ("two", 2), ("three", 1)):
        saved([said])
        (file,) = (one for one in folder.glob("*.safetensors") if one.stat().st_mtime > 9e8)
        size = file.stat().st_size
        os.utime(file, (5e8 - age, 5e8 - age))
    sessions_list()
    told = f"keys and values take {format_bytes(3 * size)} of at most 4GiB"
    assert told in capsys.readouterr().err
    saved(["four"], save_kv_limit=f"{7 * size // 2}")
    chats = sorted(list_sessions(folder).sessions, key=lambda chat: chat.first_message)
    has_rows = {c.first_message: c.path.with_suffix(".safetensors").exists() for c in chats}
    assert has_rows == {"one": False, "two": True, "three": True, "four": True}
    saved(["five"], save_kv_limit="1kB")
    assert not list(folder.glob("*.safetensors"))
    assert len(list_sessions(folder).sessions) == 5


def test_keys_and_values_that_alone_exceed_the_limit_are_not_written_and_others_stay(
    folder: Path,
) -> None:
    saved(["one"])
    (other,) = folder.glob("*.safetensors")
    settings = {**SMALL, "save_kv": "on", "save_kv_limit": str(other.stat().st_size)}
    chat = session(babbler(), **settings)
    saving = Autosave(chat)
    talk(chat, saving, MESSAGES[:3])
    assert not saving.save_kv()
    saving.close()
    assert [*folder.glob("*.safetensors")] == [other]


def test_keys_and_values_whose_stamp_was_not_written_are_saved_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SessionError("the disk is full")

    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    talk(chat, saving, MESSAGES[:2])
    with monkeypatch.context() as broken:
        broken.setattr(SessionStore, "append", full)
        with pytest.raises(SessionError):
            saving.save_kv()
    assert saving.save_kv()
    saving.close()
    assert saved_chats.resumed(folder, "last")[1]


def test_models_with_other_weights_have_other_fingerprints(tmp_path: Path) -> None:
    model = babbler()
    before = model_fingerprint(model)
    model.module.save_pretrained(tmp_path / "saved")
    assert model_fingerprint(model) == before
    other = random_model(len(model.tokenizer))
    assert model_fingerprint(wrap_model("copy", other, model.tokenizer)) == before
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight += 0.5
    assert model_fingerprint(wrap_model("copy", other, model.tokenizer)) != before


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_summary_is_one_after_a_resume(folder: Path, rebuild: bool) -> None:
    chat = session(babbler(), **SMALL)
    saving = Autosave(chat)
    talk(chat, saving, MESSAGES[:2])
    list(pin_summary(chat, "Words."))
    list(chat.read_user(PREFIX + "so I say."))
    saving.close()
    with SessionStore.open(find_session(folder, "last")) as store:
        again = Session(babbler(), saved_profile(store))
        resume_session(again, store, rebuild=rebuild)
    summaries = [turn.is_summary for turn in again.turns]
    assert summaries == [*(turn.is_summary for turn in chat.turns[:-1]), False]
