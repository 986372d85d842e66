"""What the user stated is listed: when, and whether it is still held."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attacking import MANY
from chatting import session, smollm2, tell, tiny
from drawing import NONE, lines
from saved_chats import saved_and_resumed
from sirchat.chat import statements
from sirchat.chat.corrections import may_replace
from sirchat.chat.session import Session
from sirchat.chat.statements import StatedFact
from sirchat.chat.summary import omitted_facts
from sirchat.chat.token_rows import words_missing
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel
from sirchat.ui.commands import Commands
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_facts
from sirchat.ui.typed_input import MemoryHistory
from statement_telling import FACTS, OTHERS, telling

CORRECTIONS = [
    ("My flat is in Harbour Street.", "We moved to Elm Road."),
    ("I work as a nurse at the clinic.", "I quit and became a teacher in September."),
    ("Our wedding is on May 9.", "The wedding had to be put off until July 5."),
    ("I drive a red Volvo.", "I sold the Volvo and bought a blue Fiat."),
    ("My phone number is 271-8081.", "I have a new number: 314-1592."),
    ("My train leaves at 7:45.", "They changed the timetable, my train goes at 8:10."),
    ("My brother lives in Lisbon.", "My brother has moved to Oslo."),
    ("The meeting is in room 12.", "We meet in room 30 instead."),
    ("My boss is Mr. Okafor.", "Mrs. Brandt is my new boss."),
]
SAME_THING = [
    *CORRECTIONS,
    ("My cat is called Tom.", "Actually, my cat is called Momo."),
    ("I live in a flat on Harbour Street.", "I moved: I now live at 12 Elm Street."),
    ("I live in Rome.", "We moved to Oslo last week."),
    ("My sister lives in Rome.", "She now lives in Oslo."),
    ("My rent is 900 euros.", "My rent went up to 950 euros."),
]
UNLIKE = [
    ("My cat is called Tom.", "My sister Corin is a beekeeper."),
    ("My cat is called Tom.", "My dog is called Rex."),
    ("My flat is in Harbour Street.", "My brother works in Elm Road."),
    ("My sister lives in Rome.", "I live in Oslo."),
    ("My daughter plays the violin.", "My son plays football."),
    ("I am allergic to peanuts.", "I love strawberries."),
    ("My rent is 900 euros.", "I bought a bicycle for 400 euros."),
    ("My brother is a baker.", "My neighbour is a pilot."),
    ("We have two hens in the garden.", "We grow tomatoes on the balcony."),
    ("I work as a nurse.", "My birthday is in June."),
]


def chat_of(*said: str) -> Session:
    chat = session(telling(), policy="sink", budget=96, max_new_tokens=8, pin_instructions=False)
    for text in said:
        list(chat.ask(text))
    return chat


def test_of_a_fact_that_is_held_in_part_it_says_what_is_left() -> None:
    chat = chat_of("Hello.", FACTS[0])
    rows = chat.tokens(chat.ledger.of_turn(2, Role.USER).tolist())
    at = [row.position for row in rows if row.text.strip() == "called"]
    chat.engine.evictor.exclude(np.asarray(at))
    (fact,) = chat.facts()
    assert 0 < fact.held < fact.tokens
    assert (fact.left, fact.state) == ("My cat is … Tom.", "partly held")
    words = [row.position for row in rows if row.text != "."]
    chat.engine.evictor.exclude(np.asarray(words))
    (fact,) = chat.facts()
    assert (fact.held, fact.state) == (1, "evicted"), "of its full stop, nobody learns"


@pytest.mark.parametrize(
    ("pieces", "there", "missing"),
    [
        (["I", " am", " An", "na", "."], "11011", ("Anna",)),
        (["At", " 7", ":", "45", ",", " she"], "110101", ("7:45",)[:0]),
        (["It", " is", " €", "900"], "1101", ("€900",)),
        (["我", "叫", "安", "娜", "。"], "11000", ("安娜",)),
        (["我", "叫", "安", "娜", "。"], "10101", ("叫", "娜")),
        (["I", " love", "", "🍕", "!"], "11010", ("🍕",)),
        (["(", "no", ")"], "010", ()),
        (["I", " call", " (", "len", "(", "x", "))", "."], "11101011", ("len(x)",)),
    ],
)
def test_missing_words_are_whole_and_in_order(
    pieces: list[str], there: str, missing: tuple[str, ...]
) -> None:
    assert words_missing(pieces, np.array(list(there)) == "1") == missing


def test_in_80_columns_a_replaced_fact_keeps_room_for_its_text() -> None:
    fact = replace(chat_of(FACTS[0]).facts()[0], newer=2, newer_text="No, my cat is called " * 4)
    partly = replace(fact, held=3, missing=("called", "Tom"), left="My cat is …")
    for one in (fact, partly):
        row = lines(draw_facts([one], 0.0, NONE, 80), 80)[1]
        assert 'held; newer: "No, my cat is calle…"' in row
        assert FACTS[0] in row
    lacks = replace(partly, newer=None, newer_text="", missing=("called", "Tom", "and", "Rex"))
    row = lines(draw_facts([lacks], 0.0, NONE, 80), 80)[1]
    assert f"partly held, without 4 words  {FACTS[0]}" in row


def test_facts_are_looked_for_once_after_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, calls, usual = chat_of(*FACTS), list[object](), statements._find_facts

    def counted(*given: Any) -> list[StatedFact]:
        calls.append(given)
        return usual(*given)

    monkeypatch.setattr(statements, "_find_facts", counted)
    changes: list[Callable[[], object]] = [
        lambda: list(chat.ask("I have moved to Rome.")),
        lambda: chat.pin("cat"),
        lambda: list(chat.undo()),
        lambda: chat.erase("cat"),
    ]
    for change in changes:
        change()
        calls.clear()
        shown = [chat.facts() for _ in range(3)]
        assert len(calls) == 1
        chat._statement_cache.found = (None, [])
        assert shown == [chat.facts()] * 3


@pytest.mark.usefixtures("own_home")
def test_after_a_resume_no_sentence_is_read_anew_that_recall_knows_nor_more_than_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = saved_and_resumed(chat_of(f"Hello. {FACTS[0]}", FACTS[1]), chat_of())
    usual, read = LoadedModel.encode, list[int]()

    def encode(self: LoadedModel, ids: list[int], start: int) -> torch.Tensor:
        read.append(len(ids))
        return usual(self, ids, start)

    monkeypatch.setattr(LoadedModel, "encode", encode)
    for most, told, count in ((0, FACTS[1:], 0), (1, FACTS, 1), (9, FACTS, 2), (8, FACTS, 2)):
        assert [fact.text for fact in again.facts(max_reads=most)] == told
        assert len(read) == count
    again.erase("Rome")
    assert [fact.text for fact in again.facts()] == FACTS[:1]
    assert len(read) == 2


def test_what_a_newer_statement_replaced_is_marked() -> None:
    chat = chat_of(FACTS[1], OTHERS[0], FACTS[1])  # random states tell no two facts apart
    assert [fact.newer for fact in chat.facts()] == [4, None]


def test_a_question_states_nothing_even_if_the_encoder_takes_it_for_a_fact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = chat_of(FACTS[1], "What is my cat called?")
    every = "sirchat.models.encoder.Encoder.is_kind"
    monkeypatch.setattr(every, lambda self, kind, vectors: torch.ones(len(vectors)) > 0)
    assert [(fact.text, fact.newer) for fact in chat.facts()] == [(FACTS[1], None)]


def test_the_command_shows_them_in_a_table() -> None:
    chat, out, notes = chat_of(FACTS[0]), io.StringIO(), io.StringIO()
    screen = Screen(out, notes)
    commands = Commands(chat, screen, MemoryHistory(), SavedChat(chat, screen))
    commands.run("/facts")
    title, line = (text.split() for text in out.getvalue().splitlines())
    assert title == ["when", "is", "you", "said"]
    assert line == ["just", "now", "held", *FACTS[0].split()]
    commands.run("/facts Rome")
    assert "you stated no facts with these words" in notes.getvalue()


def test_a_fact_that_the_window_cuts_ends_with_a_mark() -> None:
    long = replace(chat_of(FACTS[0]).facts()[0], text="My cat is called Tom, " + "a tabby " * 20)
    for width in range(40, 90, 7):
        row = lines(draw_facts([long], 0.0, NONE, width), width)[1].rstrip()
        assert re.fullmatch(r".*My cat is .*…", row)
        assert len(row) == width


def test_what_corrects_a_fact_is_listed_though_the_encoder_takes_it_for_no_fact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "My birthday is in May.", "I got that wrong, my birthday is in July."
    chat = chat_of(*said)
    every = "sirchat.models.encoder.Encoder.is_kind"
    monkeypatch.setattr(every, lambda self, kind, vectors: torch.arange(len(vectors)) < 1)
    monkeypatch.setattr(statements, "SAME_SUBJECT_COSINE", -2)
    assert [(fact.text, fact.newer_text) for fact in chat.facts()] == [said, (said[1], "")]
    assert [fact.text for fact in chat.facts("wrong")] == [said[1]]


@pytest.fixture
def all_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sentence is a fact, and near every other one."""
    every = "sirchat.models.encoder.Encoder.is_kind"
    monkeypatch.setattr(every, lambda self, kind, vectors: torch.ones(len(vectors)) > 0)
    monkeypatch.setattr("sirchat.chat.statements.SAME_SUBJECT_COSINE", -2.0)


