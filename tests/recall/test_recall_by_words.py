"""A chat that recalls by words: what was told long ago is restored with the turn that told it."""

from __future__ import annotations

import io

import pytest

from chatting import babbler, session, tell, text_at
from held_rows import contents, same
from sirchat.chat.events import Recalled
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError
from sirchat.recall.passages import MIN_SCORE
from sirchat.ui.commands import Commands
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.typed_input import MemoryHistory

BY_WORDS = ["words", "meaning"]
TOLD = "Our zebra is called Quixbert."
CHAT = ["What a rainy day it is.", "Tell me a joke."]


def chat(retriever: str) -> Session:
    """A long chat whose second turn told something; it is no longer held."""
    one = session(babbler(), policy="sink", budget=96, recall=retriever, recall_n=40)
    tell(one, "Hello there.", TOLD, *CHAT * 6)
    return one


def roomy() -> Session:
    """A chat that recalls as much as there is room for."""
    return session(babbler(), policy="sink", budget=256, recall="words", recall_n="auto")


def recalled(one: Session, text: str) -> Recalled:
    (came,) = [event for event in one.read_user(text) if isinstance(event, Recalled)]
    return came


def ask(one: Session, text: str) -> str:
    """The text of what is recalled for a turn."""
    came = recalled(one, text)
    assert len(came.positions) == len(came.scores) <= 40
    assert one.resident <= 96
    return text_at(one, came.positions)


@pytest.mark.parametrize("retriever", BY_WORDS)
def test_what_was_told_is_restored_whole_and_said_by_which_words(retriever: str) -> None:
    one = chat(retriever)
    assert TOLD in ask(one, "What is the name of Quixbert's species?")
    assert "template" not in {row.role for row in one.tokens(list(one.recall.scores))}
    one.undo()
    assert not one.recall.turns
    came = recalled(one, "What is the zebra's name? Quixbert?")
    assert came.turns == one.recall.turns
    assert sum(each.tokens for each in came.turns) == len(came.positions)
    assert [each.turn for each in came.turns] == sorted({each.turn for each in came.turns})
    (told,) = [each for each in came.turns if one.turns[each.turn].text == TOLD]
    assert {"Quixbert", "zebra"} <= set(told.words)
    assert came.seconds > 0


@pytest.mark.parametrize("retriever", BY_WORDS)
def test_an_undone_recall_happens_again_as_it_was(retriever: str) -> None:
    one = chat(retriever)
    before = contents(one.engine)
    first = ask(one, "Who is Quixbert?"), list(one.recall.scores.values())
    then = contents(one.engine)
    one.undo()
    assert same(contents(one.engine), before)
    ask(one, "Tell me a joke.")
    one.undo()
    assert (ask(one, "Who is Quixbert?"), list(one.recall.scores.values())) == first
    assert same(contents(one.engine), then)


def test_a_question_whose_words_begin_the_vocabulary_finds_what_was_told() -> None:
    one = session(babbler(), policy="sink", budget=96, recall="words")
    tell(
        one,
        "Hello there.",
        "My name is Zelda.",
        *CHAT * 6,
    )
    assert "My name is Zelda." in ask(one, "What is my name?")


STORY = "The fox which came from the hills and went about at night saw a light. "


def test_words_that_carry_nothing_find_nothing() -> None:
    one = roomy()
    tell(one, STORY * 6, "I write letters.", *CHAT * 6)
    for asked in ("and", "from", "Is it about?", "Who wrote this?"):
        list(one.read_user(asked))
        assert not one.recall.scores, asked
        assert one.recall.found is not None
        assert one.recall.found.best_score < MIN_SCORE
        one.undo()


