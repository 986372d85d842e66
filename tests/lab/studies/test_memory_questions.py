"""The study `facts-in-dialogue --questions`: its questions, and what it records of a session."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from chatting import tiny
from sirchat.chat.events import TokenRow, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import TOLD, AskedFact
from sirchat.lab.studies.facts_in_dialogue.questions import (
    TYPES,
    draw_fact,
    entries,
    unrelated_messages,
    values_of,
)
from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue
from sirchat.lab.studies.reading import read
from sirchat.lab.studies.report import Estimate, Table
from sirchat.recall.word_index import STOP_WORDS

# Beside STOP_WORDS: what an apostrophe leaves of a word, and words that only join others
_NO_CONTENT = STOP_WORDS | {"s", "m", "t", "d", "re", "ve", "ll", "don", "doesn", "isn", "ours"}


def content(text: str) -> set[str]:
    return set(re.findall(r"\w+", re.sub(r"\{\w\}", " ", text.lower()))) - _NO_CONTENT


def is_akin(one: str, other: str) -> bool:
    """Whether two words are equal but for an ending: alike in 4 letters, or in all but an s."""
    if min(len(one), len(other)) >= 4:
        return one[:4] == other[:4]
    return one.removesuffix("s") == other.removesuffix("s")


def common(one: str, other: str) -> set[tuple[str, str]]:
    return {(a, b) for a, b in product(content(one), content(other)) if is_akin(a, b)}


def with_values(wordings: list[str], entry: dict[str, Any]) -> str:
    return " ".join([*wordings, *values_of(entry)])


def test_a_paraphrase_and_a_correction_share_no_content_word() -> None:
    for entry in entries("facts", "all"):
        said, values = [*entry["told"], entry["corrected"]], values_of(entry)
        assert len(entry["told"]) >= 2
        for told in entry["told"]:
            assert common(entry["shared"], told)
            assert not common(entry["corrected"], told)
        assert not common(entry["shared"], " ".join(values)), entry
        assert not common(entry["asked"], with_values(said, entry)), entry
        assert not common(" ".join(said), " ".join(values)), entry
        assert not any(common(*pair) for pair in combinations(values, 2)), entry


def test_a_question_for_a_list_shares_no_content_word() -> None:
    for entry in entries("lists", "all"):
        assert len(entry["told"]) >= 3
        assert len(values_of(entry)) >= 7
        assert not common(entry["asked"], with_values(entry["told"], entry)), entry


def test_a_question_in_two_steps_shares_words_with_the_first_only() -> None:
    for entry in entries("steps", "all"):
        assert all("{n}" in told for told in (*entry["first"], *entry["second"]))
        assert all(common(entry["asked"], told) for told in entry["first"]), entry
        names = " ".join(values_of(entry, "names"))
        assert not common(entry["asked"], with_values([*entry["second"], names], entry)), entry


def drawn(told: str, half: str = "all", seeds: int = 20) -> list[AskedFact]:
    kinds = entries(told, half)
    return [draw_fact(Random(f"{seed}{one}"), told, one) for one in kinds for seed in range(seeds)]


def test_there_are_enough_kinds_and_the_halves_have_none_in_common() -> None:
    assert [len(entries(told, "all")) for told in ("facts", "lists", "steps")] == [66, 30, 30]
    for told in TYPES.values():
        a, b = ([one["name"] for one in entries(told, half)] for half in "ab")
        names = [one["name"] for one in entries(told, "all")]
        assert len(set(names)) == len(names)
        assert not set(a) & set(b)
        assert {*a, *b} == set(names)


@pytest.mark.parametrize("told", dict.fromkeys(TYPES.values()))
def test_one_reply_of_four_has_all_values_and_the_statements_tell_them(told: str) -> None:
    places = [0, 0, 0, 0]
    for fact in drawn(told):
        assert len(set(fact.replies)) == 4
        whole = [all(value in reply for value in fact.values) for reply in fact.replies]
        assert whole[fact.right]
        assert sum(whole) == 1 or told != "lists"
        needed = [fact.told[at] for at in fact.needed]
        assert [one.value for one in needed[-len(fact.values) :]] == list(fact.values)
        assert all(one.value.lower() in one.text.lower() for one in fact.told)
        places[fact.right] += 1
    assert min(places) > sum(places) / 5


def test_a_correction_comes_after_the_old_value_which_is_a_wrong_option() -> None:
    for fact in drawn("corrections"):
        (old, new), (at,) = fact.told, fact.needed
        assert at == 1
        assert new.value == fact.values[0]
        assert any(old.value in one for n, one in enumerate(fact.replies) if n != fact.right)


def test_the_second_step_is_told_of_another_name_too() -> None:
    for fact in drawn("steps"):
        first, second = (fact.told[at] for at in fact.needed)
        (other,) = [one for at, one in enumerate(fact.told) if at not in fact.needed]
        assert fact.needed == tuple(sorted(fact.needed))
        assert first.value in second.text
        assert first.value not in other.text
        assert other.value != second.value


def study(talk: Path, setting: Profile, **options: Any) -> FactsInDialogue:
    few = {"data": str(talk), "lengths": (260,), "facts": 1, "limit": 1, "reply_tokens": 4}
    return FactsInDialogue((setting,), **{**few, "questions": tuple(TYPES), **options})


def test_the_same_seed_tells_the_same_and_another_does_not(talk: Path) -> None:
    template = Session(tiny(), Profile()).template
    one = study(talk, Profile()).woven(template, "steps", 260, 0)
    assert study(talk, Profile(), limit=9).woven(template, "steps", 260, 0) == one
    assert study(talk, Profile(), seed=1).woven(template, "steps", 260, 0) != one


def share_held(tokens: Sequence[TokenRow], sentence: str, held: set[int], part: str = "") -> float:
    """The share of the tokens with some letters of a sentence, or of a part, that are held."""
    begin = "".join(row.text for row in tokens).index(sentence)
    begin += sentence.lower().index(part.lower())
    end, at, found = begin + len(part or sentence), 0, []
    for row in tokens:
        if at < end and at + len(row.text) > begin:
            found.append(row.position in held)
        at += len(row.text)
    return float(np.mean(found))


def test_the_record_says_what_was_held_when_it_answered(
    talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by the texts of the tokens in the cache, after the question alone was read."""
    few = unrelated_messages("all")[:3]
    monkeypatch.setattr(
        "sirchat.lab.studies.facts_in_dialogue.study.unrelated_messages", lambda half: few
    )
    model = tiny()
    setting = Profile(policy="entropy", budget=96, recall="words", temperature=0, max_new_tokens=4)
    one = study(talk, setting, questions=(TOLD, "two-step"))
    session, own = Session(model, setting), Session(model, setting)
    for unit in one.units():
        session.reset()
        own.reset()
        record = one.run_unit(session, unit, one.cells()[0])
        facts, woven = one.woven(own.template, unit.split()[0], 260, 0)
        for round in woven.rounds:
            read(own, *round)
        tokens = own.tokens(range(own.seen))
        before = own.state.roles.index("assistant")
        replies = [
            row.surprisal or 0.0
            for row in tokens
            if row.role == "assistant" and (row.turn - before) // 2 not in woven.own
        ]
        assert record["nats"] == pytest.approx(np.mean(replies), abs=1e-5)
        assert (
            session.engine.save().held.tolist() == own.engine.save().held.tolist()
        )  # as if none were asked
        for fact, answer in zip(
            [f for f in facts for kind in f.asked if kind in one.questions],
            record["answers"],
            strict=True,
        ):
            done = [e for e in own.ask(fact.asked[answer["type"]]) if isinstance(e, TurnDone)]
            own.undo()
            list(own.read_user(fact.asked[answer["type"]]))
            held = {row.position for row in own.snapshot().rows}
            own.undo()

            shares = [share_held(tokens, fact.told[at].text, held) for at in fact.needed]
            assert answer["found"] == pytest.approx(np.mean([each >= 0.5 for each in shares]))
            assert answer["last"] == (shares[-1] >= 0.5 if len(shares) > 1 else None)
            assert answer["rows"] == len(held)
            assert answer["recalled"] == done[0].recalled
            assert answer["reply"] == done[1].text
            if len(shares) == 1:
                told = fact.told[fact.needed[0]]
                assert answer["told"] == pytest.approx(shares[0])
                assert answer["held"] == share_held(tokens, told.text, held, told.value)
            assert (answer["other"] is None) == (len(fact.told) == len(fact.needed))
        for text, count in zip(few, record["unrelated"], strict=True):
            list(own.read_user(text))
            assert count == len(own.recall.scores)
            own.undo()


