"""Checks whether the families of models of transformers run under a cache budget.

For each family, a small model with random weights is built. An engine reads ids with this model,
and evicts and restores rows (keys and values of tokens). Run as a program, this file prints the
table of `sirchat/models/FAMILIES.md`, which takes a minute.
"""

from __future__ import annotations

import random
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.errors import ModelError
from sirchat.memory.ledger import Flag, Role
from sirchat.memory.policies.by_position import Sink
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.probe import cache_argument, refuse_unsupported_layers
from sirchat.models.progress import quiet_libraries
from small_models import build_small, causal_families, language_model_of, small_config

Status = Literal["runs", "refused", "not built", "wrong"]

SECONDS = 30  # that the check of one family may take
_MEMORY = 4 << 30  # bytes that the check of one family may allocate
_TURNS = 40, 60, 100  # ids read
_BUDGET = 64  # maximum number of rows in the cache at the end
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class FamilyCheck:
    """The result of the check of one family of models."""

    family: str  # name of the family, the `model_type` of its configuration
    # `runs`; `refused`: sirchat does not run it; `not built`: no small model could be built here;
    # `wrong`: it runs, but its cache or its logits differ from the model's own
    status: Status
    note: str = ""  # one line; the limits of a family that runs, or the reason why it does not run

    @property
    def in_words(self) -> str:
        """Status and note as one phrase, such as `runs; compressed keys`."""
        between = "; " if self.status == "runs" else ": "
        return f"{self.status}{between if self.note else ''}{self.note}"


def check_apart(family: str) -> FamilyCheck:
    """Check a family of models in a process of its own, with limits of its time and memory."""
    with get_context("fork").Pool(1, _limit_memory) as pool:
        try:
            return pool.apply_async(check_family, (family,)).get(SECONDS)
        except (TimeoutError, MemoryError) as error:  # the former, too, if the process was killed
            why = f"the check did not end ({type(error).__name__})"
            return FamilyCheck(family, "not built", why)


def _limit_memory() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    # What this process has inherited counts, too.
    status = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    (taken,) = (line.split()[1] for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, ((int(taken) << 10) + _MEMORY,) * 2)
    torch.set_num_threads(1)


def table(checks: Sequence[FamilyCheck]) -> str:
    """A Markdown table with a row for each result; families that run come first."""
    families: dict[str, list[str]] = {}
    for check in checks:
        families.setdefault(check.in_words, []).append(f"`{check.family}`")
    order = ("run", "ref", "not", "wro")
    results = sorted(families, key=lambda words: (order.index(words[:3]), -len(families[words])))
    rows = [f"| {words} | {', '.join(families[words])} |" for words in results]
    return "\n".join(["| result | families |", "|---|---|", *rows])


@quiet_libraries()
def check_family(family: str) -> FamilyCheck:
    """Check one family of models in the current process; returns the result."""
    try:
        config = small_config(family)
        refuse_unsupported_layers(config.get_text_config(decoder=True), "it")
        module = build_small(family)
    except ModelError as error:
        return FamilyCheck(family, "refused", _in_short(error))
    except Exception as error:  # transformers raises all kinds of errors
        has_text = language_model_of(family) is not None
        note = "reads images, too; its text part is checked" if has_text else _in_short(error)
        return FamilyCheck(family, "not built", note)
    try:
        model = wrap_model("it", module, None)
        worst, shifted = largest_difference(model)
        limits = list(_limits(model))
    except ModelError as error:
        return FamilyCheck(family, "refused", _in_short(error))
    except Exception as error:
        return FamilyCheck(family, "wrong", _in_short(error))
    if _TOLERANCE < worst <= 100 * shifted <= 1:
        limits.append("attention depends a little on how many tokens are held")
    elif not worst <= _TOLERANCE:  # so, too, if it is NaN
        return FamilyCheck(family, "wrong", f"differs from recomputation by {worst:.0e}")
    return FamilyCheck(family, "runs", ", ".join(limits))


def _in_short(error: Exception) -> str:
    """An error's message in at most 120 characters, without a model's name and brackets."""
    text = " ".join(str(error.args[0] if error.args else error).split()) or type(error).__name__
    if isinstance(error, ModelError):
        text = re.sub(r"^\([^)]*\) | \(.*\)$", "", text.removeprefix("it "))
    return shorten(text, 120, placeholder=" ...")


