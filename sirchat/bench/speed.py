"""Decode and prefill, with everything on, against a bare transformers loop with DynamicCache.

On our side: surprisal, ledger, evictions, archive, and, where the model has a tokenizer, sentence
flags and decoding to text. The bare side only picks the next id.

Both sides run in turn, block by block, in one process, so that a change of the machine's mood hits
both; what counts is the ratio of each pair of blocks, ours over bare (below 1: sirchat is faster).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from sirchat.engine.engine import Engine
from sirchat.engine.records import CacheSettings, GeneratedToken, TurnRef
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.errors import ModelError
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.entropy import Entropy
from sirchat.memory.policies.h2o import H2o
from sirchat.memory.policies.salience import Salience
from sirchat.memory.policies.snapkv import Snapkv
from sirchat.models.capabilities import no_attention_reason
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import ends_sequence
from sirchat.text.detokenizer import TextStream

_PLACE = TurnRef(turn=0, round=0)
_ARCHIVE = 2**30  # bytes, the default
_POLICY = Entropy()


@dataclass(frozen=True)
class Ratio:
    """Ours over the other side, over several pairs of blocks; times in milliseconds a `unit`.

    `median` of the pairs' ratios, `low` and `high` their quartiles; `note` is what else was seen.
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
    """`cache` rows are held; `block` tokens are timed at once; `rounds` pairs are taken."""

    cache: int = 1024
    rounds: int = 15
    seen: tuple[int, int] = (2_000, 100_000)

    @property
    def block(self) -> int:
        """Tokens generated between two evictions, so that each block pays for exactly one."""
        return max(8, self.cache // 16)


def run_bench(model: LoadedModel, options: BenchOptions) -> Iterator[Ratio]:
    """Measure decode, prefill, the archive and, where `seen` grows, decode late against early."""
    yield compare("decode", lambda: _ours(model, options), lambda: _bare(model, options), options)
    yield compare(
        "prefill",
        lambda: _our_prefill(model, options),
        lambda: _bare_prefill(model, options),
        options,
    )
    yield compare(
        "decode with an archive against without",
        lambda: _ours(model, options),
        lambda: _ours(model, options, archive=0),
        options,
    )
    early, late = options.seen
    if late > early:
        name = f"decode after {late:,} tokens against after {early:,}"
        yield compare(
            name, lambda: _ours(model, options, late), lambda: _ours(model, options, early), options
        )


def bench_attention(model: LoadedModel, options: BenchOptions) -> Iterator[Ratio]:
    """Measure decode while attention is counted against decode while it is not.

    Raises ModelError for a model whose attention can't be.
    """
    if not model.exposes_attention:
        raise ModelError(no_attention_reason(model), hint="try another model")
    counting: dict[str, Policy] = {
        "attention of 4 layers": H2o(),
        "attention of all layers": H2o(layers=0),
        "the last 32 queries of 4 layers": Snapkv(),
        "salience": Salience(),
    }
    for name, policy in counting.items():
        ours = partial(_ours, model, options, policy=policy)
        yield compare(f"{name}, against none", ours, partial(_ours, model, options), options)


def bench_record(results: list[Ratio], model: LoadedModel, options: BenchOptions) -> dict[str, Any]:
    """The results with what is needed to repeat them."""
    return {
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **asdict(options),
        "results": [asdict(result) for result in results],
    }


def compare(
    name: str,
    make_ours: Callable[[], Iterator[float]],
    make_other: Callable[[], Iterator[float]],
    options: BenchOptions,
) -> Ratio:
    """Seconds a token of both sides, block by block in turn; the first pair only warms up."""
    ours, other = make_ours(), make_other()
    pairs: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        if number % 2:  # neither side always goes first
            pair = (next(ours), next(other))
        else:
            second = next(other)
            pair = (next(ours), second)
        pairs.append(pair)
    pairs = pairs[1:]
    ratios = sorted(a / b for a, b in pairs)
    low, median, high = statistics.quantiles(ratios, n=4)
    ours_ms, other_ms = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(name, ours_ms, other_ms, median, low, high, len(pairs))


def _ours(
    model: LoadedModel,
    options: BenchOptions,
    seen: int = 0,
    archive: int = _ARCHIVE,
    policy: Policy = _POLICY,
) -> Iterator[float]:
    """Seconds a token for blocks of generation with surprisal, ledger and one eviction each."""
    engine = _engine(model, options, archive, policy)
    ids = some_ids(model, seen or 2 * options.cache)
    for _ in engine.feed(ids, [Role.USER] * len(ids), _PLACE):
        pass
    sampler = Sampler(Sampling())

    text = TextStream(model.tokenizer) if model.tokenizer is not None else None

    def block() -> None:
        records = engine.generate(
            sampler, _PLACE, stop_ids=frozenset(), max_new_tokens=options.block
        )
        for record in records:
            if text is not None and isinstance(record, GeneratedToken):
                text.push(record.id)

    # Fill up, so that every timed block begins with a full cache and makes room once.
    while engine.resident < options.cache:
        for _ in engine.generate(sampler, _PLACE, stop_ids=frozenset(), max_new_tokens=1):
            pass
    while True:
        yield timed(block, model) / options.block


def _bare(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Seconds a token for blocks of a plain greedy loop that ends at the same cache length."""
    prompt = torch.tensor([some_ids(model, options.cache - options.block)], device=model.device)

    while True:
        cache = DynamicCache(config=model.module.config)
        with torch.inference_mode():
            output = model.module(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
            start_id = int(output.logits[0, -1].argmax())

        def block(cache: Any = cache, token: int = start_id) -> None:
            with torch.inference_mode():
                for _ in range(options.block):
                    ids = torch.tensor([[token]], device=model.device)
                    logits = model.module(input_ids=ids, past_key_values=cache).logits
                    token = int(logits[0, -1].argmax())

        yield timed(block, model) / options.block


def _our_prefill(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Seconds a token for reading a full cache of ids, with surprisal and ledger."""
    ids = some_ids(model, options.cache)
    while True:
        engine = _engine(model, options)

        def block(engine: Engine = engine) -> None:
            for _ in engine.feed(ids, [Role.USER] * len(ids), _PLACE):
                pass

        yield timed(block, model) / options.cache


def _bare_prefill(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Seconds a token for reading the same ids in one pass; logits of the last alone."""
    prompt = torch.tensor([some_ids(model, options.cache)], device=model.device)
    while True:
        cache = DynamicCache(config=model.module.config)

        def block(cache: Any = cache) -> None:
            with torch.inference_mode():
                model.module(input_ids=prompt, past_key_values=cache, logits_to_keep=1)

        yield timed(block, model) / options.cache


def _engine(
    model: LoadedModel,
    options: BenchOptions,
    archive: int = _ARCHIVE,
    policy: Policy = _POLICY,
) -> Engine:
    memory = CacheSettings(policy=policy, budget=options.cache, decay=0.9, archive=archive)
    if model.tokenizer is None:
        return Engine(model, memory)
    return Engine(model, memory, ends_sequence=ends_sequence(model.tokenizer, model.anchors))


def some_ids(model: LoadedModel, count: int) -> list[int]:
    """Ids that are the same each time."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()
    return ids


def timed(block: Callable[[], None], model: LoadedModel) -> float:
    """Seconds that a call takes, to the end of what it began on the device."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    block()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
