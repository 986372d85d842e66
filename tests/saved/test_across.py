"""Passages of other saved chats that fit a text: found as the files are now, and quoted."""

from __future__ import annotations

from pathlib import Path

import pytest

from session_files import head_at, new, rows_at, said
from sirchat.saved.across import FLOOR, find_passages, quote, unquoted
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore

TRIP = ("I fly to Oslo on Sunday. My flight leaves from gate B14.", "Have a good flight.")


def texts(folder: Path, words: str, **options: object) -> list[str]:
    return [passage.text for passage in find_passages(folder, words, **options)]  # type: ignore[arg-type]


def test_the_statement_that_fits_is_found_with_its_chat_and_date(tmp_path: Path) -> None:
    path = new(tmp_path, *TRIP)
    with SessionStore.open(path) as store:
        store.rename("my trip")
    new(tmp_path, "At the gate of the farm stood a goat.", "A goat!")
    best, *_ = find_passages(tmp_path, "At which gate does my flight leave?")
    assert best.text == "My flight leaves from gate B14."
    assert (best.role, best.chat) == ("user", "my trip")
    message = quote([best], "Where?")
    assert message.startswith("From my other chats:\n- ")
    assert message.endswith(', "my trip": My flight leaves from gate B14.\n\nWhere?')
    assert unquoted(message) == "Where?"
    assert unquoted("Where?\n\nHere.") == "Where?\n\nHere."


def test_nothing_comes_where_nothing_fits(tmp_path: Path) -> None:
    new(tmp_path, *TRIP)
    for words in ("What is democracy?", "and from which", "", "?!"):
        assert not texts(tmp_path, words)
    assert texts(tmp_path, "gate of the old castle in Wales")
    assert not texts(tmp_path, "gate of the old castle in Wales", floor=FLOOR)


def test_a_title_ends_no_sentence(tmp_path: Path) -> None:
    new(tmp_path, "My doctor is called Mrs. Okafor. She is kind.", "I see.")
    assert texts(tmp_path, "doctor") == ["My doctor is called Mrs. Okafor."]


def test_what_users_said_comes_first_and_questions_never(tmp_path: Path) -> None:
    new(tmp_path, "Which gate is it, for my flight?", "Your flight leaves from gate A1, I think.")
    new(tmp_path, *TRIP)
    assert texts(tmp_path, "flight gate")[0] == "My flight leaves from gate B14."
    assert len(texts(tmp_path, "flight gate")) == 2


def test_what_this_chat_or_its_branches_have_is_left_out(tmp_path: Path) -> None:
    path = new(tmp_path, *TRIP)
    assert texts(tmp_path, "gate")
    assert not texts(tmp_path, "gate", without=[path.stem])
    assert not texts(tmp_path, "gate", known=["Hello. My flight  leaves from gate B14."])


def test_a_quotation_is_not_quoted_again(tmp_path: Path) -> None:
    new(tmp_path, *TRIP)
    message = quote(find_passages(tmp_path, "gate"), "Is it far?")
    new(tmp_path, message, "No.")
    assert texts(tmp_path, "gate flight") == ["My flight leaves from gate B14."]


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
