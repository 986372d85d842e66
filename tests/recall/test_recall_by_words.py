"""A chat that recalls by words: what was told long ago is restored with the turn that told it."""

from __future__ import annotations

import pytest

from chatting import babbler, session
from families import loaded
from held_rows import contents, same
from sirchat.chat.events import Recalled
from sirchat.chat.session import Session
from sirchat.chat.settings import check_recall
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError

BY_WORDS = ["bm25", "hybrid", "words"]
TOLD = "Our zebra is called Quixbert."


def tell(one: Session, *texts: str) -> None:
    for text in texts:
        list(one.read_user(text))
        list(one.read_reply("Fine, thank you."))


def chat(retriever: str) -> Session:
    """A long chat whose second turn told something; it is no longer held."""
    one = session(babbler(), policy="sink", budget=96, recall=retriever, recall_n=40)
    tell(one, "Hello there.", TOLD, *["What a rainy day it is.", "Tell me a joke."] * 6)
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
    return "".join(row.text for row in one.tokens(came.positions))


@pytest.mark.parametrize("retriever", BY_WORDS)
def test_what_was_told_is_restored_whole_for_a_question_with_its_word(retriever: str) -> None:
    one = chat(retriever)
    assert TOLD in ask(one, "What is the name of Quixbert's species?")
    assert "template" not in {row.role for row in one.tokens(list(one.recall.scores))}


@pytest.mark.parametrize("retriever", BY_WORDS)
def test_it_is_said_of_which_turns_and_by_which_words(retriever: str) -> None:
    one = chat(retriever)
    came = recalled(one, "What is the zebra's name? Quixbert?")
    assert came.turns == one.recall.turns
    assert sum(each.tokens for each in came.turns) == len(came.positions)
    assert [each.turn for each in came.turns] == sorted({each.turn for each in came.turns})
    (told,) = [each for each in came.turns if one.turns[each.turn].text == TOLD]
    assert {"Quixbert", "zebra"} <= set(told.words)
    assert came.seconds > 0
    one.undo()
    assert not one.recall.turns


def test_a_turn_beside_the_one_that_has_the_words_is_named_with_them() -> None:
    one = chat("words")
    list(one.read_user("Quixbert"))
    beside = [each for each in one.recall.turns if "Quixbert" not in one.turns[each.turn].text]
    assert any(each.words == ("Quixbert",) for each in beside)


def test_a_correction_in_other_words_comes_back_with_what_it_corrects() -> None:
    one = session(babbler(), policy="sink", budget=160, recall="bm25")
    told, correction = "My train leaves at nine.", "Sorry, I was wrong: the train goes at ten."
    weather = ["What a rainy day it is.", "Tell me a joke.", "I like soup."] * 3
    tell(one, told, *weather, correction, *weather)
    list(one.read_user("When does my train leave?"))
    assert {told, correction} <= {one.turns[each.turn].text for each in one.recall.turns}


def test_a_turn_has_one_score_and_the_best_is_the_one_that_has_the_word() -> None:
    one = chat("bm25")
    ask(one, "Quixbert")
    by_turn: dict[int, set[float]] = {}
    for row in one.tokens(list(one.recall.scores)):
        by_turn.setdefault(row.turn, set()).add(one.recall.scores[row.position])
    assert all(len(scores) == 1 for scores in by_turn.values())
    best = max(by_turn, key=lambda turn: max(by_turn[turn]))
    assert one.turns[best].text == TOLD


@pytest.mark.parametrize("retriever", BY_WORDS)
def test_an_undone_recall_happens_again_as_it_was(retriever: str) -> None:
    one = chat(retriever)
    before = contents(one._engine)
    first = ask(one, "Who is Quixbert?"), list(one.recall.scores.values())
    then = contents(one._engine)
    one.undo()
    assert same(contents(one._engine), before)
    ask(one, "Tell me a joke.")
    one.undo()
    assert (ask(one, "Who is Quixbert?"), list(one.recall.scores.values())) == first
    assert same(contents(one._engine), then)


def test_the_policy_has_all_of_the_budget_while_recall_needs_nothing() -> None:
    one = roomy()
    while one.seen + 40 < 256:
        list(one.read_user("My name is Anna."))
        assert one.resident == one.seen
    list(one.read_user("Tell me a joke. " * 20))
    list(one.read_reply("No."))
    assert one.resident == 256


def test_what_is_erased_is_found_no_more_and_kept_nowhere() -> None:
    one = chat("bm25")
    assert "bert" in ask(one, "Quixbert")
    one.undo()
    one.erase("Quixbert")
    assert not one.recall._index._texts
    came = ask(one, "Quixbert")
    assert "bert" not in came


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"recall": name, "recall_query": "recent"}, "_query=turn") for name in BY_WORDS),
        *(({"recall": name, "recall_scope": "layer"}, "compares words, so") for name in BY_WORDS),
        *(({"recall": name, "archive": "off"}, "archive=ram") for name in ("mips", *BY_WORDS)),
        ({"recall": "attention", "recall_query": "recent"}, "requires recall_query=turn"),
        ({"recall": "nonsense"}, "one of off, on, attention, bm25"),
        ({"recall_n": 0}, "at least 1"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        changed_profile(Profile(), "/set", **settings)


@pytest.mark.parametrize("family", ["falcon", "deepseek-mla"])
@pytest.mark.parametrize("retriever", BY_WORDS)
def test_models_whose_queries_are_hidden_can_recall_by_words(family: str, retriever: str) -> None:
    check_recall(changed_profile(Profile(), "flag", recall=retriever), loaded(family), "--recall")
