"""A captured decode step on the CPU: with torch's kernels, and a stand-in for CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sirchat.models.captured_step import CapturedStep, Work, capture_first
from sirchat.models.hub_step import HubStep
from sirchat.models.llama_step import LlamaStep
from sirchat.models.model import LoadedModel


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A stand-in for a CUDA graph: operations within its block are recorded, to be repeated.

    What was a number of the host when they were recorded stays as it was; only what is in tensors,
    which keep their addresses, can change.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(made)))
        return made

    @torch.inference_mode()
    def replay(self) -> None:
        """Do all operations again, in order; their results are where they were the first time."""
        for func, args, kwargs, results in self._calls:
            for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@torch.library.custom_op("sirchat_tests::draw", mutates_args=())  # one operation in a record
def draw(
    scores: Tensor,
    values: Tensor,
    ids: Tensor,
    number: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    around: float,
) -> tuple[Tensor, Tensor]:
    """As `kernels.draw_token` must: an id, int64 [1], and whether it is right, bool [1]."""
    count = len(values)
    chances = (values.double() - values[0]).exp()  # relative to the likeliest
    total = (scores.double() - values[0]).exp().sum()
    few = many = torch.tensor([count], device=ids.device)
    if top_k:
        few = many = (values >= values[min(top_k, count) - 1]).sum(0, keepdim=True)
        total = chances[: int(few)].sum()
    likelier = (chances.cumsum(0) - chances) / total
    for lower, upper in (
        (likelier < top_p - around, likelier < top_p + around),
        (chances >= min_p * (1 + around), chances >= min_p * (1 - around)),
    ):
        few, many = few.minimum(lower.sum()), many.minimum(upper.sum())
    left = int(few)
    is_whole = left == count == len(scores)
    is_told = is_whole or (left < count and bool(values[left] < values[left - 1]))
    order = ids[:left].sort()  # the host draws in order of id
    heights = chances[:left][order.indices].cumsum(0)
    drawn = int((heights <= number * heights[-1]).sum()) if left else 0
    chosen = order.values[min(drawn, left - 1)] if left else ids[0]
    return chosen.view(1).clone(), (few == many) & (few > 0) & is_told


class StandIn:
    """In place of `CudaGraph`: records the work, and repeats it on the same memory."""

    def __init__(self, work: Work) -> None:
        self._graph = RecordedGraph()
        with self._graph:
            self.outputs = work()

    def replay(self) -> None:
        for output in self.outputs:  # who reads it before it is written again gets NaN
            output.fill_(torch.nan)
        self._graph.replay()


def why_not(model: LoadedModel) -> str:
    """Why a model's own forward can't be captured as a decode step, or ""."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sirchat.models.captured_step.CudaGraph", StandIn)
        body = partial(HubStep, model, model.encoder.layers)
        return capture_first([body], model.device, model.step_error, model.encoder).problems


@contextmanager
def captured(model: LoadedModel, **options: Any) -> Iterator[CapturedStep]:
    """Within this block, the model decodes with the captured step that this yields."""
    body = LlamaStep(model.module, "torch", model.encoder.layers)
    step = CapturedStep(body, model.device, captures=True, encoder=model.encoder, **options)
    vars(step)["can_draw"] = True
    kernels = ModuleType("sirchat.models.kernels")
    vars(kernels).update(draw_token=draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sirchat.models.captured_step.CudaGraph", StandIn)
        patch.setitem(sys.modules, kernels.__name__, kernels)
        patch.setattr("sirchat.models.kernels", kernels, raising=False)
        patch.setitem(model.__dict__, "decode_step", step)
        yield step
