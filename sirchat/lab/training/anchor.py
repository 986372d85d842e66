"""AnSAN: further trains any causal language model to compress text into anchor tokens.

AnSAN is the method of the paper Anchor-based LLMs. Each sequence (a sentence or a round) ends with
an anchor token, which must represent the whole sequence.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainingArguments,
)

from sirchat.errors import SettingError, UsageError
from sirchat.lab.synthetic.dialogue import Mix
from sirchat.lab.training.anchor_data import Row, TalkRows, TextRows, Writer
from sirchat.lab.training.anchor_trainer import (
    ENDLESS,
    AnchorTrainer,
    Attention,
    LossHistory,
    Schedule,
    Step,
    StepCallback,
    TrainingClock,
    checkpoint_losses,
    collate,
)
from sirchat.models.load import LoadOptions, load_gguf_parts
from sirchat.models.names import loading_error, locate
from sirchat.models.progress import quiet_libraries
from sirchat.text.anchors import ANCHOR, Anchors, Per, Variant, remove_anchors

# How a model is trained: with anchors of the variant `ac` or `ep`, or with `none`, as a baseline.
# `ac` adds a new anchor token; for `ep`, each token that ends a sentence is an anchor
Trained = Variant | Literal["none"]

TRAINED: tuple[Trained, ...] = (*get_args(Variant), "none")

# How often each kind of round occurs in the synthetic dialogue that anchors are trained on
TALK = Mix(tell=0.2, ask=0.25, repeat=0.03, story=0.1, quiz=0.3, untold=0.05, long_list=0.3)


@dataclass(frozen=True)
class AnchorOptions:
    """Model, data and hyperparameters of an anchor training.

    The default values are those of the paper, Anchor-based LLMs.
    """

    model: str  # a model name that `load_model` takes; the weights of a GGUF file are unpacked
    out: Path  # folder of the trained model; checkpoints go to the folder `<out>.checkpoints`
    # files to train on; if empty, the model is trained on synthetic dialogue
    data: tuple[Path, ...] = ()
    variant: Trained = "ac"  # the kind of anchors, or `none` for training without anchors
    # where the anchors of variant `ac` are placed: `sentence` is after each sentence
    per: Per = "sentence"
    scratch: bool = False  # whether to start from random weights, as in the paper's section 7.2
    attention: Attention = "sdpa"  # how attention is computed, `sdpa` or `flex`; `flex` needs a GPU
    sinks: int = 1  # number of first tokens of a document that all its later tokens attend to
    mix: Mix = TALK  # how often each kind of round occurs in synthetic dialogue
    tokens: int = 4096  # number of tokens in a training row
    batch: int = 512  # number of rows in a training step
    # number of rows in one forward pass on each device; the gradients of several passes are added
    # up to one step
    per_device: int = 1
    # number of steps. If None, training ends when `minutes` are over or, without `minutes`, after
    # one epoch of the data (1,000 steps of synthetic dialogue)
    steps: int | None = None
    # limit on the training time of all runs together, without loading the model and saving the
    # trained model; None for no limit
    minutes: float | None = None
    learning_rate: float = 2e-5
    warmup: int = 20
    schedule: Schedule = "constant"  # learning-rate schedule after the `warmup` steps
    bf16: bool = True
    gradient_checkpointing: bool = False
    seed: int = 0
    checkpoint_every: int = 250
    resume: bool = False
    trust_remote_code: bool = False

    @property
    def checkpoints(self) -> Path:
        """The folder of the training's checkpoints, `<out>.checkpoints`."""
        return self.out.with_name(f"{self.out.name}.checkpoints")

    @property
    def resumes_from(self) -> Path | None:
        """The folder of the newest checkpoint, from which the training continues.

        None if `resume` is false, or no checkpoint exists.
        """
        found = self.checkpoints.glob("checkpoint-*") if self.resume else ()
        return max(found, key=lambda one: int(one.name.rpartition("-")[2]), default=None)


@dataclass(frozen=True)
class Training:
    """What an anchor training needs: options, model, tokenizer, anchor placement, training rows.

    `anchors` is None for training without anchors.
    """

    options: AnchorOptions
    model: Any
    tokenizer: Any
    anchors: Anchors | None
    rows: Dataset[Row]


