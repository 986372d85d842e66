"""Writes and reads the files of a training of `tiny` or `tiny-anchor`.

They are checkpoints, from which an interrupted training resumes, and the trained model.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_file, save_model
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sirchat.errors import ModelError

KEPT_CHECKPOINTS = 2


def replace_files(folder: Path, write: Callable[[Path], None]) -> None:
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
