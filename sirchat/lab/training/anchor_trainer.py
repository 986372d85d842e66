"""transformers' Trainer with a time limit, a loss history, and the mask of Anchor-based LLMs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from sirchat.lab.training.anchor_data import Row
from sirchat.lab.training.masks import anchor_mask, block_mask, position_in_document

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
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{HISTORY}.new"
        new.write_text("".join(map(_line, before)), "utf-8")
        os.replace(new, self._path)

    def add(self, entry: LossEntry) -> None:
        """Append the loss of one training step to the file of losses."""
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))


def _line(entry: LossEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def mean_of_last(entries: Sequence[LossEntry]) -> float:
    """The mean loss of the newest 20 steps, or of all if there are fewer."""
    losses = [one.loss for one in entries[-LAST:]]
    return sum(losses) / len(losses)


def load_losses(folder: Path) -> list[LossEntry]:
    """The losses of all training steps, from the file in a model's folder; none without it."""
    path = folder / HISTORY
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [LossEntry(**json.loads(line)) for line in lines]


def checkpoint_losses(checkpoint: Path) -> list[LossEntry]:
    """The losses of all training steps up to a checkpoint that transformers' Trainer saved."""
    state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    return logged(state["log_history"])


def logged(records: Iterable[dict[str, Any]]) -> list[LossEntry]:
    """The losses of training steps among the log records of transformers' Trainer."""
    names = LossEntry.__slots__
    return [
        LossEntry(**{name: record[name] for name in names})
        for record in records
        if all(name in record for name in names)
    ]


# How attention is computed: SDPA with a dense mask, or flex attention with a block mask
Attention = Literal["sdpa", "flex"]


class AnchorTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped
    """A Trainer of transformers that trains under the attention mask of Anchor-based LLMs.

    It reads the training rows in order, and multiplies their losses by their weights.
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
        """Create and return the learning-rate schedule of the training.

        It depends on the step and, if there is a time limit, on the time that has passed.
        """
        warmup = self.args.get_warmup_steps(num_training_steps)

        def factor(step: int) -> float:
            share = self.clock.share
            return learning_rate(step, num_training_steps, warmup, self.schedule, share)

        scheduler = LambdaLR(optimizer or self.optimizer, factor)
        self.lr_scheduler: LRScheduler | None = scheduler
        return scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the values `logs`; if a step's loss is among them, add tokens read and training time.

        The added keys are `tokens` and `seconds`, both counted since the training began.
        """
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
        """The loss that one forward pass over the rows `inputs` adds to the loss of its step."""
        is_anchor, document = inputs["is_anchor"], inputs["document"]
        # `collate` does not make the masks: all batches of a step would then hold one in memory.
        if self.attention == "flex":
            mask = block_mask(is_anchor, document, sinks=self.sinks)
        else:
            mask = anchor_mask(is_anchor, document, sinks=self.sinks)
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
    """The sum of the weighted losses of all predicted tokens, in nats, as a scalar tensor."""
    ids, weight = row["input_ids"][:, 1:], row["weight"][:, 1:]
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids.flatten(), reduction="none")
    weight = weight / weight.mean(1, keepdim=True)
    return (nats.view_as(weight) * weight).sum()


def collate(rows: list[Row]) -> Row:
    """Stack B training rows into a batch with columns [B, tokens].

    The column `position`, a token's position in its document, is added, and `labels` [B, tokens -
    1], the tokens to predict.
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
    """A finished step of an anchor training."""

    entry: LossEntry  # the number, loss and time of the step
    # number of steps of the training, or an upper bound if a time limit ends the training
    steps: int
    mean_loss: float  # mean loss of the last 20 steps, in nats per token
    tokens_per_second: float  # mean training speed since this run began, in tokens per second


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """A Trainer callback: after each step, updates clock and loss history, and calls `show`.

    If several processes train together, only the first one has a history and calls `show`;
    `history` is None in the others.
    """

    def __init__(
        self, clock: TrainingClock, history: LossHistory | None, show: Callable[[Step], None]
    ) -> None:
        self._clock, self._history, self._show = clock, history, show
        self._before = (clock.seconds, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the training clock; transformers calls this when the training begins."""
        self._before = (self._clock.seconds, state.num_input_tokens_seen)
        self._clock.start()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Update the training clock; the learning rate of the next step is computed after that."""
        self._clock.finish_step(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save a checkpoint and stop the training if the time limit allows no further step."""
        if self._clock.is_over:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write the loss of the finished step to the loss history, and call `show` with the step.

        Log records without a loss are ignored.
        """
        if self._history is None:
            return
        for entry in logged([{**(logs or {}), "step": state.global_step}]):
            self._history.add(entry)
            seconds, tokens = self._before
            speed = (entry.tokens - tokens) / max(1e-9, entry.seconds - seconds)
            mean = mean_of_last(self._history.entries)
            self._show(Step(entry, state.max_steps, mean, speed))


Schedule = Literal["constant", "cosine"]

# Number of steps for a training that ends by its time limit; it is too large to be reached
ENDLESS = 1_000_000


class TrainingClock:
    """Counts the seconds of a training, over all its runs."""

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
        """Start the clock at the number of seconds that it had after the last finished step."""
        self._start = self._now() - self.seconds

    def finish_step(self, device: torch.device | None = None) -> None:
        """Set `seconds` to the training time, at the end of a training step."""
        seconds = self._now() - self._start
        if distributed.is_available() and distributed.is_initialized():
            shared = torch.tensor(seconds, dtype=torch.float32, device=device)
            distributed.broadcast(shared, src=0)
            seconds = shared.item()
        self._last_step, self.seconds = seconds - self.seconds, seconds

    @property
    def share(self) -> float:
        """The share of the training's time limit that has passed, 0 to 1; 0 without a limit."""
        return 0.0 if self._limit is None else min(1.0, self.seconds / self._limit)

    @property
    def is_over(self) -> bool:
        """Whether the training must end: another step as long as the last would reach the limit."""
        return self._limit is not None and self.seconds + self._last_step >= self._limit


def learning_rate(
    step: int, steps: int, warmup: int, schedule: Schedule, share: float = 0.0
) -> float:
    """The factor that multiplies the peak learning rate in step number `step`, counted from 0."""
    rising = min(1.0, step / warmup) if warmup else 1.0
    if schedule == "constant":
        return rising
    passed = max(share, (step - warmup) / max(1, steps - warmup))
    return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, passed))))
