"""The training recipe of the bundled models: sizes, phases, stages and learning-rate schedule.

A training is a sequence of phases, and a phase is a sequence of stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sirchat.lab.synthetic.dialogue import Mix
from sirchat.lab.synthetic.rounds import Speaker

SizeName = Literal["micro", "small", "medium"]


@dataclass(frozen=True, slots=True)
class Size:
    """A size of the bundled model: its shape, and the amounts of data in its training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    dialogues: int  # conversations that the tokenizer is trained on
    tokens_per_step: int
    longest: int  # longest row, in tokens
    probes: int  # conversations per kind and distance for the recall table of the model card


SIZES: dict[SizeName, Size] = {
    "micro": Size(32, 1, 2, 1, 64, 320, 20, 256, 128, 0),
    "small": Size(256, 6, 4, 2, 704, 2048, 3000, 6144, 2048, 8),
    "medium": Size(320, 7, 5, 1, 832, 2048, 3000, 12288, 2048, 8),  # for a GPU: 16 MB in bf16
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a training phase, with its own length of rows and its own mix of dialogue."""

    until: float  # share of the phase's steps after which the stage ends, 0 to 1
    tokens: int  # number of tokens in a training row
    mix: Mix  # how often each kind of round occurs in the generated dialogues
    # share of the stage's steps in which the attention mask hides tokens that a budget would evict
    gaps: float = 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the training, in which the learning rate rises and falls once."""

    steps: int  # number of steps of the phase in the full recipe
    stages: tuple[Stage, ...]  # the stages of the phase, in order
    peak: float = 1.0  # factor that multiplies the optimizers' learning rates
    # if above 0, the model's weights at the end of the phase are averaged with the weights at its
    # start; `keep` is the share of the weights at the start in this mean
    keep: float = 0.0
    # roles whose messages are followed by an anchor token, if the model has one
    gathered: tuple[Speaker, ...] = ()


# Short dialogues full of facts come first: a small model learns to copy only from such dialogues.
# Then rows get longer, and small talk separates the questions from their facts.
COPYING = Phase(
    1900,
    (
        Stage(0.42, 256, Mix(tell=0.36, ask=0.34, repeat=0.12)),
        Stage(0.5745, 512, Mix(tell=0.22, ask=0.30, repeat=0.07)),
        Stage(0.985, 1024, Mix(tell=0.15, ask=0.27, repeat=0.04, story=0.12)),
        Stage(1.00, 2048, Mix(tell=0.12, ask=0.25, repeat=0.03, story=0.12)),
    ),
)

# A model that copies learns the rest from long dialogues in which most rounds are questions from
# the bank: multiple choice, and recall across a thousand tokens of other rounds.
_QUIZZES = Mix(0.16, 0.14, 0.02, game=0.03, story=0.12, quiz=0.5, untold=0.03, long_list=0.3)
_FAR = Mix(0.10, 0.10, 0.01, game=0.02, story=0.12, quiz=0.62, untold=0.02, long_list=0.3)

DISTANCE = Phase(
    1500, (Stage(0.4, 512, _QUIZZES), Stage(0.75, 1024, _FAR), Stage(1.0, 2048, _FAR)), peak=0.5
)

# Masks hide tokens that a budget would evict: the model learns to recall facts from the few tokens
# that are kept, and to do everything else as well when tokens are missing.
_SPARSE = Mix(0.14, 0.13, 0.02, game=0.02, story=0.12, quiz=0.5, untold=0.05, long_list=0.3)
_SPARSE_FAR = replace(_SPARSE, tell=0.1, ask=0.1, quiz=0.6)

GAPS = Phase(
    1600,
    (
        Stage(0.15, 256, _SPARSE),
        Stage(0.55, 512, _SPARSE, gaps=0.6),
        Stage(0.625, 1024, _SPARSE_FAR, gaps=0.5),
        Stage(0.88, 1536, _SPARSE_FAR, gaps=0.4),
        Stage(1.0, 2048, _SPARSE_FAR, gaps=0.4),
    ),
    peak=0.6,
)

# Long rows with more of the two kinds that are learnt slowest: game habits, and untold facts.
_SLOWEST = Mix(0.1, 0.13, 0.01, game=0.03, story=0.12, quiz=0.48, untold=0.1, long_list=0.3)
POLISH = Phase(500, (Stage(1.0, 1536, _SLOWEST, gaps=0.35),), peak=0.5)

# Corrections and similar facts: the newer value counts, and the cat's name is not the dog's.
_NEIGHBOURS = replace(_SLOWEST, tell=0.14, ask=0.15, quiz=0.42, untold=0.12)
CORRECTIONS = Phase(550, (Stage(1.0, 1536, _NEIGHBOURS, gaps=0.35),), peak=0.5)

# Facts told at the start of a long conversation and asked for at its end, next to facts that were
# never told; names of relatives and friends; and small talk, which the other phases hardly have.
_APART = replace(_NEIGHBOURS, ask=0.18, quiz=0.38, untold=0.05, apart=0.5, subjects=0.3)
FAR_APART = Phase(800, (Stage(1.0, 1536, _APART, gaps=0.3),), peak=0.5)

# Several stories in a row, as in the retrieval paper: which hero did what, and in which story.
_SERIES = replace(_APART, apart=0.35, series=0.3)
# The mean of the weights before and after this phase recalls more than either of them.
STORIES = Phase(400, (Stage(1.0, 1024, _SERIES, gaps=0.3),), peak=0.5, keep=0.4)

# Again facts told long before the question, and questions for untold facts and stories.
_LAST = replace(_APART, tell=0.12, ask=0.15, apart=0.6, subjects=0.35, story=0.2, quiz=0.4)
TOLD_OR_NOT = Phase(200, (Stage(1.0, 1536, _LAST, gaps=0.3),), peak=0.35, keep=0.5)

PHASES = (COPYING, DISTANCE, GAPS, POLISH, CORRECTIONS, FAR_APART, STORIES, TOLD_OR_NOT)
RECIPE_STEPS = sum(phase.steps for phase in PHASES)

# `tiny-anchor` then learns to compress text into anchors. A small model learns to compress only if
# every reply depends on an anchor: at first an anchor also follows the user's message, and the
# reply sees that message only through the anchor.
_FACTS = Mix(0.32, 0.33, 0.08, quiz=0.06, untold=0.03, long_list=0.15)
_MESSAGES: tuple[Speaker, ...] = ("system", "user", "assistant")
ANCHOR_EACH_MESSAGE = Phase(400, (Stage(1.0, 256, _FACTS),), peak=0.5, gathered=_MESSAGES)

# Then an anchor follows each round, as in a chat.
_ROUNDS: tuple[Speaker, ...] = ("system", "assistant")
ANCHOR_EACH_ROUND = Phase(300, (Stage(1.0, 256, _FACTS),), peak=0.5, gathered=_ROUNDS)

# Values of many tokens (codes, made-up names, lists) are the hardest to compress into one token.
_VALUES = Mix(
    0.28, 0.34, 0.06, story=0.12, quiz=0.1, untold=0.04, long_list=0.1, subjects=0.1, apart=0.1,
    long_values=0.55,
)  # fmt: skip
VALUES = Phase(600, (Stage(1.0, 384, _VALUES),), peak=0.5, gathered=_ROUNDS)
_MORE = replace(
    _VALUES, tell=0.36, ask=0.46, repeat=0, story=0.1, quiz=0.05, apart=0, long_values=0.6
)
MORE_VALUES = Phase(700, (Stage(1.0, 384, _MORE),), peak=0.5, gathered=_ROUNDS)

# Last, long rows: facts at the start, questions at the end, quizzes and small talk between.
_DISTANT = replace(
    _MORE, tell=0.24, ask=0.3, quiz=0.3, story=0.12, untold=0.06, subjects=0.15, apart=0.5,
    long_values=0.5,
)  # fmt: skip
# The weights after this phase recall better over long distances, the weights before it over short
# distances, and their mean over both.
DISTANT = Phase(450, (Stage(1.0, 1024, _DISTANT),), peak=0.4, keep=0.3, gathered=_ROUNDS)

ANCHOR_PHASES = (ANCHOR_EACH_MESSAGE, ANCHOR_EACH_ROUND, VALUES, MORE_VALUES, DISTANT)

WARMUP_STEPS = 100
DECAY_FROM = 0.66  # share of a phase's steps after which the learning rate falls


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The phase that a training step belongs to, and the step's number in the phase."""

    phase: Phase  # the phase that the step belongs to
    step: int  # the step's number in the phase, from 0
    steps: int  # number of steps of the phase in this training

    @property
    def stage(self) -> Stage:
        """The stage of the phase that the training step belongs to."""
        stages = self.phase.stages
        return next((s for s in stages if self.step < s.until * self.steps), stages[-1])

    @property
    def learning_rate(self) -> float:
        """The factor that multiplies the optimizers' learning rates in the training step."""
        warmup = min(1.0, (self.step + 1) / min(WARMUP_STEPS, max(1, self.steps // 4)))
        left = (1 - self.step / max(1, self.steps)) / (1 - DECAY_FROM)
        return self.phase.peak * warmup * max(0.03, min(1.0, left))


def scheduled_step_at(step: int, steps: int, phases: tuple[Phase, ...] = PHASES) -> ScheduledStep:
    """The phase of a training step, counted from 0, and the step's number in it."""
    start = planned = 0
    whole = sum(phase.steps for phase in phases)
    for phase in phases:
        planned += phase.steps
        end = round(steps * planned / whole)
        if step < end or phase is phases[-1]:
            return ScheduledStep(phase, step - start, end - start)
        start = end
    raise AssertionError("there is always a last phase")
