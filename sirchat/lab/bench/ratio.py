"""Compares the speed of two sides: sirchat ("ours"), and another way to do the same work.

The work is divided into blocks. Both sides run in one process, in turn, block by block, so that a
change of the machine's speed affects both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.lab.bench.record import machine
from sirchat.models.compiling import CompileMode, use_compiled
from sirchat.models.decoder import Decoder
from sirchat.models.devices import DeviceName, DtypeName, pick_device, pick_dtype
from sirchat.models.gguf.blocks import BLOCK_FLOATS, split_blocks
from sirchat.models.gguf.header import BLOCKS, GgufTensor
from sirchat.models.load import Quantize, load_model
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.packed import BlockGpuLinear
from sirchat.models.packing import fuse_projections, pack_module


@dataclass(frozen=True)
class Ratio:
    """The result of a comparison: sirchat's time divided by the time of the other side.

    Both sides were timed for several pairs of blocks, and each pair has a ratio.
    """

    name: str  # name of the comparison
    ours_ms: float  # sirchat's median time in milliseconds per `unit`
    other_ms: float  # the other side's median time in milliseconds per `unit`
    median: float  # median of the pairs' ratios
    low: float  # lower quartile of the pairs' ratios
    high: float  # upper quartile of the pairs' ratios
    pairs: int  # number of pairs
    note: str = ""  # a text with further measurements; empty if there are none
    unit: str = "token"  # the unit of work that the times refer to: a token, a turn or a search


@dataclass(frozen=True)
class BenchOptions:
    """The sizes of a benchmark: of the cache, of the timed work, and of the text before it."""

    cache: int = 1024  # number of tokens that the cache holds while decoding
    rounds: int = 15  # number of pairs of blocks that are timed
    # numbers of tokens that are read before decode is timed. The time of decode after each further
    # number is compared with the time after the first number
    seen: tuple[int, ...] = (2_000, 100_000)

    @property
    def block(self) -> int:
        """Number of tokens in a timed block: sirchat evicts tokens once per so many new tokens."""
        return max(8, self.cache // 16)


def bench_record(results: list[Ratio], model: LoadedModel, options: BenchOptions) -> dict[str, Any]:
    """The results of a benchmark as a JSON object, with what is needed to repeat the benchmark.

    This is the model, the device, the number types, the machine and the sizes.
    """
    return {
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(model.cache_dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "machine": machine(),
        **asdict(options),
        "results": [asdict(result) for result in results],
    }


def compare(
    name: str,
    make_ours: Callable[[], Iterator[float]],
    make_other: Callable[[], Iterator[float]],
    options: BenchOptions,
) -> Ratio:
    """Time two ways to do the same work in turn, block by block.

    `next` of each side runs one block and returns seconds per token, turn or search.
    """
    ours, other = make_ours(), make_other()
    pairs: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        if number % 2:  # the side that goes first alternates
            pairs.append((next(ours), next(other)))
        else:
            second = next(other)
            pairs.append((next(ours), second))
    pairs = pairs[1:]
    ratios = sorted(a / b for a, b in pairs)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    ours_ms, other_ms = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(name, ours_ms, other_ms, median, low, high, len(pairs))


def some_ids(model: LoadedModel, count: int) -> list[int]:
    """Draw `count` random ids from the model's vocabulary; every call returns the same ids."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()
    return ids


def measure_seconds(block: Callable[[], object], model: LoadedModel) -> float:
    """Call `block`, and return the seconds until the call and the model's device have finished."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    block()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


# Models that are built with random weights, by short names.
SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("shapes.yaml").read_text(encoding="utf-8")
)


def bench_model(
    name: str,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    quantize: Quantize = "auto",
    *,
    for_hub: bool = False,
    compile: CompileMode = "off",
) -> LoadedModel:
    """Load the model for a benchmark, as `load_model` says, or build it with random weights.

    Raises ModelError if the weights can't have this form.
    """
    if name not in SHAPES:
        # What it runs beside has as many threads, however many cores are free by now.
        how: dict[str, Any] = {"compile": compile, "threads": torch.get_num_threads()}
        types: dict[str, Any] = {"device": device, "dtype": dtype, "quantize": quantize}
        return load_model(name, for_hub=for_hub, **types, **how)
    where = pick_device(device)
    if quantize == "packed" and where.type == "cpu":
        raise ModelError("random weights have no blocks to keep", hint="--quantize int8 or int4")
    model = random_model(name, SHAPES[name], where, pick_dtype(dtype, where), quantize)
    use_compiled(model, compile)
    return model


def random_model(
    name: str,
    shape: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "auto",
) -> LoadedModel:
    """Build a model of a shape, the values of its config, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"max_position_embeddings": 8192, **shape})
    torch.manual_seed(0)
    with device:  # 8b in float32 on the CPU first would take minutes, and 32 GB
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if quantize in ("int8", "int4"):
        pack_module(module, 8 if quantize == "int8" else 4)
    elif quantize == "packed":
        _fill_with_blocks(module)
    return wrap_model(f"{name} (random weights)", module, None)


def _fill_with_blocks(module: Any) -> None:
    """Replace the matrices by random blocks for a GPU: Q4_K and, of the head, Q6_K, if they fit."""
    random, head = np.random.default_rng(0), module.get_output_embeddings()
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear):
            kinds = ("Q4_K", "Q6_K") if layer.in_features % 256 == 0 else ("Q4_0", "Q8_0")
            kind = kinds[layer is head]
            size, width = BLOCKS[kind][1:]
            blocks = random.integers(0, 256, (layer.weight.numel() // size, width), np.uint8)
            blocks[:, slice(*BLOCK_FLOATS[kind])].view(np.float16)[:] = 1e-4
            tensor = GgufTensor(tuple(layer.weight.shape), kind, blocks.reshape(-1))
            parts = split_blocks(tensor, module.device)
            module.set_submodule(name, BlockGpuLinear(*parts, bias=layer.bias))
            fuse_projections(module, name)


def load_unpacked(model: LoadedModel, profile: Profile) -> LoadedModel | None:
    """Load the profile's model in float32 as a module of transformers, for the plain loop."""
    is_one = model.precision == "float32" and not isinstance(model.module, Decoder)
    if model.device.type != "cpu" or is_one:
        return None
    return bench_model(profile.model, profile.device, "float32", "none", for_hub=True)
