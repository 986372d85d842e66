"""AnSAN: further trains any causal language model to compress each sequence into its anchor token.

Anchor-based LLMs, section 4: next-token loss under the attention mask of equation (4). The new
token of the `<AC>` variant starts as the mean of all embeddings. This uses transformers' Trainer
with our own masks and loss; the model's code is unchanged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from sirchat.errors import ModelError, SettingError, UsageError
from sirchat.models.model import locate, unloadable
from sirchat.text.anchors import ANCHOR, Anchors, Per, Variant, remove
from sirchat.training.anchor_rows import Row, TalkRows, TextRows, Writer
from sirchat.training.ansan import block_mask, position_in_document, visible
from sirchat.world.dialogue import Mix

Schedule = Literal["constant", "cosine"]

Trained = Variant | Literal["none"]
"""The kind of anchors that a model is trained with; `none` is ordinary training, as a baseline."""

Attention = Literal["sdpa", "flex"]
"""How attention is computed: SDPA with a dense mask, or flex attention with a block mask."""

TRAINED: tuple[Trained, ...] = (*get_args(Variant), "none")

TALK = Mix(tell=0.2, ask=0.25, repeat=0.03, story=0.1, quiz=0.3, untold=0.05, long_list=0.3)
"""The default mix of rounds in synthetic dialogue."""


@dataclass(frozen=True)
class AnchorOptions:
    """Model, data and hyperparameters of an anchor training; the defaults are the paper's.

    Attributes:
        model: a folder, or a hub id.
        out: folder of the trained model; checkpoints go to `<out>.checkpoints`.
        data: files to train on; empty for synthetic dialogue.
        variant, per: see `Trained` and `Anchors`.
        attention: see `Attention`; `flex` needs a GPU.
        scratch: start from new random weights of the model's shape (section 7.2).
        sinks: number of first tokens of each document that all its tokens attend to.
        mix: mix of rounds in synthetic dialogue.
        tokens: tokens in a row.
        batch: rows in a step.
        steps: number of steps; None for one epoch of the data (synthetic: 1,000).
        per_device: rows in one forward pass on each device; gradients are accumulated.
        schedule: learning-rate schedule after `warmup` steps.
    """

    model: str
    out: Path
    data: tuple[Path, ...] = ()
    variant: Trained = "ac"
    per: Per = "sentence"
    scratch: bool = False
    attention: Attention = "sdpa"
    sinks: int = 1
    mix: Mix = TALK
    tokens: int = 4096
    batch: int = 512
    per_device: int = 1
    steps: int | None = None
    learning_rate: float = 2e-5
    warmup: int = 20
    schedule: Schedule = "constant"
    bf16: bool = True
    gradient_checkpointing: bool = False
    seed: int = 0
    checkpoint_every: int = 250
    resume: bool = False
    trust_remote_code: bool = False

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.out.with_name(f"{self.out.name}.checkpoints")


@dataclass(frozen=True)
class Training:
    """Everything that a training needs: options, model, tokenizer, anchors and rows."""

    options: AnchorOptions
    model: Any
    tokenizer: Any
    anchors: Anchors | None
    rows: Dataset[Row]


def prepare(options: AnchorOptions) -> Training:
    """Load the model and the data.

    Raises ModelError when the model can't be loaded, SettingError for settings that can't work
    together and for data that can't be read, UsageError for a missing extra.
    """
    if find_spec("accelerate") is None:
        raise UsageError("accelerate is not installed", hint="pip install 'sirchat[anchors]'")
    if options.attention == "flex" and not torch.cuda.is_available():
        raise SettingError("attention is 'flex', which trains on a GPU, and there is none here")
    rows_at_once(options)
    model, tokenizer = _load(options)
    if options.attention == "flex":
        model.set_attn_implementation("flex_attention")
    anchors = None
    if options.variant == "ep":
        anchors = Anchors("ep", "sentence", None, options.sinks)
    elif options.variant == "ac":
        anchors = Anchors("ac", options.per, add_anchor(model, tokenizer), options.sinks)
    if anchors is None:
        remove(model.config)
    else:
        anchors.write(model.config)
    rows = _rows(options, Writer(tokenizer, anchors))
    return Training(options, model, tokenizer, anchors, rows)


def _load(options: AnchorOptions) -> tuple[Any, Any]:
    """The model to train, and its tokenizer."""
    trust = {"trust_remote_code": options.trust_remote_code}
    source, gguf = locate(options.model)
    if gguf:
        raise ModelError(f"model {options.model!r} is GGUF, which can't be trained")
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **trust)
        if options.scratch:
            config = AutoConfig.from_pretrained(source, **trust)
            with torch.random.fork_rng():
                torch.manual_seed(options.seed)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trust)
                return model, tokenizer
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, **trust
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise unloadable(options.model, error) from error
    return model, tokenizer


@torch.no_grad()
def add_anchor(model: Any, tokenizer: Any) -> int:
    """Add the anchor token, if there is none yet; returns its id.

    The embeddings of a new token start as the mean of all others.
    """
    known = tokenizer.convert_tokens_to_ids(ANCHOR)
    if known is not None and ANCHOR in tokenizer.get_added_vocab():
        return int(known)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*tokenizer.extra_special_tokens, ANCHOR]}
    )
    token_id = int(tokenizer.convert_tokens_to_ids(ANCHOR))
    rows = model.get_input_embeddings().weight.shape[0]
    if token_id >= rows:
        model.resize_token_embeddings(token_id + 1, mean_resizing=False)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    for table in tables:  # a single one if they are tied
        table[token_id] = table[:rows].mean(0)
    return token_id


class AnchorTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped
    """Trains on rows in their order, under the mask of equation (4)."""

    def __init__(self, *, sinks: int, **options: Any) -> None:
        super().__init__(**options)
        self.sinks = sinks
        # The loss is a sum, divided by the token count of the whole step.
        self.model_accepts_loss_kwargs = True

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def compute_loss(
        self,
        model: Any,
        inputs: Row,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The weighted mean loss over all tokens of the step, on all devices."""
        mask = inputs.get("visible")
        if mask is None:
            mask = block_mask(inputs["is_anchor"], inputs["document"], sinks=self.sinks)
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
    """The loss in nats summed over all predicted tokens; weights have mean 1 in each row."""
    ids, weight = row["input_ids"][:, 1:], row["weight"][:, 1:]
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids.flatten(), reduction="none")
    weight = weight / weight.mean(1, keepdim=True)
    return (nats.view_as(weight) * weight).sum()