@pytest.mark.parametrize("retriever", BY_WORDS)
def test_greetings_and_thanks_do_not_come_back_and_recall_nothing(retriever: str) -> None:
    one = session(babbler(), policy="sink", budget=96, recall=retriever, recall_n=40)
    tell(one, "Hello, good morning!", TOLD, "Thanks a lot.", *["Tell me a joke."] * 6)
    for text in ("What is our zebra called?", "Hello zebra, good morning to the zebra!"):
        back = ask(one, text)
        assert TOLD in back
        assert "Hello" not in back
        assert "hank" not in back
    assert not ask(one, "Hello, good morning to you!")


def test_what_fits_the_words_of_the_best_passage_is_found_in_a_second_step() -> None:
    one = roomy()
    tell(one, "Hello there.", "Our dentist is Doctor Quixbert Zamenhof.", *CHAT * 4)
    tell(one, "Doctor Quixbert Zamenhof moved to Narvik.", *CHAT * 10)
    assert "Narvik" in text_at(one, recalled(one, "Where does our dentist live?").positions)


def test_of_a_long_turn_the_sentence_with_the_word_comes_back() -> None:
    one = roomy()
    tell(one, f"{STORY * 9}{TOLD} {STORY * 9}", *["What a rainy day it is."] * 4)
    list(one.read_user("Our zebra Quixbert"))
    text = text_at(one, list(one.recall.scores))
    assert TOLD in text
    (turn,) = one.recall.turns
    assert TOLD in turn.text


def test_what_was_only_asked_and_what_the_model_replied_give_way_to_what_was_told() -> None:
    one, asked = roomy(), "What is our zebra Quixbert called?"
    tell(one, "Hello there.", TOLD, *CHAT * 6)
    tell(one, asked, reply="The zebra Quixbert is called Humbert.", is_generated=True)
    tell(one, *CHAT * 10)
    text = text_at(one, recalled(one, asked).positions)
    assert TOLD in text
    assert "Humbert" not in text
    assert asked not in text


