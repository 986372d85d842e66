"""Made-up conversations over weeks, as LoCoMo's file gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Said = tuple[str, str, str]  # id, speaker and text of a turn

_FIRST: list[Said] = [
    ("D1:1", "Ana", "Hello Ben! I painted the garden shed green."),
    ("D1:2", "Ben", "Nice. My canary is called Fennel, by the way."),
    ("D1:3", "Ana", "What a name! I will bring seeds on Sunday."),
]
_SECOND: list[Said] = [
    ("D2:1", "Ben", "The seeds were a success, Fennel sang for an hour."),
    ("D2:2", "Ana", "Glad to hear it."),
    ("D2:3", "Ana", "I am off to Lisbon tomorrow."),
    ("D2:4", "Ben", "Send me a postcard, please."),
]

QUESTIONS: list[dict[str, Any]] = [
    {"question": "What is Ben's canary called?", "answer": "Fennel", "category": 4}
    | {"evidence": ["D1:2"]},
    {"question": "When did Ana go to Lisbon?", "answer": 2021, "category": 2}
    | {"evidence": ["D2:3; D2:4"]},
    {"question": "What did Ana bring, and what did she paint?", "answer": "seeds, a shed"}
    | {"category": 1, "evidence": ["D1:1", "D:1:03"]},
    {"question": "Does Ben like birds?", "answer": "Likely yes; he has one", "category": 3}
    | {"evidence": ["D9:9"]},
    {"question": "What is Ana's canary called?", "adversarial_answer": "Fennel", "category": 5}
    | {"evidence": ["D1:2"]},
]


def locomo_entry(name: str = "conv-1", more: int = 0) -> dict[str, Any]:
    """A conversation as in LoCoMo's file; `more` sessions of small talk follow its two."""
    spoken = [_FIRST, _SECOND]
    for number in range(3, 3 + more):
        lines = [f"Day {number} was a quiet one.", f"So was mine, number {number}."]
        both = zip(("Ana", "Ben"), lines, strict=True)
        spoken.append([(f"D{number}:{n}", *one) for n, one in enumerate(both, 1)])
    said: dict[str, Any] = {"speaker_a": "Ana", "speaker_b": "Ben"}
    for number, turns in enumerate(spoken, 1):
        said[f"session_{number}_date_time"] = f"{number}:15 pm on 3 May, 2021"
        said[f"session_{number}"] = [
            {"speaker": who, "dia_id": one, "text": text} for one, who, text in turns
        ]
    said["session_1"][0] |= {"blip_caption": "a photo of a green shed", "img_url": ["x"]}
    return {"sample_id": name, "conversation": said, "qa": QUESTIONS}


def locomo_file(folder: Path, count: int = 2, more: int = 0) -> Path:
    """A file of so many conversations."""
    path = folder / "locomo.json"
    path.write_text(json.dumps([locomo_entry(f"conv-{n}", more) for n in range(count)]))
    return path
