"""The recipe of the bundled anchor model: `tiny`, trained on in three phases of longer rows.

Short rows full of facts come first, as in `tiny`'s own training: there it learns to put what was
told into an anchor, and to read it there. Then quizzes and small talk come between.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sirchat.training.anchor import AnchorOptions
from sirchat.training.dialogue import Mix

_FACTS = Mix(tell=0.32, ask=0.33, repeat=0.05, story=0.1, quiz=0.06, untold=0.03, long_list=0.2)
_QUIZZES = Mix(tell=0.16, ask=0.2, repeat=0.02, story=0.12, quiz=0.35, untold=0.05, long_list=0.3)
_APART = Mix(
    tell=0.14, ask=0.18, repeat=0.01, game=0.02, story=0.12, quiz=0.38, untold=0.05,
    long_list=0.3, apart=0.5, subjects=0.3,
)  # fmt: skip


def phases(out: Path, *, seed: int = 0, resume: bool = False) -> list[AnchorOptions]:
    """The phases in order: each goes on from what the one before it wrote."""
    first = AnchorOptions(
        model="tiny",
        out=out.with_name(f"{out.name}.1"),
        per="round",
        mix=_FACTS,
        tokens=256,
        batch=24,
        per_device=24,
        steps=1000,
        learning_rate=6e-4,
        schedule="cosine",
        seed=seed,
        resume=resume,
    )
    second = replace(
        first,
        model=str(first.out),
        out=out.with_name(f"{out.name}.2"),
        mix=_QUIZZES,
        tokens=512,
        batch=12,
        per_device=12,
        steps=500,
        seed=seed + 1,
    )
    third = replace(
        second, model=str(second.out), out=out, mix=_APART, tokens=1024, batch=6, per_device=6,
        steps=400, learning_rate=4e-4, seed=seed + 2,
    )  # fmt: skip
    return [first, second, third]
