"""Trains a model, and shows loss, recall, speed and time left meanwhile, and a report at the end.

`sirchat train` calls these functions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sirchat.lab.progress import duration, shown_progress
from sirchat.lab.training.anchor_trainer import HISTORY, LAST, load_losses, mean_of_last
from sirchat.models.progress import quiet_libraries
from sirchat.ui.screen import make_notes_console

if TYPE_CHECKING:
    from sirchat.lab.training.anchor import AnchorOptions
    from sirchat.lab.training.anchor_trainer import Step
    from sirchat.lab.training.encoder import EncoderOptions


def train_anchor_with_progress(options: AnchorOptions) -> None:
    """Train a model with anchors, and write it to the folder `options.out`."""
    from sirchat.lab.training.anchor import is_first, prepare, train_anchors

    with quiet_libraries():
        training = prepare(options)  # errors in the options appear before the bar
    if not is_first():
        train_anchors(training)
        return
    console = make_notes_console()
    with shown_progress(console, "first step") as show:
        train_anchors(training, lambda step: show(*_progress(step, options)))
    for line in report(options.out):
        console.print(line, markup=False, soft_wrap=True)
    Console().print(str(options.out), soft_wrap=True, highlight=False, markup=False)


def train_encoder_with_progress(options: EncoderOptions, lesson: Path | None = None) -> None:
    """Train a sentence encoder, by which recall finds what is said in other words.

    Progress and the test's result are printed to stderr, and the path of the file to stdout. With
    a path `lesson`, a lesson is written there instead.
    """
    from sirchat.lab.training.encoder import ids_of, open_trainer, write_lesson

    console, done = make_notes_console(), 0
    if lesson is not None:
        with quiet_libraries():
            write_lesson(options, lesson)
        Console().print(str(lesson), soft_wrap=True, highlight=False, markup=False)
        return
    with quiet_libraries():
        trainer = open_trainer(options)  # errors in the options appear before the bar
    with shown_progress(console, "first conversation") as show:
        for conversation in trainer.conversations():
            trainer.read(conversation)
            done += len(ids_of(conversation))
            show(min(done, options.tokens), options.tokens, "tokens")
    path, test, told, focus = trainer.finish()
    teacher = "" if test.by_teacher is None else f"; the teacher finds {test.by_teacher:.2f}"
    lines = [f"finds {test.found:.2f} of paraphrases among {test.sentences:,} sentences{teacher}"]
    for one in told:
        wrong = "" if math.isnan(one.in_talk) else f", {one.in_talk:.2f} of talk"
        lines.append(
            f"tells {one.hits:.2f} of sentences of the kind {one.kind}; wrong in "
            f"{one.false_alarms:.2f} of others{wrong}"
        )
    if focus is None:
        lines.append("focus: auto is off: whether it wins is measured with --data")
    else:
        lines.append(
            f"focus: auto is {'on' if focus.wins else 'off'}: right {focus.right.value:+.2f} "
            f"({focus.right.low:.2f} to {focus.right.high:.2f}), ordinary replies "
            f"{focus.nats.value:+.3f} nats a token"
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    Console().print(str(path), soft_wrap=True, highlight=False, markup=False)


def _progress(step: Step, options: AnchorOptions) -> tuple[float, float, str]:
    """The progress of an anchor training after `step`: amount done, total amount, and a text."""
    entry = step.entry
    text = f"loss {step.mean_loss:.3f} (mean of {LAST}), {step.tokens_per_second:,.0f} tok/s"
    if options.minutes is None or options.steps is not None:
        return entry.step, step.steps, f"steps, {text}"
    return entry.seconds / 60, options.minutes, f"minutes, step {entry.step:,}, {text}"


def report(out: Path) -> list[str]:
    """The lines of a summary of the losses in a model's folder; none if it has no losses."""
    losses = load_losses(out)
    if not losses:
        return []
    first, last = losses[0], losses[-1]
    return [
        f"loss in nats per token: first {first.loss:.3f}, last {last.loss:.3f}, "
        f"mean of the last {min(LAST, len(losses))} {mean_of_last(losses[-LAST:]):.3f}",
        f"{last.step:,} steps, {last.tokens:,} tokens, {duration(last.seconds)}",
        f"losses: {out / HISTORY}",
    ]