def _limits(model: LoadedModel) -> Iterator[str]:
    """Yield the limits of a model that sirchat can run, such as `compressed keys`."""
    if not model.exposes_attention():
        yield "no attention weights"
    if model.caches_latents:
        yield "compressed keys"


def largest_difference(model: LoadedModel) -> tuple[float, float]:
    """Compare the engine's keys, values and logits with those of the model without the engine."""
    draw = random.Random(0)
    first, second, third = (draw.choices(range(3, model.vocab_size), k=count) for count in _TURNS)
    roomy = CacheSettings(Sink(), budget=256, sinks=0, archive=1 << 30)
    engine, own = Engine(model, roomy), _OwnCache(model)
    _feed(engine, first, 0)
    own.read(first)
    rows = np.arange(len(first))
    engine.evictor.exclude(rows)
    _feed(engine, second, 1)
    pairs = [(_logits(engine), own.read_alone(second)[-1])]
    engine.ledger.flag(Flag.EXCLUDED, rows, False)
    engine.switcher.switch(replace(roomy, budget=300))
    for number, layer in enumerate(own.row_layers()):
        pairs.append((engine.cache.layer_keys(number).clone(), layer.keys))
        pairs.append((engine.cache.layer_values(number).clone(), layer.values))
    few = third[: 1 if model.reads_singly else 3]
    pairs.append((model.forward(few, engine.cache), own.read(few)))
    engine.switcher.switch(CacheSettings(Sink(), budget=_BUDGET))
    _feed(engine, third, 2)
    if engine.resident > _BUDGET or not _logits(engine).isfinite().all():
        raise RuntimeError(f"a budget of {_BUDGET} tokens is not kept")
    shifted = _difference(_OwnCache(model).read(second)[-1], pairs[0][1])
    return max(_difference(ours, theirs) for ours, theirs in pairs), shifted


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


class _OwnCache:
    """Computes the expected results: runs the model with transformers' cache, never evicting."""

    def __init__(self, model: LoadedModel) -> None:
        self._module, self._singly = model.module, model.reads_singly
        self._cache = DynamicCache(config=model.module.config)
        for at, layer in enumerate(self._cache.layers):
            # With a sliding window, a layer would drop rows.
            if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
                states = LinearAttentionAndFullAttentionLayer(layer.number_of_states)
                self._cache.layers[at] = states
            elif isinstance(layer, DynamicSlidingWindowLayer):
                self._cache.layers[at] = DynamicLayer()
        self._read = 0

    @torch.inference_mode()
    def read(self, ids: list[int]) -> Tensor:
        """Read ids [m] after all rows in transformers' cache; returns logits [m, V]."""
        if self._singly and len(ids) > 1:
            return torch.cat([self.read([one]) for one in ids])
        positions = torch.arange(self._read, self._read + len(ids))[None]
        self._read += len(ids)
        out = self._module(
            input_ids=torch.tensor([ids]),
            position_ids=positions,
            use_cache=True,
            **cache_argument(self._module, self._cache),
        )
        return torch.as_tensor(out.logits[0])

    def read_alone(self, ids: list[int]) -> Tensor:
        """Read ids [m] like `read`, but with attention only among themselves.

        The ids get the same positions as with `read`. Returns logits [m, V].
        """
        before = [(layer.keys, layer.values) for layer in self.row_layers()]
        for layer in self.row_layers():
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
        logits = self.read(ids)
        for layer, (keys, values) in zip(self.row_layers(), before, strict=True):
            layer.keys = torch.cat((keys, layer.keys), dim=2)
            layer.values = torch.cat((values, layer.values), dim=2)
        return logits

    def row_layers(self) -> list[Any]:
        """The layers of transformers' cache that have keys and values."""
        layers = (one for one in self._cache.layers if isinstance(one, DynamicLayer))
        return [one for one in layers if one.keys is not None]


def _feed(engine: Engine, ids: list[int], turn: int) -> None:
    list(engine.prefill(ids, [Role.USER] * len(ids), TurnRef(turn, turn)))


def _logits(engine: Engine) -> Tensor:
    if engine.logits is None:
        raise RuntimeError("nothing was read")
    return engine.logits


if __name__ == "__main__":
    print(table(list(map(check_apart, causal_families()))))  # noqa: T201
