"""SirLLM's tasks: scores against a plain computation, its files, its tables."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from chatting import babbler, session, tiny
from command import run
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.engine.types import ContinuationScore
from sirchat.errors import SettingError
from sirchat.lab.studies import generated, sirllm_files
from sirchat.lab.studies.choice import Question, choose, most_likely, named_option
from sirchat.lab.studies.multiple_choice import MultipleChoice
from sirchat.lab.studies.reading import read
from sirchat.lab.studies.run import run_units
from sirchat.models.model import LoadedModel
from sirchat.text.template import Template

FULL, SINK = Profile(policy="full"), Profile(policy="sink", budget=64)


FRUIT = {
    "id": "answer_0",
    "question": {
        "stem": "Which fruit is yellow?",
        "choices": [{"label": "A", "text": " a long ripe banana "}, {"label": "B", "text": "tea"}],
    },
    "answerKey": "A",
}
MOVE = {
    "id": "0",
    "question": {
        "stem": "?",
        "choices": [{"label": one[0].upper(), "text": one} for one in ("rock", "paper")],
    },
    "user_choice": "P",
}


@pytest.mark.parametrize(("model", "items"), [(babbler, 8), (tiny, 6)])
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
            *template.assistant_turn(before.answer).ids,
            *template.closing,
            *template.user_turn(question.text).ids,
        ]
        replies = [template.assistant_turn(reply).ids for reply in question.replies]
        plain = [sum(_log_probability(loaded, ids, reply)) for reply in replies]
        option = choose(chat, question, "paper")
        assert option == plain.index(max(plain))
        assert chat.turns[-1].text == question.replies[option]
        taken[option] += 1
    assert len(taken) > 2  # not always the first


def test_an_empty_reply_is_scored_by_how_likely_the_reply_ends_at_once() -> None:
    """SirLLM's DailyDialog has options without any text."""
    chat = session(tiny(), policy="full")
    list(chat.read_user("What is the opposite of hot?"))
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


@pytest.mark.parametrize(("said", "option"), [("B", 1), ("A) tea", 0), ("All of them", None)])
def test_a_letter_that_only_begins_a_word_is_no_option(said: str, option: int | None) -> None:
    assert named_option(said, ("A", "B")) == option


def test_by_text_the_options_are_not_listed_and_their_texts_are_the_replies(tmp_path: Path) -> None:
    file = str(written(tmp_path / "keys.jsonl", FRUIT))
    study = MultipleChoice((SINK,), 1, task="grocery", data=file, scoring="text")
    ((question,),) = study.conversations
    assert question.text == "Which fruit is yellow?"
    assert question.replies == ("a long ripe banana", "tea")


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
        for one in (*between, asked):
            assert f"({one.answer}) {one.unlisted.answer}" in one.text
            assert one.text.startswith(f"{one.unlisted.text}\n")
    assert len(sirllm_files.moves(data / "rock_paper_scissors_dominant_paper.jsonl")) == 1_000


@pytest.mark.parametrize("text", ["{}", "nothing", '{"question": {}}', "[1]"])
def test_a_file_of_something_else_is_refused_by_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "dailydialog.jsonl").write_text(text + "\n")
    with pytest.raises(SettingError, match="line 1, is not a question"):
        MultipleChoice((FULL,), 2, task="dailydialog", data=str(tmp_path))
    with pytest.raises(SettingError, match="can't be read"):
        MultipleChoice((FULL,), 2, task="grocery", data=str(tmp_path / "none.jsonl"))


def test_a_shot_is_a_question_before_with_its_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    first_six = generated.grocery(0, 0)[:6]

    def note(chat: Session, question: Question, _: str) -> int:
        asked.append([turn.text for turn in chat.turns])
        for _read in (*chat.read_user(question.text), *chat.read_reply(question.answer)):
            pass
        return question.right

    monkeypatch.setattr("sirchat.lab.studies.multiple_choice.choose", note)
    study = MultipleChoice((SINK,), 1, task="grocery", shots=(2,))
    vars(study)["conversations"] = [first_six]
    run_units(study, babbler())
    conversation, shots = study.conversations[0], asked[6:]
    assert len(shots) == 5  # what to buy is no question
    for number, turns in enumerate(shots, 1):
        before = conversation[max(0, number - 2) : number]
        assert turns == [text for one in before for text in (one.text, one.answer)]


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


def written(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("grocery_keys/keys.jsonl", "data/grocery_keys/keys.jsonl", "grocery_keys.jsonl"),
        *("keys.jsonl", "dailydialog/dailydialog.jsonl", "data/dailydialog/dailydialog.jsonl"),
        *("dailydialog.jsonl", "rock_paper_scissors_dominant_paper.jsonl"),
        "rock_paper_scissors/rock_paper_scissors_dominant_paper.jsonl",
        "data/rock_paper_scissors/rock_paper_scissors_dominant_paper.jsonl",
    ],
)
def test_a_file_is_found_under_each_of_its_names(name: str, tmp_path: Path) -> None:
    file = written(tmp_path / name, *([MOVE, MOVE] if "rock" in name else [FRUIT]))
    task = "dailydialog" if "dialog" in name else "grocery"
    for data in map(str, (tmp_path, file)):
        if "rock" in name:
            assert sirllm_files.moves_of_players(data) == {"paper": ["paper", "paper"]}
            continue
        ((question,),) = MultipleChoice((FULL,), 5, task=task, data=data).conversations
        assert question.text == "Which fruit is yellow?\n(A) a long ripe banana\n(B) tea"


def test_a_missing_file_is_refused_in_one_line_with_what_was_looked_for(tmp_path: Path) -> None:
    for task, name in (
        ("grocery", "grocery_keys/keys.jsonl, grocery_keys.jsonl or keys.jsonl"),
        ("dailydialog", "dailydialog/dailydialog.jsonl or dailydialog.jsonl"),
        ("rock-paper-scissors", "rock_paper_scissors_dominant_scissors.jsonl"),
    ):
        done = run("eval", task, "--data", str(tmp_path))
        assert done.returncode == 2, task
        first, *hint = done.stderr.strip().splitlines()
        assert f"data {str(tmp_path)!r} has no " in first
        assert name in first
        assert len(hint) <= 1
    with pytest.raises(SettingError, match=r"nowhere.jsonl.* can't be read"):
        MultipleChoice((FULL,), 1, task="grocery", data="nowhere.jsonl")


def _log_probability(model: LoadedModel, before: list[int], reply: list[int]) -> list[float]:
    """Of each id of the reply, by one forward pass without a cache."""
    ids = torch.tensor([[*before, *reply]])
    with torch.inference_mode():
        logits = model.module(input_ids=ids, use_cache=False).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    return [float(scores[len(before) + at - 1, token]) for at, token in enumerate(reply)]


@pytest.mark.parametrize(
    "wrong",
    [{"answerKey": "C"}, {"id": 1}, {"question": {}}, {"question": {"stem": "?", "choices": "AB"}}],
)
def test_a_line_in_another_format_is_named(wrong: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text(json.dumps(FRUIT) + "\n" + json.dumps(FRUIT | wrong) + "\n", "utf-8")
    with pytest.raises(SettingError, match="line 2, is not a question with answerKey"):
        sirllm_files.grocery(file)
