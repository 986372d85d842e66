"""Puts packed layers, including experts, into a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from sirchat.memory.free_memory import trim_memory
from sirchat.models.packed import (
    GROUP,
    GpuKernels,
    GpuLinear,
    Int8Head,
    Int8Linear,
    MatmulMethod,
    PackedLinear,
    SharedEmbedding,
    int4_class,
    set_matmul_method,
)

Rounded = TypeVar("Rounded", bound=tuple[Tensor, ...])

# Groups of layers with the same input; a decode step computes one product for each group.
_SAME_INPUT_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_MAX_ERROR = 0.05  # of a product by kernels: torch's has 16 bits, a wrong one differs by 1
_ROUNDED_ROWS = 4096  # rows of a matrix that are rounded at a time on a GPU


@torch.no_grad()
def pack_module(module: Any, bits: int, device: torch.device | None = None) -> None:
    """Replace a model's linear layers in place by packed ones of 8 or 4 bits, on `device`.

    The head gets 8 bits, and so do layers whose shape does not allow 4. Embeddings stay, or read
    the head's weights if they share them. Without `device`, layers stay where they are.
    """
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied, device = embeddings.weight is head.weight, device or module.device
    four = int4_class(device)
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.detach()
        packed: PackedLinear
        if layer is head:
            packed = eight = Int8Head(*_rounded(quantize_int8, weight, device), layer.bias)
            if is_tied:
                shared = SharedEmbedding(embeddings, eight, weight.dtype)
                module.set_input_embeddings(shared)
        elif bits == 4 and four.fits(*weight.shape):
            packed = four.from_values(*_rounded(quantize_int4, weight, device), layer.bias)
        else:
            packed = Int8Linear(*_rounded(quantize_int8, weight, device), layer.bias)
        module.set_submodule(name, packed.to(device))
        fuse_projections(module, name)
    trim_memory()


def same_input_names(path: str) -> tuple[str, tuple[str, ...]]:
    """The module with the layer at `path`, and its layers with the same input, in joined order."""
    owner, _, name = path.rpartition(".")
    return owner, next((group for group in _SAME_INPUT_NAMES if name in group), (name,))


def fuse_projections(module: Any, path: str) -> None:
    """Join the packed layer at `path` with those that have the same input.

    They wait until all are packed, and stay alone if they are packed in different ways.
    """
    owner, names = same_input_names(path)
    layers = [getattr(module.get_submodule(owner), name, None) for name in names]
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    kinds = {(type(layer), *layer.row_kinds) for layer in packed}
    if len(packed) < max(2, len(layers)) or len(kinds) > 1 or packed[0].joined is not None:
        return
    joined, start = packed[0].join_layers(packed), 0
    for layer in packed:
        layer.take_rows(joined, start)
        start += layer.out_features


def use_gpu_kernels(module: nn.Module) -> None:
    """Let Triton's kernels unpack and multiply packed weights on a GPU, if they work there."""
    layers = [one for one in module.modules() if isinstance(one, GpuLinear | Int8Linear)]
    if not layers:
        return
    device = next(layers[-1].buffers()).device  # the first layers may be on a CPU
    first = next(one for one in layers if next(one.buffers()).device == device)
    x = torch.linspace(-1, 1, first.in_features, device=device)[None]
    expected = first.multiply_packed(x)
    try:
        from sirchat.models import packed_kernels

        kernels = GpuKernels(packed_kernels.unpack_rows, packed_kernels.multiply_rows)
        set_matmul_method(module, MatmulMethod(gpu_kernels=kernels), device.type)
        found = first.multiply_packed(x)
        works = (found - expected).norm() < _MAX_ERROR * expected.norm()
    except Exception:  # Triton is not there, or raises any kind of error
        works = False
    if not works:
        set_matmul_method(module, MatmulMethod(), device.type)


class PackedExperts(nn.Module):
    """Replaces a layer's experts, stacked tensors in transformers, by packed layers of each expert.

    The gate and the biases of the module `original` are still used.
    """

    def __init__(self, original: Any, layers: Mapping[Any, Sequence[PackedLinear]]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.ModuleList(layers[part]) for part in ("gate", "up", "down")
        )
        self.gate_up_proj_bias = getattr(original, "gate_up_proj_bias", None)  # [E, 2 F]
        self.down_proj_bias = getattr(original, "down_proj_bias", None)  # [E, K]
        original.gate_up_proj = original.down_proj = None
        self._original = (original,)  # in a tuple, so that it is not a submodule

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Sum each row's k `chosen` experts, weighted by `shares`; x and the result are [m, K]."""
        out = torch.zeros_like(x)
        for expert in set(chosen.flatten().tolist()):
            row_indices, choice_indices = torch.where(chosen == expert)
            share = shares[row_indices, choice_indices, None]
            y = self._expert_output(expert, x[row_indices]) * share
            out.index_add_(0, row_indices, y.to(out.dtype))
        return out

    def _expert_output(self, expert: int, x: Tensor) -> Tensor:
        original = self._original[0]
        gate, up = self.gate[expert](x), self.up[expert](x)  # [n, F] each
        if original.is_concatenated:
            both = torch.cat((gate, up), -1)
        else:  # the rows of gate and up alternate
            both = torch.stack((gate, up), -1).flatten(-2)
        if self.gate_up_proj_bias is not None:
            both = both + self.gate_up_proj_bias[expert]
        y: Tensor = self.down[expert](original._apply_gate(both))
        return y if self.down_proj_bias is None else y + self.down_proj_bias[expert]


def quantize_int8(weight: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round each row of a matrix [N, K] to 255 steps; returns q and scale of `Int8Linear`.

    With `out`, q is written there, and the float32 `weight` is overwritten.
    """
    # Twice over the weights, but without a copy of them.
    largest = torch.maximum(weight.amax(1, keepdim=True), weight.amin(1, keepdim=True).neg())
    # By a tensor: to divide by a number, a GPU multiplies by its inverse, which rounds.
    largest_float = largest.float().clamp_min(1e-12)  # [N, 1]
    scale = (largest_float / torch.full_like(largest_float, 127)).bfloat16()
    steps = weight / scale if out is None else weight.div_(scale)
    steps.round_().clamp_(-127, 127)
    return steps.to(torch.int8) if out is None else out.copy_(steps), scale[:, 0]


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix [N, K] to 16 steps in each group of 32; returns q, scale and minimum."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minimum, maximum = groups.amin(-1), groups.amax(-1)
    scale = ((maximum - minimum) / torch.full_like(maximum, 15)).clamp_min(1e-12)  # as above
    q = ((groups - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
    return q.to(torch.uint8).view_as(weight), scale, minimum


def _rounded(
    quantize: Callable[[Tensor], Rounded], weight: Tensor, device: torch.device
) -> Rounded:
    """Round a matrix [N, K] by `quantize`; on a GPU from float32, so that results equal a CPU's."""
    if device.type == "cpu":
        return quantize(weight)
    parts = [quantize(rows.to(device).float()) for rows in torch.split(weight, _ROUNDED_ROWS)]
    return cast(Rounded, tuple(torch.cat(each) for each in zip(*parts, strict=True)))
