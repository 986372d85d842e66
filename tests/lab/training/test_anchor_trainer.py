"""The trainer of anchors: the history of its loss, its clock, its learning rate."""

from __future__ import annotations

import json
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
    TrainingClock,
    checkpoint_losses,
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


def test_the_history_up_to_a_checkpoint_is_in_the_checkpoint(tmp_path: Path) -> None:
    records = [
        {"step": 1, "tokens": 512, "loss": 3.9, "learning_rate": 2e-5, "seconds": 1.5, "epoch": 1},
        {"step": 1, "train_loss": 3.9},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    assert checkpoint_losses(tmp_path) == [entry(1)]


def test_the_report_says_first_last_and_mean(tmp_path: Path) -> None:
    assert report(tmp_path) == []
    LossHistory(tmp_path, [entry(step) for step in range(1, 31)])
    assert report(tmp_path) == [
        "loss in nats per token: first 3.900, last 1.000, mean of the last 20 1.950",
        "30 steps, 15,360 tokens, 45 s",
        f"losses: {tmp_path / HISTORY}",
    ]


class Time:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def finish_steps(clock: TrainingClock, time: Time, *seconds: float) -> None:
    for one in seconds:
        time.seconds += one
        clock.finish_step()


def test_the_time_is_over_before_a_step_that_would_not_fit() -> None:
    clock = TrainingClock(60, now=(time := Time()))
    finish_steps(clock, time, 20)
    assert (clock.seconds, clock.is_over) == (20, False)
    assert clock.share == pytest.approx(1 / 3)
    finish_steps(clock, time, 19)
    assert not clock.is_over
    finish_steps(clock, time, 11)  # at second 50, and another step as long would end at 61
    assert clock.is_over


def test_the_time_between_two_runs_does_not_count() -> None:
    clock = TrainingClock(60, before=[10, 20, 30], now=(time := Time()))
    time.seconds += 500  # until the training begins
    clock.start()
    assert (clock.seconds, clock.is_over) == (30, False)
    finish_steps(clock, time, 10)
    assert (clock.seconds, clock.is_over) == (40, False)


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
