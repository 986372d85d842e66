"""Where a chat's text is read anew, the user's pins stay, and each turn keeps its number.

That is so for `/model`, for `/undo` and `/branch` after a resume, and for `--resume --rebuild`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from chatting import random_model
from plain_model import load_model
from saved_chats import SAYINGS, Chat
from sirchat.chat.rereading import PinnedText, copy_session, read_again
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.chat.summary import make_summary, pin_summary
from sirchat.config.profile import Profile
from sirchat.models.model import wrap_model
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore
from sirchat.ui.saved_chat import show_resumed_chat
from sirchat.ui.screen import Screen
from sirchat.ui.turn_commands import make_undoable
from template_shapes import tokenizer

pytestmark = pytest.mark.usefixtures("folder")

NAME, DOG = "My name is Anna.", "My dog is called Rex, and he barks."


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with another tokenizer, most of whose tokens are single letters."""
    path, ids = tmp_path_factory.mktemp("models") / "other", tokenizer("chatml")
    random_model(len(ids)).save_pretrained(path)
    ids.save_pretrained(path)
    return str(path)


# Reads a chat anew; returns the session that has read it, and what was shown.
Way = Callable[[Chat, str, Path], tuple[Session, str]]


def by_model(chat: Chat, other: str, folder: Path) -> tuple[Session, str]:
    shown = chat.do(f"/model {other}")
    return chat.session, shown


def left_and_resumed(chat: Chat) -> Chat:
    chat.do("/save trunk")
    chat.saved_chat.close()
    chat = Chat()
    chat.do("/load trunk")
    return chat


def by_undo(chat: Chat, other: str, folder: Path) -> tuple[Session, str]:
    chat = left_and_resumed(chat)
    shown = chat.do("/undo")
    assert "were read again" in shown
    return chat.session, shown


def by_branch(chat: Chat, other: str, folder: Path) -> tuple[Session, str]:
    chat = left_and_resumed(chat)
    shown = chat.do("/branch other 1")
    assert "was read again" in shown
    assert len(list_sessions(folder).sessions) == 2
    return chat.session, shown


def by_rebuild(chat: Chat, other: str, folder: Path) -> tuple[Session, str]:
    chat.do("/save trunk")
    chat.saved_chat.close()
    with SessionStore.open(find_session(folder, "trunk")) as store:
        again = Session(load_model(other, device="cpu"), saved_profile(store))
        resume_session(again, store, rebuild=True)
    out = io.StringIO()
    show_resumed_chat(again, Screen(out, out))
    return again, out.getvalue()


ways = pytest.mark.parametrize("way", [by_model, by_undo, by_branch, by_rebuild])


def plain(text: str) -> str:
    """A text without blanks, and without the broken characters that a random model writes."""
    return "".join(text.replace("\ufffd", "").split())


def pinned(session: Session) -> dict[int, str]:
    """What is pinned of each turn, without system prompts and blanks."""
    texts: dict[int, str] = {}
    for row in session.snapshot().rows:
        if "pinned" in row.flags and row.role not in ("system", "template"):
            texts[row.turn] = texts.get(row.turn, "") + "".join(row.text.split())
    return texts


def count(session: Session) -> int:
    rows = session.snapshot().rows
    return sum("pinned" in row.flags and row.role in ("user", "assistant") for row in rows)


@pytest.mark.slow
@ways
def test_pins_are_pinned_again_by_their_text(way: Way, other: str, folder: Path) -> None:
    chat = Chat(system="Be brief.")
    chat.say(NAME, SAYINGS[1], DOG, *SAYINGS[2:])
    chat.do("/pin Anna")
    chat.do(f"/pin {DOG}")
    before = pinned(chat.session)
    assert "Anna" in before[1]
    assert before[5] == "MydogiscalledRex,andhebarks."
    session, shown = way(chat, other, folder)
    assert pinned(session) == before
    assert f"{count(session)} tokens that you had pinned are pinned again\n" in shown


@pytest.mark.parametrize("way", [by_model, by_rebuild])
def test_of_more_pins_than_have_room_the_newest_are_kept(
    way: Way, other: str, folder: Path
) -> None:
    chat = Chat(system="Be brief.", budget=120)
    chat.say(NAME, DOG, "We met in Rome, in May.")
    for text in (NAME, DOG, "We met in Rome, in May."):
        chat.do(f"/pin {text}")
    before = pinned(chat.session)
    session, shown = way(chat, other, folder)  # which reads twice as many tokens
    after = pinned(session)
    assert after[5] == before[5] == "WemetinRome,inMay."
    assert before[3].endswith(after[3])
    assert 1 not in after
    line = re.search(
        r"(\d+) tokens that you had pinned are pinned again; "
        r"(\d+) are not: pins take at most half of the budget",
        " ".join(shown.split()),
    )
    assert line is not None
    assert int(line[1]) == count(session) <= 60
    assert int(line[2]) > 0
    list(session.ask("and on"))
    assert session.resident <= 120


