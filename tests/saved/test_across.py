"""Passages of other saved chats that fit a text: found as the files are now, and quoted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatting import babbler, session
from random_encoders import random_encoder
from session_files import head_at, new, rows_at, said
from sirchat.paths import sessions_dir
from sirchat.recall.passage_search import PassageSearch, Sought
from sirchat.saved.across import Passage, find_passages, quote, unquoted
from sirchat.saved.autosave import Autosave
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from sirchat.text.detokenizer import TokenTexts

TRIP = ("I fly to Oslo on Sunday. My flight leaves from gate B14.", "Have a good flight.")


def find(folder: Path, words: str, **options: Any) -> list[Passage]:
    tokenizer = babbler().tokenizer
    search = PassageSearch(TokenTexts(tokenizer), tokenizer)
    return find_passages(folder, Sought((words,)), search, ("", 0), **options)


def texts(folder: Path, words: str, **options: Any) -> list[str]:
    return [passage.text for passage in find(folder, words, **options)]


def test_the_statement_that_fits_is_found_with_its_chat_and_date(tmp_path: Path) -> None:
    path = new(tmp_path, *TRIP)
    with SessionStore.open(path) as store:
        store.rename("my trip")
    new(tmp_path, "At the gate of the farm stood a goat.", "A goat!")
    best, *_ = find(tmp_path, "At which gate does my flight leave?")
    assert best.text == TRIP[0]
    assert (best.role, best.chat) == ("user", "my trip")
    message = quote([best], "Where?")
    assert message.startswith("From my other chats:\n- ")
    assert message.endswith(f', "my trip": {TRIP[0]}\n\nWhere?')
    assert unquoted(message) == "Where?"
    assert unquoted("Where?\n\nHere.") == "Where?\n\nHere."


def test_nothing_comes_where_nothing_fits(tmp_path: Path) -> None:
    new(tmp_path, *TRIP)
    for words in ("What is democracy?", "and from which", "", "?!"):
        assert not texts(tmp_path, words)


def test_one_rare_word_of_several_is_not_enough(tmp_path: Path) -> None:
    new(tmp_path, "The zebra of the circus is called Quixbert.", "A zebra!")
    assert texts(tmp_path, "zebra")
    assert texts(tmp_path, "What is the zebra of the circus called?")
    assert not texts(tmp_path, "Who repaired the engine of the zebra carousel?")


def test_a_title_ends_no_sentence(tmp_path: Path) -> None:
    new(
        tmp_path,
        "All of us like the doctor, Mrs. Ng. She lives in the old house over there.",
        "I see.",
    )
    assert texts(tmp_path, "doctor") == ["All of us like the doctor, Mrs. Ng."]


def test_what_users_said_comes_first_and_questions_never(tmp_path: Path) -> None:
    new(tmp_path, "Which gate is it, for my flight?", "Your flight leaves from gate A1, I think.")
    new(tmp_path, *TRIP)
    first, *others = texts(tmp_path, "flight gate")
    assert first == TRIP[0]
    assert not any("?" in text for text in others)


def test_what_this_chat_or_its_branches_have_is_left_out(tmp_path: Path) -> None:
    path = new(tmp_path, *TRIP)
    assert texts(tmp_path, "gate")
    assert not texts(tmp_path, "gate", without=[path.stem])
    assert not texts(tmp_path, "gate", known=[f"Hello. {TRIP[0]}".replace(" gate", "  gate")])


def test_a_quotation_is_not_quoted_again(tmp_path: Path) -> None:
    new(tmp_path, *TRIP)
    message = quote(find(tmp_path, "gate"), "Is it far?")
    new(tmp_path, message, "No.")
    assert texts(tmp_path, "gate") == [TRIP[0]]


@pytest.mark.parametrize("is_open", [False, True])
def test_erased_words_are_not_found(tmp_path: Path, is_open: bool) -> None:
    path = new(tmp_path, *TRIP)
    assert texts(tmp_path, "gate")
    with SessionStore.open(path) as store:
        store.replace(said("I fly to Oslo.", "Nice."), rows_at(range(6)), head_at(6))
        if is_open:
            assert not texts(tmp_path, "gate")
    assert not texts(tmp_path, "gate")
    assert find_session(tmp_path, path.stem) == path


@pytest.mark.usefixtures("own_home")
def test_saved_passages_are_found_by_meaning_if_the_same_encoder_made_them() -> None:
    model = babbler()
    model = replace(model, encoder=random_encoder(model, (1,), 8))
    for number, text in enumerate(
        ["My aunt has two horses and a pony.", "It will rain in Rome for the whole week."]
    ):
        chat = session(model, max_new_tokens=4)
        saving = Autosave(chat)
        list(chat.read_user(text))
        list(chat.read_reply("Fine."))
        chat.recall.update()
        chat.recall.search.passages.vectors[:] = np.eye(8)[2 * number : 2 * number + 2]
        saving.save()
        saving.close_without_saving()
    # Not a word is shared, but the vector is that of the second chat's message.
    vector = np.eye(8, dtype=np.float32)[2]
    message, stamp = Sought(("kettle",), vector), (model.name, model.encoder.check_sum)
    search = PassageSearch(TokenTexts(model.tokenizer), model.tokenizer)
    (found, *_) = find_passages(sessions_dir(), message, search, stamp)
    assert found.text == text
    for other in ((model.name, 0), ("another", model.encoder.check_sum)):
        search = PassageSearch(TokenTexts(model.tokenizer), model.tokenizer)
        assert not find_passages(sessions_dir(), message, search, other)
