"""The rows of `sirchat bench gpu`: each measures one part of decoding, on random weights or `tiny`.

A way to decode that is missing or fails becomes a number without a value, and the row goes on. On a
CPU all sizes are tiny: what one learns there is that the rows work.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile, supported_activities

from sirchat.engine.engine import Engine, Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken, RecallSettings, TurnRef
from sirchat.errors import ModelError, SirchatError
from sirchat.lab.bench.decode import (
    bare_blocks,
    bare_read,
    generated_blocks,
    prefill,
    static_cache_times,
    weight_bytes,
    with_decoder,
)
from sirchat.lab.bench.gpu_value import Value
from sirchat.lab.bench.ratio import SHAPES, BenchOptions, Ratio, compare, random_model, some_ids
from sirchat.lab.bench.record import machine
from sirchat.memory.policies.by_attention import H2o
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.devices import DeviceName, DtypeName, pick_device, pick_dtype
from sirchat.models.load import Quantize, load_model
from sirchat.models.model import LoadedModel

_Values = Iterator[Value]

# The shape of all models on a CPU.
_SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_CHAT = Sampling(temperature=0.2, top_p=0.9, repetition_penalty=1.05)  # a chat's default
_GREEDY = Sampling()
_SPREAD = 3.0  # standard deviation of a trained model's logits, about
_ARCHIVE = 2**30  # bytes
_TURN = TurnRef(turn=0, round=0)


class Bench:
    """The device, the sizes, and the models, which rows share.

    Raises ModelError if the device is not available.
    """

    def __init__(self, device: str) -> None:
        name: DeviceName = device  # type: ignore[assignment]  # `pick_device` refuses others
        self.name, self.device = name, pick_device(name)
        self.is_small = self.device.type == "cpu"
        self.dtype = pick_dtype("auto", self.device)
        self.options = BenchOptions(cache=64, rounds=2) if self.is_small else BenchOptions(rounds=3)
        self._models: dict[tuple[str, str], LoadedModel] = {}

    @property
    def plan(self) -> list[tuple[str, float]]:
        """The name of each row, and the most seconds that it may take."""
        return [(name, row.seconds) for name, row in ROWS.items()]

    @property
    def machine(self) -> dict[str, Any]:
        """What the machine is, with versions."""
        try:
            triton = version("triton")
        except PackageNotFoundError:
            triton = "none"
        return machine() | {"cuda": torch.version.cuda, "triton": triton}

    def measure(self, row: str) -> _Values:
        """Measure a row; an error becomes its last value."""
        yield from _tried("the rest", partial(ROWS[row].measure, self))
        gc.collect()

    def is_well(self) -> bool:
        """Whether the GPU works: after some errors it does nothing more for a process."""
        try:
            self.seconds(lambda: None, 1)
        except RuntimeError:
            return False
        return True

    def model(self, name: str, quantize: Quantize = "none") -> LoadedModel:
        """The model of a shape with random weights."""
        if (name, quantize) not in self._models:
            shape = _SMALL if self.is_small else SHAPES[name]
            make = partial(random_model, name, shape, self.device, self.dtype, quantize)
            try:
                made = make()
            except torch.OutOfMemoryError:
                self._models.clear()
                gc.collect()
                torch.cuda.empty_cache()
                made = make()
            self._models[name, quantize] = made
        return self._models[name, quantize]

    def seconds(self, work: Callable[[], object], count: int = 1) -> float:
        """The seconds that a call of `work` takes; of several calls, one more goes first."""
        for _ in range(count > 1):
            work()
        if not self.is_small:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            work()
        if not self.is_small:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    def again(
        self, prepare: Callable[[], Any], work: Callable[[Any], object], parts: int = 1
    ) -> Iterator[float]:
        """The seconds of each of the equal parts of `work` on what `prepare` makes; forever."""
        while True:
            yield self.seconds(partial(work, prepare())) / parts

    def compare(self, ours: Callable[[], Iterator[float]], other: Callable[[], Any]) -> Ratio:
        """Time two ways to do the same work in turn."""
        return compare("", ours, other, self.options)

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` as a CUDA graph; on a CPU `work` itself."""
        if self.is_small:
            return work
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that are read or written when memory is copied."""
        size = 2**20 if self.is_small else 2**30
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * len(source) / self.seconds(lambda: target.copy_(source), 20)

    @cached_property
    def arithmetic(self) -> float:
        """Multiplications and additions a second in a product of large matrices."""
        size = 256 if self.is_small else 8192
        matrix = torch.randn(size, size, device=self.device, dtype=self.dtype)
        return 2 * size**3 / self.seconds(lambda: matrix @ matrix, 10)


def _device(bench: Bench) -> _Values:
    yield Value("copying memory", bench.bandwidth / 1e9, "GB/s", "bytes read and written")
    yield Value("multiplying matrices", bench.arithmetic / 1e12, "TFLOP/s", str(bench.dtype))
    number = torch.zeros(1, device=bench.device)

    def kernels(count: int) -> None:
        for _ in range(count):
            number.add_(1)

    for label, work, count in (
        ("a graph of one tiny kernel", bench.captured(partial(kernels, 1)), 1),
        ("a tiny kernel in a graph of 1,000", bench.captured(partial(kernels, 1000)), 1000),
        ("a tiny kernel without a graph", partial(kernels, 1000), 1000),
    ):
        yield Value(label, 1e6 * bench.seconds(work, 20) / count, "µs")


def _decode(bench: Bench, name: str, quantize: Quantize = "none") -> _Values:
    model, options = bench.model(name, quantize), bench.options
    against, other = "a bare loop of transformers", partial(bare_blocks, model, options)
    if quantize != "none":
        against, other = "unpacked", partial(generated_blocks, bench.model(name), options)
    if not bench.is_small:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ratio = bench.compare(partial(generated_blocks, model, options), other)
    size = weight_bytes(model)
    step: Any = model.decode_step
    kind = getattr(getattr(step, "body", step), "kernels", type(step).__name__)
    why = getattr(getattr(model, "captured", None), "problems", "")  # not to use the fastest step
    yield Value(
        "a token", ratio.ours_ms, "ms", f"{options.cache:,} rows; {kind}; {why}".rstrip("; ")
    )
    limit = 1000 * size / bench.bandwidth
    reached = f"{size / 1e9:.2f} GB, {limit / ratio.ours_ms:.0%} of the bandwidth"
    yield Value("over reading the weights once", ratio.ours_ms / limit, "x", reached)
    yield _over(f"over {against}", ratio)
    if not bench.is_small:
        most = torch.cuda.max_memory_allocated()
        yield Value(
            "most memory, of both sides",
            most / 2**30,
            "GiB",
            f"{before / 2**30:.2f} before decoding",
        )


def _steps(bench: Bench, name: str) -> _Values:
    model = bench.model(name)

    def token(label: str, make: _MakeStep) -> _Values:
        with _stepping(model, make) as step:
            blocks = generated_blocks(model, bench.options)
            taken = [next(blocks) for _ in range(bench.options.rounds + 1)][1:]
            yield Value(f"{label}: a token", 1000 * statistics.median(taken), "ms")
            if hasattr(step, "capture_seconds"):
                yield Value(f"{label}: capture", step.capture_seconds, "s")
            counts, more = _kernels(bench, model)
            yield Value(f"{label}: kernels a token", counts, note=more)

    for label, make in _STEPS.items():
        yield from _tried(label, partial(token, label, make))


def _kernels(bench: Bench, model: LoadedModel) -> tuple[float, str]:
    """How many kernels a token takes; and copies, launches and waits, in words."""
    counts, tokens = Counter[str](), 4
    engine = _reading(model, 64)
    _said(engine, 8)
    kinds = supported_activities()  # type: ignore[no-untyped-call]
    with profile(activities=kinds) as seen:
        bench.seconds(partial(_said, engine, tokens))
    for event in seen.events() or ():
        if str(event.device_type).endswith("CUDA"):
            counts["copies" if event.name.startswith("Mem") else "kernels"] += 1
        elif event.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")):
            counts["launches"] += 1
        elif event.name.startswith("cuda") and event.name.endswith("Synchronize"):
            counts["waits"] += 1
    more = (f"{counts[kind] / tokens:g} {kind}" for kind in ("copies", "launches", "waits"))
    return counts["kernels"] / tokens, ", ".join(more)


def _over_generate(bench: Bench, name: str) -> _Values:
    model = bench.model(name)
    static = static_cache_times(model, bench.options)
    yield Value("generate's first reply", bench.seconds(lambda: next(static)), "s", "compiles")
    ratio = bench.compare(partial(generated_blocks, model, bench.options), lambda: static)
    yield _over("over generate with a static cache", ratio)


def _sampling(bench: Bench) -> _Values:
    for size in (512, 1024) if bench.is_small else (49_152, 128_256):
        logits = _SPREAD * torch.randn(size, device=bench.device)
        for label, how in {"greedy": _GREEDY, "a chat's default": _CHAT}.items():
            pick = partial(Sampler(how).pick, logits, lambda count: list(range(count)), 7)
            yield Value(f"{label}, of {size:,} logits", 1000 * bench.seconds(pick, 20), "ms")
    for name in ("135m", "1b"):
        model = bench.model(name)
        spread = float(model.forward([0], model.new_cache(1)).std())
        # As narrow as a trained model's choice: random weights make more even logits.
        chat = replace(_CHAT, temperature=_CHAT.temperature * spread / _SPREAD)
        sides = (partial(_kept_blocks, bench, model, how) for how in (chat, _GREEDY))
        yield _over(f"{name}: decoding, a chat's over greedy", bench.compare(*sides))


def _features(bench: Bench, name: str) -> _Values:
    model = bench.model(name)
    full = partial(generated_blocks, model, bench.options)
    yield _over("evicting over not", bench.compare(full, partial(_kept_blocks, bench, model)))
    yield _over("an archive over undo's rows alone", bench.compare(full, partial(full, archive=0)))
    yield from _tried("recall", partial(_recall, bench, model))
    yield _over("h2o over entropy", bench.compare(partial(full, policy=H2o()), full))


def _recall(bench: Bench, model: LoadedModel) -> _Values:
    budget = bench.options.cache
    recall = RecallSettings("words", n=16 if bench.is_small else 400)
    engine = _reading(model, 2 * budget, budget=budget, archive=_ARCHIVE, recall=recall)
    evictor, ledger = engine.evictor, engine.ledger
    archived = np.setdiff1d(np.arange(ledger.seen), ledger.held_positions)[: recall.n]

    def restore(_: object) -> None:
        evictor.begin_recall(archived, incoming=32)

    def turn(restores: bool, _: object) -> None:
        if restores:
            restore(_)
        prefill(engine, some_ids(model, 32))
        _said(engine, 32)
        evictor.end_recall()

    back = evictor.end_recall
    ratio = bench.compare(*(partial(bench.again, back, partial(turn, by)) for by in (True, False)))
    restoring = bench.again(back, restore)
    yield Value(f"restoring {len(archived)} rows", 1000 * [next(restoring) for _ in "ab"][1], "ms")
    yield _over("a turn of 32 + 32 tokens with it over without", ratio)


def _prefill(bench: Bench, name: str) -> _Values:
    model = bench.model(name)
    own = with_decoder(model)  # as the weights of a folder are read
    for count in (64, 128) if bench.is_small else (1024, 8192):
        new = partial(_reading, own, 0, budget=count + 256)
        read = partial(prefill, ids=some_ids(model, count))
        bare = partial(bench.again, partial(int, count), partial(bare_read, model))
        ratio = bench.compare(partial(bench.again, new, read), bare)
        yield _over(f"{count:,} ids over one bare pass", ratio)
        work = 2 * count * weight_bytes(model) / bench.dtype.itemsize  # but attention's
        share = 1e5 * work / bench.arithmetic / ratio.ours_ms
        yield Value(f"{count:,} ids: share of the arithmetic", share, "%")

        def first(engine: Engine, read: Callable[[Engine], None] = read) -> None:
            read(engine)
            _said(engine, 1)

        times = bench.again(new, first)
        yield Value(
            f"{count:,} ids and the first token", 1000 * [next(times) for _ in "ab"][1], "ms"
        )


def _server(bench: Bench, name: str) -> _Values:
    model, block, alone = bench.model(name), 16, 0.0
    step = _own_step(model)
    for count in (1, 2) if bench.is_small else (1, 4, 16):
        ids, caches = [0] * count, [_filled(model, bench.options.cache // 2) for _ in range(count)]

        def tokens(ids: list[int] = ids, caches: list[Any] = caches) -> None:
            for _ in range(block):
                read = [(one, cache.length, cache) for one, cache in zip(ids, caches, strict=True)]
                logits = step.read_together(read)[0]
                ids[:] = logits.argmax(-1).tolist()
                for cache in caches:
                    cache.commit(1)

        speed = count * block / bench.seconds(tokens, 4)
        alone = alone or speed
        yield Value(f"{count} at once", speed, "tokens/s", f"{speed / alone:.2f} times that of one")


def _exactness(bench: Bench) -> _Values:
    load, count = partial(load_model, "tiny"), 16 if bench.is_small else 64
    model = load(device=bench.name)
    new = partial(_reading, model, 200, budget=128, archive=_ARCHIVE)
    ids, _ = _said(new(), count)

    def same(label: str, make: _MakeStep) -> _Values:
        with _stepping(model, make):
            found = _said(new(), count)[0]
        yield Value(f"greedy ids as {label}", sum(map(int.__eq__, ids, found)), f"of {count}")

    for label, make in _STEPS.items():
        yield from _tried(label, partial(same, label, make))
    engine = new()
    start = engine.checkpoint()
    first = _said(engine, count)
    engine.undo(start)
    yield _unequal("after undo", first, _said(engine, count))
    other = _reading(model, 0, budget=128, archive=_ARCHIVE)
    other.load(engine.save(), engine.store.copy_key_values())
    yield _unequal("after resume", _said(engine, count), _said(other, count))
    yield from _tried("a batch of 4", partial(_batch, model))
    right = _logits(load(device="cpu", dtype="float32"))
    types: tuple[DtypeName, ...] = ("float32", "bfloat16")
    for dtype in types:
        found = _logits(load(device=bench.name, dtype=dtype))
        yield Value(f"logits in {dtype}, against the CPU's", _error(found, right), "error")


def _batch(model: LoadedModel) -> _Values:
    step, rows = _own_step(model), (9, 40, 130, 200)
    tokens = [(number, count, _filled(model, count)) for number, count in enumerate(rows)]
    alone = torch.cat([step.read_together([token])[0].clone() for token in tokens])
    error = _error(step.read_together(tokens)[0], alone)
    yield Value("a batch of 4 against each alone", error, "error")


# What makes a model's decode step.
_MakeStep = Callable[[LoadedModel], Any]


def _captured_step(model: LoadedModel, kernels: str, captures: bool) -> Any:
    body = import_module("sirchat.models.llama_step").LlamaStep
    made = import_module("sirchat.models.captured_step").CapturedStep
    step = body(model.module, kernels, model.encoder.layers)
    return made(step, model.device, captures=captures, encoder=model.encoder)


# Ways to decode a token.
_STEPS: dict[str, _MakeStep] = {
    "transformers": lambda model: None,
    "own step": partial(_captured_step, kernels="torch", captures=False),
    "captured": partial(_captured_step, kernels="torch", captures=True),
    "captured, Triton": partial(_captured_step, kernels="triton", captures=True),
}


@contextmanager
def _stepping(model: LoadedModel, make: _MakeStep) -> Iterator[Any]:
    """Let the model decode with another step."""
    usual = model.decode_step
    model.use_decode_step(step := make(model))
    try:
        yield step
    finally:
        model.use_decode_step(usual)


def _own_step(model: LoadedModel) -> Any:
    if model.decode_step is None:
        raise ModelError(f"{model.name} has no decode step on {model.device}")
    return model.decode_step


def _kept_blocks(bench: Bench, model: LoadedModel, how: Sampling = _GREEDY) -> Iterator[float]:
    """Seconds a token where as many rows are held as in `generated_blocks`, and none evicted."""
    cache, block = bench.options.cache, bench.options.block
    new = partial(_reading, model, cache - block, budget=cache + block, archive=_ARCHIVE)
    return bench.again(new, lambda engine: _said(engine, block, how), block)


def _reading(model: LoadedModel, count: int, budget: int = 256, **settings: Any) -> Engine:
    """A conversation that has read `count` ids."""
    engine = Engine(model, CacheSettings(policy=Entropy(), budget=budget, **settings))
    prefill(engine, some_ids(model, count))
    return engine


def _said(engine: Engine, count: int, how: Sampling = _GREEDY) -> tuple[list[int], Tensor]:
    """Generate a reply: its ids [count], and the logits [V] after it."""
    records = Generation(engine, Sampler(how), _TURN, stop_ids=frozenset(), max_new_tokens=count)
    ids = [record.id for record in records if isinstance(record, GeneratedToken)]
    assert engine.logits is not None
    return ids, engine.logits.clone()


def _filled(model: LoadedModel, count: int) -> Any:
    """A cache that holds `count` tokens, and has room for as many as the rows read."""
    cache = model.new_cache(count + 128)
    model.read(some_ids(model, count), cache)
    cache.commit(count)
    return cache


def _logits(model: LoadedModel) -> Tensor:
    """The logits [32, V] after single tokens that follow a text."""
    cache, found = _filled(model, 64), list[Tensor]()
    for token_id in some_ids(model, 32):
        found.append(model.forward([token_id], cache).cpu())
        cache.commit(1)
    return torch.cat(found)


def _error(found: Tensor, right: Tensor) -> float:
    """The largest relative error among the rows of logits [n, V]."""
    off, size = (found.double() - right.double()).norm(dim=-1), right.double().norm(dim=-1)
    return float((off / size).max())


def _unequal(name: str, *replies: tuple[list[int], Tensor]) -> Value:
    """How much the logits after two replies differ that must be equal."""
    (ids, logits), (other_ids, other) = replies
    note = "the same ids" if ids == other_ids else "OTHER IDS"
    return Value(
        f"{name}: logits differ by", float((logits.cpu() - other.cpu()).abs().max()), "", note
    )


def _over(name: str, ratio: Ratio) -> Value:
    quartiles = f"{ratio.low:.2f} to {ratio.high:.2f}"
    times = f"{ratio.ours_ms:.3f} ms and {ratio.other_ms:.3f} ms"
    return Value(name, ratio.median, "x", f"{quartiles}: {times}")


def _tried(name: str, work: Callable[[], _Values]) -> _Values:
    """The values of `work`; an error becomes the last one."""
    try:
        yield from work()
    except Exception as error:  # whatever kernels and libraries raise
        kind = "refused" if isinstance(error, SirchatError) else f"failed: {type(error).__name__}"
        lines = str(error).strip().splitlines() or [""]
        yield Value(name, None, note=f"{kind}: {lines[0][:200]}")


class Row(NamedTuple):
    """A function that measures, and the most seconds that it may take."""

    seconds: float
    measure: Callable[..., _Values]


def _rows(
    seconds: float, measure: Callable[..., _Values], *names: str, **how: str
) -> dict[str, Row]:
    what = (measure.__name__.strip("_") + " " + " ".join(how.values())).replace("_", " ").strip()
    return {f"{one} {what}": Row(seconds, partial(measure, name=one, **how)) for one in names}


# The most important first.
ROWS = {
    "device": Row(30, _device),
    "exactness": Row(60, _exactness),
    **_rows(60, _decode, "135m", "8b"),
    **_rows(70, _steps, "135m", "8b"),
    **_rows(60, _decode, "1b"),
    **_rows(60, _decode, "8b", quantize="int4"),
    **_rows(70, _decode, "8b", quantize="packed"),
    **_rows(100, _over_generate, "135m"),
    **_rows(50, _features, "135m", "8b"),
    "sampling": Row(40, _sampling),
    **_rows(40, _server, "8b", "135m"),
    **_rows(40, _prefill, "8b", "135m"),
    **_rows(50, _decode, "8b", quantize="int8"),
    **_rows(40, _decode, "1b", quantize="int4"),
    **_rows(50, _steps, "1b"),
    **_rows(90, _over_generate, "1b"),
    **_rows(110, _over_generate, "8b"),
}