def prepare(options: AnchorOptions) -> Training:
    """Load the model and the data for an anchor training, and return them as a `Training`.

    Raises ModelError if the model can't be loaded, SettingError for options that can't be combined
    and for data that can't be read, and UsageError if the package accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        raise UsageError("accelerate is not installed", hint="pip install 'sirchat[anchors]'")
    if options.attention == "flex" and not torch.cuda.is_available():
        raise SettingError("attention 'flex' needs a GPU, which is missing here; choose 'sdpa'")
    if options.minutes is not None and not options.minutes > 0:
        raise SettingError(f"--minutes can't be {options.minutes:g}; it must be more than 0")
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
        remove_anchors(model.config)
    else:
        anchors.write_to_config(model.config)
    rows = _rows(options, Writer(tokenizer, anchors))
    return Training(options, model, tokenizer, anchors, rows)


@quiet_libraries()
def _load(options: AnchorOptions) -> tuple[Any, Any]:
    """Load the model to be trained, in float32, and its tokenizer; returns both."""
    checkpoint = options.resumes_from
    source, gguf_file = (str(checkpoint), "") if checkpoint else locate(options.model)
    more: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    more |= {"gguf_file": gguf_file} if gguf_file else {}
    try:
        if gguf_file and not options.scratch:
            path, cpu = Path(source) / gguf_file, torch.device("cpu")
            return load_gguf_parts(path, LoadOptions(cpu, torch.float32, for_hub=True))
        tokenizer = AutoTokenizer.from_pretrained(source, **more)
        if options.scratch and not checkpoint:
            config = AutoConfig.from_pretrained(source, **more)
            more = {"trust_remote_code": options.trust_remote_code}
            with torch.random.fork_rng():
                torch.manual_seed(options.seed)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **more)
                return model, tokenizer
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, **more
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise loading_error(options.model, error) from error
    return model, tokenizer


@torch.no_grad()
def add_anchor(model: Any, tokenizer: Any) -> int:
    """Add the anchor token to model and tokenizer, unless the tokenizer has it; returns its id.

    The input and output embeddings of the new token become the mean of all other embeddings.
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
    for table in tables:  # one table if input and output are tied
        mean = table[:rows].mean(0)
        table[rows:] = mean  # a tokenizer may have tokens that the model lacks
        table[token_id] = mean
    return token_id


def _rows(options: AnchorOptions, writer: Writer) -> Dataset[Row]:
    if options.data:
        return TextRows(writer, options.data, options.tokens)
    rows = (_steps(options) or 1000) * options.batch
    return TalkRows(writer, options.mix, rows, options.tokens, options.seed)


def _steps(options: AnchorOptions) -> int | None:
    """The most steps that the options allow; None for one epoch of the data."""
    endless = options.steps is None and options.minutes is not None
    return ENDLESS if endless else options.steps


@quiet_libraries()
def train_anchors(training: Training, show: Callable[[Step], None] = lambda step: None) -> None:
    """Train a model with anchors, and write the model and its losses to the folder `out`.

    `show` is called after each training step.
    """
    accelerator = _train(training, show)
    # A process that ends while another still communicates with it may hang or be aborted.
    accelerator.wait_for_everyone()
    # The same happens if threads of the process still communicate. They live as long as the model
    # that accelerate has wrapped.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def _train(training: Training, show: Callable[[Step], None]) -> Any:
    """Train a model with anchors, and write it to `out`; `show` is called after each step."""
    options, checkpoint = training.options, training.options.resumes_from
    sinks = training.anchors.sinks if training.anchors else 0
    before = checkpoint_losses(checkpoint) if checkpoint else []
    limit = None if options.minutes is None else 60 * options.minutes
    clock = TrainingClock(limit, [one.seconds for one in before])
    history = LossHistory(options.out, before) if is_first() else None
    trainer = AnchorTrainer(
        model=training.model,
        args=arguments(options),
        train_dataset=training.rows,
        data_collator=collate,
        sinks=sinks,
        attention=options.attention,
        clock=clock,
        schedule=options.schedule,
        processing_class=training.tokenizer,
        callbacks=[StepCallback(clock, history, show)],
    )
    trainer.remove_callback(PrinterCallback)
    if not clock.is_over:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)
        trained = trained.to(torch.bfloat16) if options.bf16 else trained
        trained.save_pretrained(options.out)
        training.tokenizer.save_pretrained(options.out)
    return trainer.accelerator


def is_first() -> bool:
    """Whether this process is the first of those that train together, or trains alone."""
    return int(os.environ.get("RANK", "0")) == 0


def rows_at_once(options: AnchorOptions) -> int:
    """The number of training rows that all devices together read in one forward pass each.

    Raises SettingError if `options.batch`, the rows of a step, is not a multiple of this number.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    at_once = options.per_device * processes
    if options.batch % at_once:
        raise SettingError(
            f"batch can't be {options.batch}: it must be a multiple of {at_once}, the rows of one "
            "forward pass on all devices",
            hint="change --batch or --per-device",
        )
    return at_once


def arguments(options: AnchorOptions) -> TrainingArguments:
    """The options of an anchor training, as the arguments of transformers' Trainer."""
    return TrainingArguments(
        output_dir=str(options.checkpoints),
        per_device_train_batch_size=options.per_device,
        gradient_accumulation_steps=options.batch // rows_at_once(options),
        max_steps=_steps(options) or -1,
        num_train_epochs=1,
        learning_rate=options.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
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
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="all",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
