"""The trainer of anchors: the history of its loss, its clock, its learning rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from sirchat.lab.training.anchor_trainer import (
    HISTORY,
    LossEntry,
    LossHistory,
    Schedule,
    learning_rate,
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


def test_the_report_says_first_last_and_mean(tmp_path: Path) -> None:
    assert report(tmp_path) == []
    LossHistory(tmp_path, [entry(step) for step in range(1, 31)])
    assert report(tmp_path) == [
        "loss in nats per token: first 3.900, last 1.000, mean of the last 20 1.950",
        "30 steps, 15,360 tokens, 45 s",
        f"losses: {tmp_path / HISTORY}",
    ]


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("constant", "constant_with_warmup"), ("cosine",) * 2]
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_by_steps_the_learning_rate_is_that_of_transformers(
    schedule: Schedule, theirs: str, warmup: int
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    oracle = get_scheduler(theirs, optimizer, warmup, 12)
    for step in range(12):
        (expected,) = oracle.get_last_lr()
        assert learning_rate(step, 12, warmup, schedule) == pytest.approx(expected)
        optimizer.step()
        oracle.step()


def test_cosine_follows_whichever_ends_first_steps_or_time() -> None:
    assert learning_rate(50, 100, 0, "cosine", share=0.1) == pytest.approx(0.5)
    assert learning_rate(10, 100, 0, "cosine", share=0.5) == pytest.approx(0.5)
    assert learning_rate(10, 100, 0, "cosine", share=1.0) == pytest.approx(0.0)
    assert learning_rate(1, 100, 2, "cosine", share=0.5) == pytest.approx(0.25)
    assert learning_rate(10, 100, 0, "constant", share=0.9) == 1.0
