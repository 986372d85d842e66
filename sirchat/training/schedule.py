"""What the trainer feeds when: model sizes, the lengthening stages, the learning-rate curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sirchat.training.dialogue import Mix

SizeName = Literal["micro", "small"]


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape and how many tokens it reads at once."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    dialogues: int  # conversations that the vocabulary is learnt from
    tokens_per_step: int
    longest: int  # longest row, in tokens
    probes: int  # conversations per kind and distance that the finished model is measured on


SIZES: dict[SizeName, Size] = {
    "micro": Size(32, 1, 2, 1, 64, 320, 20, 256, 128, 0),
    "small": Size(256, 6, 4, 2, 704, 2048, 3000, 6144, 2048, 30),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training, up to `until` (a share of all steps), with rows of `tokens`."""

    until: float
    tokens: int
    mix: Mix


# Short dialogues full of facts come first: a small model finds copying there, and only there.
# Then the rows lengthen, and small talk pushes the questions away from what they ask for.
STAGES: tuple[Stage, ...] = (
    Stage(0.42, 256, Mix(tell=0.36, ask=0.34, repeat=0.12)),
    Stage(0.5745, 512, Mix(tell=0.22, ask=0.30, repeat=0.07)),
    Stage(0.985, 1024, Mix(tell=0.15, ask=0.27, repeat=0.04, story=0.12)),
    Stage(1.00, 2048, Mix(tell=0.12, ask=0.25, repeat=0.03, story=0.12)),
)

WARMUP_STEPS = 100
DECAY_FROM = 0.66  # share of all steps after which the learning rate falls


def stage_at(step: int, steps: int) -> Stage:
    """The stage that step number `step` (from 0) belongs to."""
    return next((stage for stage in STAGES if step < stage.until * steps), STAGES[-1])


def learning_rate(step: int, steps: int) -> float:
    """The factor on the peak learning rate: warm-up, plateau, then a line down to 3 %."""
    warm = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, steps // 4)))
    left = (1 - step / max(1, steps)) / (1 - DECAY_FROM)
    return warm * max(0.03, min(1.0, left))
