"""Replies that go round in a loop, and real texts, which do not, whatever they repeat."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirchat.text.loops import LoopCheck

ROOT = Path(__file__).parents[2]


def found_after(text: str, step: int = 4) -> int | None:
    """The number of characters after which a loop is found in a text that comes in pieces."""
    check = LoopCheck()
    for start in range(0, len(text), step):
        check.push(text[start : start + step])
        if check.found:
            return start + step
    return None


@pytest.mark.parametrize(
    ("begin", "passage", "times"),
    [
        ("Tell you of my cat? ", "He's a cat. ", 7),
        ("", "I'm not a financial advisor, nor a planner. ", 4),
        ("I want:\n", "- 25g of curry powder\n", 5),
        ("L'Étoile, ", "la Marseillaise, la femme au martyre, ", 4),
        ("Groceries: ", "🍎🍌", 50),
        ("", "猫が好きです。", 6),
        ("", " ".join(f"{n} friends dance with guitar {n + 1}." for n in range(11)) + "\n", 3),
    ],
)
def test_a_loop_is_found_soon(begin: str, passage: str, times: int) -> None:
    after = found_after(begin + passage * 100)
    assert after is not None
    assert len(begin + passage) * 1.2 < after <= len(begin + passage * times)


def test_the_numbers_of_a_list_hide_no_loop() -> None:
    items = "".join(f"{n}. Don't watch TV before you go to bed.\n" for n in range(1, 99))
    assert found_after(items) is not None


@pytest.mark.parametrize(
    "text",
    [
        "| a | b |\n|---|---|\n" + "| 0 | none |\n" * 90,
        "```python\n" + "total += step(1)\n" * 90 + "```\nThat is all.",
        "def f():\n" + "    total += step(1)\n" * 90,
        "-" * 200 + "\n" + "=" * 200 + "\n" + "0" * 300,
        "Here we go round the mulberry bush, the mulberry bush, the mulberry bush,\nso early",
        "We wish you a merry Christmas,\n" * 3 + "And a happy New Year.",
        "Row, row, row your boat\nGently down the stream\nMerrily, merrily, merrily, merrily",
        "To the swinging and the ringing\nOf the bells, bells, bells-\n"
        "Of the bells, bells, bells, bells,\nBells, bells, bells-",
        "Line 0: 4766\nLine 1: 450218\nLine 2: 588518\nLine 3: 2949\nLine 4: 519698\nLine 5: 270",
        "\n" * 500,
    ],
)
def test_what_may_repeat_is_no_loop(text: str) -> None:
    assert found_after(text) is None


def _given_texts(folder: Path) -> Iterator[str]:
    dialogues = dict[str, list[str]]()
    for line in (folder / "dailydialog.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        dialogues.setdefault(row["id"].split("_")[0], []).append(row["question"]["stem"])
    yield from map("\n".join, dialogues.values())
    for sample in json.loads((folder / "locomo_dialogues_0_3.json").read_text(encoding="utf-8")):
        for name, turns in sample["conversation"].items():
            if isinstance(turns, list):
                yield name + "\n".join(f"{turn['speaker']}: {turn['text']}" for turn in turns)
    for name in ("rag_mt_bench.jsonl", "rag_questions.jsonl"):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield from (*row["turns"], *(row.get("reference") or ()))
    for name in ("rag_A_test_story.jsonl", "rag_A_test_story_2.jsonl"):
        yield (folder / name).read_text(encoding="utf-8")


def _own_texts() -> Iterator[str]:
    count = int(os.environ.get("SIRCHAT_ATTACK", 40))
    code = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:count]
    for file in [*code, *sorted(ROOT.glob("**/README.md"))[:count]]:
        yield file.read_text(encoding="utf-8", errors="replace")[:20_000]


def test_no_code_no_document_and_no_given_text_has_a_loop() -> None:
    texts = list(_own_texts())
    if "SIRCHAT_DATA" in os.environ:
        texts += _given_texts(Path(os.environ["SIRCHAT_DATA"]))
        assert len(texts) >= 500
    assert [text[:80] for text in texts if found_after(text, 8) is not None] == []
