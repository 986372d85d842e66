"""Compares the speed of sirchat's decode and prefill with a plain loop of transformers.

All of sirchat's features are on; the plain loop only picks the next id.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.chat.model_defaults import FALLBACK_SAMPLING
from sirchat.chat.settings import build_engine
from sirchat.engine.engine import Engine, Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken, TurnRef
from sirchat.lab.bench.peers import LlamaCpp
from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare, measure_seconds, some_ids
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.decoder import Decoder
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.model_config import DecoderConfig
from sirchat.models.native_step import NativeStep
from sirchat.models.probe import cache_argument
from sirchat.text.detokenizer import TextStream


class _Clock:
    """A streamer for transformers' `generate`, which records the time of each generated token.

    `times` has the time of the prompt first, then that of each new token.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def static_cache_times(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time transformers' generation with a static cache; yields seconds per token, forever."""
    from transformers import GenerationConfig  # its import would delay a start that is measured

    prompt = torch.tensor([some_ids(model, options.cache - options.block)], device=model.device)
    config = GenerationConfig(
        max_new_tokens=options.block + 1,
        min_new_tokens=options.block + 1,
        do_sample=False,
        cache_implementation="static",
        eos_token_id=None,
        pad_token_id=0,
    )
    while True:
        clock = _Clock()
        with torch.inference_mode():
            model.module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=clock,
            )
        first, last = clock.times[1], clock.times[-1]
        yield (last - first) / (len(clock.times) - 2)


_TURN = TurnRef(turn=0, round=0)


def prefill(engine: Engine, ids: list[int]) -> None:
    """Let an engine read ids."""
    for _ in engine.prefill(ids, [Role.USER] * len(ids), _TURN):
        pass


def _generate(engine: Engine, sampler: Sampler, count: int) -> None:
    for _ in Generation(engine, sampler, _TURN, stop_ids=frozenset(), max_new_tokens=count):
        pass


_COLUMNS = 1024


def weight_bytes(model: LoadedModel) -> int:
    """The size in bytes, as stored in memory, of the model's weights that a decode step reads."""
    module = model.module
    head = module.get_output_embeddings()
    in_head = set() if head is None else set(_sizes(head))
    rows_only = set(_sizes(module.get_input_embeddings())) - in_head
    return sum(size for start, size in _sizes(module).items() if start not in rows_only)


