"""The bounded cache: appending and compacting in place, without drift of the keys."""

from __future__ import annotations

import cmath
import random
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.memory.rope import Rotation, match_rotation

HEADS, HEAD_DIM = 2, 8
WHOLE = Rotation(1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
LAST = Rotation(1e2 ** -(torch.arange(0, 4, 2) / 4), interleaved=True, offset=4)
LAYERS = [LayerRotation(WHOLE), LayerRotation(None), LayerRotation(None, LAST)]
POOLED = [LayerRotation(WHOLE), LayerRotation(Rotation(WHOLE.inv_freq / 3))]  # in one tensor

steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 20)),
        st.tuples(st.just("lose"), st.integers(1, 9)),
        st.tuples(st.just("keep"), st.integers(0, 2**32)),
        st.tuples(st.just("reserve"), st.integers(1, 80)),
    ),
    max_size=12,
)


@dataclass
class Row:
    """A held row: for each layer its key and value as written, and the slot it was written at."""

    tensors: list[tuple[Tensor, Tensor]]
    written_at: int


@pytest.mark.parametrize("layers", [LAYERS, POOLED])
@given(plan=steps)
def test_slot_i_holds_row_i_as_first_written_and_rotated_once(
    plan: list[tuple[str, Any]], layers: list[LayerRotation]
) -> None:
    cache, rows = BoundedCache(layers, capacity=40), list[Row]()
    for step, what in plan:
        if step == "reserve":
            cache.grow_to(what)
        elif step == "keep":
            draw = Random(what)
            kept = sorted(draw.sample(range(len(rows)), draw.randint(0, len(rows))))
            cache.keep(torch.tensor(kept, dtype=torch.int64))
            rows = [rows[i] for i in kept]
        elif len(rows) + what <= cache.capacity:
            written = write(cache, what)
            if step == "read":  # what is not committed is lost
                cache.commit(what)
                rows += [Row(part, len(rows) + i) for i, part in enumerate(written)]
        check(cache, rows, layers)


def test_appending_never_copies_what_is_held() -> None:
    cache = BoundedCache(LAYERS, capacity=16)
    write(cache, 4)
    cache.commit(4)
    before = cache.layer_keys(0).data_ptr(), cache.nbytes
    write(cache, 12)
    cache.commit(12)
    cache.keep(torch.arange(0, 16, 2))
    assert (cache.layer_keys(0).data_ptr(), cache.nbytes) == before


@pytest.mark.parametrize("extra", [1, 3])
def test_writing_past_the_capacity_or_reading_before_writing_is_an_error(extra: int) -> None:
    cache = BoundedCache(LAYERS, capacity=4)
    with pytest.raises(LookupError):
        cache.layer_keys(0)
    write(cache, 4)
    cache.commit(4)
    with pytest.raises((RuntimeError, ValueError)):
        write(cache, extra)
    assert cache.length == 4


def test_keys_do_not_drift_in_bfloat16() -> None:
    """400 times a row is read and the oldest leaves: the rows between move 400 times."""
    held, times = 430, 400
    cache = BoundedCache([LayerRotation(WHOLE)], capacity=held)
    first = random_rows(held - 1)[0].bfloat16()  # [1, H, n, D]
    cache.layers[0].update(first, first)
    cache.commit(held - 1)
    naive = first
    cos, sin = WHOLE.cos_sin(torch.tensor([1]), torch.tensor([0]))
    for _ in range(times):
        row = random_rows(1)[0].bfloat16()
        cache.layers[0].update(row, row)
        cache.commit(1)
        cache.keep(torch.arange(1, held))
        naive = WHOLE.apply(naive, cos, sin).bfloat16()
    survivors = first[:, :, times:].float()
    old = torch.arange(times, held - 1)
    exact = WHOLE.apply(survivors, *WHOLE.cos_sin(old, old - times))
    now = cache.layer_keys(0)[:, :, : len(old)]
    assert relative_error(now, exact) < 0.005
    assert relative_error(naive[:, :, times:], exact) > 0.1


def write(cache: BoundedCache, count: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Write random rows to every layer; returns for each row its layers' keys and values."""
    layers = [random_rows(count) for _ in cache.layers]
    for layer, (keys, values) in enumerate(layers):
        cache.layers[layer].update(keys, values)
    return [[(k[:, :, [i]], v[:, :, [i]]) for k, v in layers] for i in range(count)]


def random_rows(count: int) -> tuple[Tensor, Tensor]:
    shape = (1, HEADS, count, HEAD_DIM)
    return torch.randn(shape), torch.randn(shape)


def check(cache: BoundedCache, rows: list[Row], layers: list[LayerRotation]) -> None:
    assert cache.length == len(rows)
    written, slots = torch.tensor([row.written_at for row in rows]), torch.arange(len(rows))
    for layer, rotations in enumerate(layers if rows else ()):
        for i, rotation in enumerate((rotations.key, rotations.value)):
            expected = torch.cat([row.tensors[layer][i] for row in rows], 2)
            if rotation is not None:
                expected = rotation.apply(expected, *rotation.cos_sin(written, slots))
            view = (cache.layer_keys, cache.layer_values)[i](layer)
            torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-5)


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.float() - exact).norm() / exact.norm())


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


def test_a_moved_bfloat16_row_is_computed_in_float32() -> None:
    rotation, heads = Rotation(FREQUENCIES["whole"]), random_heads().bfloat16()
    moved = move(heads, rotation, 700, 3)
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, move(heads.float(), rotation, 700, 3), rtol=0, atol=0)


@given(rotations())
def test_the_rotation_is_found_among_all_candidates(rotation: Rotation) -> None:
    found = match_rotation(samples(rotation), FREQUENCIES, 1e-4)
    assert found is not None
    assert found.has_same_angles(rotation)
    assert (found.interleaved, found.offset) == (rotation.interleaved, rotation.offset)


def test_a_tensor_that_ignores_the_position_has_no_rotation() -> None:
    heads = random_heads()
    assert match_rotation(dict.fromkeys((0, 1, 17), heads), FREQUENCIES, 1e-4) is None


def test_an_unknown_rotation_is_an_error() -> None:
    learned = {position: random_heads(position) for position in (0, 1, 17)}
    near_alone = samples(Rotation(FREQUENCIES["whole"]))  # only the nearest positions fit it
    near_alone[301] = samples(Rotation(FREQUENCIES["whole, other base"]))[301]
    for moved, frequencies in ((learned, FREQUENCIES), (learned, {}), (near_alone, FREQUENCIES)):
        with pytest.raises(LookupError):
            match_rotation(moved, frequencies, 1e-4)


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
