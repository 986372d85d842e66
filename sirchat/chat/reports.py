"""What a listener is told: the engine's records and the conversation's figures, as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from sirchat.chat.conversation import Tally
from sirchat.chat.events import (
    Event,
    Evicted,
    Notice,
    Recalled,
    Restored,
    Switched,
    TokenRow,
    TurnDone,
)
from sirchat.chat.settings import has_effect
from sirchat.chat.snapshot import (
    Positions,
    Texts,
    finite_exp,
    log_factors_of,
    log_worth_of,
    token_rows,
)
from sirchat.config.profile import Profile
from sirchat.config.values import as_typed
from sirchat.engine.engine import Engine
from sirchat.engine.records import EvictedRows, RestoredRows
from sirchat.models.capabilities import no_attention_reason
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import Anchors

_LIMITS_RECALL = ("policy", "budget", "sinks", "recall", "recall_n")


@dataclass(frozen=True, eq=False)
class Reports:
    """Makes events of what happened in one engine.

    Args:
        engine: what is reported on.
        texts: the text of each token.
        sinks: the setting in force; tokens tell whether they are sinks.
        with_tokens: whether the listener wants the tokens themselves and not only where they stand.
    """

    engine: Engine
    texts: Texts
    sinks: int
    with_tokens: bool

    def tokens(self, positions: Positions) -> tuple[TokenRow, ...]:
        """The tokens at these stream positions, ascending, held or not."""
        log_worth = log_worth_of(log_factors_of(self.engine, positions))
        worth = None if log_worth is None else finite_exp(log_worth)
        return token_rows(self.engine.ledger, positions, self.texts, self.sinks, worth)

    def forgot(self, turn: int, record: EvictedRows) -> Evicted:
        """What left during a turn."""
        return Evicted(turn, *self._place_of(record))

    def moved(self, turn: int, moves: Sequence[EvictedRows | RestoredRows]) -> Iterator[Event]:
        """What left and what came back after a turn."""
        for record in moves:
            if isinstance(record, EvictedRows):
                yield self.forgot(turn, record)
            else:
                yield Restored(turn, *self._place_of(record))

    def recalled(
        self, turn: int, measure: str, scores: tuple[float, ...], released: Positions
    ) -> Recalled:
        """What came back for a turn, with its scores, and what was `released` before."""
        positions = self.engine.recalled_positions
        return Recalled(
            turn=turn,
            measure=measure,
            positions=tuple(positions.tolist()),
            scores=scores,
            released=tuple(released.tolist()),
            resident=self.engine.resident,
            seen=self.engine.ledger.seen,
            tokens=self._wanted(positions),
        )

    def done(self, tally: Tally, text: str) -> TurnDone:
        """A turn that is over."""
        return TurnDone(
            text=text,
            resident=self.engine.resident,
            seen=self.engine.ledger.seen,
            recalled=self.engine.recalled,
            tokens=self._wanted(self.engine.ledger.held_positions),
            **{field.name: getattr(tally, field.name) for field in fields(tally)},
        )

    def switched(self, before: Profile, after: Profile, restored: int) -> Iterator[Event]:
        """What is other than it was; the first change tells what came `restored`."""
        for name in type(before).model_fields:
            old, new = getattr(before, name), getattr(after, name)
            if old != new:
                yield Switched(name, old, new, restored=restored, resident=self.engine.resident)
                restored = 0
                if not has_effect(after, name):
                    options = after.policy_options
                    made = f"{after.policy} with {as_typed(options)}" if options else after.policy
                    yield Notice(f"policy {made} makes no use of {name}")
        if any(getattr(before, name) != getattr(after, name) for name in _LIMITS_RECALL):
            yield from self.clamped(after.recall_n)

    def clamped(self, recall_n: int) -> Iterator[Notice]:
        """That fewer than `recall_n` tokens can come back, where that is so."""
        memory, reserve = self.engine.settings, self.engine.reserve
        if memory.recall is not None and memory.policy.bounded and reserve < recall_n:
            yield Notice(
                f"budget {self.engine.budget} has room for {reserve} recalled tokens, not for "
                f"{recall_n} (recall_n)"
            )

    def untrained(self, anchors: Anchors | None) -> Iterator[Notice]:
        """That the policy counts on anchors and the model knows none, where that is so."""
        if self.engine.settings.policy.compacts_at_anchors and anchors is None:
            yield Notice(
                "this model was not trained to gather text in anchors and will forget nearly "
                "everything; tiny-anchor was, `sirchat train anchor` trains others, and "
                "/policy anchor lazy=true waits"
            )

    def uncounted(self, model: LoadedModel) -> Iterator[Notice]:
        """That the policy looks at attention and the model does not tell, where that is so."""
        if self.engine.settings.counting is not None and not model.exposes_attention:
            yield Notice(
                f"{no_attention_reason(model)}; policy "
                f"{type(self.engine.settings.policy).__name__.lower()} goes without"
            )

    def troubles(self) -> Iterator[Notice]:
        """What went wrong with the archive; the conversation goes on."""
        troubles = self.engine.store.problems
        while troubles:
            yield Notice(troubles.pop(0))

    def _place_of(
        self, record: EvictedRows | RestoredRows
    ) -> tuple[tuple[int, ...], int, int, tuple[TokenRow, ...] | None]:
        """What an event tells of tokens that moved."""
        rows = self._wanted(record.positions)
        return tuple(record.positions.tolist()), record.resident, record.seen, rows

    def _wanted(self, positions: Positions) -> tuple[TokenRow, ...] | None:
        return self.tokens(positions) if self.with_tokens else None
