"""Trains the bundled model `tiny` from random weights."""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sirchat.errors import ModelError, SettingError
from sirchat.lab.training.masks import draw_gaps
from sirchat.lab.training.network import build_model, build_optimizers, token_losses, weighted_loss
from sirchat.lab.training.probe import model_card, probe
from sirchat.lab.training.rows import Batch, Renderer, build_tokenizer, span_matches
from sirchat.lab.training.schedule import (
    PHASES,
    RECIPE_STEPS,
    SIZES,
    Phase,
    ScheduledStep,
    SizeName,
    scheduled_step_at,
)

KEPT_CHECKPOINTS = 2


def replace_files(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder, then move its files into `folder`, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        write(temporary)
        for file in sorted(temporary.iterdir()):
            file.chmod(0o644)
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint(
    folder: Path, step: int, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Write weights and optimizer states after `step` steps, as the checkpoint `folder/step-N`.

    The checkpoint appears atomically. The newest two checkpoints are kept, and older ones deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:07d}"
    temporary = folder / f".{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_model(model, str(temporary / "model.safetensors"))
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"step": step, "optimizers": states}, temporary / "optimizer.pt")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    for old in list_checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old)


def save_phase_start(folder: Path, model: LlamaForCausalLM) -> None:
    """Save a model's weights at the start of a training phase, to average with them at its end.

    The file replaces the weights that were saved for an earlier phase.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".before.safetensors"
    save_model(model, str(temporary))
    os.replace(temporary, folder / "before.safetensors")


@torch.no_grad()
def average_with_saved(folder: Path, model: LlamaForCausalLM, share: float) -> None:
    """Average the model's weights with the weights that `save_phase_start` saved in `folder`.

    The model gets the mean. `share`, 0 to 1, is the share of the saved weights in the mean.
    """
    before = copy.deepcopy(model)
    load_model(before, str(folder / "before.safetensors"))
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        now.lerp_(then, share)


def list_checkpoints(folder: Path) -> list[Path]:
    """The paths of the training checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def load_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Load the newest checkpoint in `folder` into the model and its optimizers.

    Raises ModelError if the checkpoint belongs to a model of another shape.
    """
    found = list_checkpoints(folder)
    if not found:
        return 0
    try:
        load_model(model, str(found[-1] / "model.safetensors"))
    except RuntimeError as error:
        raise ModelError(
            f"the checkpoint {found[-1]} belongs to a model of another shape",
            hint="choose another folder with --out, or leave out --resume",
        ) from error
    device = next(model.parameters()).device
    state: dict[str, Any] = torch.load(
        found[-1] / "optimizer.pt", map_location=device, weights_only=True
    )
    for optimizer, one in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(one)
    return int(state["step"])


def export(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    """Write a trained model, its tokenizer and its model card to `folder`.

    The weights are stored in bfloat16. AutoModelForCausalLM and AutoTokenizer can load the folder.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
        max_new_tokens=64,
    )
    weights = {
        name: weight.to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }

    def write(temporary: Path) -> None:
        config.save_pretrained(temporary)
        generation.save_pretrained(temporary)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")

    replace_files(folder, write)


@dataclass(frozen=True)
class TrainOptions:
    """Options of the training of a bundled model."""

    out: Path  # folder of the trained model
    steps: int = RECIPE_STEPS
    size: SizeName = "small"
    seed: int = 0  # of the random weights and of the generated dialogues
    resume: bool = False  # from the newest checkpoint, as if there had been no interruption
    checkpoint_every: int = 250  # steps

    @property
    def checkpoints(self) -> Path:
        """The folder of the training's checkpoints, `<out>.checkpoints`."""
        return self.out.with_name(f"{self.out.name}.checkpoints")


@dataclass(frozen=True, slots=True)
class TrainStep:
    """The result of one training step, with losses in nats per token."""

    step: int  # steps done
    loss: float
    answer_loss: float  # of reply tokens
    recall: float | None  # share of exact answers to questions about facts, in this batch
    tokens_per_second: float  # since the training began


