"""Reads LoCoMo's file, and turns a conversation into rounds of a chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatting import session, tiny
from sirchat.errors import SettingError
from sirchat.lab.studies.long_talk import LongTalk, long_talks, read_talk, rounds_of
from weeks_of_talk import locomo_entry, locomo_file


def talk(folder: Path, more: int = 0) -> LongTalk:
    return long_talks(locomo_file(folder, 1, more))[0]


def test_a_file_of_locomo(tmp_path: Path) -> None:
    one, other = long_talks(locomo_file(tmp_path, 2))
    assert (one.name, other.name) == ("conv-0", "conv-1")
    assert one.speakers == ("Ana", "Ben")
    assert [len(each.turns) for each in one.sessions] == [3, 4]
    assert one.sessions[0].date == "1:15 pm on 3 May, 2021"
    first = one.sessions[0].turns[0]
    assert (first.id, first.speaker) == ("D1:1", "Ana")
    assert (
        first.text == "Hello Ben! I painted the garden shed green. (shared a photo of a green shed)"
    )
    assert [each.answer for each in one.questions] == [
        "Fennel",
        "2021",
        "seeds, a shed",
        "Likely yes; he has one",
        "",
    ]
    assert one.questions[4].adversarial == "Fennel"


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["D1:2"], ["D1:2"]),
        (["D2:3; D2:1", "D2:3"], ["D2:1", "D2:3"]),
        (["D:1:03", "D2:4."], ["D1:3", "D2:4"]),
        (["D2:1-D2:3"], ["D2:1", "D2:2", "D2:3"]),
        (["D1:1-D1:2;D2:3-D2:4"], ["D1:1", "D1:2", "D2:3", "D2:4"]),
        (["D1:2-D2:1"], ["D1:2", "D2:1"]),
        (["D9:9", "D", "D58", ""], []),
    ],
)
def test_evidence_is_found_however_carelessly_it_is_spelled(
    tmp_path: Path, given: list[str], ids: list[str]
) -> None:
    entry = locomo_entry()
    entry["qa"] = [entry["qa"][0] | {"evidence": given}]
    (tmp_path / "one.json").write_text(json.dumps([entry]))
    assert list(long_talks(tmp_path / "one.json")[0].questions[0].evidence) == ids


@pytest.mark.parametrize("content", ["[]", "{}", "no json", "[1]", '[{"qa": []}]'])
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "other.json").write_text(content)
    for path in (tmp_path / "other.json", tmp_path / "none.json", tmp_path / "missing"):
        with pytest.raises(SettingError) as caught:
            long_talks(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_session_is_a_whole_number_of_rounds_and_begins_with_its_date(tmp_path: Path) -> None:
    assert [(one.user.text, one.reply.text) for one in rounds_of(talk(tmp_path))] == [
        (
            "(1:15 pm on 3 May, 2021)\nAna: Hello Ben! I painted the garden shed green. (shared a "
            "photo of a green shed)",
            "Ben: Nice. My canary is called Fennel, by the way.",
        ),
        ("Ana: What a name! I will bring seeds on Sunday.", ""),
        ("(2:15 pm on 3 May, 2021)", "Ben: The seeds were a success, Fennel sang for an hour."),
        (
            "Ana: Glad to hear it.\nAna: I am off to Lisbon tomorrow.",
            "Ben: Send me a postcard, please.",
        ),
    ]


def test_the_tokens_of_a_message_spell_its_text(tmp_path: Path) -> None:
    one, chat = talk(tmp_path, more=4), session(tiny(), budget=64)
    positions = read_talk(chat, one)
    said = {turn.id: turn.text for each in one.sessions for turn in each.turns}
    assert positions.keys() == said.keys()
    for name, text in said.items():
        spelled = "".join(row.text for row in chat.tokens(positions[name].tolist()))
        assert spelled.strip() == text


def test_the_given_file_of_locomo(data: Path) -> None:
    talks = long_talks(data / "locomo_dialogues_0_3.json")
    assert [one.name for one in talks] == ["conv-26", "conv-30", "conv-41", "conv-42"]
    assert [len(one.questions) for one in talks] == [199, 105, 193, 260]
    assert [len(one.sessions) for one in talks] == [19, 19, 32, 29]
    assert sum(len(each.turns) for one in talks for each in one.sessions) == 2080
    assert sum(not each.evidence for one in talks for each in one.questions) == 2
