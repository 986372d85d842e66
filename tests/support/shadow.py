"""A record of all that a model has computed in a chat, kept beside it, to compare the chat with.

`WatchedModel` is a loaded model whose caches carry a `Shadow`. It also checks the budget after each
forward pass, and can fail within one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.engine.reader import Reader
from sirchat.engine.types import NewTokens
from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_value_store import KeyValueStore
from sirchat.memory.key_values import EXACT, KeyValues, Positions
from sirchat.memory.ledger import Flag, State
from sirchat.models.encoder import EncoderOutput
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import PassResult


@dataclass
class Read:
    """What is known of a token: its id and who wrote it; its surprisal, if logits predicted it.

    `behind` is how far its logit was below the largest; 0 if it was the most likely token.
    """

    token_id: int
    turn: int
    round: int
    role: int
    surprisal: float | None
    behind: float = 0.0


@dataclass
class LastPass:
    """A forward pass: its ids, the rotary position of the first one, and what was held before.

    `absolute_positions` is whether rotary positions were those of the stream. `is_plain` is whether
    the same pass over the same rows computes the same products again.
    """

    ids: Sequence[int]
    start: int
    absolute_positions: bool
    held: Positions
    is_plain: bool


@dataclass
class Shadow:
    """All that was computed for one cache, by stream position."""

    # Where each row was written, and its keys and values as first written: [2 L, H, D].
    rows: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    tokens: dict[int, Read] = field(default_factory=dict)
    # The newest passes, with their logits.
    passes: deque[tuple[Tensor, LastPass]] = field(default_factory=partial(deque, maxlen=100))

    def copied(self) -> Shadow:
        return Shadow(dict(self.rows), dict(self.tokens), self.passes.copy())

    def taken(self, positions: Positions) -> tuple[list[int], Tensor]:
        """Where the rows at `positions` [n] were written, and the rows [2 L, H, n, D]."""
        found = [self.rows[at] for at in positions.tolist()]
        return [at for at, _ in found], torch.stack([rows for _, rows in found], 2)


def shadow_of(chat: Session) -> Shadow:
    shadow: Shadow = chat.engine.cache.shadow  # type: ignore[attr-defined]
    return shadow


def follow(chat: Session, shadow: Shadow) -> None:
    """Let a chat whose keys and values are another's go on with a copy of its shadow."""
    chat.engine.cache.shadow = shadow.copied()  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class WatchedModel(LoadedModel):
    """A model that notes what it computes; `chats` are those whose budget is checked."""

    chats: list[Session] = field(default_factory=list)
    # Empty, or the number of passes until one is interrupted in its middle.
    fail_in: list[int] = field(default_factory=list)

    @staticmethod
    def of(model: LoadedModel) -> WatchedModel:
        """The same model; what it has found out about itself is not found out again."""
        watched = WatchedModel(**{one.name: getattr(model, one.name) for one in fields(model)})
        watched.__dict__.update(
            {name: one for name, one in model.__dict__.items() if name not in watched.__dict__}
        )
        return watched

    def new_cache(self, capacity: int) -> BoundedCache:
        cache = super().new_cache(capacity)
        cache.shadow = Shadow()  # type: ignore[attr-defined]
        committed = cache.commit

        def commit(count: int, positions: int | Positions | None = None) -> None:
            committed(count, positions)
            start, end = cache.length - count, cache.length
            _note_rows(cache, np.arange(start, end), cache._stream[start:])

        cache.commit = commit  # type: ignore[method-assign]
        return cache

    def forward(self, ids: Sequence[int], cache: BoundedCache, **options: Any) -> Tensor:
        with self._checked(ids, cache, options.get("observer") is not None):
            return super().forward(ids, cache, **options)

    def read(self, ids: Sequence[int], cache: BoundedCache, **options: Any) -> PassResult:
        visible, observer = options.get("visible"), options.get("observer")
        if len(ids) == 1 or self._step_for(ids, cache, visible, observer) is not None:
            return super().read(ids, cache, **options)  # that calls `forward`
        with self._checked(ids, cache, observer is not None):
            return super().read(ids, cache, **options)

    @contextmanager
    def _checked(
        self, ids: Sequence[int], cache: BoundedCache, is_observed: bool
    ) -> Iterator[None]:
        chat = next((one for one in self.chats if one.engine.cache is cache), None)
        cache.is_observed = is_observed  # type: ignore[attr-defined]
        if chat is not None and self.fail_in:
            self.fail_in[0] -= 1
            if not self.fail_in[0]:
                self.fail_in.clear()
                # A compiled pass can't be interrupted in its middle.
                if len(ids) == 1 or self._step_for(ids, cache, None, None) is not None:
                    raise KeyboardInterrupt
                with _failing(cache):
                    yield
                return
        yield
        if chat is not None:
            rows = cache.length + len(ids)
            most = chat.engine.choice.divide_budget().hard_bound
            assert rows <= most, f"{rows} rows of {most}"


