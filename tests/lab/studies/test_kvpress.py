"""A press of kvpress keeps what a policy keeps, without a chat; kvpress itself is a stand-in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from chatting import hub_tokenizer, tiny
from sirchat.lab.studies.kvpress.needles import haystacks
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import ScorePolicy, rows_of_text
from sirchat.memory.policies.entropy import Entropy
from sirchat.memory.policies.h2o import H2o
from sirchat.memory.policies.knorm import Knorm
from sirchat.memory.policies.learned import Learned
from sirchat.memory.policies.salience import Salience
from sirchat.models.loading import load_model
from sirchat.models.surprisal import surprisal
from sirchat.text.detokenizer import WordContinuation

TEXT = "Our zebra Quixbert lives in Lisbon. What a rainy day! I moved there by train in 1987. " * 2


@dataclass
class ScorerPress:
    """What kvpress's class of this name does, for models with as many key heads in all layers."""

    compression_ratio: float = 0.0

    def __post_init__(self) -> None: ...

    def _compress(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        layer = cache.layers[module.layer_idx]
        scores = self.score(  # type: ignore[attr-defined]
            module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
        )
        count = int(layer.keys.shape[2] * (1 - self.compression_ratio))
        kept = scores.topk(count).indices[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        self.post_init_from_model(model)  # type: ignore[attr-defined]
        hooks = [
            one.self_attn.register_forward_hook(self._compress, with_kwargs=True)
            for one in model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()


@pytest.fixture
def press_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`PolicyPress`, made with the stand-in."""
    kvpress: Any = ModuleType("kvpress")
    kvpress.ScorerPress = ScorerPress
    monkeypatch.setitem(sys.modules, "kvpress", kvpress)
    name = "sirchat.lab.studies.kvpress.press"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).PolicyPress
    del sys.modules[name]


def kept(keys: Tensor, whole: Tensor) -> list[int]:
    """Which of the rows [H, n, D] are still there, by their keys in the first head."""
    alike = (keys[0][:, None] == whole[0]).all(-1)  # [k, n]
    return sorted(alike.int().argmax(1).tolist())


@pytest.mark.parametrize("policy", [Entropy(8), Salience(8), Learned(8), Knorm(8)], ids=repr)
def test_every_layer_keeps_what_the_policy_keeps(policy: ScorePolicy, press_class: Any) -> None:
    model, tokenizer = load_model("tiny", device="cpu", for_hub=True), hub_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    scores: list[float] = []
    logits = model.forward(ids, model.new_cache(len(ids)), scores=scores)
    whole, cut = DynamicCache(), DynamicCache()
    body, asked = model.module.model, torch.tensor([ids])
    press = press_class(0.5, policy=policy, tokenizer=tokenizer, scorer=model.scorer)
    with torch.no_grad():
        body(input_ids=asked, past_key_values=whole)
        with press(model.module):
            body(input_ids=asked, past_key_values=cut)
    joins, special = WordContinuation(tokenizer), set(tokenizer.all_special_ids)
    rows = rows_of_text(
        ids,
        [float("nan"), *surprisal(logits[:-1], torch.tensor(ids[1:])).tolist()],
        roles=[Role.TEMPLATE if one in special else Role.USER for one in ids],
        continues_word=[at > 0 and joins(ids[at - 1], ids[at]) for at in range(len(ids))],
        learned_scores=scores,
    )
    expected = policy.keep(rows, len(ids) // 2).tolist()
    for layer, before in zip(cut.layers, whole.layers, strict=True):
        if isinstance(policy, Knorm):  # in each head, by the mean of the layer's heads
            norms = -before.keys[0].norm(dim=-1).mean(0)
            norms[:4] = norms[-8:] = torch.inf
            expected = sorted(norms.topk(len(ids) // 2).indices.tolist())
        assert kept(layer.keys[0], before.keys[0]) == expected


def test_what_a_press_cannot_do_is_refused(press_class: Any) -> None:
    with pytest.raises(ValueError, match="H2o"):
        press_class(0.5, policy=H2o())
    with pytest.raises(ValueError, match="scorer"):
        press_class(0.5, policy=Learned())


def test_needles_are_in_their_haystacks_and_the_same_each_time() -> None:
    lines = [f"This is line {n} of some talk." for n in range(50)]

    def made() -> list[Any]:
        return list(haystacks(lines, lambda text: len(text.split()), 200, 3, seed=1))

    assert made() == made()
    for one in made():
        assert 180 < len(one.text.split()) < 260
        for needle in one.asked:
            assert needle.sentence in one.text.splitlines()
            assert needle.value in needle.sentence
            assert needle.value not in needle.question
    assert len({needle.value for one in made() for needle in one.asked}) > 3
    assert tiny().scorer.layers  # `learned` was tested with a scorer