def _sizes(module: nn.Module) -> dict[int, int]:
    """The size in bytes of each parameter and buffer of a module, by the tensor's address."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return {one.data_ptr(): one.numel() * one.element_size() for one in tensors}


def reading_bytes(size: int, model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time how long the model's device takes to read `size` bytes of memory once."""
    rows = max(1, size // (4 * _COLUMNS))
    matrix = torch.ones(rows, _COLUMNS, device=model.device)
    vector = torch.ones(_COLUMNS, device=model.device)

    @torch.inference_mode()
    def block() -> None:
        for _ in range(options.block):
            torch.mv(matrix, vector)

    while True:
        yield measure_seconds(block, model) / options.block


_ARCHIVE = 2**30  # the archive's default limit in bytes
_DECAY = 0.9
_POLICY, _GREEDY = Entropy(), Sampling()


def bench_decode(
    model: LoadedModel,
    options: BenchOptions,
    *,
    bare: LoadedModel | None = None,
    peer: LlamaCpp | None = None,
) -> Iterator[Ratio]:
    """Compare the times of sirchat's decode and prefill with other ways to do the same work."""
    plain, other = bare or model, "" if bare is None else f" against {bare.precision}"
    ours, reading = (partial(one, model, options) for one in (generated_blocks, _our_prefill))
    yield compare(f"decode{other}", ours, lambda: bare_blocks(plain, options), options)
    static = "decode against generate with a static cache"
    yield compare(static, ours, lambda: static_cache_times(plain, options), options)
    yield _against_the_limit(model, options)
    if isinstance(model.decode_step, NativeStep):
        compiled = "decode with the compiled step against without"
        yield compare(compiled, ours, lambda: _uncompiled(model, ours()), options)
    sampled = partial(ours, sampling=Sampling(**FALLBACK_SAMPLING))
    yield compare("decode with a chat's default sampling against greedy", sampled, ours, options)
    yield compare(f"prefill{other}", reading, lambda: _bare_prefill(plain, options), options)
    small = replace(options, cache=max(64, options.cache // 4))
    budgets = f"prefill under a budget of {small.cache:,} against one of {options.cache:,}"
    yield compare(budgets, lambda: _our_prefill(model, small, options.cache), reading, options)
    if peer is not None:
        decoding = partial(peer.time_decoding, model, options)
        measured = compare("decode against llama.cpp", ours, decoding, options)
        yield replace(measured, note=peer.note)
        theirs = partial(peer.time_reading, some_ids(model, options.cache))
        yield compare("prefill against llama.cpp", reading, theirs, options)
    without = partial(ours, archive=0)
    # Without an archive the same rows are copied, for undo, until the turn ends.
    yield compare("decode with an archive against undo's rows alone", ours, without, options)
    early, *later = options.seen
    for late in later:
        if late > early:
            name = f"decode after {late:,} tokens against after {early:,}"
            yield compare(name, partial(ours, late), partial(ours, early), options)


def _uncompiled(model: LoadedModel, blocks: Iterator[float]) -> Iterator[float]:
    """Run the timed blocks with the compiled decode step switched off; yield the time of each."""
    step = model.decode_step
    while True:
        model.use_decode_step(None)
        try:
            seconds = next(blocks)
        finally:
            model.use_decode_step(step)
        yield seconds


def _against_the_limit(model: LoadedModel, options: BenchOptions) -> Ratio:
    """Compare the time of a decode step with the time to read the model's weights once."""
    size = weight_bytes(model)
    measured = compare(
        "decode against reading the weights once",
        lambda: generated_blocks(model, options),
        lambda: reading_bytes(size, model, options),
        options,
    )
    ours, limit = (size / ms / 1e6 for ms in (measured.ours_ms, measured.other_ms))
    return replace(
        measured,
        note=f"{size / 2**20:,.0f} MiB of weights a token: decoding reads {ours:.1f} GB/s, "
        f"a matrix-vector product of that size {limit:.1f} GB/s",
    )


def generated_blocks(
    model: LoadedModel,
    options: BenchOptions,
    seen: int = 0,
    archive: int = _ARCHIVE,
    policy: Policy = _POLICY,
    sampling: Sampling = _GREEDY,
) -> Iterator[float]:
    """Time sirchat's decoding after `seen` tokens; yields seconds per token, forever."""
    engine = _engine(model, options, archive, policy)
    ids = some_ids(model, seen or 2 * options.cache)
    prefill(engine, ids)
    sampler = Sampler(sampling)

    text = TextStream(model.tokenizer) if model.tokenizer is not None else None

    def block() -> None:
        records = Generation(
            engine, sampler, _TURN, stop_ids=frozenset(), max_new_tokens=options.block
        )
        for record in records:
            if text is not None and isinstance(record, GeneratedToken):
                text.push(record.id)

    # Fill the cache, so that every timed block begins with a full one and makes room once.
    while engine.resident < options.cache:
        _generate(engine, sampler, 1)
    while True:
        yield measure_seconds(block, model) / options.block


@torch.inference_mode()
def bare_read(model: LoadedModel, count: int) -> tuple[dict[str, Any], int]:
    """Read ids in one pass of transformers; returns the cache's argument and the next id."""
    from transformers import DynamicCache

    given = cache_argument(model.module, DynamicCache(config=model.module.config))
    ids = torch.tensor([some_ids(model, count)], device=model.device)
    out = model.module(input_ids=ids, logits_to_keep=1, **given)
    return given, int(out.logits[0, -1].argmax())


def with_decoder(model: LoadedModel) -> LoadedModel:
    """The model with a `Decoder` of the same weights; itself if a `Decoder` can't compute it."""
    if (config := DecoderConfig.of_folder(model.module.config.to_dict())) is None:
        return model
    decoder = Decoder(config, model.dtype).eval()
    decoder.model.rotary_emb.to(model.device)
    decoder.load_state_dict(model.module.state_dict(), strict=False, assign=True)
    decoder.tie_weights()
    return wrap_model(model.name, decoder, model.tokenizer)


def bare_blocks(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time a plain greedy decoding loop of transformers; yields seconds per token, forever."""

    @torch.inference_mode()
    def block(given: dict[str, Any], token: int) -> None:
        for _ in range(options.block):
            ids = torch.tensor([[token]], device=model.device)
            token = int(model.module(input_ids=ids, **given).logits[0, -1].argmax())

    while True:
        read = bare_read(model, options.cache - options.block)
        yield measure_seconds(partial(block, *read), model) / options.block


def _our_prefill(model: LoadedModel, options: BenchOptions, count: int = 0) -> Iterator[float]:
    """Time how sirchat reads `count` ids into an empty cache; yields seconds per token, forever."""
    ids = some_ids(model, count or options.cache)
    while True:
        engine = _engine(model, options)
        yield measure_seconds(partial(prefill, engine, ids), model) / len(ids)


def _bare_prefill(model: LoadedModel, options: BenchOptions) -> Iterator[float]:
    """Time how one plain forward pass reads ids; yields seconds per token, forever."""
    while True:
        yield measure_seconds(partial(bare_read, model, options.cache), model) / options.cache


def reply_times(
    model: LoadedModel, options: BenchOptions, count: int, length: int
) -> tuple[float, float]:
    """Time a reply: read `count` ids into an empty cache, then generate 1 + `length` tokens."""
    engine, ids = _engine(model, options), some_ids(model, count)

    def block() -> None:
        prefill(engine, ids)
        _generate(engine, Sampler(Sampling()), 1)

    first = measure_seconds(block, model)
    rest = measure_seconds(partial(_generate, engine, Sampler(Sampling()), length), model)
    return first, rest / max(1, length)


def _engine(
    model: LoadedModel, options: BenchOptions, archive: int = _ARCHIVE, policy: Policy = _POLICY
) -> Engine:
    settings = CacheSettings(policy=policy, budget=options.cache, decay=_DECAY, archive=archive)
    if model.tokenizer is None:
        return Engine(model, settings)
    return build_engine(model, settings)