def test_a_question_that_tells_something_is_found_as_what_was_told() -> None:
    one = roomy()
    tell(one, "Hello there.", "Our zebra is ill.")
    tell(
        one,
        "Our zebra Quixbert eats no hay since Tuesday, what can I do?",
        reply="Call somebody who knows zebras.",
        is_generated=True,
    )
    tell(one, *CHAT * 10)
    came = recalled(one, "Since which day does our zebra eat no hay?")
    assert "hay since Tuesday" in text_at(one, came.positions)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("retriever", "erased", "stays"),
    [
        ("words", "My uncle Zebedee keeps goats.", True),
        ("meaning", "My uncle Zebedee keeps goats", True),  # its mark is left
        ("words", "uncle Zebedee", True),
        ("cosine", "uncle Zebedee", None),  # it finds tokens, of any sentence
        *((name, "goats. My brother", False) for name in BY_WORDS),  # words of both sentences
    ],
)
def test_a_sentence_with_erased_words_does_not_come_back_and_one_beside_it_is_whole(
    retriever: str, erased: str, stays: bool | None, is_late: bool
) -> None:
    one = session(babbler(), policy="sink", budget=128, recall=retriever, recall_n=90)
    tell(one, "Hello.", "My uncle Zebedee keeps goats. My brother Quixbert bakes bread.")
    if not is_late:
        one.erase(erased)
    tell(one, *CHAT * 4)
    if is_late:
        one.erase(erased)
    other = Session(one.model, one.profile)
    other.load(one.engine.save(), one.state, one.engine.store.copy_key_values())
    for chat in (one, other):
        events = list(chat.read_user("Which brother is Quixbert? Which uncle keeps goats?"))
        came = [one for one in events if isinstance(one, Recalled)]
        text = "".join(row.text for one in came for row in chat.tokens(one.positions))
        text += "".join(turn.text for turn in chat.recall.turns)
        assert stays in (None, "My brother Quixbert bakes bread." in text)
        assert not any(word in text for word in ("uncle", "keeps", "goats"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"recall": name, "recall_query": "recent"}, "_query=turn") for name in BY_WORDS),
        *(({"recall": name, "archive": "off"}, "archive=ram") for name in ("mips", *BY_WORDS)),
        ({"recall": "nonsense"}, "one of off, on, cosine"),
        ({"recall_n": 0}, "or equal to 1"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        changed_profile(Profile(), "/set", **settings)


def test_what_was_read_with_recall_off_is_found_once_it_is_on() -> None:
    one = chat("words")
    one.switch("/recall", recall="off")
    tell(one, "My zebra is called Wimbledon.", *["What a rainy day it is."] * 6)
    one.switch("/recall", recall="words")
    assert "Wimbledon" in ask(one, "How do you call a zebra?")


def test_what_fits_and_was_held_anyway_is_shown_and_said_to_be() -> None:
    one, out, notes = roomy(), io.StringIO(), io.StringIO()
    tell(one, *["What a rainy day it is."] * 20, TOLD)
    assert one.resident < one.seen
    list(one.read_user("What is the name of Quixbert's species?"))
    screen = Screen(out, notes)
    Commands(one, screen, MemoryHistory(), SavedChat(one, screen)).run("/recall")
    assert "Quixbert" in out.getvalue()
    assert "nothing was restored: all of this was held" in notes.getvalue()


def test_of_a_sentence_that_comes_back_in_part_only_what_is_there_is_shown() -> None:
    one = chat("words")
    list(one.switch("/set", recall_n=6))
    (told,) = [each for each in recalled(one, "What is Quixbert's species?").turns if each.words]
    assert told.tokens == 6
    ids = one.ledger.column("token_id")[list(one.recall.scores)]
    assert told.text == f"{one.model.tokenizer.decode(ids).strip()} …"


def test_of_a_passage_nothing_of_a_sentence_with_erased_words_is_restored_or_shown() -> None:
    one = roomy()
    tell(one, "Hello there.", "He had a zebra. My zebra has a hat.", *CHAT * 16)
    one.erase("hat")
    came = recalled(one, "What about the zebra?")
    (told,) = [each for each in came.turns if each.words]
    assert told.text == "He had a zebra."
    assert "My zebra has" not in text_at(one, came.positions)


@pytest.mark.parametrize("own", [True, False])
def test_what_the_user_said_and_its_newest_correction_come_before_the_models_words(
    own: bool,
) -> None:
    one = roomy()
    told = "In March I am moving to Valparaiso, my new city."
    corrected = "Correction: I'm moving in June, not in March."
    tell(one, "Hello there.", f"{told} My sister paints.", *CHAT * 5, f"{corrected} It is late.")
    tell(one, *CHAT * 4)
    if own:
        tell(
            one,
            "And so on.",
            reply="I am currently moving to a city, Tromso, in a month: moving in May.",
            is_generated=True,
        )
    tell(one, *CHAT * 8)
    for asked in ("In which month am I moving?", "Which city am I moving to?"):
        recalled(one, asked)
        assert one.recall.found is not None
        search, ledger = one.recall.passage_search, one.engine.ledger
        texts = [search.passages.texts(ledger, at, at + 1)[0] for at in one.recall.found.passages]
        places = [texts.index(one) for one in texts if told in one or corrected in one]
        assert len(places) == 2
        assert all("Tromso" not in one for one in texts[: max(places)]), texts
        one.undo()


def test_what_shares_no_word_is_said_to_be_found_by_words_beside_it() -> None:
    one, out = roomy(), io.StringIO()
    tell(one, TOLD, reply="The lamp is broken.")
    tell(one, *CHAT * 16)
    came = recalled(one, "What is our zebra called?")
    beside = [each for each in came.turns if not each.words]
    assert beside
    assert {each.text for each in beside} <= {"The lamp is broken.", *CHAT}
    screen = Screen(out, out)
    Commands(one, screen, MemoryHistory(), SavedChat(one, screen)).run("/recall")
    assert out.getvalue().count("(words beside it)") == len(beside)
