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

from drawing_ids import draw
from recorded_graph import RecordedGraph
from sirchat.models.captured_step import CapturedStep, Work, capture_first
from sirchat.models.hub_step import HubStep
from sirchat.models.llama_step import LlamaStep
from sirchat.models.model import LoadedModel


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
