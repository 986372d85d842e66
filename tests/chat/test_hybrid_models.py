"""Chats with hybrid models: attention layers hold tokens, other layers a state that has read all.

What is undone, tried, searched or resumed leaves the state equal to the last bit; what is erased
leaves no trace in it.
"""

from __future__ import annotations

import random
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from attacking import MANY
from chatting import answer, fail_reading, session
from families import HYBRIDS, build
from saved_chats import saved_and_resumed
from sirchat.chat.events import Notice
from sirchat.chat.retry import trial
from sirchat.chat.session import Session
from sirchat.engine.types import TurnRef
from sirchat.errors import ModelError, SettingError
from sirchat.memory.hub_cache import StateLayer
from sirchat.memory.key_values import CacheState
from sirchat.memory.ledger import Flag, Role
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.paths import tiny_model_dir
from sirchat.recall.recall import score_by_reading_turn
from small_models import build_small, causal_families

SMALL: dict[str, Any] = {"budget": 64, "recent": 8, "max_new_tokens": 3, "policy": "entropy"}
SAYINGS = [f"{n} some words and {n * n} more of them" for n in range(4)]
SEEDS = MANY or 1  # random sessions of each model
KINDS = ("qwen3_next", "lfm2", "bamba", "falcon_h1")
fast = pytest.mark.parametrize("name", ["lfm2", *(["bamba"] if MANY else [])])


