"""Compares the time of two sides: sirchat (ours), and another way to do the same work.

The work is divided into blocks. Both sides run in one process, in turn, block by block, so that a
change of the machine's speed affects both. The result is the ratio of the times of each pair of
blocks, ours divided by the other's (below 1: ours is faster).

Models may have random weights, to measure speed at sizes that are not bundled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sirchat.config.profile import Profile
from sirchat.lab.bench.record import machine
from sirchat.models.decoder import Decoder
from sirchat.models.devices import DeviceName, DtypeName, pick_device, pick_dtype
from sirchat.models.loading import Quantize, load_model
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.packing import pack_module


@dataclass(frozen=True)
class Ratio:
    """Time of our side divided by the time of the other side, from several pairs of blocks.

    Attributes:
        name: what was measured.
        ours_ms: our side's median time in milliseconds per `unit`.
        other_ms: the other side's median time in milliseconds per `unit`.
        median: median of the pairs' ratios.
        low: lower quartile of the pairs' ratios.
        high: upper quartile of the pairs' ratios.
        pairs: number of pairs.
        note: anything else that was measured, as text.
        unit: the unit of work that a time is given for: a token, a turn or a search.
    """

    name: str
    ours_ms: float
    other_ms: float
    median: float
    low: float
    high: float
    pairs: int
    note: str = ""
    unit: str = "token"


@dataclass(frozen=True)
class BenchOptions:
    """Sizes of a benchmark.

    Attributes:
        cache: number of tokens held in the cache while decoding.
        rounds: number of pairs of blocks that are timed.
        seen: numbers of tokens read before decode is timed; each is compared with the first.
    """

    cache: int = 1024
    rounds: int = 15
    seen: tuple[int, ...] = (2_000, 100_000)

    @property
    def block(self) -> int:
        """Number of tokens in a timed block: those between two successive evictions."""
        return max(8, self.cache // 16)


def bench_record(results: list[Ratio], model: LoadedModel, options: BenchOptions) -> dict[str, Any]:
    """The results as a JSON object, with the model, device and sizes needed to repeat them."""
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
    """Time both sides in turn, block by block; the first pair is a warm-up and does not count.

    A block is a piece of work whose time is measured. `make_ours` and `make_other` each start a
    side: they return an iterator that runs one block of the side at a time, and gives the seconds
    per token of the block.
    """
    ours, other = make_ours(), make_other()
    pairs: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        if number % 2:  # the side that goes first alternates
            pair = (next(ours), next(other))
        else:
            second = next(other)
            pair = (next(ours), second)
        pairs.append(pair)
    pairs = pairs[1:]
    ratios = sorted(a / b for a, b in pairs)
    low, median, high = statistics.quantiles(ratios, n=4)
    ours_ms, other_ms = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(
        name=name,
        ours_ms=ours_ms,
        other_ms=other_ms,
        median=median,
        low=low,
        high=high,
        pairs=len(pairs),
    )


def some_ids(model: LoadedModel, count: int) -> list[int]:
    """`count` random token ids; every call returns the same ids."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()
    return ids


def timed(block: Callable[[], None], model: LoadedModel) -> float:
    """The seconds that a call of `block` takes, including the device's work for it."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    block()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
"""Shapes of SmolLM2 135M, Llama 3.2 1B, Qwen3 4B and Llama 3.1 8B, for random weights."""


def bench_model(
    name: str,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    quantize: Quantize = "auto",
    for_hub: bool = False,
) -> LoadedModel:
    """A model with random weights if `name` is in SHAPES, else the one that `load_model` loads.

    `for_hub`: whether `load_model` must return a module of transformers, also for a model that
    sirchat would run with a decoder of its own.
    """
    if name not in SHAPES:
        return load_model(name, device=device, dtype=dtype, quantize=quantize, for_hub=for_hub)
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    config = AutoConfig.for_model(**SHAPES[name], max_position_embeddings=8192)
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(config)
    module = module.to(where, kind).eval()
    if quantize in ("int8", "int4"):
        pack_module(module, 8 if quantize == "int8" else 4)
    return wrap_model(f"{name} (random weights)", module, None)


def unpacked(model: LoadedModel, profile: Profile) -> LoadedModel | None:
    """The profile's model in float32, as a module of transformers, for the plain loop.

    Returns None if `model` itself serves: it is such a model already, or it is on a GPU.
    """
    is_one = model.precision == "float32" and not isinstance(model.module, Decoder)
    if model.device.type != "cpu" or is_one:
        return None
    return bench_model(profile.model, profile.device, "float32", "none", for_hub=True)
