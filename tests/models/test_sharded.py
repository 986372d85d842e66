"""Two processes that share a model: they hold the same rows and say the same as one process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from attacking import MANY
from chatting import hub_tokenizer
from random_sessions import WITH_STATISTICS, RandomSession, Step
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.records import CacheSettings, EvictedRows, GeneratedToken, TurnRef
from sirchat.engine.sampling import FixedIds
from sirchat.errors import ModelError, SirchatError
from sirchat.memory.ledger import Role
from sirchat.memory.policies.entropy import Entropy
from sirchat.models.loading import load_model
from sirchat.models.model import LoadedModel
from sirchat.models.sharded import ranks
from sirchat.saved.autosave import Autosave, resume_session
from sirchat.saved.database import SUFFIX
from sirchat.saved.store import SessionStore
from two_ranks import second_rank

_STEPS = 12
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 24}),
}


def saved_model(shape: str, folder: Path, heads: int = 2) -> str:
    """The folder of a model of this shape, with random weights and `heads` key/value heads."""
    kind, own = _SHAPES[shape]
    config = CONFIG_MAPPING[kind](
        vocab_size=len(hub_tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=heads,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.1,  # attention that prefers some rows to others
        **own,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    hub_tokenizer().save_pretrained(folder)
    return str(folder)


def steps(model: LoadedModel, seed: int, folder: Path) -> list[Step]:
    folder.mkdir()
    # Keys that the model normalizes have the same norm: `knorm` ranks them by rounding errors.
    ties = ["knorm"] if model.module.config.model_type in ("qwen3", "gemma3_text") else []
    return list(RandomSession(model, seed, folder, without=ties).run(_STEPS))


def assert_equal(found: list[Step], expected: list[Step]) -> None:
    """The same events and held rows at every step, and the same logits up to rounding."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        where = f"step {number}, {other.what}"
        assert (one.what, one.happened) == (other.what, other.happened), where
        assert one.held == other.held, where
        if one.logits is not None and other.logits is not None:
            assert np.allclose(one.logits, other.logits, atol=1e-3), where


@pytest.mark.skipif(not MANY, reason="processes that share a model have crashed in gloo once")
def test_two_processes_do_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, since a second process takes seconds to start.

    `SIRCHAT_ATTACK=1` runs one session of one shape, `SIRCHAT_ATTACK=20` twenty of each shape.
    """
    names = {"tiny": "tiny"} if MANY > 1 else {}
    for shape in _SHAPES if MANY > 1 else ["llama"]:
        names[shape] = saved_model(shape, tmp_path / shape)
    single_head = saved_model("llama", tmp_path / "single", heads=1)
    alone = {shape: load_model(name, device="cpu") for shape, name in names.items()}
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    with second_rank() as other:
        for shape, name in names.items():
            shared = load_model(name)
            for seed in range(MANY) if MANY > 1 else [3]:  # it does most things
                told = [tmp_path / f"{shape}-{seed}-{which}" for which in ("one", "two")]
                assert_equal(steps(shared, seed, told[0]), steps(alone[shape], seed, told[1]))
            if shape == "llama":  # the others normalize keys: all have the same norm
                check_statistics(shared, alone[shape])
        check_messages(shared)
        check_refusals(single_head)
        check_a_death(shared, alone[shape], other, tmp_path)


def check_statistics(shared: LoadedModel, alone: LoadedModel) -> None:
    """Policies that need something of all heads hold the same rows."""
    for policy in WITH_STATISTICS:
        assert held_under(policy, shared) == held_under(policy, alone), policy


def held_under(policy: str, model: LoadedModel) -> list[list[int]]:
    """The positions that a policy holds after each round."""
    session, held = Session(model, Profile(policy=policy, budget=48, recent=8)), list[list[int]]()
    for said in ("Anna walks to the old lake with her grey dog and a red boat.", "Tom reads."):
        list(session.read_user(said * 2))
        list(session.read_reply("Seven small towns are near the river, where nobody sells apples."))
        held.append(session.save().held.tolist())
    return held


def check_messages(model: LoadedModel) -> None:
    """A token costs one message of 256 bytes; a block of evicted rows one more, of under 1 kB."""
    at, ids = TurnRef(0, 0), [(7 * n) % 1500 + 30 for n in range(150)]
    engine = Engine(model, CacheSettings(policy=Entropy(), budget=64, archive=2**30))
    list(engine.feed(ids[:60], [Role.USER] * 60, at))
    said = engine.generate(FixedIds(ids), at, stop_ids=frozenset(), max_new_tokens=len(ids))
    evictions = tokens = has_evicted = 0
    messages, nbytes = ranks().messages.copy(), ranks().nbytes.copy()
    for record in said:
        sent, size = ranks().messages - messages, ranks().nbytes - nbytes
        messages, nbytes = ranks().messages.copy(), ranks().nbytes.copy()
        if isinstance(record, GeneratedToken):
            assert sent == {"calls": 1 + has_evicted}
            assert size["calls"] == 256 or (has_evicted and size["calls"] < 256 + 1000)
            has_evicted, tokens = 0, tokens + 1
        else:
            assert not sent
            is_eviction = isinstance(record, EvictedRows)
            has_evicted, evictions = int(is_eviction), evictions + is_eviction
    assert (tokens, evictions > 5) == (len(ids), True)


def check_refusals(single_head: str) -> None:
    """What can't be divided is refused in one line, and the processes stay in step."""
    with pytest.raises(ModelError, match=r"the 1 key/value heads .* can't be divided among 2"):
        load_model(single_head)
    with pytest.raises(ModelError, match="quantize=int8 can't be divided"):
        load_model("tiny", quantize="int8")
    with pytest.raises(ModelError, match="nosuchfolder/nosuchmodel"):
        load_model("nosuchfolder/nosuchmodel")


def check_a_death(
    shared: LoadedModel,
    alone: LoadedModel,
    other: subprocess.Popen[bytes],
    folder: Path,
) -> None:
    """When the other process dies, this one says so in one line, and the chat is saved."""
    session = Session(shared, Profile(budget=96, max_new_tokens=8))
    saving = Autosave(session, folder=folder / "saved")
    list(session.ask("My name is Anna."))
    saving.update()
    other.kill()
    with pytest.raises((SirchatError, RuntimeError)):
        list(session.ask("What is my name?"))
    assert ranks().failure.startswith("process 1 of 2 has ended")
    saving.close()
    with SessionStore.open(folder / "saved" / f"{saving.id}{SUFFIX}") as store:
        again = Session(alone, Profile(budget=96, max_new_tokens=8))
        resume_session(again, store)
    assert [turn.text for turn in again.turns[:2]] == [turn.text for turn in session.turns[:2]]
