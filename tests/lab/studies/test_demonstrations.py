"""Questions after demonstrations: tokens cached and held, and right answers."""

from __future__ import annotations

import pytest

from chatting import tiny, with_anchors
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.demonstrations import Demonstrations
from sirchat.lab.studies.run import run_units

FULL, ANCHOR = Profile(policy="full", sinks=1), Profile(policy="anchor", sinks=1)


@pytest.mark.slow
def test_what_is_cached_is_what_a_chat_would_hold() -> None:
    study = Demonstrations((FULL, ANCHOR), 2, shots=(0, 3), questions=2)
    found = run_units(study, tiny())
    assert len(found) == 2 * 2 * 2
    by_row = dict(zip([cell.name for cell in study.cells()], study.findings(found), strict=True))
    names = [f"{name}, {shots}-shot" for shots in (0, 3) for name in ("full", "anchor 1024")]
    assert list(by_row) == names
    for one in by_row["full, 0-shot"].records:
        assert (one["tokens"], one["cached"]) == (0, 0)
    for one in by_row["full, 3-shot"].records:
        assert one["cached"] == one["tokens"] > 100
        assert one["right"] == [True, True]  # tiny knows its bank
        assert len(one["anew"]) == len(one["seconds"]) == 2
        assert one["max"] > one["cached"]
    for full, one in zip(
        by_row["full, 3-shot"].records, by_row["anchor 1024, 3-shot"].records, strict=True
    ):
        assert one["tokens"] == full["tokens"]
        assert one["cached"] < 20
        assert one["max"] < full["max"]
    (table,) = study.report(found).tables
    for row, held in zip(table.rows[2:], list(by_row.values())[2:], strict=True):
        tokens, cached = (sum(one[key] for one in held.records) for key in ("tokens", "cached"))
        assert row[4] == pytest.approx(1 - cached / tokens)
    assert table.rows[2][-1] == 1.0


@pytest.mark.slow
def test_anchors_are_placed_otherwise_in_the_demonstrations_only() -> None:
    model = with_anchors()
    study = Demonstrations(
        (FULL, ANCHOR), 1, shots=(0, 2), questions=1, places=("tokens", "random")
    )
    names = [cell.name for cell in study.cells()]
    placed = ["anchors every 10 tokens", "anchors by lot, 0.1"]
    assert names[-2:] == [f"anchor 1024, 2-shot, {place}" for place in placed]
    assert len(names) == 6
    *_, own, every, at_random = study.findings(run_units(study, model))
    assert own.records[0]["cached"] == 3  # the sink, and an anchor for each
    assert own.records[0]["tokens"] < every.records[0]["tokens"]
    assert own.records[0]["cached"] < every.records[0]["cached"] < every.records[0]["tokens"] / 4
    assert at_random.records[0]["cached"] > 3


def test_only_anchor_tokens_can_be_placed_otherwise() -> None:
    study = Demonstrations((ANCHOR,), 1, shots=(1,), questions=1, places=("tokens",))
    with pytest.raises(SettingError, match="needs an anchor token, and model 'tiny' has none"):
        run_units(study, tiny())
    with pytest.raises(SettingError, match="place of anchors"):
        Demonstrations((ANCHOR,), 1, places=("nowhere",))  # type: ignore[arg-type]