def collate(rows: list[Row], sinks: int, attention: Attention = "sdpa") -> Row:
    """A batch: ids, positions within each document, and the mask or what it is made from."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    document = batch["document"]
    if attention == "sdpa":
        del batch["document"]
        batch["visible"] = visible(batch.pop("is_anchor"), document, sinks=sinks)
    batch["position"] = position_in_document(document)
    starts_document = document[:, 1:] != document[:, :-1]
    batch["weight"][:, 1:][starts_document] = 0.0  # these are not predicted
    batch["labels"] = batch["input_ids"][:, 1:].clone()
    return batch


def _rows(options: AnchorOptions, writer: Writer) -> Dataset[Row]:
    if options.data:
        return TextRows(writer, options.data, options.tokens)
    rows = (1000 if options.steps is None else options.steps) * options.batch
    return TalkRows(writer, options.mix, rows, options.tokens, options.seed)


@dataclass(frozen=True)
class Step:
    """A finished step, of `steps`: its loss in nats per token, and the speed so far."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float


class _StepCallback(TrainerCallback):  # type: ignore[misc]
    """Reports each step to `show`, in place of the Trainer's own output."""

    def __init__(self, tokens: int, show: Callable[[Step], None]) -> None:
        self._tokens, self._show, self._start = tokens, show, time.perf_counter()
        self._first: int | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report the loss of a step."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        self._first = state.global_step - 1 if self._first is None else self._first
        done = (state.global_step - self._first) * self._tokens
        speed = done / max(1e-9, time.perf_counter() - self._start)
        self._show(Step(state.global_step, state.max_steps, float(logs["loss"]), speed))


def train_anchors(training: Training, show: Callable[[Step], None] = lambda step: None) -> None:
    """Train, and write the model to the options' `out`; calls `show` after each step."""
    options = training.options
    sinks = training.anchors.sinks if training.anchors else 0
    trainer = AnchorTrainer(
        model=training.model,
        args=arguments(options),
        train_dataset=training.rows,
        data_collator=lambda rows: collate(rows, sinks, options.attention),
        sinks=sinks,
        processing_class=training.tokenizer,
        callbacks=[_StepCallback(options.batch * options.tokens, show)],
    )
    trainer.remove_callback(PrinterCallback)
    resumes = options.resume and any(options.checkpoints.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=str(newest(options.checkpoints)) if resumes else None)
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)
        trained = trained.to(torch.bfloat16) if options.bf16 else trained
        trained.save_pretrained(options.out)
        training.tokenizer.save_pretrained(options.out)
    # A process that leaves while another still talks to it may hang or be aborted.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def is_first() -> bool:
    """Whether this is the only process, or the first of several."""
    return int(os.environ.get("RANK", "0")) == 0


def newest(checkpoints: Path) -> Path:
    """The last checkpoint."""
    return max(checkpoints.glob("checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]))


def rows_at_once(options: AnchorOptions) -> int:
    """Rows of one forward pass on all devices; raises SettingError if a step is no multiple."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    at_once = options.per_device * processes
    if options.batch % at_once:
        raise SettingError(
            f"batch can't be {options.batch}: {processes} processes read {at_once} rows at once",
            hint="give a multiple of that, or another --per-device",
        )
    return at_once


def arguments(options: AnchorOptions) -> TrainingArguments:
    """The settings of transformers' Trainer."""
    return TrainingArguments(
        output_dir=str(options.checkpoints),
        per_device_train_batch_size=options.per_device,
        gradient_accumulation_steps=options.batch // rows_at_once(options),
        max_steps=-1 if options.steps is None else options.steps,
        num_train_epochs=1,
        learning_rate=options.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        lr_scheduler_type="cosine" if options.schedule == "cosine" else "constant_with_warmup",
        warmup_steps=options.warmup,
        max_grad_norm=1.0,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        activation_checkpointing=options.gradient_checkpointing,
        seed=options.seed,
        data_seed=options.seed,
        save_steps=options.checkpoint_every,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
