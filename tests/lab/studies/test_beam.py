"""The study of BEAM: questions, keys of rubrics, sources found, against plain computations."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatting import babbler, session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.beam import Beam, BeamChat, BeamQuestion, ReadChat, beam_chats, keys_of
from sirchat.lab.studies.run import run_units

RULE = "Always name the version when I ask about tools."
TOLD = ["My boat is called Walrus and has 12 berths.", RULE, "We leave the harbour on May 4."]
REPLIES = ["A fine name for a boat.", "I will.", "Then I wish you good weather."]


def question(kind: str, text: str, sources: Any, *rubric: str) -> dict[str, Any]:
    asked = {"type": kind, "question": text, "sources": sources, "rubric": list(rubric)}
    return asked | {"answer": " ".join(rubric)}


def file_of(folder: Path, **changes: Any) -> Path:
    said = [text for pair in zip(TOLD, REPLIES, strict=True) for text in pair]
    roles = ["user", "assistant"] * len(TOLD)
    messages = [
        {"id": n, "role": role, "content": text}
        for n, (role, text) in enumerate(zip(roles, said, strict=True))
    ]
    asked = [
        question("information_extraction", "How many berths has my boat?", [0], "State: 12"),
        question("knowledge_update", "When do we leave?", {"a": [4], "b": {"c": 0}}, "May 4"),
        question("instruction_following", "Which tools are there?", [2], "has versions"),
        question("abstention", "What is my dog called?", None, "no information"),
    ]
    chat = {"chat": 3, "messages": messages, "questions": asked} | changes
    path = folder / "beam.json.xz"
    path.write_bytes(lzma.compress(json.dumps([chat]).encode()))
    return path


def study(path: Path, **options: Any) -> Beam:
    profile = Profile(policy="sink", budget=160, recall="words", compile="off")
    given: dict[str, Any] = {"limit": 9999, "reply_tokens": 4, "counts": (20, 60)} | options
    return Beam((profile,), data=str(path), **given)


def test_chats_and_questions_are_read_with_all_their_sources(tmp_path: Path) -> None:
    (chat,) = beam_chats(file_of(tmp_path))
    assert chat.rounds == tuple(zip(TOLD, REPLIES, strict=True))
    assert [one.sources for one in chat.questions] == [(0,), (0, 4), (2,), ()]


@pytest.mark.parametrize("changes", [{"messages": [{"role": "user"}]}, {"questions": 3}])
def test_another_format_is_refused(tmp_path: Path, changes: Any) -> None:
    with pytest.raises(SettingError, match=r"is not in BEAM's format"):
        study(file_of(tmp_path, **changes))
    with pytest.raises(SettingError, match="chats has 9, the file has 3"):
        study(file_of(tmp_path), chats=(9,))


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("LLM response should state: March 29", {"march", "29"}),
        ("LLM response should mention: 1,200 calls per day", {"1200"}),
        ("LLM response should state: Two columns", {"2"}),
        ("LLM response should state: Uses Flask-Login v0.6.2", {"flask", "login", "0.6.2"}),
        ("LLM response should state: It is lightweight", set()),
    ],
)
def test_the_keys_of_a_rubric_are_its_numbers_dates_and_names(line: str, keys: set[str]) -> None:
    assert keys_of(line) == keys


def test_a_reply_is_right_if_it_has_the_keys_of_all_lines() -> None:
    one = BeamQuestion(0, "temporal_reasoning", "?", "", ("State: 21 days", "from March 29"), ())
    assert one.right("That is 21 days, counted from march 29th.") == 1
    assert one.right("It was 21 days in March.") == 0
    assert one.right("It is 21 days.") == 0
    told = BeamQuestion(0, "summarization", "?", "", ("In March",), ())
    vague = BeamQuestion(0, "knowledge_update", "?", "", ("5 days", "it is slow"), ())
    assert told.right("March") is None
    assert vague.right("5 days") is None


def test_sources_are_found_in_the_cache_by_recall_and_by_pins(tmp_path: Path) -> None:
    made = study(file_of(tmp_path))
    found = run_units(made, babbler())
    (record,) = found.values()
    assert record["fits"]
    by_kind = {one["kind"]: one for one in record["questions"]}
    boat, leave = by_kind["information_extraction"], by_kind["knowledge_update"]
    assert boat["restored"]["60"] == {"all": 1.0, "share": 1.0, "keys": 1.0}
    assert leave["restored"]["60"]["share"] >= 0.5
    rule = by_kind["instruction_following"]["restored"]  # no word of it is in the question
    assert rule["20"] == {"all": 1.0, "share": 1.0, "keys": None}
    assert by_kind["abstention"]["restored"] == {}
    assert boat["right"] == 0
    assert by_kind["abstention"]["right"] is None
    names = [table.name for table in made.report(found).tables]
    assert names == ["Replies", *(f"Sources found: {key}" for key in ("all", "share", "keys"))]


def test_sources_are_counted_by_turns() -> None:
    chat = session(babbler(), policy="sink", budget=160, recall="words")
    told = BeamChat(1, (("The owl is asleep.", "Good."), ("A fox.", "Yes.")), ())
    for user, reply in told.rounds:
        list(chat.read_question(user, next_role="assistant"))
        list(chat.read_reply(reply))
    read = ReadChat(chat, told, 0)
    asked = BeamQuestion(0, "event_ordering", "?", "", (), (0, 3))
    turn = chat.ledger.column("turn")
    assert read.found(asked, np.flatnonzero(turn == 0)[:1]) == {"all": 0.0, "share": 0.5}
    assert read.found(asked, np.flatnonzero((turn == 0) | (turn == 3))) == {"all": 1, "share": 1}
    assert read.found(asked, np.flatnonzero(turn == 2)) == {"all": 0.0, "share": 0.0}


def test_only_what_was_read_is_asked_for(tmp_path: Path) -> None:
    (record,) = run_units(study(file_of(tmp_path), limit=1, reply_tokens=0), babbler()).values()
    assert [one["kind"] for one in record["questions"]] == ["information_extraction", "abstention"]
    assert all(one["reply"] is None for one in record["questions"])
