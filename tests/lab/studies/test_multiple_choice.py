"""Scores of choices against a plain computation, and the counts of SirLLM's tasks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from chatting import babbler, session, tiny
from command import run
from plain_scores import log_probability
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.engine.types import ContinuationScore
from sirchat.errors import SettingError
from sirchat.lab.studies import generated, sirllm_files
from sirchat.lab.studies.choice import Question, choose, most_likely, named_option
from sirchat.lab.studies.multiple_choice import MultipleChoice
from sirchat.lab.studies.reading import read
from sirchat.lab.studies.run import run_units
from sirchat.text.template import Template

FULL, SINK = Profile(policy="full"), Profile(policy="sink", budget=64)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "items"), [(babbler, 40), (tiny, 10)])
def test_the_chosen_option_is_the_most_likely_one_by_a_plain_computation(model, items) -> None:  # type: ignore[no-untyped-def]
    loaded, rng = model(), Random(7)
    template = Template(loaded.tokenizer)
    chat = session(loaded, policy="full")
    taken = Counter[int]()
    for _ in range(items):
        chat.reset()
        before = generated.question(rng, 5, "")
        read(chat, before.text, before.answer)
        question = generated.question(rng, 5, "")
        ids = [
            *template.opening(before.text)[1].ids,
            *template.assistant(before.answer).ids,
            *template.closing,
            *template.user(question.text).ids,
        ]
        replies = [template.assistant(reply).ids for reply in question.replies]
        plain = [sum(log_probability(loaded, ids, reply)) for reply in replies]
        option = choose(chat, question, "paper")
        assert option == plain.index(max(plain))
        taken[option] += 1
    assert len(taken) > 2  # not always the first


def test_an_empty_reply_is_scored_by_how_likely_the_reply_ends_at_once() -> None:
    """SirLLM's DailyDialog has options without any text."""
    chat = session(tiny(), policy="full")
    for _ in chat.read_user("What is the opposite of hot?"):
        pass
    blank, said = chat.score_continuations(["", "The answer is cold (B)."])
    assert list(blank.ids) == chat.template.closing
    assert said.log_probabilities[0] > -0.1 > blank.log_probabilities[0]


def scored(*log_probabilities: float, ids: str, greedy: bool = False) -> ContinuationScore:
    return ContinuationScore(tuple(map(ord, ids)), log_probabilities, greedy)


def test_the_released_code_chooses_the_greedy_reply_or_the_best_first_token() -> None:
    one = scored(-1.0, -5.0, ids="xa")
    two = scored(-1.0, -4.0, -9.0, ids="xbc")
    assert most_likely([one, two], "paper") == 0
    assert most_likely([one, two], "released") == 1
    said = scored(-1.0, -5.0, ids="xa", greedy=True)
    assert most_likely([two, said], "released") == 1


@pytest.mark.parametrize(
    ("said", "option"),
    [("The answer is cold (B).", 1), ("The answer is cold (B)", 1), ("cold", None), ("", None)],
)
def test_a_generated_reply_names_an_option(said: str, option: int | None) -> None:
    replies = ("The answer is cool (A).", "The answer is cold (B).")
    assert named_option(said, replies) == option


def test_the_conversation_continues_with_the_chosen_option() -> None:
    chat = session(tiny(), policy="full")
    question = Question("Choose one.", ("I choose rock.", "I choose paper."), 1, "")
    option = choose(chat, question, "paper")
    assert option is not None
    assert chat.turns[-1].text == question.replies[option]
    assert choose(chat, Question("Hello.", ("OK",), 0, ""), "paper") == 0
    assert chat.turns[-1].text == "OK"


def test_generated_conversations_ask_for_what_was_to_be_bought() -> None:
    for number in range(20):
        request, *between, asked = generated.grocery(0, number)
        assert len(between) == 20
        assert asked.answer == f"You asked me to buy {request.text.partition('[')[2][:-2]}."
        assert len(set(asked.replies)) == 4
        assert generated.grocery(0, number) == [request, *between, asked]
        assert generated.grocery(1, number) != [request, *between, asked]
        for question in between:
            letter = question.answer[-3]
            option = question.answer.removeprefix("The answer is ")[:-5]
            assert f"{option} ({letter})" in question.text
    lengths = {len(generated.dailydialog(0, number)) for number in range(60)}
    assert min(lengths) == 4
    assert max(lengths) > 11


