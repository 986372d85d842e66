"""Attention masks for training as if under a budget."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sirchat.lab.synthetic.dialogue import Mix
from sirchat.lab.synthetic.rounds import Message
from sirchat.lab.training.masks import (
    INFORMATIVE_NATS,
    MIN_BUDGET,
    RECENT,
    SINKS,
    draw_gaps,
    lost_answers,
    visible_under_budget,
)
from sirchat.lab.training.network import build_model, token_losses, weighted_loss
from sirchat.lab.training.rows import Batch, Renderer, build_tokenizer
from sirchat.lab.training.schedule import SIZES

MIX = Mix(tell=0.4, ask=0.4, repeat=0.0)
TELL = Message("user", "I live in Oslo.", fact=("city", ""), value="Oslo")
MOVE = Message("user", "No, I moved to Rome.", fact=("city", ""), value="Rome")
OTHER = Message("user", "My cat is called Luna.", fact=("pet", "cat"), value="Luna")
OK = Message("assistant", "OK.")
ASK = Message("user", "Where do I live?")
ANSWER = Message("assistant", "You live in Rome.", "city", ("city", ""))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0, vocab_size=600, dialogues=30)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    return Renderer(tokenizer)


@given(
    st.integers(1, 10**6),
    st.integers(60, 200),
    st.sets(st.integers(1, 199), max_size=8),
    st.integers(40, 150),
)
@settings(max_examples=60)
def test_visible_tokens_are_those_that_a_budget_holds_after_each_turn(
    seed: int, tokens: int, turns: set[int], budget: int
) -> None:
    starts = sorted(turn for turn in turns if turn < tokens)
    score = np.random.default_rng(seed).permutation(tokens).astype(float)
    visible = visible_under_budget(score, np.array(starts, np.int64), budget)
    held: list[int] = []
    for at in range(tokens):
        if at in starts:  # one by one, the lowest of those that may leave
            while len(held) > budget:
                free = [t for t in held if t >= SINKS and t < at - RECENT]
                if not free:
                    break
                held.remove(min(free, key=lambda t: score[t]))
        held.append(at)
        assert np.flatnonzero(visible[at]).tolist() == held


@pytest.mark.parametrize(("hidden", "is_lost"), [("Oslo", False), ("Luna", False), ("Rome", True)])
def test_an_answer_is_lost_with_the_newest_statement_of_its_fact(
    renderer: Renderer, hidden: str, is_lost: bool
) -> None:
    one = renderer.render([TELL, OK, OTHER, OK, MOVE, OK, ASK, ANSWER])
    fact, answer = np.array(one.fact), np.array(one.answer)
    in_fact = np.flatnonzero((fact > 0) & ~answer)
    runs = np.split(in_fact, np.flatnonzero(np.diff(in_fact) > 1) + 1)
    assert len(runs) == 3
    visible = np.tri(len(fact) - 1, dtype=bool)
    visible[:, runs[["Oslo", "Luna", "Rome"].index(hidden)][-1]] = False
    dull, telling = np.zeros(len(fact)), np.full(len(fact), INFORMATIVE_NATS + 0.1)
    lost = (fact == 1) & answer & is_lost
    assert (lost_answers(visible, telling, answer, fact) == lost).all()
    assert not lost_answers(visible, dull, answer, fact).any()


def test_gaps_are_drawn_for_each_row_and_the_same_seed_gives_the_same(renderer: Renderer) -> None:
    batch = renderer.batch(Random(1), 8, 300, MIX)
    losses = torch.rand(8, 300, generator=torch.Generator().manual_seed(0))
    user = renderer.roles["user"]
    one, two = (draw_gaps(Random(5), losses, batch, user) for _ in range(2))
    assert (one.visible == two.visible).all()
    assert (one.lost == two.lost).all()
    seen = one.visible[:, 0].sum(-1)  # [rows, tokens]
    assert one.visible.shape == (8, 1, 300, 300)
    assert (seen[:, :MIN_BUDGET] == torch.arange(1, MIN_BUDGET + 1)).all()
    assert len(set(seen[:, -1].tolist())) > 3
    assert (seen[:, -1] < 300).all()
    assert not one.visible.triu(1).any()
    assert not (one.lost & ~batch.answer).any()


def test_masked_tokens_change_nothing_and_lost_tokens_have_no_loss() -> None:
    model = build_model(SIZES["micro"], 300, 0, 0, 4, 5)
    ids = torch.randint(6, 300, (2, 41), generator=torch.Generator().manual_seed(0))
    everything = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, 1, 40, 40)
    plain, _ = token_losses(model, ids)
    torch.testing.assert_close(token_losses(model, ids, everything)[0], plain)
    hidden = everything.clone()
    hidden[:, :, 20:, 5:10] = False
    changed = ids.clone()
    changed[:, 5:10] = 7
    one, two = (token_losses(model, x, hidden)[0] for x in (ids, changed))
    torch.testing.assert_close(one[:, 20:], two[:, 20:])  # one layer: nothing comes round about
    assert not torch.allclose(one[:, 10:20], two[:, 10:20])
    answer = torch.ones(2, 41, dtype=torch.bool)
    lost = torch.zeros(2, 41, dtype=torch.bool)
    lost[:, 21:] = True
    batch = Batch(ids, answer, answer.long(), answer.long())
    assert weighted_loss(plain, batch, lost).item() == pytest.approx(plain[:, :20].mean().item())
