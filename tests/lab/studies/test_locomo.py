"""The study of LoCoMo: answers, F1, evidence held and restored, against plain computations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatting import babbler, session, tiny
from command import run
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.by_question import per_question
from sirchat.lab.studies.locomo import (
    NOT_MENTIONED,
    Locomo,
    ReadTalk,
    f1,
    held,
    multi_answer_f1,
    nats,
    nats_a_token,
    question_and_options,
    reply_score,
    says_not_mentioned,
    stems,
    token_f1,
)
from sirchat.lab.studies.long_talk import LongTalk, TalkQuestion, read_talk, rounds_of
from sirchat.lab.studies.report import Estimate, Record
from sirchat.lab.studies.run import run_units
from sirchat.lab.studies.study import Findings
from sirchat.models.model import LoadedModel
from sirchat.text.template import Template
from weeks_of_talk import locomo_file

pytest.importorskip("snowballstemmer")

FULL, SINK = Profile(policy="full"), Profile(policy="sink", budget=96)


def study(folder: Path, *settings: Profile, more: int = 6, **options: Any) -> Locomo:
    options = {"limit": 99, "reply_tokens": 4} | options
    return Locomo(settings or (SINK,), data=str(locomo_file(folder, 2, more)), **options)


def ids_before(model: LoadedModel, talk: LongTalk, question: TalkQuestion) -> list[int]:
    """All ids that the model has read when the question is asked."""
    template, ids = Template(model.tokenizer), list[int]()
    for user, reply in rounds_of(talk):
        turn = template.user_turn(user.text) if ids else template.opening(user.text)[1]
        ids += [*turn.ids, *template.assistant_turn(reply.text).ids, *template.closing]
    return ids + template.user_turn(question_and_options(question)[0]).ids


def test_nats_are_those_of_one_forward_pass_under_full(tmp_path: Path) -> None:
    one = study(tmp_path, FULL, more=1)
    (found, _) = run_units(one, tiny()).values()
    assert found["fits"]
    for question, record in zip(one.talks[0].questions[:4], found["questions"], strict=False):
        before = ids_before(tiny(), one.talks[0], question)
        answer = Template(tiny().tokenizer).assistant_turn(question.answer.split(";")[0]).ids
        with torch.inference_mode():
            logits = tiny().module(torch.tensor([[*before, *answer]])).logits[0].double()
        scores = torch.log_softmax(logits, -1)[len(before) - 1 : -1]
        expected = -float(scores[torch.arange(len(answer)), torch.tensor(answer)].sum())
        assert record["nats"] == pytest.approx(expected, rel=1e-3)
        assert record["answer_tokens"] == len(answer)


def test_a_reply_is_the_greedy_one_of_at_most_so_many_tokens(tmp_path: Path) -> None:
    one = study(tmp_path, FULL, more=1, reply_tokens=6)
    (found, _) = run_units(one, babbler()).values()
    question, ids = one.talks[0].questions[0], list[int]()
    before = ids_before(babbler(), one.talks[0], question)
    with torch.inference_mode():
        for _ in range(6):
            logits = babbler().module(torch.tensor([[*before, *ids]])).logits[0, -1]
            ids.append(int(logits.argmax()))
    assert found["questions"][0]["said"] == babbler().tokenizer.decode(ids).strip()


def test_held_is_the_share_of_evidence_tokens_left_when_the_question_has_been_read(
    tmp_path: Path,
) -> None:
    """Under `window` the last tokens are held, so the position of the evidence decides."""
    one = study(
        tmp_path, Profile(policy="window", budget=128), more=0, reply_tokens=0, conversations=(0,)
    )
    units = run_units(one, tiny())
    names = [table.name for table in one.report(units).tables]
    assert names == ["Answers", "nats a token by category", "evidence held by category"]
    (found,) = units.values()
    talk, chat = one.talks[0], session(tiny(), policy="window", budget=128)
    for question, record in zip(talk.questions, found["questions"], strict=True):
        chat.reset()
        positions = read_talk(chat, talk)
        list(chat.read_user(question_and_options(question)[0]))
        wanted = [at for name in question.evidence for at in positions[name].tolist()]
        if question.category == 5:
            continue  # the order of its options is drawn
        still = sum(at >= chat.seen - chat.resident for at in wanted)
        assert record["held"] == (pytest.approx(still / len(wanted)) if wanted else None)
    assert {record["held"] == 0 for record in found["questions"][:3]} == {True, False}


def test_what_comes_back_is_what_a_session_with_recall_would_recall(tmp_path: Path) -> None:
    one = study(tmp_path, conversations=(0,), reply_tokens=0, retrievers=("mips",), counts=(8, 40))
    (found,) = run_units(one, tiny()).values()
    talk = one.talks[0]
    for question, record in zip(talk.questions[:2], found["questions"], strict=False):
        chat = session(tiny(), policy="sink", budget=96)
        positions = read_talk(chat, talk)
        before = set(chat.engine.save().held.tolist())
        chat.switch("eval", budget=96 + 40, recall="mips", recall_n=40)
        list(chat.read_user(question_and_options(question)[0]))
        ranked = sorted(chat.recall.scores, key=lambda at: (-chat.recall.scores[at], -at))
        turns = [set(positions[name].tolist()) - before for name in question.evidence]
        turns = [each for each in turns if each]
        missing = set[int]().union(*turns)
        for n in (8, 40):
            back = set(ranked[:n])
            halves = [len(each & back) >= len(each) / 2 for each in turns]
            assert record["back"]["mips"][str(n)] == {
                "share": pytest.approx(len(missing & back) / len(missing)),
                "any": any(halves),
                "all": all(halves),
            }


def test_passages_that_come_back_are_those_that_a_session_finds_with_so_much_room(
    tmp_path: Path,
) -> None:
    one = study(tmp_path, conversations=(0,), retrievers=("words",), counts=(12, 40))
    talk, chat = one.talks[0], session(tiny(), policy="sink", budget=96)
    read_before = ReadTalk(chat, talk, read_talk(chat, talk))
    back = read_before.measure_restored_evidence(talk.questions, ("words",), (12, 40))
    assert chat.profile.recall == "off"
    held_before, shares = chat.ledger.held_positions, set[float]()
    for question in talk.questions[:3]:
        missing = [np.setdiff1d(each, held_before) for each in read_before.evidence(question)]
        for n in (12, 40):
            chat.switch("eval", budget=168, recall="words", recall_n=n)
            list(chat.read_user(question_and_options(question)[0]))
            found = chat.recall.found
            assert found is not None
            assert len(found.positions) <= n
            share = np.isin(np.concatenate(missing), found.positions).mean()
            assert back[question.number]["words"][str(n)]["share"] == pytest.approx(share)
            shares.add(float(share))
            chat.undo()
            chat.switch("eval", budget=96, recall="off")
    assert max(shares) > 0.5 > min(shares)


def question(number: int, category: int = 4, **values: Any) -> Record:
    """The record of a question whose values are made up."""
    found = {"nats": 6.0, "answer_tokens": 3, "f1": 0.5, "held": 0.25, "abstains": None}
    return {"number": number, "category": category, "back": {}} | found | values


def conversation(*questions: Record) -> Record:
    return {"fits": True, "tokens": 100, "questions": list(questions)}


def test_adversarial_questions_count_only_in_their_own_column() -> None:
    record = conversation(
        question(0), question(1, 5, nats=None, answer_tokens=None, f1=None, abstains=1.0, held=1.0)
    )
    findings = Findings("sink", [[record]])
    for measured, value in ((nats, 6.0), (nats_a_token, 2.0), (f1, 0.5), (held, 0.25)):
        assert per_question(findings, measured) == {(0, 0): value}


def test_differences_are_those_of_the_same_questions_averaged_over_seeds(tmp_path: Path) -> None:
    random = Profile(policy="random")
    one = study(tmp_path, Profile(policy="window"), Profile(policy="sink"), random, repeats=2)

    def records(*shifts: float) -> list[Record]:
        hard = np.array([3.0, 9.0, 30.0])
        return [
            conversation(*(question(n, nats=x) for n, x in enumerate((hard + by).tolist())))
            for by in shifts
        ]

    values = [*records(0, 0), *records(3, 3), *records(3, 6), *records(9, 12)]
    tables = one.report(dict(zip(one.keys(), values, strict=True))).tables
    (differences,) = (table for table in tables if table.name == "Differences of nats a token")
    assert differences.columns == ("setting", "less window 1024")
    sink, drawn = differences.rows
    # three tokens an answer: 3, and (3 + 6) / 2 and (9 + 12) / 2 more nats
    assert _values([sink[1], drawn[1]]) == [1.0, 2.5]


def test_restored_evidence_is_counted_by_category(tmp_path: Path) -> None:
    def back(category: int, share: float) -> Record:
        restored = {"share": share, "any": 1.0, "all": 0.0}
        return question(category, category, back={"cosine": {"20": restored}})

    one = study(tmp_path, retrievers=("cosine",), counts=(20,), conversations=(0,))
    (key,) = one.keys()
    records = conversation(back(1, 0.25), back(3, 1.0), question(9, 4))
    *_, whole, table = one.report({key: records}).tables
    assert table.columns[1:] == (
        "multi-hop (1)",
        "temporal (0)",
        "open-domain (1)",
        "single-hop (0)",
    )
    (row,) = table.rows
    assert _values([row[1], row[3]]) == [0.25, 1.0]
    assert _values(whole.rows[0][1:2]) == [0.625]


def _values(cells: Sequence[object]) -> list[float]:
    assert all(isinstance(one, Estimate) for one in cells)
    return [one.value for one in cells if isinstance(one, Estimate)]


@pytest.mark.parametrize(
    ("options", "blamed"),
    [
        ({"conversations": (2,)}, "conversations is 2"),
        ({"retrievers": ("nonsense",)}, "recall"),
        ({"retrievers": ("mips",), "counts": (93,)}, "counts is"),
        ({"retrievers": ("mips",), "counts": ()}, "counts is"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], blamed: str) -> None:
    with pytest.raises(SettingError, match=blamed):
        study(tmp_path, **options)


def test_recall_is_measured_where_it_is_on(tmp_path: Path) -> None:
    options = ("--policies", "sink", "--budgets", "64", "--limit", "2", "--model", "tiny")
    more = ("--reply-tokens", "0", "--recall", "words", "--recall-n", "8", "--counts", "4,8")
    result = run("eval", "locomo", "--data", str(locomo_file(tmp_path, 1)), *options, *more)
    assert result.returncode == 0, result.stderr
    assert "words" in result.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cats AND a dog.", ["cat", "dog"]),
        ("Painting, painted, paints!", ["paint", "paint", "paint"]),
        ("1,000 miles", ["1000", "mile"]),
        ("self-care", ["selfcar"]),
        ("another theory", ["anoth", "theori"]),
        ("as it is", ["as", "it", "is"]),
        ("", []),
    ],
)
def test_words_are_compared_in_lower_case_stemmed_without_articles_and_punctuation(
    text: str, words: list[str]
) -> None:
    assert stems(text) == words


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("green shed", "green shed", 1),
        ("green shed in town", "green shed", 2 / 3),  # precision 1/2, recall 1
        ("red red red", "red red green", 2 / 3),  # two of three in both
        ("blue", "red", 0),
        ("", "red", 0),
        ("red", "", 0),
        ("7 may 2021", "8 may 2021", 2 / 3),
    ],
)
def test_f1_is_that_of_the_words_counted_as_often_as_they_occur(
    reply: str, answer: str, score: float
) -> None:
    assert token_f1(reply, answer) == pytest.approx(score)


def test_each_of_several_answers_is_scored_by_the_part_of_the_reply_that_fits_it_best() -> None:
    # seeds: 1; green shed: 2 * (1 * 1/2) / (1 + 1/2); tea: 0
    assert multi_answer_f1("a shed, seeds", "seeds, green shed, tea") == pytest.approx(
        (1 + 2 / 3 + 0) / 3
    )
    assert token_f1("a shed, seeds", "seeds, green shed, tea") != pytest.approx(5 / 9)


@pytest.mark.parametrize(
    ("category", "answer", "score"),
    [
        (1, "tea, milk", 0.5),  # tea: 1, milk: 0
        (4, "tea, milk", 2 / 3),  # one word, which is one of two
        (3, "tea; since she said so", 1.0),
        (2, "tea; since she said so", 1 / 3),  # one word, which is one of five
    ],
)
def test_the_category_decides_what_of_the_answer_counts(
    category: int, answer: str, score: float
) -> None:
    question = TalkQuestion(0, "What?", answer, category, ())
    assert reply_score(question, "Tea.") == pytest.approx(score)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("(a) Not mentioned in the conversation", True),
        ("There is No Information Available.", True),
        ("Fennel", False),
        ("a", True),
        ("(A)", True),
        ("b", False),
        ("(b)", False),
        ("yes", False),
        ("", False),
    ],
)
def test_an_adversarial_question_is_right_if_nothing_was_mentioned(reply: str, right: bool) -> None:
    assert says_not_mentioned(reply, (NOT_MENTIONED, "Fennel")) is right
    if reply in ("a", "b"):
        assert says_not_mentioned(reply, ("Fennel", NOT_MENTIONED)) is not right


def test_an_empty_reply_to_an_adversarial_question_counts_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadTalk, "_without_name", lambda self, reply: "")
    (found, *_) = run_units(study(tmp_path, FULL, more=1, reply_tokens=1), tiny()).values()
    abstains = {one["abstains"] for one in found["questions"] if one["category"] == 5}
    assert abstains == {0.0}