class Trainer:
    """Holds the model, the optimizers and the data of one training of a bundled model.

    The method `step` trains on one batch.
    """

    phases: ClassVar[tuple[Phase, ...]] = PHASES  # the phases of the training, in order

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.size = SIZES[options.size]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, model = self.begin()
        self.model = model.to(self.device)
        self.optimizers = build_optimizers(self.model)

    def begin(self) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
        """Train the tokenizer, and build the model with random weights; returns both."""
        tok = build_tokenizer(self.options.seed, self.size.vocab, self.size.dialogues)
        ids = (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id)
        return tok, build_model(self.size, len(tok), self.options.seed, *ids)

    def schedule_at(self, step: int) -> ScheduledStep:
        """The phase that training step `step` belongs to, and the step's number in this phase."""
        return scheduled_step_at(step, self.options.steps, self.phases)

    def renderer(self, step: int) -> Renderer:
        """The object that turns the conversations of training step `step` into ids."""
        return Renderer(self.tokenizer)

    def batch(self, step: int) -> Batch:
        """Generate the training batch of step `step`."""
        stage = self.schedule_at(step).stage
        tokens = min(stage.tokens, self.size.longest)
        rng = Random(f"{self.options.seed}/batch/{step}")
        rows = self.size.tokens_per_step // tokens
        return self.renderer(step).batch(rng, rows, tokens, stage.mix)

    def step(self, step: int) -> tuple[float, float, float | None]:
        """Train the model on the batch of step `step`; phases begin and end in this method, too.

        Returns what `summary` returns: mean loss, mean loss of reply tokens, and recall.
        """
        batch = self.batch(step)
        scheduled = self.schedule_at(step)
        if scheduled.step == 0:
            self.end_phase(step)
            self.begin_phase()
            if scheduled.phase.keep:
                save_phase_start(self.options.checkpoints, self.model)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * scheduled.learning_rate
        visible, lost = self.attention_mask(step, batch)
        losses, correct = self.forward(batch, visible)
        torch.autograd.backward(weighted_loss(losses, batch, lost))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return summary(losses.detach().cpu(), correct.cpu(), batch, lost)

    def end_phase(self, done: int) -> None:
        """Average the model's weights at the end of a phase, after `done` training steps."""
        if done and (keep := self.schedule_at(done - 1).phase.keep):
            average_with_saved(self.options.checkpoints, self.model, keep)

    def begin_phase(self) -> None:
        """Begin a training phase: round the weights to bfloat16, and create new optimizers.

        An exported model is rounded in the same way.
        """
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(weight.bfloat16())
        self.optimizers = build_optimizers(self.model)

    def forward(self, batch: Batch, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Read a batch under the attention mask `visible`; None is a causal mask.

        Returns two tensors [rows, tokens]: the loss of each predicted token in nats, and whether
        the prediction was right.
        """
        visible = None if visible is None else visible.to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return token_losses(self.model, batch.ids.to(self.device), visible)

    def attention_mask(self, step: int, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """The attention mask for the batch of a training step, and the tokens without loss."""
        rng = Random(f"{self.options.seed}/gaps/{step}")
        if rng.random() >= self.schedule_at(step).stage.gaps:
            return None, None
        with torch.no_grad():
            losses, _ = self.forward(batch, None)
        gaps = draw_gaps(rng, losses.cpu(), batch, self.renderer(step).roles["user"])
        return gaps.visible, gaps.lost

    def card(self) -> str:
        """Measure the recall of the trained model, and return the text of its model card."""
        options, size = self.options, self.size
        renderer = Renderer(self.tokenizer)
        recalls = probe(self.model, renderer, seed=options.seed, dialogues=size.probes)
        return model_card(
            command=f"sirchat train tiny --steps {options.steps} --seed {options.seed}",
            parameters=self.model.num_parameters(),
            vocab=len(self.tokenizer),
            tokens=options.steps * size.tokens_per_step,
            seed=options.seed,
            recalls=list(recalls) if size.probes else [],
        )

    def finish(self) -> None:
        """End the training: write the model, its tokenizer and its model card to `out`."""
        self.model.eval()
        self.end_phase(self.options.steps)
        export(self.options.out, self.model, self.tokenizer, self.card())


def summary(
    losses: Tensor, correct: Tensor, batch: Batch, lost: Tensor | None = None
) -> tuple[float, float, float | None]:
    """Summarise a training step in three numbers: mean loss, mean loss of reply tokens, recall."""
    span = batch.span if lost is None else batch.span.masked_fill(lost, 0)
    hits = span_matches(correct, span[:, 1:])
    recall = float(hits.float().mean()) if len(hits) else None
    return float(losses.mean()), float(losses[batch.answer[:, 1:]].mean()), recall


def train(options: TrainOptions, kind: type[Trainer] = Trainer) -> Iterator[TrainStep]:
    """Train a bundled model, and yield the result of each training step."""
    if options.steps < 0:
        raise SettingError(f"steps is {options.steps}, must be 0 or more")
    trainer = kind(options)
    parts = trainer.model, trainer.optimizers
    first = load_checkpoint(options.checkpoints, *parts) if options.resume else 0
    begun = time.perf_counter()
    for step in range(first, options.steps):
        loss, answer_loss, recall = trainer.step(step)
        done = step + 1
        if done % options.checkpoint_every == 0 or done == options.steps:
            save_checkpoint(options.checkpoints, done, trainer.model, trainer.optimizers)
        rate = (done - first) * trainer.size.tokens_per_step / (time.perf_counter() - begun)
        yield TrainStep(done, loss, answer_loss, recall, rate)
    trainer.finish()
