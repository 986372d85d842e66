"""The results that the papers print, as tables to compare our own with.

The tables use sirchat's names: SirLLM's StreamLLM is `sink`, and SirLLM itself is `entropy`. A
budget is the paper's cache size, sinks included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sirchat.lab.studies.report import Table, Value

_POLICIES = ("sink", "random", "interval", "entropy")
_SHOTS = ("sink", "1-shot", "2-shot", "3-shot", "entropy")
_PRINTED: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def dailydialog() -> Table:
    """SirLLM's Table 1: share of right answers in DailyDialog."""
    rows: list[tuple[Value, ...]] = []
    for model, printed in _PRINTED["dailydialog"].items():
        for policy, right in zip(_POLICIES, printed["right"], strict=True):
            decay = printed["decay"] if policy == "entropy" else 1.0
            rows.append((_row_name(model, policy, 512, decay), right / 100))
    return Table("Published: SirLLM, Table 1", ("setting", "right"), tuple(rows))


def grocery() -> Table:
    """SirLLM's Table 2: shares of right answers in Grocery Shopping."""
    rows = [
        (_row_name(model, policy, 1024), *(percent / 100 for percent in both))
        for model, printed in _PRINTED["grocery"].items()
        for policy, both in zip(_POLICIES, printed, strict=True)
        if both is not None
    ]
    return Table("Published: SirLLM, Table 2", ("setting", "ACCc", "ACCg"), tuple(rows))


def few_shot() -> Table:
    """SirLLM's Table 4: Grocery Shopping with examples before each question."""
    rows = [
        (f"{model} {name}", *(percent / 100 for percent in both))
        for model, printed in _PRINTED["few_shot"].items()
        for name, both in zip(_SHOTS, printed, strict=True)
    ]
    return Table("Published: SirLLM, Table 4", ("setting", "ACCc", "ACCg"), tuple(rows))


def rock_paper_scissors() -> Table:
    """SirLLM's Table 3: shares of rounds won."""
    rows: list[tuple[Value, ...]] = []
    for model, printed in _PRINTED["rock_paper_scissors"].items():
        for policy, (paper, rock, scissors, average, decay) in zip(_POLICIES, printed, strict=True):
            won = (percent / 100 for percent in (rock, paper, scissors, average))
            rows.append((_row_name(model, policy, 1024, decay), *won))
    columns = ("setting", "rock", "paper", "scissors", "all")
    return Table("Published: SirLLM, Table 3", columns, tuple(rows))


def retrieval() -> Table:
    """Table 1 of Retrieval-Augmented StreamingLLM, by number of restored tokens."""
    return Table(
        "Published: Retrieval-Augmented StreamingLLM, Table 1, one reply each",
        ("tokens restored", "20", "50", "200"),
        tuple((name, *right) for name, right in _PRINTED["retrieval"].items()),
    )


def _row_name(model: str, policy: str, budget: int, decay: float = 1.0) -> str:
    return f"{model} {policy} {budget}" + (f" decay {decay:g}" if decay != 1 else "")
