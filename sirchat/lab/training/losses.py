"""Records the loss of every step of an anchor training, as JSON lines in the model's folder.

Each checkpoint contains the losses of all steps up to it. A resumed training first rewrites the
file with the losses in its checkpoint, so that no step is missing or repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sirchat.lab.training.checkpoint import replace_files

# Name of the file in the model's folder that has the loss of every training step
HISTORY = "loss.jsonl"

LAST = 20  # number of newest training steps whose mean loss is shown


@dataclass(frozen=True, slots=True)
class LossEntry:
    """The loss of one training step: an entry of the loss history."""

    step: int  # number of the step, from 1
    tokens: int  # number of tokens read from the start of the training to the end of the step
    loss: float  # loss of the step in nats per token
    learning_rate: float  # learning rate of the step
    # training time from the start of the training to the end of the step, without the time between
    # two runs
    seconds: float


class LossHistory:
    """The file with the loss of every training step, in a model's folder."""

    def __init__(self, folder: Path, before: Sequence[LossEntry] = ()) -> None:
        self._path = folder / HISTORY
        self.entries = list(before)
        lines = "".join(_line(one) for one in before)
        replace_files(folder, lambda made: _write(made / HISTORY, lines))

    def add(self, entry: LossEntry) -> None:
        """Append the loss of one training step to the file of losses."""
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))


def mean_of_last(entries: Sequence[LossEntry], last: int = LAST) -> float:
    """The mean loss, in nats per token, of the newest `last` steps among `entries`.

    If there are fewer entries, it is the mean of all.
    """
    losses = [one.loss for one in entries[-last:]]
    return sum(losses) / len(losses)


def load_losses(folder: Path) -> list[LossEntry]:
    """The losses of all training steps, from the file in a model's folder.

    The list is empty if the folder has no such file.
    """
    path = folder / HISTORY
    if not path.is_file():
        return []
    return [LossEntry(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def checkpoint_losses(checkpoint: Path) -> list[LossEntry]:
    """The losses of all training steps up to a checkpoint that transformers' Trainer saved.

    `checkpoint` is the folder of the checkpoint.
    """
    state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    return list(logged(state["log_history"]))


def logged(records: Iterable[dict[str, Any]]) -> Iterable[LossEntry]:
    """Yield the loss of each training step from the log records of transformers' Trainer.

    Records of other things than a step's loss are skipped.
    """
    names = LossEntry.__slots__
    return (
        LossEntry(**{name: record[name] for name in names})
        for record in records
        if all(name in record for name in names)
    )


def _line(entry: LossEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


PLOT = "loss.svg"  # name of the file in the model's folder with the plot of the losses


def draw_losses(entries: Sequence[LossEntry], folder: Path) -> bool:
    """Draw the losses of a training as an SVG file in a model's folder; returns True.

    If matplotlib is not installed, nothing is drawn, and the result is False.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    with rc_context({"svg.hashsalt": PLOT}):  # makes the file reproducible
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        tokens = [one.tokens for one in entries]
        ends = range(1, len(entries) + 1)
        means = [mean_of_last(entries[max(0, end - LAST) : end]) for end in ends]
        axes.plot(tokens, [one.loss for one in entries], color="C0", alpha=0.3, label="each step")
        axes.plot(tokens, means, color="C0", label=f"mean of the last {LAST} steps")
        axes.set(xlabel="tokens read", ylabel="loss (nats per token)", title="training loss")
        axes.legend()
        figure.savefig(folder / PLOT, format="svg", metadata={"Date": None})
    return True