def test_even_if_the_encoder_finds_them_near_only_what_may_be_the_same_thing_is_newer() -> None:
    assert [pair for pair in SAME_THING if not may_replace(*pair)] == []
    assert [pair for pair in UNLIKE if may_replace(*pair)] == []


@pytest.mark.parametrize(
    ("older", "newer", "is_in_part"),
    [
        ("I live in Oslo and my dog is Rex.", "My dog is Max now.", True),
        ("My flat is in Oslo, and my dog is Rex.", "My flat is in Rome now.", True),
        ("I live in Oslo and my dog is Rex.", "I live in Rome and my dog is Max now.", False),
        ("My favourite colours are red, green and blue.", "My favourite colour is red now.", False),
    ],
)
def test_of_a_sentence_that_tells_two_things_one_may_be_replaced(
    older: str, newer: str, is_in_part: bool, all_near: None
) -> None:
    chat = chat_of(older, newer)
    facts = chat.facts()
    assert [fact.newer_text for fact in facts] == [newer, ""]
    how = "newer in part" if is_in_part else "newer"
    assert f'held; {how}: "{newer}"' in lines(draw_facts(facts, 0.0, NONE, 200), 200)[1]
    (left_out,) = omitted_facts(facts, newer)
    corrected = "corrected in part" if is_in_part else "corrected"
    assert left_out.text.endswith(f'"{older}" ({corrected})')


