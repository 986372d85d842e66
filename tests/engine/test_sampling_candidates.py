"""The next token, chosen from the likeliest ids alone: it is the one chosen from all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from simulated_devices import DEVICES, SimulatedTensor, refuses_waits, simulated_devices
from sirchat.engine.sampling import Sampler, Sampling, candidates, leading, narrowed
from sirchat.errors import ModelError
from sirchat.memory.random_numbers import Purpose, uniform

CHAT = Sampling(temperature=0.2, top_p=0.9, repetition_penalty=1.05)  # a chat's default
POSITIONS = range(8)
SAID = [0, 3, 3, 5]
UNSEEN = 1e-40  # a chance so small that no draw shows it; float32 counts it as 0


def whole_scores(logits: Tensor, sampling: Sampling) -> Tensor:
    """The scores [V], -inf where an id is excluded: by sorting all."""
    scores = logits.float()
    if sampling.repetition_penalty != 1.0:
        for at in set(SAID):
            by = sampling.repetition_penalty
            scores = scores.index_fill(0, torch.tensor([at]), 0.0)
            score = logits.float()[at]
            scores[at] = score * by if score < 0 else score / by
    scores = scores / sampling.temperature
    if sampling.top_k is not None:
        least = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None:
        rising, order = scores.sort()
        is_left_out = rising.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_left_out[-1] = False
        scores = scores.masked_fill(is_left_out.scatter(0, order, is_left_out), -torch.inf)
    if sampling.min_p is not None:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.max(), -torch.inf)
    return scores


def drawn(logits: Tensor, sampling: Sampling) -> list[int]:
    """What is drawn at each of the positions, by the chances of all ids."""
    heights = whole_scores(logits, sampling).double().softmax(-1).cumsum(-1).numpy()
    assert not math.isnan(heights[-1])
    draws = uniform(sampling.seed, Purpose.SAMPLING, np.array(POSITIONS))
    return [int(np.searchsorted(heights, draw * heights[-1], side="right")) for draw in draws]


def picked(logits: Tensor, sampling: Sampling) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.pick(logits, lambda count: SAID, position) for position in POSITIONS]


@st.composite
def some_logits(draw: st.DrawFn) -> Tensor:
    """Raw logits of a small or larger vocabulary: peaked, flat, or with many equal ones."""
    vocab = draw(st.sampled_from([7, 300, 1024, 1025, 3000, 20_000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(vocab, generator=generator) * draw(st.sampled_from([0.1, 1, 3, 10]))
    kind = draw(st.sampled_from(["normal", "peaked", "equal", "bfloat16", "constant", "masked"]))
    if kind == "peaked":
        logits[torch.randint(vocab, (5,), generator=generator)] += 12.0
    elif kind == "equal":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = logits.bfloat16()
    elif kind == "constant":
        logits = torch.full((vocab,), 2.5)
    elif kind == "masked":
        logits[
            torch.rand(vocab, generator=generator) < draw(st.sampled_from([0.5, 0.99]))
        ] = -torch.inf
        logits[3] = 0.0
    return logits


some_sampling = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.2, 0.7, 1.0, 2.0]),
    top_k=st.none() | st.sampled_from([1, 2, 5, 40, 1000, 1023, 1024, 1025, 5000]),
    top_p=st.none() | st.just(1.0) | st.floats(0.01, 0.999),
    min_p=st.none() | st.just(0.0) | st.floats(1e-4, 0.999),
    repetition_penalty=st.sampled_from([1.0, 1.05, 1.5]),
    seed=st.integers(0, 99),
)


@given(some_logits(), some_sampling)
@example(torch.linspace(0, 3, 3000), Sampling(temperature=1.0, top_k=2000, top_p=0.3))
@settings(max_examples=200)
def test_the_likeliest_ids_give_what_all_give(logits: Tensor, sampling: Sampling) -> None:
    assert picked(logits, sampling) == drawn(logits, sampling)
    plain = Sampling(**{**vars(sampling), "repetition_penalty": 1.0})
    wanted = whole_scores(logits, plain).double().softmax(-1)
    for name, chances in both_chances(logits, plain):
        assert torch.equal(chances > UNSEEN, wanted > UNSEEN), name
        torch.testing.assert_close(chances, wanted, rtol=1e-12, atol=UNSEEN)


def both_chances(logits: Tensor, sampling: Sampling) -> Iterator[tuple[str, Tensor]]:
    """The chance of each id [V], by the candidates, if they tell it, and by all ids."""
    yield "all", narrowed(logits, sampling).double().softmax(-1)
    if (found := candidates(logits, sampling)) is not None:
        ids, chances = map(torch.from_numpy, found)
        assert (ids.diff() > 0).all()
        yield "candidates", torch.zeros(len(logits)).double().index_put((ids,), chances)


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_k": 20, "top_p": 0.8, "min_p": 0.1}])
def test_the_likeliest_ids_usually_suffice(options: dict[str, Any]) -> None:
    sampling = Sampling(**{**vars(CHAT), **options})
    assert sum(candidates(real_logits(seed), sampling) is None for seed in range(50)) <= 2
    few = torch.full((3000,), -torch.inf).index_fill(0, torch.tensor([5, 9]), 1.0)
    assert candidates(few, sampling) is not None
    flat = 0.1 * real_logits(0)
    assert (candidates(flat, Sampling(temperature=1.0, top_p=0.9))) is None


@pytest.mark.parametrize("vocab", [500, 3000])
def test_what_rounding_decides_is_left_to_all_ids(vocab: int) -> None:
    logits = 3 * real_logits(0, vocab)
    heights = logits.sort().values.softmax(-1).cumsum(-1)
    for height in heights[-9:-1].tolist():
        sampling = Sampling(temperature=1.0, top_p=1 - height)
        assert candidates(logits, sampling) is None
        assert picked(logits, sampling) == drawn(logits, sampling)
    chances = logits.softmax(-1)
    for chance in (chances.sort().values[-9:-1] / chances.max()).tolist():
        assert candidates(logits, Sampling(temperature=1.0, min_p=chance)) is None


def real_logits(seed: int, vocab: int = 49_152) -> Tensor:
    """As those of a language model: few ids are likely."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.empty(vocab).exponential_(generator=generator)
    return 2.5 * torch.randn(vocab, generator=generator) + 4 * few


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.5}]
)
@pytest.mark.parametrize("vocab", [8, 3000])
def test_what_is_no_number_is_an_error(vocab: int, options: dict[str, Any], wrong: float) -> None:
    logits = torch.zeros(vocab)
    logits[3] = wrong
    for no_numbers in (logits, torch.full((vocab,), -torch.inf)):
        with np.errstate(invalid="raise"), pytest.raises(ModelError, match="not numbers"):
            picked(no_numbers, Sampling(temperature=0.7, **options))


class CopiesToHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers in each copy from a simulated device to the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_on_host = isinstance(made, int | float | Tensor) and not isinstance(
            made, SimulatedTensor
        )
        if is_on_host and args and isinstance(args[0], SimulatedTensor):
            self.sizes.append(args[0].numel())
        return made


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"temperature": 0.0}, [1]),
        ({}, [2049]),
        ({"top_p": None, "min_p": 0.1}, [2049]),
        ({"top_p": None, "top_k": 40}, [2049]),
        ({"temperature": 5.0}, [2049, 3000]),  # too flat
        ({"top_p": None}, [3000]),
    ],
)
def test_a_token_is_one_small_copy_from_a_device(options: dict[str, Any], sizes: list[int]) -> None:
    sampling, logits = Sampling(**{**vars(CHAT), **options}), real_logits(1, 3000)
    everything = torch.ones(3000, dtype=torch.bool)
    wanted = Sampler(sampling).pick(logits, lambda count: SAID, 7)
    with simulated_devices():
        on_device = SimulatedTensor(logits, DEVICES[0])
        for allowed in (None, lambda ids: everything):
            with CopiesToHost() as copies:
                found = Sampler(sampling, 0, allowed).pick(on_device, lambda count: SAID, 7)
            assert (found, copies.sizes) == (wanted, sizes)
        with refuses_waits():
            leading(on_device)
        on_device.host[5] = torch.nan
        with pytest.raises(ModelError, match="not numbers"):
            Sampler(sampling).pick(on_device, lambda count: SAID, 7)


def test_on_a_device_top_p_leaves_equal_scores_together() -> None:
    """Or sorts all on the CPU, where more ids may be as likely as the last candidate."""
    sampling, logits = Sampling(temperature=1.0, top_p=0.6), torch.full((3000,), -20.0)
    logits[torch.tensor([2000, 7, 900, 30])] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    with simulated_devices():
        found = candidates(SimulatedTensor(logits, DEVICES[0]), sampling)
        assert found is not None
        assert found[0].tolist() == [7, 30, 900, 2000]
        assert found[1].tolist() == pytest.approx([0.175, 0.175, 0.175, 0.475], abs=1e-3)
        assert candidates(SimulatedTensor(torch.zeros(1024), DEVICES[0]), sampling) is not None
        assert candidates(SimulatedTensor(torch.zeros(1031), DEVICES[0]), sampling) is None
    assert candidates(logits, sampling) is None
