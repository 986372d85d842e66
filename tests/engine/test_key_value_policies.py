"""Policies that rank by keys and values: what they hold in a conversation, and when refused."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
import torch

import sirchat
from chatting import session, tiny
from families import loaded
from sirchat.chat.settings import check_policy
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.errors import SettingError, UsageError
from sirchat.memory.attention import AttentionStats, PassAttention
from sirchat.memory.ledger import Role
from sirchat.memory.policies.base import Policy
from sirchat.memory.policies.by_key import Keydiff, Knorm
from sirchat.memory.policies.by_position import Sink
from sirchat.memory.policies.check import contract_violations
from sirchat.saved.saved_tensors import attention_fits, attention_tensors, pop_attention


def talked(settings: CacheSettings, count: int = 60) -> Engine:
    engine = Engine(loaded("llama"), settings)
    ids = torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    list(engine.prefill(ids, [Role.USER] * count, TurnRef(0, 0)))
    return engine


def bounded(policy: Policy, budget: int = 64) -> CacheSettings:
    return CacheSettings(policy=policy, budget=budget, archive=2**20, protect=False)


def test_the_shortest_or_most_distinctive_keys_of_all_that_was_read_stay() -> None:
    engine = talked(bounded(Sink()))
    keys = torch.stack([engine.cache.layer_keys(at)[0] for at in range(4)])  # [L, H, n, D]
    anchor = torch.nn.functional.normalize(keys, dim=-1).mean(2, keepdim=True)
    similarity = torch.cosine_similarity(keys, anchor, dim=-1)
    for policy, scores in ((Knorm(recent=0), keys.norm(dim=-1)), (Keydiff(recent=0), similarity)):
        wanted = scores.mean((0, 1))[4:].topk(16, largest=False).indices + 4
        engine.switcher.switch(bounded(policy, budget=20))
        assert engine.ledger.held_positions.tolist() == [*range(4), *sorted(wanted.tolist())]


def test_values_have_their_norms_archived_or_not_and_what_is_gone_has_the_median() -> None:
    engine = talked(bounded(Sink()))
    values = torch.stack([engine.cache.layer_values(at)[0] for at in range(4)])  # [L, H, n, D]
    wanted = values.abs().sum(-1).mean((0, 1)).double().numpy()
    engine.switcher.switch(bounded(Sink(), budget=20))
    engine.erase(np.array([5, 58]))  # of an archived and of a held row
    found = engine.store.statistics(np.arange(60), ["value_norm"])["value_norm"].numpy()
    known = np.delete(np.arange(60), [5, 58])
    assert found[known] == pytest.approx(wanted[known], rel=1e-5)
    assert found[[5, 58]] == pytest.approx([median_low(wanted[known].tolist())] * 2, rel=1e-5)


def test_other_policies_have_no_statistics_computed_and_no_keys_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = "sirchat.memory.key_value_store.KeyValueStore"
    monkeypatch.setattr(f"{store}.as_read", None)
    assert talked(bounded(Keydiff(), budget=32)).resident <= 32
    monkeypatch.setattr(f"{store}.statistics", None)
    assert talked(bounded(Sink(), budget=32)).resident <= 32


def example(path: str, begins: str) -> dict[str, Any]:
    """The names that an example of a README of the package defines."""
    text = (Path(sirchat.__file__).parent / path / "README.md").read_text("utf-8")
    (code,) = re.findall(rf"^```python\n({begins}.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, path, "exec", dont_inherit=True), names)
    return names


def test_a_policy_may_see_the_keys_of_each_layer_and_head_as_the_example_does() -> None:
    votes = example("memory/policies", "# votes.py")["Votes"](recent=0)
    assert contract_violations(votes) == []
    engine = talked(bounded(Sink()))
    total = np.zeros(60)
    for layer in range(4):
        for head in engine.cache.layer_keys(layer)[0].double().numpy():  # [n, D]
            units = head / np.linalg.norm(head, axis=-1, keepdims=True)
            cosines = units @ units.mean(0)
            total += [(cosines > one).sum() for one in cosines]  # from how many it differs more
    wanted = np.sort(np.argsort(total[4:])[-16:] + 4)
    engine.switcher.switch(bounded(votes, budget=20))
    assert engine.ledger.held_positions.tolist() == [*range(4), *wanted]
    rows = engine.choice.view(np.arange(60))  # most of them archived
    again = talked(bounded(Sink()))
    for layer in range(4):
        kept = again.cache.layer_keys(layer)[0], again.cache.layer_values(layer)[0]
        torch.testing.assert_close(rows.keys[layer], kept[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(rows.values[layer], kept[1], rtol=0, atol=1e-5)


def test_the_example_of_a_press_scores_as_kvpress_does_in_each_layer_and_head() -> None:
    cur = example("memory/policies", "# cur.py")["Cur"](recent=0)
    assert contract_violations(cur) == []
    engine, scores = talked(bounded(Sink())), []
    for layer in range(4):
        heads = (engine.cache.layer_keys(layer)[0], engine.cache.layer_values(layer)[0])
        for k, v in zip(*(each.double().numpy() for each in heads), strict=True):  # [n, D]
            products = np.ones(60)
            for squares in ((k**2).sum(-1), (v**2).sum(-1)):
                for at in range(60):  # windows of 16 tokens, the last one shorter
                    products[at] *= squares[at] / squares[at // 16 * 16 :][:16].sum()
            scores.append(products / products.sum())
    wanted = np.mean(scores, axis=0)
    engine.switcher.switch(bounded(cur, budget=20))
    rows = engine.choice.view(np.arange(60))  # most of them archived
    assert cur.score(rows).numpy() == pytest.approx(wanted, rel=1e-4)
    best = np.sort(np.argsort(wanted[4:])[-16:] + 4)
    assert engine.ledger.held_positions.tolist() == [*range(4), *best]


def test_a_policy_may_see_the_attention_of_each_head_as_the_example_of_snapkv_does() -> None:
    snap = example("memory/policies", "# snap.py")["Snap"](recent=0, window=8)
    assert contract_violations(snap) == []
    model = loaded("llama")
    engine = Engine(model, bounded(snap, budget=60))
    ids = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(1))
    list(engine.prefill(ids[:55].tolist(), [Role.USER] * 55, TurnRef(0, 0)))
    for token in ids[55:].tolist():  # as a reply is read
        list(engine.prefill([token], [Role.ASSISTANT], TurnRef(1, 0)))
    usual = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        layers = model.module(input_ids=ids[None], output_attentions=True).attentions
    model.module.set_attn_implementation(usual)
    heads = torch.cat(layers)[:, :, -8:].double()  # [L, H, the queries, n]
    seen = engine.choice.view(engine.ledger.held_positions).head_attention
    torch.testing.assert_close(seen, heads.sum(2), rtol=0, atol=1e-5)
    assert (heads.sum(2).std((0, 1)) > 1e-3).any()  # heads differ
    wanted = np.zeros(52)
    for one in heads.mean(2).flatten(0, 1)[:, :52].numpy():
        padded = np.pad(one, 2)
        wanted += [padded[at : at + 5].mean() for at in range(52)]
    engine.switcher.switch(bounded(snap, budget=30))
    best = np.sort(np.argsort(wanted[4:])[-18:] + 4)
    assert engine.ledger.held_positions.tolist() == [*range(4), *best, *range(52, 60)]


def test_attention_of_heads_goes_on_after_other_policies_undo_and_a_resume() -> None:
    stats = AttentionStats()
    mean, heads = np.full((1, 3), 0.5, np.float32), np.arange(18, dtype=np.float32)
    stats.add(np.arange(3), [PassAttention.from_weights(mean, 1)], 0.0, window=3)
    assert stats.recent(np.arange(3)).tolist() == [[[0.5, 0.5, 0.5]]]
    of_heads = PassAttention.from_weights(mean, 1)._replace(newest=heads.reshape(2, 3, 1, 3))
    stats.add(np.arange(3), [of_heads], 0.0, window=3)
    wanted = heads.reshape(2, 3, 3) + 0.5  # a mean counts for every head
    assert np.array_equal(stats.recent(np.arange(3)), wanted)
    saved = stats.checkpoint(np.arange(3))
    restored = pop_attention(attention_tensors(saved))
    assert restored is not None
    assert attention_fits(restored, 3)
    stats.erase(np.array([1]))
    assert np.array_equal(stats.recent(np.arange(3))[..., 1], np.zeros((2, 3)))
    stats.undo(saved, 3)
    assert np.array_equal(stats.recent(np.arange(3)), wanted)
    again = AttentionStats()
    again.load(restored)
    assert np.array_equal(again.recent(np.arange(3)), wanted)
    again.add(np.arange(3), [PassAttention.from_weights(mean, 1)], 0.0, window=3)
    assert again.recent(np.arange(3)) == pytest.approx(wanted.mean((0, 1))[None, None] + 0.5)


def test_a_session_copies_the_held_keys_and_values_of_a_layer() -> None:
    chat = session(tiny(), policy="sink", budget=64, recall="off", max_new_tokens=20)
    with pytest.raises(UsageError, match="nothing was read yet"):
        chat.keys_values(0)
    list(chat.ask("My name is Anna."))
    before = chat.keys_values(1)
    assert before.positions.tolist() == list(range(chat.seen))
    assert torch.equal(before.first_written, before.keys)  # nothing has moved
    for text in ("Tell me a joke.", "What is the capital of Italy?", "Tell me a story."):
        list(chat.ask(text))
    after = chat.keys_values(1)
    assert after.positions.tolist() == chat.ledger.held_positions.tolist()
    assert after.positions[-1] > len(after.positions)  # some were evicted
    sinks = slice(0, 4)
    assert torch.equal(after.first_written[:, sinks], before.first_written[:, sinks])
    assert torch.equal(after.keys, chat.engine.cache.layer_keys(1)[0])
    assert torch.equal(after.values, chat.engine.cache.layer_values(1)[0])
    assert not torch.allclose(after.keys[:, 4:], after.first_written[:, 4:])
    torch.testing.assert_close(after.keys.norm(dim=-1), after.first_written.norm(dim=-1))
    for tensor in after[1:]:
        tensor.zero_()
    assert chat.engine.cache.layer_keys(1).abs().min() > 0
    assert torch.equal(chat.keys_values(1).keys, chat.engine.cache.layer_keys(1)[0])
    with pytest.raises(UsageError, match="of layer 6: layers are 0 to 5"):
        chat.keys_values(6)


def test_the_example_of_the_ledgers_columns_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = example("memory", "# Which held tokens")
    chat, at, length = names["chat"], names["at"], names["length"]
    rows = chat.tokens(range(chat.seen))
    mine = sorted((length[n], p) for n, p in enumerate(at) if rows[p].role == "user")
    texts = [rows[p].text for p in sorted(p for _, p in mine[-3:])]
    assert capsys.readouterr().out == f"{texts} {int(at[-1]) - len(at) + 1}\n"
    table = (Path(sirchat.__file__).parent / "memory" / "README.md").read_text("utf-8")
    for name in chat.ledger.rows().dtype.names:
        dtype = chat.ledger.column(name).dtype.name
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\| {dtype} \|", table, re.M), name


@pytest.mark.parametrize(
    ("policy", "options"), [("knorm", {}), ("keydiff", {}), ("h2o", {"values": True})]
)
def test_a_model_that_caches_compressed_keys_is_refused(
    policy: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = changed_profile(Profile(), "flag", policy=policy, policy_options=options)
    check_policy(profile, loaded("llama"), "policy")
    check_policy(Profile(policy="h2o"), loaded("deepseek-mla"), "policy")
    monkeypatch.setattr(Sink, "needs", "keys")
    for refused in (profile, Profile(policy="sink")):
        with pytest.raises(SettingError, match="compressed keys"):
            check_policy(refused, loaded("deepseek-mla"), "policy")
