"""Train a model behind a progress bar that shows loss, recall, speed and time left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sirchat.errors import SettingError
from sirchat.models.progress import quiet_libraries
from sirchat.training.schedule import SIZES
from sirchat.training.trainer import Trainer, TrainOptions, TrainStep, train

if TYPE_CHECKING:
    from sirchat.training.anchor import AnchorOptions


_COLUMNS = (
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.description}"),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def train_with_progress(
    kind: type[Trainer], out: Path, *, steps: int | None, size: str, seed: int, resume: bool
) -> None:
    """Train a bundled model into `out`; progress goes to stderr, the folder's name to stdout."""
    names = [name for name in SIZES if name == size]
    if not names:
        raise SettingError(f"--size can't be {size!r}; it must be one of {', '.join(SIZES)}")
    recipe = sum(phase.steps for phase in kind.phases) if steps is None else steps
    options = TrainOptions(out=out, steps=recipe, size=names[0], seed=seed, resume=resume)
    with Progress(*_COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task("making ready", total=recipe)
        for record in train(options, kind):
            progress.update(task, completed=record.step, description=_describe(record))
    Console().print(str(out), soft_wrap=True, highlight=False, markup=False)


def train_anchor_with_progress(options: AnchorOptions) -> None:
    """Train a model with anchors; progress goes to stderr, the folder's name to stdout.

    If several processes train together, only the first one prints.
    """
    from sirchat.training.anchor import Step, is_first, prepare, train_anchors

    with quiet_libraries():
        training = prepare(options)  # errors in the options appear before the bar
    with Progress(*_COLUMNS, console=Console(stderr=True), disable=not is_first()) as progress:
        task = progress.add_task("first step", total=None)

        def show(step: Step) -> None:
            speed = f"loss {step.loss:.3f}, {step.tokens_per_second:,.0f} tok/s"
            progress.update(task, total=step.steps, completed=step.step, description=speed)

        train_anchors(training, show)
    if is_first():
        Console().print(str(options.out), soft_wrap=True, highlight=False, markup=False)


def _describe(record: TrainStep) -> str:
    recall = "" if record.recall is None else f", recall {record.recall:.2f}"
    speed = f", {record.tokens_per_second:,.0f} tok/s"
    return f"loss {record.loss:.3f}, answers {record.answer_loss:.3f}{recall}{speed}"
