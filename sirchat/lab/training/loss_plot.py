"""A plot of a training's loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sirchat.lab.training.loss_history import LAST, LossEntry, mean_of_last

PLOT = "loss.svg"
"""Name of the file in the model's folder."""


def draw_losses(entries: Sequence[LossEntry], folder: Path) -> bool:
    """Write the plot to a model's folder as SVG; returns False if matplotlib is not installed."""
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
