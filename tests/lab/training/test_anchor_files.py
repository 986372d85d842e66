"""Files to train on: which text or conversation each of them is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sirchat.errors import SettingError, TranscriptError
from sirchat.lab.training.anchor_data import FileMessage, load_text

ROUND = [FileMessage("user", "Hi."), FileMessage("assistant", "Hello.")]
MESSAGES = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
SHAREGPT = {
    "conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
}


def read(folder: Path, name: str, text: str) -> list[str | list[FileMessage]]:
    (folder / name).write_text(text, encoding="utf-8")
    return list(load_text(folder / name))


def test_a_file_is_one_text_unless_it_is_a_transcript(tmp_path: Path) -> None:
    text = "It rains.\nUSER: it says here.\n"
    assert read(tmp_path, "a.txt", text) == [text]
    assert read(tmp_path, "b.md", "\n" + text) == ["\n" + text]
    assert read(tmp_path, "c.txt", "USER: Hi.\nASSISTANT: Hello.\n") == [ROUND]
    system = FileMessage("system", "Be kind.")
    assert read(tmp_path, "d", "SYSTEM: Be kind.\nUSER: Hi.\nASSISTANT: Hello.") == [
        [system, *ROUND]
    ]


def test_lines_of_json_are_texts_and_conversations(tmp_path: Path) -> None:
    lines = [
        {"text": "It rains."},
        {"messages": MESSAGES},
        SHAREGPT,
        *MESSAGES,
        {"text": "a\u2028b"},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    assert read(tmp_path, "a.jsonl", text) == ["It rains.", ROUND, ROUND, ROUND, "a\u2028b"]


@pytest.mark.parametrize(
    "line",
    ["{}", "[", "7", '{"messages": [7]}', '{"messages": 7}', '{"text": 7}', '{"role": "user"}'],
)
def test_a_line_that_is_neither_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingError, match="line 2, is neither a text nor a conversation"):
        read(tmp_path, "a.jsonl", '{"text": "It rains."}\n' + line)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="can't be read"):
        list(load_text(tmp_path / "none"))
    with pytest.raises(SettingError, match="not JSON"):
        read(tmp_path, "a.json", "It rains.")
    with pytest.raises(TranscriptError, match=r"b\.json, conversation 2"):
        read(tmp_path, "b.json", json.dumps([SHAREGPT, {"conversations": 7}]))
