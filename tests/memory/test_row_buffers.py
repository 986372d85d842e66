"""Keys and values of all layers in one tensor: as exact as buffers apart, and moved at once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attacking import MANY
from held_rows import append_rows
from simulated_devices import DEVICES, counted, simulated_devices
from sirchat.memory.cache import BoundedCache, LayerRotation
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.key_values import KeyValues, Positions, Transfers, to_device
from sirchat.memory.ledger import Ledger, Placement
from sirchat.memory.rope import Rotation

HEADS, DIMS, CAPACITY = 2, 8, 24
TURN = Rotation(9 ** -(torch.arange(0, DIMS, 2) / DIMS))
NEAR, FAR = LayerRotation(TURN), LayerRotation(Rotation(TURN.inv_freq / 7))
LAYERS = [NEAR, FAR, NEAR]  # as in Gemma, not all have the same frequencies
OTHER = LayerRotation(None)  # a layer that is not rotated, so that all have buffers of their own

steps = st.lists(
    st.tuples(
        st.sampled_from(["read", "keep", "restore", "reserve", "positions"]),
        st.integers(0, 2**32),
    ),
    max_size=9,
)


def new_cache(layers: list[LayerRotation], *devices: torch.device) -> BoundedCache:
    """A cache with the first layers on these devices, one on each, and the others on the last."""
    others = [devices[-1]] * (len(layers) - len(devices))
    return BoundedCache(layers, CAPACITY, torch.bfloat16, [*devices, *others])


def random_rows(count: int, seed: int, heads: int = HEADS, dims: int = DIMS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, heads, count, dims), generator=generator).bfloat16()


def write(cache: BoundedCache, count: int, seed: int, at: Positions | None = None) -> None:
    for number, layer in enumerate(cache.row_layers):
        rows = (random_rows(count, seed + 2 * number + which) for which in (0, 1))
        layer.update(*to_device(list(rows), layer.tensors[0].device or torch.device("cpu")))
    cache.commit(count, at)


@dataclass
class Held:
    """A cache, the stream positions of its rows, and first-written rows of an earlier step."""

    cache: BoundedCache
    positions: Positions
    seen: int = 0
    stored: KeyValues | None = None

    def do(self, step: str, seed: int) -> None:
        """Carry out a step, if it is possible."""
        cache, draw, held = self.cache, Random(seed), len(self.positions)
        if step == "read":
            new = np.arange(self.seen, self.seen + draw.randint(1, 5))
            cache.grow_to(held + len(new))
            write(cache, len(new), seed, new)
            self.seen, self.positions = self.seen + len(new), np.append(self.positions, new)
        elif step == "reserve":
            cache.grow_to(cache.capacity + draw.randint(1, 9))
        elif step == "keep":
            left, is_kept = (
                list[KeyValues](),
                np.array([draw.random() < 0.7 for _ in range(held)], bool),
            )
            kept, leaving = (torch.from_numpy(np.flatnonzero(one)) for one in (is_kept, ~is_kept))
            expected = cache.first_written_rows(leaving, self.positions[~is_kept])
            cache.keep(kept, leaving, left.append)
            assert same(left[0], expected)
            self.stored = expected if len(expected) else self.stored
            self.positions = self.positions[is_kept]
        elif self.stored is not None and step == "restore":
            cache.replace(self.stored)
            self.positions = self.stored.positions
        elif step == "positions":
            cache.set_positions(absolute_positions=draw.random() < 0.5)


def same(one: KeyValues, other: KeyValues) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=False)  # the last layer may be `OTHER`
    return (
        one.positions.tolist() == other.positions.tolist()
        and one.written_at.tolist() == other.written_at.tolist()
        and all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    )


def all_read(cache: BoundedCache) -> list[Tensor]:
    layers = range(len(cache.layers))
    return [view(at) for at in layers for view in (cache.layer_keys, cache.layer_values)]


@given(steps)
@settings(max_examples=MANY or 2, deadline=None)
def test_rows_in_one_tensor_have_the_bits_of_those_in_buffers_apart(
    plan: list[tuple[str, int]],
) -> None:
    with simulated_devices(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sirchat.memory.cache._MAX_ROTATED_BYTES", 1_000)  # all layers of few rows
        cpu = torch.device("cpu")
        caches = [new_cache([*LAYERS, OTHER], cpu)]
        caches += [new_cache(LAYERS, *one) for one in ([cpu], [DEVICES[0]])]
        caches += [new_cache(LAYERS, *one) for one in ([cpu, DEVICES[0]], [*DEVICES, cpu])]
        apart, *pooled = every = [Held(one, np.zeros(0, np.int64)) for one in caches]
        for step, seed in [("read", 1), ("read", 2), ("keep", 3), *plan]:
            for one in every:
                one.do(step, seed)
            rows, positions = torch.arange(len(apart.positions)), apart.positions
            expected, *found = (one.cache.first_written_rows(rows, positions) for one in every)
            assert all(same(one, expected) for one in found)
            assert apart.cache.pool is None
            for cache in (one.cache for one in pooled):
                pools = [rows.pool for rows in cache.buffers if rows.pool is not None]
                assert sum(map(len, pools)) == 3
                assert {pool.shape[1:] for pool in pools} == {(3, HEADS, cache.capacity, DIMS)}
                assert cache.pool is (pools[0] if len(pools) == 1 else None)
                views = zip(all_read(cache), all_read(apart.cache), strict=False)
                assert all(torch.equal(one.cpu(), other) for one, other in views)


@pytest.mark.parametrize(
    ("layers", "shapes"),
    [
        ([NEAR, NEAR], [(2, 8, 8), (1, 8, 8)]),  # the second layer has fewer heads
        ([NEAR, NEAR], [(2, 8, 8), (2, 8, 4)]),  # its values are shorter
        ([NEAR, NEAR], [(2, 8, 4), (2, 8, 4)]),  # as in all layers
        ([LayerRotation(None, TURN)] * 2, [(2, 8, 8)] * 2),  # only values are rotated
        ([LayerRotation(None)] * 2, [(2, 8, 8)] * 2),
        ([NEAR, LayerRotation(Rotation(torch.ones(2)))], [(2, 8, 8)] * 2),  # a part of each key
        ([NEAR, LayerRotation(Rotation(TURN.inv_freq, interleaved=True))], [(2, 8, 8)] * 2),
    ],
)
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_layers_that_differ_have_buffers_apart(
    layers: list[LayerRotation], shapes: list[tuple[int, int, int]], how: str
) -> None:
    cache, rows = BoundedCache(layers, CAPACITY), list[Tensor]()
    for heads, *dims in shapes:
        rows += [random_rows(6, len(rows) + at, heads, dims[at]) for at in (0, 1)]
    if how == "written":
        for number, layer in enumerate(cache.layers):
            layer.update(*rows[2 * number : 2 * number + 2])
        cache.commit(6)
    else:
        cache.replace(KeyValues(np.arange(6), np.arange(6), [one[0] for one in rows]))
    assert cache.pool is None
    for one, tensor in zip(rows, cache.tensors, strict=True):
        assert tensor.buffer is not None
        size = one.nbytes // 6 * CAPACITY * (1 if tensor.rotation is None else 2)
        assert size == tensor.buffer.nbytes == tensor.buffer.untyped_storage().nbytes()
    kept = torch.tensor([0, 2, 5])
    cache.keep(kept)
    found = cache.first_written_rows(torch.arange(3), np.arange(3))
    assert all(map(torch.equal, found.tensors, [one[0, :, kept] for one in rows]))
    for number, tensor in enumerate(cache.tensors):
        view = (cache.layer_keys, cache.layer_values)[number % 2](number // 2)
        expected = rows[number][:, :, kept]
        if tensor.rotation is not None:
            turn = tensor.rotation.cos_sin(kept, torch.arange(3))
            expected = tensor.rotation.apply(expected, *turn).bfloat16()
        assert torch.equal(view, expected)


@pytest.mark.parametrize("layers", [LAYERS, [*LAYERS, OTHER]])
def test_what_moves_on_a_gpu_is_copied_to_it_and_from_it_at_once(
    layers: list[LayerRotation],
) -> None:
    with simulated_devices(), torch.inference_mode():
        cache, ledger = new_cache(layers, DEVICES[0]), Ledger()
        store = KeyValueStore(cache, ledger, limit=2**20)
        write(cache, 20, seed=0)
        append_rows(ledger, [1.0] * 20)
        checkpoint = store.checkpoint()
        with counted() as eviction:
            store.place(Placement(np.array([0, 1, 2, *range(9, 20)])))
        assert eviction == {"upload": 1, "download": 1}
        with counted() as again:  # the rows are archived already
            store.undo(checkpoint)
            again.clear()
            store.place(Placement(np.array([0, 1, 2, *range(9, 20)])))
        assert again == {"upload": 1}
        with counted() as recall:
            store.place(Placement(np.array([0, 1, 4, 6, *range(9, 20)])))
        saved = cache.first_written_rows(torch.arange(15), ledger.held_positions.copy()).to("cpu")
        with counted() as resume:
            cache.replace(saved)
        if layers is LAYERS:
            # indices of the evicted and of the held rows, the restored ones, what rotates them
            assert recall == {"upload": 4, "download": 1}
            assert resume == {"upload": 1}


def test_policies_rank_held_and_evicted_rows_of_layers_on_two_devices() -> None:
    with simulated_devices():
        found = list[Tensor]()
        for places in ([torch.device("cpu")], [torch.device("cpu"), DEVICES[0]]):
            cache, ledger = new_cache(LAYERS, *places), Ledger()
            store = KeyValueStore(cache, ledger, limit=2**20)
            write(cache, 12, seed=0)
            append_rows(ledger, [1.0] * 12)
            store.place(Placement(np.array([0, 1, 2, 8, 9, 11])))
            found += store.statistics(np.arange(12), ["key_norm", "key_similarity"]).values()
            found += store.as_read(np.arange(12))[0]
        half = len(found) // 2
        assert all(map(torch.equal, found[:half], found[half:]))


def test_rows_for_the_archive_leave_a_gpu_as_one_tensor_however_many_layers_there_are() -> None:
    with simulated_devices(), torch.inference_mode():
        for layers in ([NEAR] * 2, [NEAR] * 5):
            cache, left = new_cache(layers, DEVICES[0]), list[KeyValues]()
            write(cache, 20, seed=0)
            cache.keep(torch.arange(3, 20), torch.arange(3), left.append)
            (rows,), transfers = left, Transfers()
            with counted() as counts, TorchCalls() as calls:
                found = transfers.to_host(rows.tensors, rows.block).take()
            assert counts == {"download": 1}
            assert len(calls.made) <= 3
            assert all(map(torch.equal, found, transfers.to_host(rows.tensors).take()))
            assert len(found) == 2 * len(layers)


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operations within its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("most", "copies"), [(2**20, 1), (50, 7)])
def test_tensors_of_any_types_are_copied_at_once_unless_large(
    most: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.memory.key_values._MAX_JOINED_BYTES", most)
    tensors = [
        random_rows(3, 0)[0],
        torch.arange(3)[::2],
        torch.ones(0),
        torch.randn(5).expand(2, 5),
        torch.tensor([True, False, True]),
        torch.tensor(7.5, dtype=torch.float64),
        torch.from_numpy(np.broadcast_to(np.int64(4), 1).copy()).as_strided((1,), (0,)),
    ]
    with simulated_devices():
        there = tensors[0].to(DEVICES[0])
        with counted() as counts:
            *moved, again, stayed = to_device([*tensors, tensors[0], there], DEVICES[0])
        assert counts == {"upload": copies}
        assert again is moved[0]
        assert stayed is there
        with counted() as counts:
            back = Transfers().to_host([*moved, tensors[1]]).take()
        assert counts == {"download": copies}
        assert back[-1] is tensors[1]
        for found, expected in zip(back, tensors, strict=False):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@pytest.mark.gpu
def test_an_eviction_on_a_gpu_waits_for_nothing() -> None:
    gpu = torch.device("cuda", 0)
    caches = [new_cache(LAYERS, device) for device in (torch.device("cpu"), gpu)]
    stores = [KeyValueStore(cache, Ledger(), limit=2**20) for cache in caches]
    for at in range(9):
        for store in stores:
            write(store.cache, 8, at)
            append_rows(store.ledger, [1.0] * 8)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                held = store.ledger.held_count
                stays = store.ledger.held_positions[[0, *range(max(1, held - 9), held)]]
                store.place(Placement(stays))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        expected, found = (store.copy_key_values() for store in stores)
        assert found is not None
        assert expected is not None
        assert same(found, expected)
        views = [torch.stack([cache.layer_keys(at).cpu() for at in range(3)]) for cache in caches]
        torch.testing.assert_close(*views)
