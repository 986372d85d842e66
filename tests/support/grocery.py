"""SirLLM's grocery sessions as a transcript: shopping list, 20 questions, question for the list."""

from __future__ import annotations

import json
from pathlib import Path

ROUNDS_PER_SESSION = 22


def grocery_turns(data: Path, sessions: int) -> list[dict[str, str]]:
    """`{"role", "content"}` objects of the first sessions, one after another."""
    lines = (data / "grocery_keys.jsonl").read_text(encoding="utf-8").splitlines()
    turns = []
    for line in lines[: sessions * ROUNDS_PER_SESSION]:
        item = json.loads(line)
        choices = item["question"]["choices"]
        answer = next(c["text"] for c in choices if c["label"] == item["answerKey"])
        asked = item["question"]["stem"].strip()
        if len(choices) > 1:
            asked += " " + " ".join(f"({c['label']}) {c['text']}" for c in choices)
            answer = f"({item['answerKey']}) {answer}"
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return turns
