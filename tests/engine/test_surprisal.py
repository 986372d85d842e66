"""Every token's surprisal is what the model predicted, whatever is held and however it was read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine_steps import Record, generate, prefill, some_ids
from families import BigramModel, loaded
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, EvictedRows, GeneratedToken, ReadProgress
from sirchat.memory.policies.entropy import Entropy
from sirchat.models.model import LoadedModel


@pytest.mark.parametrize("rows_per_pass", [1, 7, 10**6])
def test_nothing_evicted_every_surprisal_is_that_of_one_long_read(rows_per_pass: int) -> None:
    model = loaded("llama")
    engine = Engine(model, CacheSettings(Entropy(), budget=256))
    engine.reader.rows_per_pass = rows_per_pass
    shown: list[float] = []
    for turn in (0, 2):
        prefill(engine, some_ids(45, turn), turn)
        records = generate(engine, 15, turn + 1)
        shown += [record.surprisal for record in records if isinstance(record, GeneratedToken)]
        engine.decay_at_round_end()
    ids = torch.tensor(engine.ledger.column("token_id").tolist())
    with torch.inference_mode():
        logits = model.module(ids[None], use_cache=False).logits[0]
    expected = -logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    got = engine.ledger.column("surprisal")
    assert np.isnan(got[0])
    np.testing.assert_allclose(got[1:], expected, atol=1e-4)
    assert shown == [*got[45:60].tolist(), *got[105:120].tolist()]


@pytest.mark.slow
@given(st.lists(st.integers(1, 120), min_size=1, max_size=5), st.integers(16, 80))
@settings(max_examples=30)
def test_evictions_do_not_touch_the_surprisal_of_the_next_token(
    turns: list[int], budget: int
) -> None:
    """In a bigram model the surprisal of a token is known, whatever is held."""
    model = BigramModel()
    engine = Engine(model, CacheSettings(Entropy(), budget))
    for turn, count in enumerate(turns):
        prefill(engine, some_ids(count, turn, model.vocab_size), 2 * turn)
        generate(engine, 10, 2 * turn + 1)
    ids = torch.tensor(engine.ledger.column("token_id"), dtype=torch.int64)
    expected = -model.table.log_softmax(-1)[ids[:-1], ids[1:]]
    np.testing.assert_allclose(engine.ledger.column("surprisal")[1:], expected, rtol=0, atol=1e-4)


def test_with_evictions_a_model_sees_what_is_held_and_nothing_else() -> None:
    """An oracle over transformers' own cache and rotation reads the same conversation."""
    model = loaded("llama")
    engine, oracle = Engine(model, CacheSettings(Entropy(), budget=48)), Oracle(model)
    for turn in range(0, 8, 2):
        oracle.follow(prefill(engine, some_ids(40, turn), turn), engine)
        oracle.follow(generate(engine, 20, turn + 1), engine)
        engine.decay_at_round_end()
    assert oracle.evictions > 10
    np.testing.assert_allclose(
        engine.ledger.column("surprisal")[1:], oracle.surprisals[1:], atol=1e-4
    )


class Oracle:
    """A conversation with keys and values in plain lists, moved by the model's own rotation."""

    def __init__(self, model: LoadedModel) -> None:
        self.module = model.module
        self.held: list[int] = []  # stream positions
        self.rows: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []  # written at, per layer
        self.logits: Tensor | None = None
        self.surprisals: list[float] = []
        self.evictions = 0

    def follow(self, records: list[Record], engine: Engine) -> None:
        stream: list[int] = engine.ledger.column("token_id").tolist()
        for record in records:
            if isinstance(record, EvictedRows):
                gone = set(record.positions.tolist())
                stays = [i for i, position in enumerate(self.held) if position not in gone]
                self.held = [self.held[i] for i in stays]
                self.rows = [self.rows[i] for i in stays]
                self.evictions += 1
            elif isinstance(record, GeneratedToken):
                self.read(stream[record.position : record.position + 1])
            elif isinstance(record, ReadProgress):
                fed = record.total - record.done
                self.read(stream[len(self.surprisals) : len(stream) - fed])

    @torch.inference_mode()
    def read(self, ids: list[int]) -> None:
        cache, start = self.cache(), len(self.rows)
        output = self.module(torch.tensor([ids]), past_key_values=cache)
        for i, token in enumerate(ids):
            before = output.logits[0, i - 1] if i else self.logits
            nats = math.nan if before is None else -float(before.log_softmax(-1)[token])
            self.held.append(len(self.surprisals))
            self.surprisals.append(nats)
            at = slice(start + i, start + i + 1)
            layers = [(layer.keys[:, :, at], layer.values[:, :, at]) for layer in cache.layers]
            self.rows.append((start + i, layers))
        self.logits = output.logits[0, -1]

    def cache(self) -> DynamicCache:
        """The held rows at positions 0..n-1, each turned once from where it was written."""
        cache = DynamicCache(config=self.module.config)
        if not self.rows:
            return cache
        moves = torch.tensor([[slot - then for slot, (then, _) in enumerate(self.rows)]])
        cos, sin = self.module.model.rotary_emb(self.rows[0][1][0][0], moves)
        for layer in range(len(self.rows[0][1])):
            keys = torch.cat([layers[layer][0] for _, layers in self.rows], 2)
            values = torch.cat([layers[layer][1] for _, layers in self.rows], 2)
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[0], values, layer)
        return cache


@pytest.mark.parametrize("rows_per_pass", [1, 2, 10**6])
@pytest.mark.parametrize("count", [1, 2, 9, 200])
def test_the_first_token_ranks_as_its_chunks_maximum(rows_per_pass: int, count: int) -> None:
    model = BigramModel()
    engine = Engine(model, CacheSettings(Entropy(), budget=64, sinks=0))  # chunks of 16
    engine.reader.rows_per_pass = rows_per_pass
    prefill(engine, some_ids(count))
    nats = engine.ledger.column("surprisal")
    assert np.isnan(nats[0])
    expected = max(nats[1:16].tolist(), default=math.log(model.vocab_size))
    assert engine.ledger.surprisal_of(np.array([0])).tolist() == [expected]