def test_a_table_for_each_type_has_means_and_paired_differences(talk: Path) -> None:
    def record(told: str, kinds: tuple[str, ...], right: float) -> dict[str, Any]:
        some = {"said": None, "held": 1, "told": 1, "found": right, "last": None, "other": None}
        some |= {"rows": 90, "recalled": 8, "nats": 2.0, "seconds": 0.004, "right": right}
        answers = [{**some, "type": kind} for kind in kinds for _ in range(2)]
        return {"told": told, "length": 260, "answers": answers, "tokens": 250} | {
            "nats": 3 + right,
            "recalled": 5.0,
            "unrelated": [0, 0, 6, 10 * right],
        }

    settings = (Profile(budget=96), Profile(budget=512))
    one = FactsInDialogue(
        settings,
        data=str(talk),
        lengths=(260,),
        facts=2,
        limit=2,
        questions=("paraphrase", "listed"),
    )
    found = {
        "0/0/facts 260 0": record("facts", ("paraphrase",), 1.0),
        "0/0/lists 260 0": record("lists", ("listed",), 0.5),
        "1/0/facts 260 0": record("facts", ("paraphrase",), 0.25),
        "1/0/lists 260 0": record("lists", ("listed",), 0.5),
    }
    assert list(found) == one.keys()
    *tables, replies, unrelated = one.report(found).tables
    assert [table.name for table in tables] == ["paraphrase, 260 tokens", "listed, 260 tokens"]
    rows = [dict(zip(tables[0].columns, row, strict=True)) for row in tables[0].rows]
    assert [row["n"] for row in rows] == [2, 2]
    assert [getattr(row["right of four"], "value", None) for row in rows] == [1.0, 0.25]
    assert rows[0]["right of four, less row 1"] is None
    assert getattr(rows[1]["right of four, less row 1"], "value", None) == -0.75
    assert getattr(rows[0]["search ms"], "value", None) == 4
    assert getattr(replies.rows[0][3], "value", None) == 0.375
    assert replies.rows[1][3] is None
    assert [getattr(value, "value", value) for value in unrelated.rows[0]][1:] == [8, 0.5, 3.375]
    assert "last found" not in tables[0].columns