@contextmanager
def _failing(cache: BoundedCache) -> Iterator[None]:
    """Context manager: Ctrl-C comes when the middle layer writes its row."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    layer = cache.row_layers[len(cache.row_layers) // 2]
    with patch.object(layer, "update", stop):
        yield


def _note_rows(cache: BoundedCache, rows: Positions, stream: Positions) -> None:
    """Note the rows numbered `rows` [k], just written, which have the positions `stream` [k]."""
    shadow: Shadow = cache.shadow  # type: ignore[attr-defined]
    first = cache.first_written_rows(torch.from_numpy(rows), rows)
    written = torch.stack(first.tensors)
    assert torch.equal(torch.stack(cache.as_read(torch.from_numpy(rows))), written)
    for number, (at, place) in enumerate(
        zip(stream[: len(rows)].tolist(), first.written_at.tolist(), strict=True)
    ):
        shadow.rows[at] = place, written[:, :, number].clone()


@contextmanager
def watching() -> Iterator[None]:
    """Context manager: ids, surprisals and logits are noted, too, and rows that are read again."""
    recorded = Reader._record

    def record(
        self: Reader, chunk: NewTokens, found: Any, encoder_output: EncoderOutput
    ) -> list[float]:
        shadow: Shadow = self.cache.shadow  # type: ignore[attr-defined]
        before, seen, ledger = self.logits, self.ledger.seen, self.ledger
        held, start = ledger.held_positions.copy(), self.cache.length
        start = seen if self.cache.absolute_positions else start
        surprisals = recorded(self, chunk, found, encoder_output)
        for at, (token_id, role) in enumerate(zip(chunk.ids, chunk.roles, strict=True)):
            one = Read(token_id, chunk.turn.turn, chunk.turn.round, int(role), None)
            if not at and before is not None:
                one.surprisal = -float(torch.log_softmax(before.double(), -1)[token_id])
                one.behind = float(before.max() - before[token_id])
            shadow.tokens[seen + at] = one
        ahead = self._precomputed is not None and len(self._precomputed.ids) > 1
        observed: bool = self.cache.is_observed  # type: ignore[attr-defined]
        is_plain = not (ahead or observed)
        last = LastPass(chunk.ids, start, self.cache.absolute_positions, held, is_plain)
        shadow.passes.append((found.logits, last))
        return surprisals

    added = KeyValueStore.add_reread

    def add_reread(self: KeyValueStore, rows: KeyValues) -> None:
        shadow: Shadow = self.cache.shadow  # type: ignore[attr-defined]
        assert len(self.rereadable(rows.positions)) == len(rows.positions), (
            "read again, but not lost"
        )
        for number, at in enumerate(rows.positions.tolist()):
            written = torch.stack([one[:, number] for one in rows.tensors])
            shadow.rows[at] = int(rows.written_at[number]), written
        added(self, rows)

    with (
        patch.object(Reader, "_record", record),
        patch.object(KeyValueStore, "add_reread", add_reread),
    ):
        yield


def check(chat: Session, theta: float) -> None:
    """Compare what a chat holds, and what its ledger says, with its shadow.

    `theta` is the base of the model's rotary frequencies.
    """
    engine, shadow = chat.engine, shadow_of(chat)
    cache, ledger, archive = engine.cache, engine.ledger, engine.store.archive
    held, seen = ledger.held_positions.copy(), ledger.seen
    assert (np.diff(held) > 0).all(), "held rows are not ascending"
    assert not len(held) or held[-1] < seen, "a row is held that was never read"
    assert cache.length == len(held), "cache and ledger differ"
    assert cache.length <= chat.engine.choice.divide_budget().hard_bound, "over the budget"
    state, flags = ledger.column("state"), ledger.column("flags")
    assert np.flatnonzero(state == State.HELD).tolist() == held.tolist(), "state of held rows"
    archived = np.flatnonzero(state == State.ARCHIVED)
    restorable = (state != State.NOT_STORED) & (flags & Flag.EXCLUDED == 0)
    assert engine.store.reachable().tolist() == np.flatnonzero(restorable).tolist(), "reachable"
    assert archive.has(archived).all(), "an archived row is not in the archive"
    assert not (flags[held] & Flag.ERASED).any(), "an erased row is held"
    pinned = np.setdiff1d(ledger.pinned_positions, held)
    assert (
        not chat.engine.settings.policy.honours_pins
        or not archive.has(pinned).any()
        or not chat.engine.settings.policy.bounded
    ), "a pinned row is only in the archive"
    stored = archive.positions
    assert not len(stored) or stored[-1] < seen, "the archive has a row that was undone"
    if len(held):
        rows = cache.first_written_rows(torch.arange(len(held)), held)
        _check_rows(shadow, rows, archive.bits(held), "held")
        _check_keys(chat, rows, theta)
    if len(stored):
        _check_rows(shadow, archive.fetch(stored), archive.bits(stored), "archived")
    _check_ledger(chat, shadow)


def _check_rows(shadow: Shadow, rows: KeyValues, bits: NDArray[np.uint8], what: str) -> None:
    """Compare rows with what was written; those of an archive over its limit are rounded."""
    places, wanted = shadow.taken(rows.positions)
    assert rows.written_at.tolist() == places, f"{what} rows: written elsewhere"
    found = torch.stack(rows.tensors)
    same_size = {2: torch.int16, 4: torch.int32}[found.element_size()]  # also of NaN
    exact = torch.from_numpy(bits == EXACT)
    pair = (one[:, :, exact].view(same_size) for one in (found, wanted))
    assert torch.equal(*pair), f"{what} rows have drifted"
    for tier, share in ((8, 0.01), (4, 0.15)):  # half a step of up to 1.5 times the smallest
        some = torch.from_numpy(bits == tier)
        given, rounded = (one[:, :, some].double() for one in (wanted, found))
        largest = given.abs().amax(-1) + wanted.double().abs().mean(2, keepdim=True).amax(-1)
        error = (rounded - given).abs().amax(-1) / largest  # [2 * layers, H, n]
        assert (error <= share).all(), f"{what} rows in {tier} bits: {error.max()}"


def _check_keys(chat: Session, rows: KeyValues, theta: float) -> None:
    """Each key is where its slot is: rotated anew, in float64, from where it was written."""
    cache, held = chat.engine.cache, rows.positions
    new = held if cache.absolute_positions else np.arange(len(held))
    for layer in range(len(cache.row_layers)):
        keys, given = rows.tensors[2 * layer : 2 * layer + 2]
        wanted = rotated(keys, rows.written_at, new, theta)
        found, values = cache.layer_keys(layer)[0], cache.layer_values(layer)[0]
        # Angles of a whole turn are rounded to float32, by half a unit of 4 eps.
        most = 4 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(
            found.double(), wanted, rtol=most, atol=most, msg="a key has drifted"
        )
        assert torch.equal(values, given), "a value differs"


def rotated(keys: Tensor, old: Positions, new: Positions, theta: float) -> Tensor:
    """Keys [H, n, D] rotated from positions `old` to `new` [n], in float64.

    As in Llama, angles are rounded to float32: position 200 is turned by up to 8e-6 too much, so
    keys that were rotated by exact angles would not be those that the model computes.
    """
    half = keys.shape[-1] // 2
    frequency = 1 / theta ** (torch.arange(half).float() / half)
    first, last = (torch.from_numpy(np.asarray(at)).float()[:, None] for at in (old, new))
    angle = (last * frequency).double() - (first * frequency).double()
    a, b = keys.double()[..., :half], keys.double()[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _check_ledger(chat: Session, shadow: Shadow) -> None:
    ledger = chat.ledger
    columns = {
        name: ledger.column(name).tolist()
        for name in ("token_id", "turn", "round", "role", "flags", "surprisal")
    }
    for at in range(ledger.seen):
        token = shadow.tokens[at]
        found = tuple(columns[name][at] for name in ("turn", "round", "role"))
        assert found == (token.turn, token.round, token.role), f"row {at}: {found}"
        if columns["flags"][at] & Flag.ERASED:
            assert columns["token_id"][at] == columns["surprisal"][at] == 0, "not erased"
            continue
        assert columns["token_id"][at] == token.token_id, f"row {at} has another id"
        if token.surprisal is not None:
            gap = abs(columns["surprisal"][at] - token.surprisal)
            assert gap < 1e-3, f"row {at}: surprisal is {gap} off"


def logits_gap(chat: Session, model: LoadedModel) -> tuple[float, bool] | None:
    """How far the carried logits are from those of the same pass over a new cache.

    Returns the largest difference, and `LastPass.is_plain`. None if nothing can be compared.
    """
    engine, shadow = chat.engine, shadow_of(chat)
    last = next((one for logits, one in shadow.passes if logits is engine.logits), None)
    if last is None or engine.logits is None:
        return None
    cache = LoadedModel.new_cache(model, len(last.held) + len(last.ids))
    cache.absolute_positions = last.absolute_positions
    if len(last.held):
        places, rows = shadow.taken(last.held)
        cache.replace(KeyValues(last.held.copy(), np.asarray(places), list(rows)))
    positions = range(last.start, last.start + len(last.ids))
    again = LoadedModel.read(model, last.ids, cache, positions=positions)
    return float((again.logits - engine.logits).abs().max()), last.is_plain