@cache
def hybrid(name: str) -> LoadedModel:
    """A small hybrid model with random weights and the bundled tokenizer; it never ends a reply."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    sizes = {"vocab_size": len(tokenizer), "tie_word_embeddings": False}
    if name in HYBRIDS:
        module = build(name, {**HYBRIDS[name], **sizes})
    else:
        module = build_small(name, **sizes).float()
    with torch.no_grad():
        module.get_output_embeddings().weight[:8] = 0.0  # control tokens
    return wrap_model(name, module, tokenizer)


def chat(name: str, *texts: str, **settings: Any) -> Session:
    made = session(hybrid(name), **{**SMALL, **settings})
    for text in texts:
        list(made.ask(text))
    return made


def state(of: Session) -> list[Tensor]:
    return tensors(of.engine.save().state)


def tensors(layers: CacheState) -> list[Tensor]:
    return [tensor.clone() for layer in layers for tensor in layer.values()]


def memory(of: Session) -> list[Tensor]:
    """State, next logits, and keys and values as attention reads them."""
    engine = of.engine
    rows = engine.cache.as_read(torch.arange(engine.ledger.held_count))
    assert engine.logits is not None
    return [*state(of), engine.logits.clone(), *(row.clone() for row in rows)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


@fast
def test_a_trial_and_a_search_are_taken_back_to_the_last_bit(name: str) -> None:
    talk = chat(name, *SAYINGS, recall="mips", recall_n=8)
    engine = talk.engine
    assert engine.ledger.archived_count, "there is something to search"
    before = memory(talk)
    with trial(talk, "/retry", {"policy": "sink", "recall": "off"}):
        list(talk.ask("and now something else"))
    assert same(memory(talk), before)
    ids = engine.ledger.column("token_id")[:9].tolist()  # the search reads them, and undoes that
    result = score_by_reading_turn(engine, talk.model, ids, [Role.USER] * 9, TurnRef(8, 5))
    assert result is not None
    assert same(memory(talk), before)


@pytest.mark.skipif(not MANY, reason="it builds all families of transformers")
def test_random_sessions_of_every_hybrid_family_are_exact() -> None:
    """`SIRCHAT_ATTACK=20` plays 20 sessions of each family that runs and has a state."""
    played = set(HYBRIDS)
    for name in causal_families():
        try:
            with_state = name not in played and chat(name).model.new_cache(8).has_state
        except Exception:  # it can't be built small, or is refused: the census says why
            continue
        if with_state:
            test_random_sessions_are_exact(name)
            played.add(name)
    assert len(played) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_random_sessions_are_exact(name: str) -> None:
    """Undo and resumption to the last bit."""
    for seed in range(SEEDS):
        draw, talk = random.Random(seed), chat(name, SAYINGS[0])
        before: list[list[Tensor]] = []
        for _ in range(14):
            what = draw.choice(["say", "say", "say", "undo", "set", "recall", "resume"])
            if what == "say":
                before = [*before, memory(talk)]
                list(talk.ask(draw.choice(SAYINGS)))
            elif what == "undo" and before:
                talk.undo()
                settings = {"policy": "entropy", "budget": 64, "recall": "off"}
                if all(getattr(talk.profile, key) == value for key, value in settings.items()):
                    assert same(memory(talk), before[-1])
                assert same(state(talk), before.pop()[: len(state(talk))])
            elif what == "set":
                policy, budget = draw.choice(["sink", "entropy"]), draw.choice([48, 64])
                talk.switch("/set", policy=policy, budget=budget)
            elif what == "recall":
                talk.switch("/recall", recall=draw.choice(["words", "off"]), recall_n=8)
            elif what == "resume":
                was = memory(talk)
                talk = copied(talk)
                assert same(memory(talk), was)
                before = []
            assert talk.resident <= talk.budget


def copied(talk: Session) -> Session:
    """The same chat in another session."""
    made = Session(talk.model, talk.profile)
    received = talk.ledger.attention.checkpoint(np.arange(talk.seen))
    made.load(talk.engine.save(), talk.state, talk.engine.store.copy_key_values(), received)
    return made


@pytest.mark.parametrize("name", [*KINDS, "jamba"])
def test_scoring_replies_changes_nothing_and_agrees_with_reading_them(name: str) -> None:
    talk = chat(name, SAYINGS[0])
    before = memory(talk)
    list(talk.read_user("well?"))
    at_question = memory(talk)
    scores = talk.score_continuations(["yes it is", "no", ""])
    assert same(memory(talk), at_question)
    for score, text in zip(scores, ["yes it is", "no"], strict=False):
        seen = talk.seen
        list(talk.read_reply(text))
        ledger = talk.ledger
        assert ledger.column("token_id")[seen : seen + len(score.ids)].tolist() == list(score.ids)
        nats = ledger.column("surprisal")[seen : seen + len(score.ids)]
        np.testing.assert_allclose(-np.array(score.log_probabilities), nats, rtol=1e-3, atol=1e-3)
        talk.undo()
        assert same(memory(talk), before)
        list(talk.read_user("well?"))


@fast
def test_an_interrupt_while_the_state_is_computed_again_leaves_all_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(name, *SAYINGS)
    before, turns = memory(talk), deepcopy(talk.turns)
    with monkeypatch.context() as patch:
        fail_reading(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            talk.erase("some")
    assert same(memory(talk), before)
    assert talk.turns == turns
    talk.erase("some")
    assert not same(state(talk), before[: len(state(talk))])


@fast
def test_guessed_tokens_are_not_read(name: str) -> None:
    on, off = (chat(name, *SAYINGS[:2], lookup=lookup) for lookup in (True, False))
    assert same(memory(on), memory(off))


@fast
def test_a_pass_that_fails_leaves_the_state(name: str) -> None:
    talk, plain = chat(name, SAYINGS[0]), chat(name, SAYINGS[0])
    handle = hybrid(name).module.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(talk.ask(SAYINGS[1]))
    handle.remove()
    talk.undo()
    for each in (talk, plain):
        list(each.ask(SAYINGS[2]))
    assert same(memory(talk), memory(plain))


@fast
def test_how_much_attention_a_reply_paid_is_not_told(name: str) -> None:
    talk = chat(name, SAYINGS[0])
    before = memory(talk)
    assert talk.attention_paid(1).shares is None
    assert same(memory(talk), before)


def resumed(talk: Session, **settings: Any) -> Session:
    """The same chat, saved and resumed."""
    return saved_and_resumed(talk, session(talk.model, **{**SMALL, **settings}))


@fast
def test_a_resumed_chat_continues_from_the_same_state(name: str, own_home: Path) -> None:
    talk = chat(name, *SAYINGS[:3], save_kv="on")
    again = resumed(talk)
    assert same(memory(again), memory(talk))
    replies = [answer(list(each.ask(SAYINGS[3]))) for each in (talk, again)]
    assert replies[0] == replies[1]
    assert same(memory(again), memory(talk))


@pytest.mark.parametrize("name", ["lfm2", *(["jamba"] if MANY else [])])
def test_without_saved_keys_the_whole_text_is_read_again_for_the_state(
    name: str, own_home: Path
) -> None:
    talk = chat(name, SAYINGS[0], save_kv="off")
    again = resumed(talk, save_kv="off")
    for ours, theirs in zip(state(again), state(talk), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    again = resumed(chat(name, *SAYINGS, save_kv="off"), save_kv="off")
    assert again.resident < again.seen, "evicted tokens are read, too"
    rebuilt = state(again)
    again.engine.rebuild_state()
    assert same(state(again), rebuilt)


@fast
def test_what_is_lost_is_read_again_with_a_state_of_its_own(name: str) -> None:
    talk = chat(name, *SAYINGS, archive_limit="1KiB")
    before = memory(talk)
    talk.engine.evictor.reread(np.arange(talk.seen))
    assert talk.ledger.archived_count == talk.seen - talk.resident > 0
    assert same(memory(talk), before)


@fast
def test_what_is_erased_leaves_no_trace_in_the_state(name: str) -> None:
    """Two chats that differ in one word are the same after the word is erased."""
    talks = [chat(name, "my name is X", f"and {word} it is, so be it") for word in ("9", "7")]
    assert not same(*map(state, talks))
    for talk, word in zip(talks, ("9", "7"), strict=True):
        talk.state.set_turns(talk.state.turns[:3])
        talk.undo()
        list(talk.read_user(f"and {word} it is, so be it"))
        talk.erase(word)
    assert same(*map(state, talks))
    ledger = talks[0].ledger
    left = np.flatnonzero(ledger.column("flags") & np.uint8(Flag.ERASED) == 0)
    assert len(left) < ledger.seen
    fresh = hybrid(name).new_cache(len(left))
    hybrid(name).forward(ledger.column("token_id")[left].tolist(), fresh)
    fresh.commit(len(left))
    for ours, theirs in zip(state(talks[0]), tensors(fresh.state), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@fast
@pytest.mark.parametrize(
    "settings", [{"policy": "h2o"}, {"recall": "cosine", "recall_n": 8}], ids=str
)
def test_attention_layers_alone_are_counted(name: str, settings: dict[str, Any]) -> None:
    talk = chat(name, *SAYINGS, "and now?", **settings)
    assert talk.resident <= talk.budget < talk.seen, "some were evicted"
    layers = len(talk.model.rotations)
    assert layers == len(talk.engine.cache.row_layers)
    assert all(tensor.isfinite().all() for tensor in memory(talk))
    if settings.get("policy") == "h2o":
        held = talk.ledger.held_positions
        assert (talk.ledger.attention.totals(held, 0.0)[:-1] > 0).all()
    else:
        assert talk.recall.scores


def test_the_start_says_that_evicted_tokens_leave_a_trace() -> None:
    said = [event.text for event in chat("lfm2").opening_events() if isinstance(event, Notice)]
    assert any("a token that is evicted still has left its trace there" in text for text in said)


def test_a_policy_that_hides_tokens_from_attention_is_refused() -> None:
    with pytest.raises(SettingError, match="policy can't be anchor: lfm2 has layers with a state"):
        chat("lfm2", policy="anchor")
    with pytest.raises(SettingError, match="/set: policy can't be anchor"):
        chat("lfm2").switch("/set", policy="anchor")


def test_a_model_that_continues_token_by_token_is_found() -> None:
    """Jamba's layers begin a new state if several tokens are read at once."""
    assert hybrid("jamba").reads_singly
    assert not any(hybrid(name).reads_singly for name in KINDS)


def test_a_model_whose_state_cant_be_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateLayer, "copy_state", lambda self: {})
    module = hybrid("lfm2").module
    with pytest.raises(ModelError, match="the state of its recurrent layers can't be continued"):
        wrap_model("lfm2", module, None)
