"""The results that the papers print: they are consistent, and shown next to our own."""

from __future__ import annotations

from typing import Any

import pytest

from sirchat.lab.studies import paper_tables
from sirchat.lab.studies.report import Table
from sirchat.lab.studies.rock_paper_scissors import PLAYERS


def rows_by_name(table: Table) -> dict[str, dict[str, Any]]:
    return {str(row[0]): dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}


def test_the_average_of_the_players_is_the_one_that_is_printed() -> None:
    rows = rows_by_name(paper_tables.rock_paper_scissors())
    assert len(rows) == 16
    for name, row in rows.items():
        assert row["all"] == pytest.approx(sum(row[one] for one in PLAYERS) / 3, abs=1e-4), name


@pytest.mark.parametrize(
    ("table", "column", "gaps"),
    [  # the paper's own differences from StreamLLM
        (paper_tables.dailydialog(), "right", {"Yi-6b entropy 512 decay 0.7": 0.0695}),
        (paper_tables.dailydialog(), "right", {"Vicuna-13b interval 512": -0.0905}),
        (
            paper_tables.grocery(),
            "ACCg",
            {"Yi-34b entropy 1024": 0.6331, "Yi-6b random 1024": 0.5182},
        ),
        (paper_tables.few_shot(), "ACCc", {"Vicuna-7b 3-shot": -0.0103, "Yi-34b entropy": 0.0009}),
    ],
)
def test_differences_from_sink_are_those_of_the_paper(
    table: Table, column: str, gaps: dict[str, float]
) -> None:
    rows = rows_by_name(table)
    for name, gap in gaps.items():
        model = name.partition(" ")[0]
        (sink,) = [row for other, row in rows.items() if other.startswith(f"{model} sink")]
        assert rows[name][column] - sink[column] == pytest.approx(gap, abs=1e-6)
