"""Commands that take what is meant: words without quotes, a message at once, `exit` alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chatting import session
from saved_chats import Chat, refusal
from sirchat.chat.evicted_text import evicted_words
from sirchat.chat.pinned_summary import last_user_message, pin_summary, undo_summaries
from sirchat.ui.commands import Edit
from terminal import Terminal

SAID = ("The Pelican is grey.", "red " * 30, "green " * 30)


@pytest.fixture
def chat(own_home: Path) -> Chat:
    chat = Chat(policy="sink")
    chat.say(*SAID)
    return chat


def test_recall_takes_words_without_quotes(chat: Chat) -> None:
    shown = chat.do("/recall Pelican")
    assert re.match(r"pinned: “.*The Pelican is grey\..*”\n", shown)
    assert re.search(
        r"\n\d+ tokens, \d+ of them restored; .*\d+ evicted to make room; holds ", shown
    )
    assert all("pinned" in rank.row.flags for rank in chat.session.why("Pelican"))
    assert "all of this is pinned already; holds" in chat.do("/recall Pelican")
    assert chat.session.profile.recall == "off"


def test_recall_still_knows_its_retrievers_and_what_is_like_one(chat: Chat) -> None:
    chat.do("/recall mips")
    assert chat.session.profile.recall == "mips"
    assert "did you mean words?" in refusal(chat, "/recall wrods")
    assert '"Ostrich": these words are not in this chat' in refusal(chat, "/recall Ostrich")
    chat.say("I like wrods.")
    assert "pinned" in chat.do("/recall wrods")
    assert chat.session.profile.recall == "mips"


def test_words_that_can_no_longer_be_restored_are_not_called_unknown(own_home: Path) -> None:
    chat = Chat(policy="sink", archive="off")
    chat.say(*SAID)
    assert '"Pelican" was evicted, and is no longer archived' in refusal(chat, "/recall Pelican")


def test_edit_means_the_users_own_message_and_not_a_summary(chat: Chat) -> None:
    list(pin_summary(chat.session, "colours."))
    assert last_user_message(chat.session) == SAID[-1]
    undo_summaries(chat.session)
    assert chat.texts == list(SAID)
    assert chat.commands.run("/edit blue it is") == Edit("blue it is")


def test_undo_says_what_it_holds_under_a_budget_that_has_grown(chat: Chat) -> None:
    chat.say("blue " * 30)
    chat.do("/budget 400")
    shown = chat.do("/undo")
    held = chat.session.resident
    assert f"holds {held}/400 as before that message; the budget of 400 stays" in shown


def test_undo_says_if_a_smaller_budget_holds_less_than_before_the_message(chat: Chat) -> None:
    before = chat.session.resident
    chat.say("blue")
    chat.do("/budget 48")
    shown = chat.do("/undo")
    held = chat.session.resident
    assert held <= 48 < before
    assert f"holds {held}/48, not {before} as before that message; the budget of 48 stays" in shown


def test_pin_and_unpin_count_only_what_they_change() -> None:
    chat = Chat(system="Call me Anna.", save=False)
    chat.say("My name is Anna.")
    shown = chat.do("/pin Anna")  # the system prompt's was pinned by the setting
    assert shown.startswith("pinned: “Anna”\n1 token; pinned already: 1; holds ")
    assert "all of this is pinned already" in chat.do("/pin Anna")
    assert "nothing of this was pinned" in chat.do("/unpin name")
    assert "2 tokens no longer pinned" in chat.do("/unpin Anna")


def test_words_that_tell_little_are_not_named_as_evicted() -> None:
    chat = session(policy="sink", budget=64)
    for word in ("Pelican", "Heron", "Stork", "Raven", "Eagle"):
        list(chat.ask(f"Quite the bird is a {word} and so on."))
    gone = [rank.row.position for n in range(0, 10, 2) for rank in chat.why(f"turn {n}")]
    named = evicted_words(chat, gone)
    assert "Pelican" in named
    assert not {"the", "a", "and", "Quite", "bird"} & set(named)


def test_at_the_prompt(tmp_path: Path) -> None:
    flags = ("--policy", "sink", "--budget", "64")
    with Terminal(*flags, home=tmp_path) as chat:
        for text in ("My dog is called Rex.", "I live in Lisbon.", "Tell me a joke."):
            chat.ask(text)
        chat.say("quit")
        chat.wait(r"leave\? \(y/n\)")
        assert "nothing was sent" in chat.ask("no")
        assert "tok/s" in chat.ask("quit")
        assert "tok/s" in chat.ask("/edit What is my dog called?")
        shown = " ".join(chat.ask("/retry full").split())
        assert "Your dog is called Rex." in shown
        assert "the memory is as before: policy sink, budget 64" in shown
        chat.say("/exit")
        assert chat.ended() == 0
    with Terminal(*flags, home=tmp_path) as chat:
        chat.ask("Hello.")
        chat.say("bye")
        chat.wait(r"leave\? \(y/n\)")
        chat.say("y")
        assert chat.ended() == 0