@pytest.mark.parametrize("way", [by_model, by_branch])
def test_what_was_erased_is_not_pinned_again(way: Way, other: str, folder: Path) -> None:
    chat = Chat(budget=128)
    chat.say("The dog Rex. The cat Tom. The dog Rex, too.", *SAYINGS[:2])
    chat.do("/pin Tom")
    chat.do("/pin Rex")
    chat.do("/erase Tom --yes")
    session, _ = way(chat, other, folder)
    assert re.sub(r"\W", "", pinned(session)[0]) == "RexRex"
    assert "Tom" not in "".join(turn.text for turn in session.turns)


# --- sentences from which words were erased


TORN = "I am allergic to sesame seeds. My brother Quixbert bakes bread."


def told(session: Session) -> str:
    """All that recall may find, what `/facts` lists, and a summary."""
    session.recall.update()
    found = session.recall.passage_search.passages.texts(session.ledger)
    stated = session.facts()
    return "\n".join([*found, *(fact.text for fact in stated), make_summary(session, stated)])


def by_undo_at_once(chat: Chat, other: str, folder: Path) -> tuple[Session, str]:
    return chat.session, chat.do("/undo")


def by_a_summary_taken_back(chat: Chat, other: str, folder: Path) -> tuple[Session, str]:
    list(pin_summary(chat.session, "Much was said."))
    return by_undo(chat, other, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [by_model, by_undo, by_branch, by_rebuild, by_undo_at_once, by_a_summary_taken_back],
)
def test_what_is_left_of_a_sentence_is_told_nowhere(way: Way, other: str, folder: Path) -> None:
    chat = Chat(budget=512, recall="words")
    chat.say("Hello.", f"{TORN} I live in a house.", *SAYINGS[:2])
    chat.do("/erase sesame seeds --yes")
    chat.do("/erase live --yes")
    session, _ = way(chat, other, folder)
    sessions = [session, copy_session(session)]
    if way is by_undo_at_once:
        sessions.append(left_and_resumed(chat).session)
    for one in sessions:
        assert one is not None
        assert any("I am allergic to ." in turn.text for turn in one.turns)
        assert "Quixbert bakes" in told(one)
        assert not re.search("allergic|house", told(one))


@pytest.mark.parametrize(
    ("erased", "stays"),
    [
        (["My uncle Zebedee keeps goats."], True),
        (["My uncle Zebedee keeps goats"], True),  # its mark is left
        (["goats."], False),  # and what is left goes on
        (["goats. My brother"], False),
        (["goats. My brother", "weird"], False),
        (["uncle", "Zebedee keeps"], True),
    ],
)
def test_a_sentence_beside_a_torn_one_is_whole(erased: list[str], stays: bool, other: str) -> None:
    chat = Chat(budget=512, recall="words")
    chat.say("My uncle Zebedee keeps goats. My brother Quixbert bakes bread. What a weird day.")
    for words in erased:
        chat.do(f"/erase {words} --yes")
    chat.do(f"/model {other}")
    assert ("My brother Quixbert bakes bread." in told(chat.session)) == stays
    gone = "uncle|keeps|goats" if stays else "uncle|keeps|Quixbert bakes"
    assert not re.search(gone, told(chat.session))


@pytest.mark.parametrize("more", ["", " Bread with butter."])
@pytest.mark.parametrize("prompt", [None, "Be brief."])
def test_a_message_sent_again_has_no_more_than_what_is_left(prompt: str | None, more: str) -> None:
    chat = Chat(budget=512, recall="words", system=prompt)
    chat.say(NAME, TORN)
    chat.do("/erase sesame seeds --yes")
    make_undoable(chat.session, chat.screen, chat.saved_chat)
    session = chat.saved_chat.session
    for _ in range(2):
        list(session.retry(text=session.undoable_message + more if more else None))
        assert "I am allergic to ." in session.undoable_message
        assert "Quixbert bakes" in told(session)
        assert "allergic" not in told(session)
    session.undo()
    list(session.ask("I am allergic to ."))  # now the user says so
    assert "allergic" in told(session)