def test_a_model_without_an_encoder_tells_facts_by_their_form() -> None:
    chat = session(tiny(), budget=512, max_new_tokens=8)
    for text in ("Hello!", "My name is Anna.", "I see.", "What is my name?", "Tell me a joke."):
        list(chat.ask(text))
    assert [fact.text for fact in chat.facts()] == ["My name is Anna."]
    for text in ("My name is long.", "Actually, my name is Berta."):
        list(chat.ask(text))
    assert [fact.newer_text for fact in chat.facts()] == ["Actually, my name is Berta."] * 2 + [""]


@pytest.mark.slow
@pytest.mark.real
def test_a_real_model_tells_facts_from_talk_and_marks_corrections_and_nothing_else() -> None:
    """Of a few, or with `SIRCHAT_ATTACK` of all; one correction may be missed."""

    def marked(pairs: list[tuple[str, str]]) -> int:
        count = 0
        for older, newer in pairs if MANY else pairs[:2]:
            chat = session(smollm2(), pin_instructions=False)
            tell(chat, older)
            list(chat.read_user(f"Tell me a joke. {newer} What is democracy?"))
            assert MANY or [fact.text for fact in chat.facts()] == [older, newer]
            count += chat.facts()[0].newer_text == newer
        return count

    assert marked(CORRECTIONS) >= (8 if MANY else 1)
    assert marked(UNLIKE) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "My name is Mara and I live at 12 Harbour Street.",
            "Actually, I moved: I now live at 7 Mill Lane.",
        ),
        ("I live in Norwich, at 12 Elm Hill.", "Actually, I moved: I live in Bristol now."),
    ],
)
def test_without_an_encoder_a_clause_that_says_the_same_with_another_name_is_newer(
    old: str, new: str
) -> None:
    chat = session(policy="sink", budget=256, max_new_tokens=2)
    tell(chat, old, "My cat is called Pixel.", "My dog lives at Bob's.", new, "My cat is now ill.")
    newer = {one.text: one.newer_text for one in chat.facts() if one.newer_text}
    assert newer == {old: new}
    assert next(one for one in chat.facts() if one.newer_text).is_newer_in_part
