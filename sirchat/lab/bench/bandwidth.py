"""The weights that a decode step reads, and how fast this machine reads as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sirchat.lab.bench.ratio import BenchOptions, timed
from sirchat.models.model import LoadedModel

_COLUMNS = 1024


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of the weights that a step for one token reads: all, as they are kept.

    An embedding counts only where the output head shares it. Of a mixture of experts, all count.
    """
    module = model.module
    head = module.get_output_embeddings()
    in_head = set() if head is None else set(_sizes(head))
    rows_only = set(_sizes(module.get_input_embeddings())) - in_head
    return sum(size for start, size in _sizes(module).items() if start not in rows_only)


def _sizes(module: nn.Module) -> dict[int, int]:
    """Bytes of each tensor of a module by its address, so that a shared one counts once."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return {one.data_ptr(): one.numel() * one.element_size() for one in tensors}


def reading(size: int, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Seconds to read so many bytes on the model's device, without end: the limit of a step.

    A float32 matrix of that size is multiplied with a vector, which takes one pass over it.
    """
    rows = max(1, size // (4 * _COLUMNS))
    matrix = torch.ones(rows, _COLUMNS, device=model.device)
    vector = torch.ones(_COLUMNS, device=model.device)

    @torch.inference_mode()
    def block() -> None:
        for _ in range(options.block):
            torch.mv(matrix, vector)

    while True:
        yield timed(block, model) / options.block