@pytest.mark.parametrize("archive", ["ram", "off"])
def test_pins_outlive_a_long_chat_with_or_without_an_archive(archive: str, other: str) -> None:
    chat = Chat(archive=archive, policy="sink")
    chat.say(NAME)
    chat.do("/pin Anna")
    chat.say(*(f"{saying} and so on, and so on, for long" for saying in SAYINGS))
    chat.do(f"/model {other}")
    assert "Anna" in pinned(chat.session)[0]


def test_a_pin_made_after_the_message_that_is_undone_stays() -> None:
    chat = Chat(archive_limit="10kB", policy="sink", sinks=12)
    chat.say(NAME, *SAYINGS)
    chat.do("/pin Anna")
    chat.say("And so on, and so on. " * 12)
    chat.do("/pin name")
    assert pinned(chat.session) == {0: "nameAnna"}
    assert "were read again" in chat.do("/undo")
    assert pinned(chat.session) == {0: "nameAnna"}


# --- numbers of turns


A_PROMPT: list[str] = ["/system Be brief.", *SAYINGS[:3]]
SEVERAL = [*A_PROMPT, "/system Be kind.", *SAYINGS[3:]]
TALKS = {
    "a prompt that is set later": [SAYINGS[0], "/system Be brief.", *SAYINGS[1:3]],
    "several": SEVERAL,
    "the same twice": [*A_PROMPT, "/system none", "/system Be brief.", *SAYINGS[3:]],
    "none left": [*A_PROMPT, "/system none", SAYINGS[3]],
    "an erased one": [*A_PROMPT, "/erase turn 0 --yes", SAYINGS[3]],
}


def talk(chat: Chat, lines: list[str]) -> None:
    for line in lines:
        (chat.do if line.startswith("/") else chat.say)(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "lines"),
    [
        *(pytest.param(by_model, lines, id=name) for name, lines in TALKS.items()),
        *((way, SEVERAL) for way in (by_undo, by_branch, by_rebuild)),
    ],
)
def test_each_turn_keeps_its_number(way: Way, lines: list[str], other: str, folder: Path) -> None:
    chat = Chat(budget=512)
    talk(chat, lines)
    turns, prompt = list(chat.session.turns), chat.session.profile.system
    last = max(n for n, turn in enumerate(turns) if turn.role == "user")
    session, _ = way(chat, other, folder)
    kept = turns[:last] if way in (by_undo, by_branch) else turns
    assert [(t.role, t.text) for t in session.turns] == [(o.role, o.text) for o in kept]
    assert session.profile.system == prompt
    for number, turn in enumerate(kept):  # as `/pin turn N` finds them
        rows = session.tokens(range(session.seen))
        spelled = "".join(row.text for row in rows if row.turn == number and row.role == turn.role)
        assert plain(spelled) == plain(turn.text)


@pytest.mark.parametrize("shape", ["gemma", "mistral"])
def test_a_template_without_later_system_prompts_changes_no_number(shape: str) -> None:
    said = [("system", ""), ("user", NAME), ("assistant", "Hi."), ("system", "Be kind.")]
    turns = [Turn(role, text) for role, text in [*said, *said[1:]]]
    model = wrap_model(shape, random_model(len(tokenizer(shape))), tokenizer(shape))
    session = Session(model, Profile(budget=512, system="Be kind."))
    read_again(session, turns, [PinnedText(4, len("Mynameis"), len("MynameisAnna"))])
    assert [(t.role, t.text) for t in session.turns] == [(o.role, o.text) for o in turns]
    assert pinned(session) == {4: "Anna"}


@pytest.mark.parametrize("way", [by_model, by_branch])
def test_only_the_last_system_prompt_is_held_after_all(way: Way, other: str, folder: Path) -> None:
    chat = Chat(budget=512, sinks=0)
    talk(chat, SEVERAL)
    session, _ = way(chat, other, folder)
    held = [row for row in session.snapshot().rows if row.role == "system"]
    assert "".join("".join(row.text for row in held).split()) == "Bekind."
    assert all("pinned" in row.flags for row in held)


def test_undo_takes_back_a_system_prompt_that_came_after_the_message() -> None:
    chat = Chat()
    chat.do("/system Be brief.")
    chat.say(*SAYINGS[:2])
    chat.do("/system Be kind.")
    chat = left_and_resumed(chat)
    assert "were read again" in chat.do("/undo")
    assert chat.session.profile.system == "Be brief."
    assert [turn.role for turn in chat.session.turns] == ["system", "user", "assistant"]