def test_released_files_are_read_whole(data: Path) -> None:
    talks = sirllm_files.dailydialog(data / "dailydialog.jsonl")
    assert (len(talks), sum(map(len, talks))) == (200, 735)
    assert talks[0][0].text.splitlines()[0] == "Hey man , you wanna buy some weed ?"
    assert talks[0][0].text.splitlines()[-1] == "(D) Some what ?"
    assert talks[0][0].answer == "D"
    bought = sirllm_files.grocery(data / "grocery_keys.jsonl")
    assert (len(bought), sum(map(len, bought))) == (150, 3300)
    for request, *between, asked in bought:
        assert request.replies == ("OK",)
        assert {one.group for one in between} == {sirllm_files.COMMONSENSE}
        assert asked.group == sirllm_files.GROCERY
        wanted = request.text.partition("[")[2].partition("]")[0]
        assert f"({asked.answer}) {wanted}" in asked.text
    assert len(sirllm_files.moves(data / "rock_paper_scissors_dominant_paper.jsonl")) == 1_000


@pytest.mark.parametrize("text", ["{}", "nothing", '{"question": {}}', "[1]"])
def test_a_file_of_something_else_is_refused_by_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "dailydialog.jsonl").write_text(text + "\n")
    with pytest.raises(SettingError, match="line 1, is not a question"):
        MultipleChoice((FULL,), 2, task="dailydialog", data=str(tmp_path))
    with pytest.raises(SettingError, match="can't be read"):
        MultipleChoice((FULL,), 2, task="grocery", data=str(tmp_path / "none.jsonl"))


@pytest.mark.slow
def test_tiny_keeps_its_knowledge_and_evicts_what_the_policy_evicts() -> None:
    study = MultipleChoice((FULL, Profile(policy="sink", budget=256)), 2, task="grocery")
    found = run_units(study, tiny())
    full, sink = study.findings(found)
    assert full.by_seed[0] != sink.by_seed[0]
    for one in (full, sink):
        assert all(all(each["right"]["commonsense"]) for each in one.records)
    assert all(each["right"]["grocery"] == [True] for each in full.records)
    table, _ = study.report(found).tables
    assert table.columns == ("setting", "ACCc", "ACCg", "ACCc - sink 256", "ACCg - sink 256")


@pytest.mark.slow
def test_a_shot_is_a_question_before_with_its_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def note(chat: Session, question: Question, _: str) -> int:
        asked.append([turn.text for turn in chat.turns])
        for _read in (*chat.read_user(question.text), *chat.read_reply(question.answer)):
            pass
        return question.right

    monkeypatch.setattr("sirchat.lab.studies.multiple_choice.choose", note)
    study = MultipleChoice((SINK,), 1, task="grocery", shots=(2,))
    run_units(study, babbler())
    conversation, shots = study.conversations[0], asked[22:]
    assert len(shots) == 21  # what to buy is no question
    for number, turns in enumerate(shots, 1):
        before = conversation[max(0, number - 2) : number]
        assert turns == [text for one in before for text in (one.text, one.answer)]


@pytest.mark.slow
def test_the_commands_print_what_the_paper_does(data: Path, endless: str) -> None:
    few = ("--limit", "1", "--policies", "sink", "--budgets", "128", "--model", endless)
    for task, columns in (("dailydialog", ["right"]), ("grocery", ["ACCc", "ACCg"])):
        done = run("eval", task, *few, "--data", str(data), "--json")
        assert done.returncode == 0, done.stderr
        table, published = json.loads(done.stdout)["tables"].values()
        assert table["columns"][1 : 1 + len(columns)] == columns
        assert published["columns"][1:] == columns
        assert not math.isnan(table["rows"][0][1]["value"])
    refused = run("eval", "grocery", "--scoring", "papers")
    assert refused.returncode == 2
    assert "paper?" in refused.stderr
