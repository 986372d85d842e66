"""Draws that can be repeated, and the choice of the next token."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from simulated_devices import DEVICES, SimulatedTensor, simulated_devices
from sirchat.engine.sampling import Sampler, Sampling, candidates
from sirchat.errors import ModelError
from sirchat.memory.random_numbers import Purpose, uniform
from sirchat.models.surprisal import surprisal

HELD_IDS = [*range(0, 32, 3), 3]


@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from(Purpose),
    st.lists(st.integers(0, 2**40), max_size=9),
    st.integers(0, 2**40),
)
def test_draws_are_those_of_splitmix_in_every_version(
    seed: int, purpose: Purpose, positions: list[int], seen: int
) -> None:
    """Old conversations can be read again: each draw depends on its key alone, and is frozen."""
    draws = uniform(seed, purpose, np.array(positions, np.int64), seen).tolist()
    assert draws == [splitmix_draw(seed, purpose, position, seen) for position in positions]


def splitmix_draw(seed: int, purpose: int, position: int, seen: int) -> float:
    """The draw, once more, in Python's own integers."""
    whole, gamma = 2**64, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % whole
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % whole
        return x ^ (x >> 31)

    state = mix((seed + gamma * purpose) % whole)
    state = mix(state ^ ((seen + gamma) % whole))
    return (mix(state ^ ((position * gamma + gamma) % whole)) >> 11) / 2**53


def test_temperature_zero_takes_the_likeliest_after_the_repetition_penalty() -> None:
    for seed in range(20):
        logits = random_logits(seed)
        for sampling in (Sampling(), Sampling(top_k=3, top_p=0.2, min_p=0.5, seed=seed)):
            assert pick(sampling, logits) == int(logits.argmax())
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    assert sampler.pick(torch.arange(4.0), lambda count: [3], 0) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 2.5, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
    ],
)
def test_tokens_are_drawn_with_the_probabilities_that_transformers_gives(
    options: dict[str, Any],
) -> None:
    logits, times = random_logits(1), 2000
    sampler = Sampler(Sampling(**options))
    drawn = Counter(sampler.pick(logits, lambda count: HELD_IDS, p) for p in range(times))
    expected = (probabilities(logits, **options) * times).tolist()
    assert all(expected[token] > 0 for token in drawn)
    likely = [token for token, count in enumerate(expected) if count >= 5]
    seen = [drawn[token] for token in likely] + [times - sum(drawn[t] for t in likely)]
    told = [expected[token] for token in likely] + [times - sum(expected[t] for t in likely)]
    both = [(s, t) for s, t in zip(seen, told, strict=True) if t > 1e-6]
    assert chisquare([s for s, _ in both], [t for _, t in both]).pvalue > 0.01


@given(
    st.sampled_from(["normal", "peaked", "equal", "masked", "constant"]),
    st.sampled_from([7, 300, 3000]),
    st.none() | st.sampled_from([1, 5, 40, 5000]),
    st.none() | st.floats(0.01, 0.99),
    st.none() | st.floats(1e-4, 0.99),
)
def test_ids_are_left_with_their_chances_and_equally_likely_ones_together(
    kind: str, vocab: int, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """The oracle goes from the likeliest score to less likely ones."""
    scores = 3 * np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
    scores[::7] += 9 * (kind == "peaked")
    scores = scores.round() if kind == "equal" else scores
    scores[1::2] = -np.inf if kind == "masked" else scores[1::2]
    scores = np.zeros_like(scores) if kind == "constant" else scores
    weights, total = {s: np.sum(scores == s) * math.exp(s) for s in set(scores.tolist())}, 0.0
    falling = sorted(weights, reverse=True)
    sizes = np.cumsum([np.sum(scores == one) for one in falling]).tolist()
    count = next((n for n, size in enumerate(sizes, 1) if size >= (top_k or vocab)), len(falling))
    whole = sum(weights[one] for one in falling[:count])
    wanted = list[float]()
    for one in falling[:count]:
        assume(top_p is None or abs(total / whole - top_p) > 1e-6)
        if total / whole < (top_p or 1) and math.exp(one - falling[0]) >= (min_p or 0):
            wanted.append(one)
        total += weights[one]
    ids, chances = candidates(scores, Sampling(1.0, top_k, top_p, min_p))
    assert set(ids.tolist()) == set(np.flatnonzero(np.isin(scores, wanted) & (scores > -80)))
    assert chances == pytest.approx(np.exp(scores[ids].astype(float) - falling[0]))


def probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """What `generate` draws from, in its order of processors."""
    chosen: list[LogitsProcessor] = [RepetitionPenaltyLogitsProcessor(repetition_penalty)]
    chosen.append(TemperatureLogitsWarper(temperature))
    chosen += [TopKLogitsWarper(top_k)] if top_k is not None else []
    chosen += [TopPLogitsWarper(top_p)] if top_p is not None else []
    chosen += [MinPLogitsWarper(min_p)] if min_p is not None else []
    scores: Tensor = LogitsProcessorList(chosen)(torch.tensor([HELD_IDS]), logits[None])
    return scores[0].double().softmax(-1)


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=9), st.data())
def test_surprisal_is_minus_the_logarithm_of_the_probability(
    logits: list[float], data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    total = sum(math.exp(x - max(logits)) for x in logits)
    expected = max(logits) - logits[token] + math.log(total)
    got = surprisal(torch.tensor([logits]), torch.tensor([token]))
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([expected], rel=1e-5, abs=1e-5)
    assert got.item() >= 0


def pick(sampling: Sampling, logits: Tensor) -> int:
    return Sampler(sampling).pick(logits, lambda count: HELD_IDS, 0)


def random_logits(seed: int) -> Tensor:
    return 2 * torch.randn(32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("wrong", "options"),
    [
        (math.nan, {}),
        (math.nan, {"repetition_penalty": 2.0}),
        *((wrong, {"temperature": 0.7}) for wrong in (math.nan, math.inf, -math.inf)),
        *((wrong, {"temperature": 0.7, "top_k": 2}) for wrong in (math.nan, math.inf, -math.inf)),
    ],
)
def test_no_token_is_drawn_from_what_is_no_number(wrong: float, options: dict[str, Any]) -> None:
    logits = torch.full((32,), -math.inf if wrong < 0 else 0.0)
    logits[3] = wrong
    with np.errstate(invalid="raise"), pytest.raises(ModelError, match="not numbers"):
        pick(Sampling(**options), logits)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_device_gives_the_token_that_the_processor_gives(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9, repetition_penalty=1.05)
    logits, every = random_logits(1), torch.ones(32, dtype=torch.bool)
    wanted = pick(sampling, logits)
    with simulated_devices():
        for allowed in (None, lambda ids: every):
            sampler = Sampler(sampling, 0, allowed)
            assert (
                sampler.pick(SimulatedTensor(logits, DEVICES[0]), lambda _: HELD_IDS, 0) == wanted
            )
