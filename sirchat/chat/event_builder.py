"""Makes the events that a session yields, from the engine's records and the token counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from sirchat.chat.events import (
    Ended,
    Event,
    Evicted,
    Notice,
    Recalled,
    Restored,
    Started,
    Switched,
    TokenRow,
    TurnDone,
)
from sirchat.chat.settings import has_effect
from sirchat.chat.state import ConversationState, TurnStats
from sirchat.chat.token_rows import is_measured, policy_scores, token_rows
from sirchat.config.profile import Profile
from sirchat.config.values import format_setting
from sirchat.engine.engine import Engine
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import EvictedRows, RestoredRows
from sirchat.models.model import LoadedModel, no_attention_reason
from sirchat.recall.recall import Recall, RecallResult
from sirchat.text.detokenizer import Texts
from sirchat.text.template import Template
from sirchat.version import __version__

_MAX_COMPRESSION = 8  # from float32 to 4 bits, the least that a token takes in an archive
_RECALL_LIMITS = {"policy", "budget", "sinks", "recall", "recall_n"}


@dataclass(frozen=True, eq=False)
class EventBuilder:
    """Makes the events that need the engine's counts or the text of tokens.

    Events of a reply's text are made in reply.py, events of progress in turn.py.
    """

    engine: Engine
    texts: Texts
    with_tokens: bool  # whether events have a record of each token, besides its stream position

    def tokens(self, positions: Positions) -> tuple[TokenRow, ...]:
        """A record of each token, held or evicted, at these stream positions, ascending."""
        scores = policy_scores(self.engine, positions)
        return token_rows(self.engine, positions, self.texts, scores)

    def started(self, model: LoadedModel, profile: Profile, template: Template) -> list[Event]:
        """The event `Started`, then a notice for each setting that does not suit this model."""
        started = Started(
            version=__version__,
            model=model.name,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            context_length=model.context_length,
            profile=profile.model_dump(),
        )
        texts = list(getattr(model.tokenizer, "notices", ()))
        if model.window is not None and self.engine.budget > model.window:
            texts.append(
                f"some layers of this model attend only to the newest {model.window} held tokens, "
                f"not to all {self.engine.budget} that the budget allows"
            )
        if model.has_state:
            texts.append(
                "some layers of this model keep no tokens but a state, which has read every token: "
                "a token that is evicted still has left its trace there"
            )
        if not model.tokenizer.chat_template:
            texts.append(
                "this model has no chat template: it reads lines that begin with USER: and "
                "ASSISTANT:, and its reply ends where it writes the next USER:"
            )
        texts += self._mismatches(model, profile, {*_RECALL_LIMITS, "reasoning"}, template)
        return [started, *map(Notice, texts)]

    def evicted(self, turn: int, record: EvictedRows) -> Evicted:
        """The event for tokens that were evicted during the turn with index `turn`."""
        return Evicted(turn, **self._counts(record))

    def moved(self, turn: int, records: Sequence[EvictedRows | RestoredRows]) -> list[Event]:
        """An event for each record of evicted or restored tokens; `turn` is the last turn."""
        return [
            self.evicted(turn, record)
            if isinstance(record, EvictedRows)
            else Restored(turn, **self._counts(record))
            for record in records
        ]

    def recalled(self, turn: int, recollection: RecallResult, recall: Recall) -> list[Event]:
        """The events for what recall did for turn `turn`."""
        events: list[Event] = []
        positions, settings = recollection.positions, self.engine.settings.recall
        if recollection.problem:
            why = f"no token can be restored: {recollection.problem}"
            events.append(Notice(f"{why}; choose another retriever with /recall"))
        if settings is not None and (len(positions) or len(recollection.released)):
            recalled = Recalled(
                turn=turn,
                retriever=settings.retriever,
                positions=tuple(positions.tolist()),
                scores=tuple(recall.scores.values()),
                released=tuple(recollection.released.tolist()),
                turns=recall.turns,
                focused=recollection.focused,
                seconds=recollection.seconds,
                resident=self.engine.resident,
                seen=self.engine.ledger.seen,
                tokens=self._tokens(positions),
            )
            events.append(recalled)
        return events

    def done(self, stats: TurnStats, text: str, thinking: str, recalled: int) -> TurnDone:
        """The event for a finished turn, read or answered with `recalled` tokens of recall."""
        return TurnDone(
            text=text,
            thinking=thinking,
            resident=self.engine.resident,
            seen=self.engine.ledger.seen,
            recalled=recalled,
            tokens=self._tokens(self.engine.ledger.held_positions),
            **{field.name: getattr(stats, field.name) for field in fields(stats)},
        )

    def ended(self, state: ConversationState) -> Ended:
        """The event that ends a session, with the totals of the conversation."""
        return Ended(
            turns=len(state.turns),
            seen=self.engine.ledger.seen,
            resident=self.engine.resident,
            tokens_out=state.totals.tokens_out,
            seconds_prefill=state.totals.seconds_prefill,
            seconds_decode=state.totals.seconds_decode,
        )

    def switched(
        self, model: LoadedModel, before: Profile, after: Profile, restored: int, template: Template
    ) -> list[Event]:
        """An event for each changed setting, and notices of those that do not suit model or policy.

        The first event has `restored`, the number of archived tokens that the change restored.
        """
        events: list[Event] = []
        changed = [
            name
            for name in type(before).model_fields
            if getattr(before, name) != getattr(after, name)
        ]
        for name in changed:
            old, new, resident = getattr(before, name), getattr(after, name), self.engine.resident
            events.append(Switched(name, old, new, restored=restored, resident=resident))
            restored = 0
            if not has_effect(after, name):
                policy = after.policy
                if after.policy_options:
                    policy += f" with {format_setting(after.policy_options)}"
                events.append(Notice(f"{name} has no effect under policy {policy}"))
        return [*events, *map(Notice, self._mismatches(model, after, changed, template))]

    def take_problems(self) -> list[Notice]:
        """A notice for each problem of the archive since the last call; the chat continues."""
        return [Notice(text) for text in self.engine.store.take_problems()]

    def _mismatches(
        self, model: LoadedModel, profile: Profile, changed: Collection[str], template: Template
    ) -> Iterator[str]:
        """Notices of the `changed` settings that do not suit each other or this model."""
        settings, recall_n = self.engine.settings, profile.recall_n
        policy, is_limited = settings.policy, not _RECALL_LIMITS.isdisjoint(changed)
        if is_limited and settings.recall is not None and policy.bounded:
            room = self.engine.evictor.recall_room(0)
            if not isinstance(recall_n, str) and room < recall_n:
                yield (
                    f"budget {self.engine.budget} leaves room to restore only {room} tokens, "
                    f"not recall_n = {recall_n}; raise the budget or lower recall_n"
                )
        if "policy" in changed and policy.compacts_at_anchors and model.anchors is None:
            yield (
                "this model was not trained to compress text into anchor tokens, but policy anchor "
                "evicts nearly all others; choose the model tiny-anchor, train a model with "
                "`sirchat train anchor`, or use /policy anchor lazy=true, which evicts tokens "
                "only when the cache is full"
            )
        if "reasoning" in changed and profile.reasoning != "auto":
            problem = template.switches.problem(profile.reasoning)
            yield from [problem] if problem else []
        held, store = self.engine.ledger.held_positions, self.engine.store
        if "archive_limit" in changed and settings.archive and len(held):
            size = store.cache.first_written_rows(torch.arange(1), held[:1].copy()).nbytes
            if settings.archive < size // _MAX_COMPRESSION:
                yield (
                    f"archive_limit {profile.archive_limit} holds no token: one takes {size:,} "
                    "bytes; of what is evicted, only the text is kept"
                )
        lacks_attention = settings.attention_stats is not None and not model.exposes_attention()
        if "policy" in changed and lacks_attention:
            name = type(policy).__name__.lower()
            yield f"{no_attention_reason(model)}; policy {name} works without attention weights"
        elif "policy" in changed and len(held) and not is_measured(self.engine, held).any():
            yield (
                "attention is recorded from the next message on; until then, policy "
                f"{profile.policy} keeps the newest tokens"
            )

    def _counts(self, record: EvictedRows | RestoredRows) -> dict[str, Any]:
        """The fields, by name, that the events `Evicted` and `Restored` share."""
        return {
            "positions": tuple(record.positions.tolist()),
            "resident": record.resident,
            "seen": record.seen,
            "tokens": self._tokens(record.positions),
        }

    def _tokens(self, positions: Positions) -> tuple[TokenRow, ...] | None:
        return self.tokens(positions) if self.with_tokens else None
