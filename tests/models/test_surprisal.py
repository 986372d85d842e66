"""Surprisal is what the model predicted, however it is computed, and whatever is held."""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attacking import MANY
from engine_steps import generate, prefill, some_ids
from families import HELD, TELLING, BigramModel, build, loaded
from simulated_devices import DEVICES, move, simulated_devices
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, GeneratedToken
from sirchat.memory.policies.by_surprisal import Entropy
from sirchat.models.model import LoadedModel
from sirchat.models.packed import Int8Linear
from sirchat.models.packing import quantize_int8
from sirchat.models.surprisal import PassResult, has_linear_head, surprisal_of_states

IDS = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def both_ways(model: LoadedModel, ids: list[int]) -> tuple[PassResult, PassResult]:
    found = model.read(ids, model.new_cache(len(ids)))
    return found, PassResult.of_logits(model.forward(ids, model.new_cache(len(ids))), ids)


@pytest.mark.parametrize("family", HELD if MANY else TELLING)
def test_a_reading_says_what_the_logits_say(family: str) -> None:
    for ids in (IDS, IDS[:2], IDS[:1]):
        found, wanted = both_ways(loaded(family), ids)
        torch.testing.assert_close(found.surprisal, wanted.surprisal, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)


def test_models_whose_logits_are_changed_behind_the_head_are_left_to_transformers() -> None:
    plain = [name for name in TELLING if has_linear_head(loaded(name).module)]
    assert plain == ["llama", "mistral-sliding", "gemma3"]
    bent = build("gemma3_text", {"final_logit_softcapping": 20.0})
    assert not has_linear_head(bent)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "eight bits"])
def test_blocks_of_tokens_add_up(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    rows, width, vocabulary = 300, 64, 5_000  # five blocks of tokens
    hidden, ids = 3 * torch.randn(rows, width), torch.randint(0, vocabulary, (rows,))
    layer = torch.nn.Linear(width, vocabulary, bias=bias).requires_grad_(False)
    exact = layer.weight.double()
    head: torch.nn.Module = layer
    if kind == "bfloat16":
        head, hidden = layer.bfloat16(), hidden.bfloat16()
        exact = layer.weight.double()
    elif kind == "eight bits":
        q, scale = quantize_int8(layer.weight)
        head = Int8Linear(q, scale, layer.bias)
        exact = q.double() * scale.double()[:, None]
    logits = hidden.double() @ exact.T + (layer.bias.double() if bias else 0)
    wanted = -torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
    for count in (rows, 7):
        found = surprisal_of_states(head, hidden[:count], ids[:count])
        torch.testing.assert_close(found, wanted[:count].float(), rtol=1e-4, atol=1e-4)


def test_surprisal_is_never_negative() -> None:
    layer = torch.nn.Linear(4, 3000, bias=False).requires_grad_(False)
    layer.weight.zero_()[7] = 100.0
    assert surprisal_of_states(layer, torch.ones(5, 4), torch.full((5,), 7)).tolist() == [0.0] * 5


class LiveNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers of the tensors that operations made and that are still in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self._made.append(ref(made))
            alive = {id(one): one.numel() for at in self._made if (one := at()) is not None}
            self.most = max(self.most, sum(alive.values()))
        return made


def test_elsewhere_too_only_some_rows_have_all_their_logits_in_memory() -> None:
    torch.manual_seed(0)
    rows, vocabulary = 3000, 3000
    hidden, ids = torch.randn(rows, 16), torch.randint(0, vocabulary, (rows,))
    head = torch.nn.Linear(16, vocabulary).requires_grad_(False)
    wanted = surprisal_of_states(head, hidden, ids)
    with simulated_devices():
        move(head, DEVICES[0])
        on_device = hidden.to(DEVICES[0])
        with LiveNumbers() as live:
            found = surprisal_of_states(head, on_device, ids)
        torch.testing.assert_close(found.cpu(), wanted)
        assert live.most < 4 * 512 * vocabulary


@pytest.mark.parametrize("max_pass_ids", [7, 10**6])
def test_nothing_evicted_every_surprisal_is_that_of_one_long_read(max_pass_ids: int) -> None:
    model = loaded("llama")
    engine = Engine(model, CacheSettings(Entropy(), budget=256))
    engine.reader.max_pass_ids = max_pass_ids
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


@settings(max_examples=MANY or 6)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(16, 60))
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


@pytest.mark.parametrize("max_pass_ids", [1, 2, 10**6])
@pytest.mark.parametrize("count", [1, 2, 9, 200])
def test_the_first_token_ranks_as_its_chunks_maximum(max_pass_ids: int, count: int) -> None:
    model = BigramModel()
    engine = Engine(model, CacheSettings(Entropy(), budget=64, sinks=0))  # chunks of 16
    engine.reader.max_pass_ids = max_pass_ids
    prefill(engine, some_ids(count))
    nats = engine.ledger.column("surprisal")
    assert np.isnan(nats[0])
    expected = max(nats[1:16].tolist(), default=math.log(model.vocab_size))
    assert engine.ledger.surprisal_of(np.array([0])).tolist() == [expected]
