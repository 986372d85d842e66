"""Anchor-based language models: equation (4) in one pass, and Algorithm 1 piece by piece."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PretrainedConfig

from chatting import notices, session
from engine_steps import generate, prefill
from families import loaded
from plain_model import load_model
from sirchat.chat.settings import build_policy
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken
from sirchat.errors import ContextFullError, ModelError, SettingError
from sirchat.lab.training.anchor import AnchorOptions, prepare
from sirchat.lab.training.masks import anchor_mask, block_mask, position_in_document
from sirchat.memory.cache import BoundedCache
from sirchat.memory.ledger import MovedRows
from sirchat.memory.policies.anchor import Anchor
from sirchat.memory.policies.by_position import Sink
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import PassResult
from sirchat.text.anchors import Anchors, anchors_of

FAMILIES = {  # tokens that are read; windows count held rows, so these texts stay within theirs
    "llama": 90,
    "llama3-rope": 90,
    "qwen2": 90,
    "gpt-neox": 90,
    "mistral-sliding": 22,
    "gemma2": 22,
}


@pytest.mark.parametrize("sinks", [0, 2])
def test_blocks_of_flex_attention_are_the_same_mask(sinks: int) -> None:
    lots = torch.Generator().manual_seed(0)
    is_anchor = torch.rand(2, 300, generator=lots) < 0.1
    document = (torch.rand(2, 300, generator=lots) < 0.02).long().cumsum(1)
    dense = anchor_mask(is_anchor, document, sinks=sinks)
    made = block_mask(is_anchor, document, sinks=sinks)
    assert made.shape == (2, 1, 300, 300)
    at = torch.arange(300)
    found = made.mask_mod(torch.tensor([0, 1])[:, None, None], None, at[:, None], at)
    assert torch.equal(found, dense[:, 0])


@given(st.data())
def test_the_mask_is_equation_4_with_documents_sinks_and_what_is_kept(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 20))
    bits = st.lists(st.booleans(), min_size=length, max_size=length)
    is_anchor, is_kept, begins = (data.draw(bits) for _ in range(3))
    sinks = data.draw(st.integers(0, 3))
    document = np.cumsum(begins).tolist()
    found = anchor_mask(
        torch.tensor([is_anchor]), torch.tensor([document]), torch.tensor([is_kept]), sinks=sinks
    )[0, 0]
    places = position_in_document(torch.tensor([document]))[0].tolist()
    for i in range(length):
        for j in range(length):
            same = document[i] == document[j]
            own = sum(is_anchor[j:i]) == 0
            free = not is_anchor[i] and (is_anchor[j] or is_kept[j])
            expected = j <= i and same and (own or free or places[j] < sinks)
            assert found[i, j] == expected, (i, j)
    for at, place in enumerate(places):
        assert place == at - document.index(document[at])


@dataclass(frozen=True)
class RecordedLogits(LoadedModel):
    """A model that notes every row of logits it computes."""

    rows: list[Tensor] = field(default_factory=list)

    def forward(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> Tensor:
        logits = super().forward(ids, cache, **how)
        self.rows.append(logits)
        return logits

    def read(self, ids: Sequence[int], cache: BoundedCache, **how: Any) -> PassResult:
        return PassResult.of_logits(self.forward(ids, cache, **how), ids)


def heard(family: str) -> RecordedLogits:
    model = loaded(family)
    return RecordedLogits(
        **{name: getattr(model, name) for name in LoadedModel.__dataclass_fields__}
    )


def is_anchor(token_id: int) -> bool:
    return token_id % 9 == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_masked_pass_equals_pieces_that_are_reduced(family: str) -> None:
    sinks = 2 * (list(FAMILIES).index(family) % 2)
    model, rng = heard(family), random.Random(f"{family} {sinks}")
    ids = [rng.randrange(3, 128) for _ in range(FAMILIES[family])]
    memory = CacheSettings(Anchor(), budget=512, sinks=sinks, absolute_positions=True)
    engine = Engine(model, memory, ends_sequence=is_anchor)
    start = 0
    while start < len(ids):
        end = start + rng.choice((1, 1, 3, 8, 20))
        chunk = ids[start:end]
        prefill(engine, chunk)
        start = end
    anchors = torch.tensor([[is_anchor(one) for one in ids]])
    mask = anchor_mask(anchors, sinks=sinks)[0, 0]
    with torch.inference_mode():
        logits = model.module(
            input_ids=torch.tensor([ids]),
            attention_mask=model.mask(mask),
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
        ).logits[0]
    torch.testing.assert_close(torch.cat(model.rows), logits.float(), rtol=0, atol=1e-5)
    last = max(at for at, one in enumerate(ids) if is_anchor(one))
    held = [at for at, one in enumerate(ids) if is_anchor(one) or at > last or at < sinks]
    assert engine.ledger.held_positions.tolist() == held


def test_generated_anchors_reduce_what_is_held() -> None:
    engine = Engine(loaded("llama"), CacheSettings(Anchor(), budget=512), ends_sequence=is_anchor)
    ids = [1, 5, 6, 7, 8, 9, 10, 11]
    prefill(engine, ids)
    sampler = Sampler(Sampling(temperature=1.0, seed=2))
    since, held, gone = 6, [0, 1, 2, 3, 5, 6, 7], list[int]()
    for record in generate(engine, 60, sampler=sampler):
        if isinstance(record, GeneratedToken):
            assert gone == []
            held.append(record.position)
            if is_anchor(record.id):
                gone = [one for one in held[:-1] if one >= since]
                held, since = [one for one in held if one not in gone], record.position + 1
        elif isinstance(record, MovedRows) and not record.restored:
            assert record.positions.tolist() == gone
            gone = []
    assert since > 20
    assert engine.ledger.held_positions.tolist() == held


def test_pins_stay_and_a_lazy_policy_waits_until_room_is_needed() -> None:
    ids = [1, *range(10, 17), 18, *range(20, 25), 27, 28]
    for policy, held in ((Anchor(), [0, 2, 3, 8, 14, 15]), (Anchor(lazy=True), list(range(16)))):
        engine = Engine(
            loaded("llama"), CacheSettings(policy, budget=64, sinks=1), ends_sequence=is_anchor
        )
        prefill(engine, ids[:2])
        prefill(engine, ids[2:4], pinned=True)
        prefill(engine, ids[4:])
        assert engine.ledger.held_positions.tolist() == held


def test_a_switch_to_anchors_reduces_and_back_restores() -> None:
    model = loaded("llama")
    engine = Engine(model, CacheSettings(Sink(), budget=64, archive=2**20), ends_sequence=is_anchor)
    ids = [1, *random.Random(0).choices(range(3, 128), k=50)]
    prefill(engine, ids)
    before = engine.cache.layer_keys(0).clone()
    engine.switcher.switch(CacheSettings(Anchor(), budget=64, archive=2**20))
    last = max(at for at, one in enumerate(ids) if is_anchor(one))
    expected = [at for at, one in enumerate(ids) if at < 4 or at > last or is_anchor(one)]
    assert engine.ledger.held_positions.tolist() == expected
    engine.switcher.switch(CacheSettings(Sink(), budget=64, archive=2**20))
    assert torch.equal(engine.cache.layer_keys(0), before)


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_positions_of_the_stream_are_those_of_the_model(family: str) -> None:
    """Rows that left leave gaps; switched to the cache and back, keys are as they were."""
    model = heard(family)
    engine = Engine(model, CacheSettings(Sink(), budget=24, absolute_positions=True))
    ids = random.Random(1).choices(range(3, 128), k=60)
    prefill(engine, ids)
    held = engine.ledger.held_positions.copy()
    keys = [engine.cache.layer_keys(layer).clone() for layer in range(4)]
    fresh = model.new_cache(64)
    model.forward([ids[at] for at in held], fresh, positions=held.tolist())
    fresh.commit(len(held))
    torch.testing.assert_close(keys[0], fresh.layer_keys(0), rtol=0, atol=1e-5)
    engine.switcher.switch(CacheSettings(Sink(), budget=24))
    assert not torch.equal(engine.cache.layer_keys(0), keys[0])
    engine.switcher.switch(CacheSettings(Sink(), budget=24, absolute_positions=True))
    for layer, key in enumerate(keys):
        torch.testing.assert_close(engine.cache.layer_keys(layer), key, rtol=0, atol=1e-5)


def test_positions_of_the_stream_end_with_the_models_context() -> None:
    model = replace(loaded("llama"), context_length=64)
    engine = Engine(model, CacheSettings(Sink(), budget=24, absolute_positions=True))
    with pytest.raises(ContextFullError, match="positions"):
        prefill(engine, [5] * 65)
    assert engine.ledger.seen == 0
    prefill(engine, [5] * 64)
    with pytest.raises(ContextFullError):
        generate(engine, 2)


def test_positions_and_lazy_are_settings() -> None:
    assert build_policy(Profile(policy="anchor", policy_options={"lazy": True})) == Anchor(True)
    for wrong in (1, "yes"):
        with pytest.raises(SettingError, match="true or false"):
            build_policy(Profile(policy="anchor", policy_options={"lazy": wrong}))
    with pytest.raises(SettingError, match="whole number"):
        build_policy(Profile(policy="reservoir", policy_options={"sample": True}))


@pytest.mark.parametrize(
    "entry",
    [
        {"variant": "ac"},
        {"variant": "xx", "per": "round", "token_id": 1, "sinks": 1},
        {"variant": "ac", "per": "round", "token_id": None, "sinks": 1},
        {"variant": "ac", "token_id": 2049},
        {"variant": "ac", "token_id": -1},
        {"variant": "ep", "token_id": 10**9},
        7,
    ],
)
def test_a_config_that_makes_no_sense_is_refused(entry: object) -> None:
    with pytest.raises(ModelError, match="the model's config"):
        anchors_of(PretrainedConfig(vocab_size=2049, sirchat_anchors=entry))


def test_a_config_says_what_the_anchors_are() -> None:
    config = PretrainedConfig(vocab_size=8)
    assert anchors_of(config) is None
    Anchors("ac", "round", 7, 2).write_to_config(config)
    assert anchors_of(config) == Anchors("ac", "round", 7, 2)


def test_a_model_without_training_is_warned_of() -> None:
    chat = session(policy="anchor")
    assert any("not trained" in text for text in notices(chat.opening_events()))
    assert not any("not trained" in text for text in notices(session().opening_events()))
    other = session()
    assert any("not trained" in text for text in notices(other.switch("/policy", policy="anchor")))
    lazy = session(policy="anchor", policy_options={"lazy": True})
    assert not any("not trained" in text for text in notices(lazy.opening_events()))


def test_a_chat_with_anchors_holds_one_token_of_each_finished_round(tmp_path: Path) -> None:
    ready = prepare(
        AnchorOptions("tiny", tmp_path / "out", per="round", tokens=8, steps=1, batch=1)
    )
    ready.model.save_pretrained(tmp_path / "out")
    ready.tokenizer.save_pretrained(tmp_path / "out")
    model = load_model(str(tmp_path / "out"), device="cpu")
    chat = session(model, policy="anchor", sinks=1, max_new_tokens=8)
    chat.opening_events()
    for turn, text in enumerate(("Hello!", "My name is Anna.", "What is my name?"), 1):
        list(chat.ask(text))
        rows = chat.tokens(chat.ledger.held_positions.tolist())
        assert [row.text for row in rows] == ["<|bos|>", *["<AC>"] * turn]
    seen, held = chat.seen, chat.ledger.held_positions.tolist()
    list(chat.ask("Hello again!"))
    chat.undo()
    assert (chat.seen, chat.ledger.held_positions.tolist()) == (seen, held)
