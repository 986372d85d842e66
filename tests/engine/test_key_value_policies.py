"""Policies that rank by keys and values: what they hold in a conversation, and when refused."""

from __future__ import annotations

import pytest
import torch

from families import loaded
from sirchat.chat.settings import check_policy
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, TurnRef
from sirchat.errors import SettingError
from sirchat.memory.ledger import Role
from sirchat.memory.policies.keydiff import Keydiff
from sirchat.memory.policies.knorm import Knorm
from sirchat.memory.policies.sink import Sink


def talked(settings: CacheSettings, count: int = 60) -> Engine:
    engine = Engine(loaded("llama"), settings)
    ids = torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    list(engine.prefill(ids, [Role.USER] * count, TurnRef(0, 0)))
    return engine


def bounded(policy: Sink | Knorm | Keydiff, budget: int = 64) -> CacheSettings:
    return CacheSettings(policy=policy, budget=budget, archive=2**20, protect=False)


def test_the_shortest_or_most_distinctive_keys_of_all_that_was_read_stay() -> None:
    engine = talked(bounded(Sink()))
    keys = torch.stack([engine.cache.layer_keys(at)[0] for at in range(4)])  # [L, H, n, D]
    anchor = torch.nn.functional.normalize(keys, dim=-1).mean(2, keepdim=True)
    similarity = torch.cosine_similarity(keys, anchor, dim=-1)
    for policy, scores in ((Knorm(recent=0), keys.norm(dim=-1)), (Keydiff(recent=0), similarity)):
        wanted = scores.mean((0, 1))[4:].topk(16, largest=False).indices + 4
        engine.evictor.switch(bounded(policy, budget=20))
        assert engine.ledger.held_positions.tolist() == [*range(4), *sorted(wanted.tolist())]


def test_other_policies_have_no_statistics_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirchat.memory.key_value_store.key_value_stats", None)
    assert talked(bounded(Sink(), budget=32)).resident <= 32


@pytest.mark.parametrize(
    ("policy", "options"), [("knorm", {}), ("keydiff", {}), ("h2o", {"values": True})]
)
def test_a_model_that_caches_compressed_keys_is_refused(
    policy: str, options: dict[str, bool]
) -> None:
    profile = changed_profile(Profile(), "flag", policy=policy, policy_options=options)
    check_policy(profile, loaded("llama"), "policy")
    check_policy(Profile(policy="h2o"), loaded("deepseek-mla"), "policy")
    with pytest.raises(SettingError, match="compressed keys"):
        check_policy(profile, loaded("deepseek-mla"), "policy")
