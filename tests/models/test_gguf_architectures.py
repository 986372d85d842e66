"""GGUF files of many architectures: read by name, exactly, and packed if they are of few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")

from gguf_models import MODELS, random_model, write_model  # noqa: E402

from sirchat.models.gguf.contents import is_supported  # noqa: E402
from sirchat.models.gguf.header import parse_gguf  # noqa: E402
from sirchat.models.gguf.loading import load_module  # noqa: E402

IDS = torch.arange(3, 43)[None]


def logits(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = module(IDS).logits[0].float()
    return out


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("case", MODELS)
def test_the_logits_are_those_of_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    module = random_model(case)
    path = write_model(tmp_path / "model.gguf", module, case, lambda name, shape: "F32")
    file = parse_gguf(path)
    assert is_supported(file)
    found = load_module(file, torch.float32).eval()
    torch.testing.assert_close(logits(found), logits(module), rtol=1e-5, atol=1e-5)


def few_bits(name: str, shape: tuple[int, ...]) -> str:
    """Two types of blocks for matrices, float32 for all else, as llama.cpp stores it."""
    if len(shape) < 2 or shape[-1] % 32 or "gate_inp" in name:
        return "F32"
    return "Q8_0" if "down" in name or "embd" in name else "Q4_0"


@pytest.mark.parametrize("case", MODELS)
def test_packed_weights_give_nearly_the_same_logits(case: str, tmp_path: Path) -> None:
    module = random_model(case)
    path = write_model(tmp_path / "model.gguf", module, case, few_bits)
    found = load_module(parse_gguf(path), torch.float32, keep_packed=True).eval()
    error = relative(logits(found), logits(module))
    print(case, error)
    assert error < 0.03
