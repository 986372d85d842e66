"""Commands that take what is meant: words without quotes, turns; `/recall WORDS`, never pinned."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from chatting import session, smallest, tiny
from saved_chats import Chat, refusal
from sirchat.chat.events import Delta
from sirchat.chat.evicted_text import evicted_words
from sirchat.chat.session import Session
from sirchat.chat.summary import last_user_message, pin_summary
from sirchat.chat.targets import positions_of
from sirchat.errors import SirchatError
from sirchat.memory.ledger import Flag, Role, State
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from sirchat.ui.commands import Edit
from sirchat.ui.status import describe_recalled
from sirchat.ui.switching import Switching
from template_shapes import HEADERS, with_template

SAID = ("The Pelican is grey.", "red " * 30, "green " * 30)


@pytest.fixture
def chat(own_home: Path) -> Chat:
    chat = Chat(policy="sink")
    chat.say(*SAID)
    return chat


def test_recall_takes_words_without_quotes(chat: Chat) -> None:
    shown = chat.do("/recall Pelican")
    assert shown.startswith("restored for your next message: “The Pelican is grey.”\n")
    assert re.search(r"\n\d+ tokens, \d+ of them were evicted; .*; holds ", shown)
    rows = {rank.row.position: rank for rank in chat.session.why("Pelican")}
    assert all(rank.state == "held" for rank in rows.values())
    assert chat.session.profile.recall == "off"


@pytest.mark.parametrize("line", ["/policy window", "/budget 64", "/pin red", "/set sinks 2"])
def test_what_was_recalled_is_held_for_the_reply_whatever_is_set_meanwhile(
    chat: Chat, line: str
) -> None:
    chat.do("/recall Pelican")
    chat.do(line)
    events = chat.session.ask("Hello.")
    assert any(isinstance(event, Delta) for event in events)  # the reply has begun
    assert all(rank.state == "held" for rank in chat.session.why("Pelican"))


def test_recall_still_knows_its_retrievers_and_what_is_like_one(chat: Chat) -> None:
    chat.do("/recall mips")
    assert chat.session.profile.recall == "mips"
    assert "did you mean words?" in refusal(chat, "/recall wrods")
    assert '"Ostrich": these words are not in this chat' in refusal(chat, "/recall Ostrich")
    chat.say("I like wrods.")
    assert "stays for your next message: “I like wrods.”" in chat.do("/recall wrods")
    assert chat.session.profile.recall == "mips"
    chat = Chat(policy="sink", archive="off")
    chat.say(*SAID)
    assert '"Pelican" was evicted, and is no longer archived' in refusal(chat, "/recall Pelican")


def test_words_that_are_not_side_by_side_find_the_sentences_that_have_them(chat: Chat) -> None:
    assert "message: “The Pelican is grey.”" in chat.do("/recall grey Pelican")
    assert "message: “The Pelican is grey. … green" in chat.do("/recall green Pelican")
    line = '"Ostrich grey": these words are not in this chat side by side'
    assert refusal(chat, "/recall Ostrich grey") == line
    chat.say("Message turn 99 is a fine one.")  # a turn is meant, though these words are there
    for command in ("/recall", "/pin", "/why", "/erase"):
        line = f"there is no turn 99: this chat has {len(chat.session.turns)}, counted from 0"
        assert refusal(chat, f"{command} turn 99") == line
    assert "these words are not in this chat" in refusal(chat, "/pin C++")
    assert refusal(Chat(), "/pin last") == "you have said nothing yet"
    line = '"green Pelican": these words are not in this chat side by side'
    for command in ("/pin", "/why", "/unpin"):
        assert line in refusal(chat, f"{command} green Pelican")


def test_words_that_are_nearly_those_of_the_chat_are_told(chat: Chat) -> None:
    for command in ("/pin", "/unpin", "/erase", "/recall", "/why"):
        told = refusal(chat, f"{command} pelicans")
        assert told == '"pelicans": these words are not in this chat (did you mean Pelican?)'
    assert "(did you mean The Pelican is grey?)" in refusal(chat, "/pin The Pelicann is gray")
    assert "did you mean" not in refusal(chat, "/pin grey Pelican")


def test_pin_alone_lists_what_is_pinned_by_message_and_writer(chat: Chat) -> None:
    assert chat.do("/pin") == "nothing is pinned; /pin TEXT keeps words\n"
    reply = chat.session.turns[1].text.strip()
    for words in ("Pelican", "grey", reply):
        chat.do(f"/pin {words}")
    yours, models, total = chat.do("/pin").splitlines()
    assert re.fullmatch(r"turn 0, of yours, \d+ tokens: “Pelican … grey”", yours)
    assert models.startswith("turn 1, of the model's, ")
    assert models.endswith(f"{reply.split()[-1]}”")
    assert total.endswith(" tokens pinned; /unpin TEXT lets go")
    chat.do("/system Be brief.")
    assert chat.do("/pin").splitlines()[-2].endswith(": “Be brief.”"), "without the marks around it"
    chat.do("/policy window")
    assert chat.do("/pin").endswith(
        " tokens pinned; /unpin TEXT lets go; but policy window ignores pins\n"
    )


def test_words_around_a_word_are_of_its_writer_and_not_of_the_prompt_that_a_template_adds() -> None:
    own = "<|im_start|>system\nYou are kind.<|im_end|>\n"
    it = with_template(own + HEADERS["thinking is kept"].replace("</think>{% endif", "{% endif"))
    chat = session(smallest("own", it), policy="full", max_new_tokens=4)
    list(chat.ask("The Pelican is grey."))
    for word, text in (("Pelican", "The Pelican is grey."), ("kind", "You are kind.")):
        at = positions_of(chat, word, np.arange(chat.seen), around=12)
        assert "".join(row.text for row in chat.tokens(at.tolist())).strip() == text


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("/unpin", "TEXT|last|turn N (for example: /unpin last)"),
        ("/export", "md|json FILE [--force] (for example: /export md talk.md)"),
        *((command, "") for command in ("/erase", "/branch", "/search")),
    ],
)
def test_a_command_alone_that_needs_words_says_what_to_type(command: str, needs: str) -> None:
    told = refusal(Chat(save=False), command)
    assert told.startswith(f"{command} needs {needs}")
    assert f"(for example: {command} " in told


def test_undo_says_what_it_holds_under_a_budget_that_has_changed(chat: Chat) -> None:
    before = chat.session.resident
    for budget in ("400", "48"):
        chat.say("blue " * 30)
        chat.do(f"/budget {budget}")
        shown, held = chat.do("/undo"), chat.session.resident
        assert f"holds {held}/{budget}" in shown
        assert (held < before) == (budget == "48")


def test_edit_means_the_users_own_message_and_not_a_summary(chat: Chat) -> None:
    list(pin_summary(chat.session, "colours."))
    assert last_user_message(chat.session) == SAID[-1]
    chat.session.undo_summaries()
    assert chat.texts == list(SAID)
    assert chat.commands.run("/edit blue it is") == Edit("blue it is")


def test_words_that_tell_little_are_not_named_as_evicted() -> None:
    chat = session(policy="sink", budget=64)
    for word in ("Pelican", "Heron", "Stork", "Raven", "Eagle"):
        list(chat.ask(f"Quite the bird is a {word} and so on."))
    gone = [rank.row.position for n in range(0, 10, 2) for rank in chat.why(f"turn {n}")]
    named = evicted_words(chat, gone)
    assert "Pelican" in named
    assert not {"the", "a", "and", "Quite", "bird"} & set(named)


# --- /recall WORDS: shown and restored for the next message


def quiet_chat(*said: str) -> Chat:
    chat = Chat(tiny(), policy="sink", max_new_tokens=4, pin_system=False, save=False, decay=1.0)
    chat.say(*said)
    return chat


def held(chat: Chat) -> str:
    """The text that is held, by the ledger; nothing of it is pinned."""
    ledger = chat.session.ledger
    assert not (ledger.column("flags") & Flag.PINNED).any()
    at = np.flatnonzero(ledger.column("state") == State.HELD)
    return "".join(row.text for row in chat.session.tokens(at.tolist()))


def test_one_token_that_steps_aside_is_counted() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, save=False)
    chat.say("My cat is called Luna.", *["Tell me a joke."] * 3)
    came = chat.session.engine.store.archived()[: 64 - chat.session.resident + 1]
    Switching(chat.session, chat.screen).restore(came)
    assert chat.session.resident == 64
    shown = " ".join(chat.out.getvalue().split())
    assert "were evicted; 1 stepped aside until it is answered; " in shown


@pytest.mark.parametrize("recall", ["off", "words"])
def test_words_are_restored_as_they_were_told_not_as_the_model_repeated_them(recall: str) -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, save=False, max_new_tokens=24)
    chat.say("My cat is called Luna.", *["Tell me a joke."] * 3)
    assert "Luna" in chat.session.turns[1].text
    assert "Luna" not in held(chat)
    chat.session.switch("/recall", recall=recall)
    before = chat.session.ledger.held_positions.tolist()
    shown = " ".join(chat.do('/recall "Luna"').split())
    assert held(chat).count("Luna") == 1
    now = chat.session.ledger.held_positions.tolist()
    came, aside = (len(set(one) - set(other)) for one, other in ((now, before), (before, now)))
    assert f"“My cat is called Luna.” 6 tokens, {came} of them were evicted; " in shown
    assert (f"; {aside} stepped aside until it is answered; " in shown) == (aside > 0)
    for _ in "ab":  # another reply is given from the same memory
        chat.say("What is my cat called?")
        assert "Luna" in chat.session.turns[-1].text
        line = describe_recalled(chat.session.recall, chat.session.seen)
        assert line.startswith(f"recalled {came} tokens")
        assert "Luna" in chat.do("/recall")
        chat.session.undo()
    chat.say("Hello!", "Tell me a joke.")
    assert "Luna" not in held(chat)


@pytest.mark.parametrize("way", ["undo", "resume", "both"])
def test_what_was_restored_for_the_next_message_is_still_so_after(way: str, folder: Path) -> None:
    """It is no longer after the reply to that message."""
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, max_new_tokens=24)
    chat.say("My cat is called Luna.", *["Tell me a joke."] * 4)
    assert "“My cat is called Luna.”" in chat.do('/recall "Luna"')
    if way != "resume":
        chat.do("/undo")
    session = chat.session
    chat.saved_chat.close()
    if way != "undo":
        store = SessionStore.open(find_session(folder, "last"))
        session = Session(tiny(), saved_profile(store))
        resume_session(session, store)
        store.close()
    list(session.ask("What is my cat called?"))
    assert "Luna" in session.turns[-1].text
    assert "Luna" in "".join(row.text for row in session.tokens(list(session.recall.scores)))
    list(session.ask("Hello!"))
    assert not session.recall.scores


def test_what_was_restored_from_an_undone_message_is_forgotten() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, save=False, max_new_tokens=24)
    chat.say(*["Tell me a joke."] * 2, "My cat is called Luna.", *["Tell me a joke."] * 4)
    chat.do('/recall "Luna"')
    for _ in range(5):
        chat.do("/undo")
    assert not chat.session.state.restored_by_user
    chat.say("Tell me a joke.", "My cat is called Tom.")


def test_of_what_was_restored_the_rest_of_a_sentence_with_erased_words_is_not_recalled() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, max_new_tokens=8)
    chat.say("My cat is called Luna. I live in Rome.", *["Tell me a joke."] * 3)
    chat.do('/recall "Luna"')
    chat.do('/erase --yes "Luna"')
    chat.say("Hello!")
    assert "is called" not in chat.do("/recall")
    assert "I live in Rome." in chat.do("/recall")


def test_the_words_around_what_is_restored_are_of_no_sentence_with_erased_words() -> None:
    chat = Chat(tiny(), budget=64, recent=0, max_new_tokens=16, policy="window")
    chat.say("My favourite colour is Rex. I live in Lisbon.")
    chat.do('/erase --yes "Rex"')
    told = chat.do('/recall "Lisbon"')
    assert "Lisbon" in told
    assert "favourite" not in told


def test_where_nothing_can_be_restored_a_line_says_why() -> None:
    chat = quiet_chat("My name is Anna.", "I live in Rome.", "Hello!")
    ledger = chat.session.ledger
    is_said = (ledger.column("turn") == 2) & (ledger.column("role") == Role.USER)
    chat.session.erase("turn 2")
    with pytest.raises(SirchatError, match="nothing is restored: it is no longer archived"):
        Switching(chat.session, chat.screen).restore(np.flatnonzero(is_said))
