"""transformers' Trainer with a time limit, and with the attention mask of Anchor-based LLMs.

The mask is that of the paper's equation (4); see the module `masks`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from sirchat.lab.training.anchor_data import Row
from sirchat.lab.training.losses import LossEntry, LossHistory, logged, mean_of_last
from sirchat.lab.training.masks import block_mask, position_in_document, visible

Attention = Literal["sdpa", "flex"]
"""How attention is computed: SDPA with a dense mask, or flex attention with a block mask."""


class AnchorTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped
    """transformers' Trainer that reads rows in order, and stops at the time limit of `clock`.

    Args:
        sinks: number of tokens at a document's start that all later tokens of it attend to.
        attention: how attention is computed.
        clock: counts the seconds of training.
        schedule: the learning-rate schedule.
        options: further arguments of transformers' Trainer.
    """

    def __init__(
        self,
        *,
        sinks: int,
        attention: Attention,
        clock: TrainingClock,
        schedule: Schedule,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sinks, self.attention = sinks, attention
        self.clock, self.schedule = clock, schedule
        # The loss is a sum, divided by the token count of the whole step.
        self.model_accepts_loss_kwargs = True

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        """Create the schedule of the learning rate, by steps and, if time is limited, by time."""
        warmup = self.args.get_warmup_steps(num_training_steps)

        def factor(step: int) -> float:
            share = self.clock.share
            return learning_rate(step, num_training_steps, warmup, self.schedule, share)

        scheduler = LambdaLR(optimizer or self.optimizer, factor)
        self.lr_scheduler: LRScheduler | None = scheduler
        return scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the token count and the time so far to each step's logged loss."""
        if "loss" in logs:
            logs |= {"tokens": self.state.num_input_tokens_seen, "seconds": self.clock.seconds}
        super().log(logs, start_time)

    def compute_loss(
        self,
        model: Any,
        inputs: Row,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The weighted mean loss over all tokens of the step, on all devices."""
        is_anchor, document = inputs["is_anchor"], inputs["document"]
        # `collate` does not make the masks: all batches of a step would then hold one in memory.
        if self.attention == "flex":
            mask = block_mask(is_anchor, document, sinks=self.sinks)
        else:
            mask = visible(is_anchor, document, sinks=self.sinks)
        output = model(
            input_ids=inputs["input_ids"],
            attention_mask=mask,
            position_ids=inputs["position"],
            use_cache=False,
        )
        sums = weighted_sum(output.logits, inputs)
        count = num_items_in_batch if num_items_in_batch is not None else inputs["labels"].numel()
        loss: Tensor = sums / count
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return loss


def weighted_sum(logits: Tensor, row: Row) -> Tensor:
    """The weighted loss in nats, summed over all predicted tokens; each row's mean weight is 1."""
    ids, weight = row["input_ids"][:, 1:], row["weight"][:, 1:]
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids.flatten(), reduction="none")
    weight = weight / weight.mean(1, keepdim=True)
    return (nats.view_as(weight) * weight).sum()


def collate(rows: list[Row]) -> Row:
    """Stack rows into a batch, whose columns are [B, tokens].

    Adds the column `position`, within each document, and `labels` [B, tokens - 1].
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    document = batch["document"]
    batch["position"] = position_in_document(document)
    starts_document = document[:, 1:] != document[:, :-1]
    batch["weight"][:, 1:][starts_document] = 0.0  # a document's first token is not predicted
    batch["labels"] = batch["input_ids"][:, 1:].clone()
    return batch


@dataclass(frozen=True)
class Step:
    """A finished training step.

    Attributes:
        entry: the number, loss and time of the step.
        steps: number of steps of the training, or an upper bound if a time limit ends the training.
        mean_loss: mean loss of the last steps, in nats per token.
        tokens_per_second: speed since this run began.
    """

    entry: LossEntry
    steps: int
    mean_loss: float
    tokens_per_second: float


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Updates the clock and the loss history, and calls `show` after each step.

    Only the first process has a history and calls `show`.
    """

    def __init__(
        self, clock: TrainingClock, history: LossHistory | None, show: Callable[[Step], None]
    ) -> None:
        self._clock, self._history, self._show = clock, history, show
        self._before = (clock.seconds, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._before = (self._clock.seconds, state.num_input_tokens_seen)
        self._clock.start()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the clock, before the learning rate of the next step is computed."""
        self._clock.finish_step(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save a checkpoint and stop the training if there is no time for one more step."""
        if self._clock.is_over:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the loss of a step, and show it."""
        if self._history is None:
            return
        for entry in logged([{**(logs or {}), "step": state.global_step}]):
            self._history.add(entry)
            seconds, tokens = self._before
            speed = (entry.tokens - tokens) / max(1e-9, entry.seconds - seconds)
            mean = mean_of_last(self._history.entries)
            self._show(Step(entry, state.max_steps, mean, speed))


Schedule = Literal["constant", "cosine"]

ENDLESS = 1_000_000
"""Number of steps, never reached, of a training that ends only by its time limit."""


class TrainingClock:
    """Counts the seconds of training, including those before the training was resumed.

    Args:
        limit: seconds that the training may take; None for no limit.
        before: for each step of earlier runs, the seconds of training until the step ended.
        now: returns the current time in seconds.
    """

    def __init__(
        self,
        limit: float | None = None,
        before: Sequence[float] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit, self._now = limit, now
        *_, second_last, self.seconds = (0.0, 0.0, *before)
        self._last_step = self.seconds - second_last
        self.start()

    def start(self) -> None:
        """Start counting from the number of seconds at the end of the last step."""
        self._start = self._now() - self.seconds

    def finish_step(self, device: torch.device | None = None) -> None:
        """Read the time at the end of a step.

        If several processes train together, all use the time of the first process. `device` is the
        device of this process.
        """
        seconds = self._now() - self._start
        if distributed.is_available() and distributed.is_initialized():
            shared = torch.tensor(seconds, dtype=torch.float32, device=device)
            distributed.broadcast(shared, src=0)
            seconds = shared.item()
        self._last_step, self.seconds = seconds - self.seconds, seconds

    @property
    def share(self) -> float:
        """The share of the time limit that has passed, 0 to 1; 0 without a limit."""
        return 0.0 if self._limit is None else min(1.0, self.seconds / self._limit)

    @property
    def is_over(self) -> bool:
        """Whether one more step, if it takes as long as the last, would reach the time limit."""
        return self._limit is not None and self.seconds + self._last_step >= self._limit


def learning_rate(
    step: int, steps: int, warmup: int, schedule: Schedule, share: float = 0.0
) -> float:
    """The factor by which the learning rate of step `step` (from 0) is multiplied.

    It rises linearly in the `warmup` steps, and then follows `schedule`. `cosine` falls to 0 when
    all `steps` are done or the time limit is reached, whichever comes first; `share` is the share
    of the time limit that has passed, 0 to 1.
    """
    rising = min(1.0, step / warmup) if warmup else 1.0
    if schedule == "constant":
        return rising
    passed = max(share, (step - warmup) / max(1, steps - warmup))
    return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, passed))))
