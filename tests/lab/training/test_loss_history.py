"""The history of a training's loss: its file, and what is said of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sirchat.lab.training.anchor_trainer import (
    HISTORY,
    PLOT,
    LossEntry,
    LossHistory,
    checkpoint_losses,
    draw_losses,
    load_losses,
)
from sirchat.lab.training.display import report


def entry(step: int) -> LossEntry:
    return LossEntry(step, 512 * step, 4 - step / 10, 2e-5, 1.5 * step)


def test_a_resumed_training_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    before = LossHistory(tmp_path)
    for step in range(1, 8):
        before.add(replace(entry(step), loss=9.0))
    with (tmp_path / HISTORY).open("a") as file:
        file.write('{"step": 8, "tok')  # the process was killed
    resumed = LossHistory(tmp_path, [entry(1), entry(2), entry(3), entry(4)])
    resumed.add(entry(5))
    assert load_losses(tmp_path) == [entry(step) for step in range(1, 6)]


def test_the_history_up_to_a_checkpoint_is_in_the_checkpoint(tmp_path: Path) -> None:
    records = [
        {"step": 1, "tokens": 512, "loss": 3.9, "learning_rate": 2e-5, "seconds": 1.5, "epoch": 1},
        {"step": 1, "train_loss": 3.9},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    assert checkpoint_losses(tmp_path) == [entry(1)]


def test_the_report_says_first_last_and_mean_and_draws_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report(tmp_path) == []
    LossHistory(tmp_path, [entry(step) for step in range(1, 31)])
    assert report(tmp_path) == [
        "loss in nats per token: first 3.900, last 1.000, mean of the last 20 1.950",
        "30 steps, 15,360 tokens, 45 s",
        f"losses: {tmp_path / HISTORY}; plot: {tmp_path / PLOT}",
    ]
    plot = (tmp_path / PLOT).read_text("utf-8")
    assert plot.startswith("<?xml")
    draw_losses(load_losses(tmp_path), tmp_path)
    assert (tmp_path / PLOT).read_text("utf-8") == plot


def test_without_matplotlib_there_is_a_report_without_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    LossHistory(tmp_path, [entry(1)])
    assert report(tmp_path)[-1].endswith("no plot: pip install 'sirchat[plots]'")
    assert not (tmp_path / PLOT).exists()
