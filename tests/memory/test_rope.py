"""Rotary embeddings: rotating keys, and detecting a layer's rotation."""

from __future__ import annotations

import cmath
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sirchat.memory.rope import Rotation, match_rotation

HEADS, HEAD_DIM = 2, 12
FREQUENCIES = {
    "whole": 1e4 ** -(torch.arange(0, 12, 2) / 12),
    "half": 5e5 ** -(torch.arange(0, 6, 2) / 6),
    "whole, other base": 1e6 ** -(torch.arange(0, 12, 2) / 12),
    "too wide": 1e4 ** -(torch.arange(0, 16, 2) / 16),
}
positions = st.integers(0, 5000)


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    inv_freq = FREQUENCIES[draw(st.sampled_from(["whole", "half", "whole, other base"]))]
    offset = draw(st.sampled_from([0, HEAD_DIM - 2 * len(inv_freq)]))
    return Rotation(inv_freq, draw(st.booleans()), offset)


@given(rotations(), positions, positions)
def test_a_pair_rotates_like_a_complex_number(rotation: Rotation, old: int, new: int) -> None:
    head = random_heads()[0]
    expected = head.tolist()
    for pair, frequency in enumerate(rotation.inv_freq.tolist()):
        if rotation.interleaved:
            real, imaginary = rotation.offset + 2 * pair, rotation.offset + 2 * pair + 1
        else:
            real = rotation.offset + pair
            imaginary = real + rotation.inv_freq.numel()
        z = complex(expected[real], expected[imaginary]) * cmath.exp(1j * (new - old) * frequency)
        expected[real], expected[imaginary] = z.real, z.imag
    # Angles are rounded to float32, as models round them: up to 5000 * 2^-24 radians.
    got = move(head, rotation, old, new)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-3, atol=1e-3)


@given(rotations(), positions, positions, positions)
def test_two_moves_equal_one(rotation: Rotation, a: int, b: int, c: int) -> None:
    heads = random_heads()
    twice = move(move(heads, rotation, a, b), rotation, b, c)
    torch.testing.assert_close(twice, move(heads, rotation, a, c), rtol=1e-5, atol=1e-5)


def test_a_moved_bfloat16_row_is_computed_in_float32() -> None:
    rotation, heads = Rotation(FREQUENCIES["whole"]), random_heads().bfloat16()
    moved = move(heads, rotation, 700, 3)
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, move(heads.float(), rotation, 700, 3), rtol=0, atol=0)


@given(rotations())
def test_the_rotation_is_found_among_all_candidates(rotation: Rotation) -> None:
    found = match_rotation(samples(rotation), FREQUENCIES, 1e-4)
    assert found is not None
    assert found.same_angles(rotation)
    assert (found.interleaved, found.offset) == (rotation.interleaved, rotation.offset)


def test_a_tensor_that_ignores_the_position_has_no_rotation() -> None:
    heads = random_heads()
    assert match_rotation(dict.fromkeys((0, 1, 17), heads), FREQUENCIES, 1e-4) is None


@pytest.mark.parametrize("frequencies", [FREQUENCIES, {}])
def test_an_unknown_rotation_is_an_error(frequencies: dict[str, Tensor]) -> None:
    learned = {position: random_heads(position) for position in (0, 1, 17)}
    with pytest.raises(LookupError):
        match_rotation(learned, frequencies, 1e-4)


def test_a_rotation_that_explains_only_the_nearest_position_is_no_match() -> None:
    wrong = samples(Rotation(FREQUENCIES["whole"]))
    wrong[301] = samples(Rotation(FREQUENCIES["whole, other base"]))[301]
    with pytest.raises(LookupError):
        match_rotation(wrong, FREQUENCIES, 1e-4)


def samples(rotation: Rotation) -> dict[int, Tensor]:
    heads = random_heads()
    return {position: move(heads, rotation, 0, position) for position in (0, 1, 17, 301)}


def move(x: Tensor, rotation: Rotation, old: int, new: int) -> Tensor:
    """`x` [..., D], all at position `old`, moved to `new`."""
    cos, sin = rotation.cos_sin(torch.tensor([old]), torch.tensor([new]))
    return rotation.apply(x[..., None, :], cos, sin)[..., 0, :]


def random_heads(seed: int = 0) -> Tensor:
    draw = random.Random(seed)
    return torch.tensor([[draw.gauss(0, 1) for _ in range(HEAD_DIM)] for _ in range(HEADS)])