def test_what_has_no_effect_and_what_is_unknown_is_refused(talk: Path) -> None:
    for wrong, message in (
        ({"questions": (TOLD,), "half": "a"}, "half a has no effect on the questions told"),
        ({"questions": ("guessed",)}, "there is no questions 'guessed'"),
        ({"questions": ()}, "there is no questions ''"),
        ({"half": "c"}, "there is no half 'c'"),
    ):
        with pytest.raises(SettingError, match=message):
            study(talk, Profile(), **wrong)


def test_a_conversation_under_several_seeds_is_one_conversation(talk: Path) -> None:
    some: dict[str, Any] = {
        "said": None,
        "held": 1,
        "told": 1,
        "found": 1,
        "last": None,
        "other": None,
    }
    some |= {"rows": 90, "recalled": 8, "nats": 2.0, "seconds": 0.004, "type": TOLD}

    def tables(repeats: int) -> tuple[Table, ...]:
        settings = (Profile(policy="sink", budget=512), Profile(policy="random", budget=96))
        asked: dict[str, Any] = {"facts": 1, "limit": 6, "questions": (TOLD,), "lengths": (260,)}
        one = FactsInDialogue(settings, data=str(talk), repeats=repeats, **asked)
        found = dict[str, dict[str, Any]]()
        keys = one.keys()
        for key in keys:
            number = int(key[-1])
            answers = [some | {"right": float(number % 2)}]
            found[key] = {"told": TOLD, "length": 260, "answers": answers, "tokens": 250}
            found[key] |= {"nats": number / (1 + int(key[0])), "recalled": 1.0}
            found[key] |= {"unrelated": [number]}
        return one.report(found).tables

    for once, thrice in zip(tables(1), tables(3), strict=True):
        for row, same in zip(once.rows, thrice.rows, strict=True):
            estimates = [one for one in row if isinstance(one, Estimate)]
            assert estimates == [one for one in same if isinstance(one, Estimate)] != []
