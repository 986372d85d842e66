"""A conversation with one model: it reads and answers turns, and yields events.

`ask`, `retry`, `read_user` and `read_reply` are generators, and work while the caller iterates over
the events; other methods work at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from sirchat.chat.event_builder import EventBuilder
from sirchat.chat.events import Ended, Erased, Event, Notice, Pinned, TokenRow, Undone
from sirchat.chat.formats import ModelFormats
from sirchat.chat.panel_snapshot import Snapshot, take_snapshot
from sirchat.chat.reply import AfterReply, OpenReply, state_now
from sirchat.chat.settings import (
    all_or_nothing,
    build_cache_settings,
    build_engine,
    build_sampler,
    check_profile,
    updated_profile,
)
from sirchat.chat.state import ConversationState, Reply, Turn, TurnStats, UndoPoint, undo_depth
from sirchat.chat.statements import StatedFact, fit_rules, pin_rules, sentences_at, stated_in
from sirchat.chat.targets import Target, erase_target, positions_of, tokens_asked
from sirchat.chat.tool_loop import ChatTool, Toolbox, answer_with_tools, reply_format, template_for
from sirchat.chat.turn import Interrupted, OpenTurn
from sirchat.chat.why import AttentionPaid, TokenRank, attention_paid, token_ranks
from sirchat.config.profile import Profile
from sirchat.engine.budget import budget_for
from sirchat.engine.extra_passes import score_continuations
from sirchat.engine.generation import Generation
from sirchat.engine.sampling import Allowed, FixedIds, PromptLookup
from sirchat.engine.types import ContinuationScore, EngineState, RestoredRows
from sirchat.errors import UndoError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.key_value_store import HeldKeysValues
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.models.devices import DeviceMemory, memory_by_device
from sirchat.models.model import LoadedModel
from sirchat.paths import archives_dir
from sirchat.recall.recall import Recall
from sirchat.text.detokenizer import TokenTexts
from sirchat.text.loops import LoopCheck
from sirchat.text.other_templates import ToolTemplate
from sirchat.text.template import Template, TurnIds
from sirchat.text.text_file import without_surrogates
from sirchat.text.transcript import split_tagged

__all__ = ("Interrupted", "Session")


class Session:
    """One conversation with one model. Raises SettingError for a setting that the model refuses.

    Callers may set `template`, `toolbox` and `stop_ids`, and read all others:
        model, profile, template: the model, the settings in force, and what turns text into ids.
        state: turns, token counts and times.
        engine: KV cache, archive, and what evicts; only the session lets it read or move tokens.
        ledger: the table of all tokens ever read.
        recall: what recall has restored.
        undo_points: one for each user turn that can be undone, oldest first.
        epoch: number of conversations begun; each `reset` begins one.
        erasures: number of calls of `erase`, after which saved text must be written again.
        toolbox: the tools that the model may call.
        formats: limits replies to JSON, if the setting `json_schema` says so.
        last_reply: what is known of the last reply.

    `rows_in_events`: whether events list the tokens themselves, not only their positions.
    """

    def __init__(
        self, model: LoadedModel, profile: Profile, *, rows_in_events: bool = False
    ) -> None:
        self.model = model
        self.profile = profile
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        self.template = Template(model.tokenizer, model.anchors, declared)
        self.stop_ids = self.template.stop_ids(declared)
        self.toolbox, self.formats = Toolbox(), ModelFormats()
        self.epoch = self.erasures = 0
        self._end_ids = self.template.end_ids(declared)
        self._texts = TokenTexts(model.tokenizer)
        self._rows_in_events = rows_in_events
        check_profile(profile, model)
        self.reset()

    def reset(self) -> None:
        """Start an empty conversation; the settings stay."""
        if isinstance(self.template, ToolTemplate):
            self.template = template_for(self.model, None, self.template.ends)
        self._folder = archives_dir() / f"{os.getpid()}-{secrets.token_hex(4)}"
        settings = build_cache_settings(self.profile, self._folder)
        self.engine = build_engine(self.model, settings, self.profile.seed)
        self.epoch += 1
        self.state, self.ledger = ConversationState(), self.engine.ledger
        # Whatever the settings: instructions and passages are told by them, also later.
        self.ledger.token_vectors.wanted = self.model.encoder.size > 0
        self.undo_points = list[UndoPoint]()
        self.recall = Recall(self.engine, self.model, self._texts)
        self._events = EventBuilder(self.engine, self._texts, self._rows_in_events)
        self._vectors, self.last_reply = dict[str, Tensor](), AfterReply()  # of sentences said

    @property
    def template(self) -> Template:
        """The chat template, as the setting `reasoning` has it."""
        return self._template.with_reasoning(self.profile.reasoning)

    @template.setter
    def template(self, template: Template) -> None:
        self._template = template

    @property
    def turns(self) -> list[Turn]:
        """All messages of the conversation, in order."""
        return self.state.turns

    @property
    def resident(self) -> int:
        """Number of tokens in the KV cache now."""
        return self.engine.cache.length

    @property
    def seen(self) -> int:
        """Number of tokens read or generated since the conversation began."""
        return self.ledger.seen

    @property
    def budget(self) -> int:
        """The largest number of tokens that the KV cache may hold."""
        return self.engine.budget

    @property
    def speed(self) -> float:
        """Tokens per second of the current or the last reply; 0 before the first reply."""
        return self.state.reply.tokens_out / max(self.state.reply.seconds_decode, 1e-9)

    @property
    def memory(self) -> list[DeviceMemory]:
        """For each device, the bytes that the model, the cache and the archive take there."""
        return memory_by_device(self.model.module, self.engine.cache, self.engine.store.archive)

    @property
    def last_said(self) -> str:
        """Text of the user turn that `undo` takes back; raises UndoError if there is none."""
        if not self.undo_points:
            is_off = self.seen and self.profile.archive == "off"
            hint = "more messages can be undone with /set archive ram" if is_off else ""
            raise UndoError("there is no message to undo", hint=hint)
        return self.undo_points[-1].text

    def budget_for(self, tokens: int) -> int | None:
        """The smallest budget that holds a message of so many tokens; None if there is none."""
        return budget_for(tokens, self.engine.settings, self.ledger, self.model.context_length)

    def ask(
        self,
        text: str,
        interrupted: Interrupted = lambda: False,
        *,
        attempt: int = 0,
        reply: Reply | None = None,
        allowed: Allowed | None = None,
        tools: Sequence[ChatTool | Callable[..., object]] | None = None,
    ) -> Iterator[Event]:
        """Read a user turn and answer it, with calls of `tools`; by default those of `toolbox`.

        Its tokens are chosen as `build_sampler` says, with random numbers that `attempt` varies.
        Raises ContextFullError, before reading, if they can't fit, and SettingError if the setting
        `json_schema` can't be kept.
        """
        box = self.toolbox if tools is None else Toolbox(tools)
        yield from self._tell_tools(box.told)
        if allowed is None and (reply is None or reply.finish is None):
            allowed = yield from reply_format(self, box, reply)
        yield from self.read_question(text, interrupted)
        self.state.attempt = attempt
        yield from answer_with_tools(self, box, text, interrupted, reply, allowed)

    def read_question(
        self,
        text: str,
        interrupted: Interrupted = lambda: False,
        *,
        before: str | None = None,
        given: TurnIds | None = None,
    ) -> Iterator[Event]:
        """Read a user turn, as `read_user` does, and pin its rules and preferences."""
        yield from self.read_user(text, interrupted, before=before, given=given)
        wanted = self.profile.pin_instructions and self.engine.settings.policy.honours_pins
        chat = self.engine, self._texts, self.model.encoder, self.state, self._vectors
        yield from pin_rules(*chat, is_wanted=wanted)

    def _tell_tools(self, told: str) -> list[Event]:
        """Let the model read of the tools `told`, in place of those that it was told before."""
        template, is_told = self.template, told == self.state.tools
        if not is_told or (told and getattr(template, "tools", "") != told):
            template = template_for(self.model, told or None, template.ends)
        events = self.switch("tools", bool, template) if self.seen and not is_told else []
        self.state.tools, self.template = told, template
        return events

    def begin_reply(
        self,
        interrupted: Interrupted,
        reply: Reply | None = None,
        allowed: Allowed | None = None,
        turn: OpenTurn | None = None,
        *,
        is_undoable: bool = False,
    ) -> OpenReply:
        """Begin the reply to what was read, or go on with `turn`; the arguments are those of `ask`.

        The caller generates it by `OpenReply.events`, or by `step` with those of other sessions. If
        it `is_undoable`, or retried, `undo_reply` can take it back.
        """
        profile, closing = self.profile, self.template.closing
        is_kept = (is_undoable or self.state.attempt) and profile.archive != "off"
        before = state_now(self.state, self.engine) if is_kept and self.undo_points else None
        turn = turn or self._open_turn("assistant")
        sampler, most = build_sampler(profile, reply, self.state.attempt, allowed)
        generation = Generation(
            self.engine,
            sampler,
            turn.ref,
            stop_ids=self.stop_ids,
            max_new_tokens=most,
            closing=len(closing),
            lookup=PromptLookup() if profile.lookup else None,
        )
        opened = OpenReply(
            turn,
            generation,
            self.template.reply_stream(),
            closing,
            self._end_ids,
            stops=sampler.is_exhausted if isinstance(sampler, FixedIds) else interrupted,
            # A format may want repetitions.
            loops=LoopCheck() if profile.stop_loops and not (reply or allowed) else None,
            finish=reply.finish if reply else None,
            # Without an archive, a new checkpoint deletes what an undo needs.
            can_go_on=profile.archive != "off",
        )
        self.last_reply = opened.after
        opened.after.before = before
        return opened

    def go_on(self, begun: Reply, interrupted: Interrupted = lambda: False) -> Iterator[Event]:
        """Go on with the last reply, which was cut and has `begun` so, as if it had not been.

        Raises LookupError if more was read since, or if a token is lost: memory and turns are then
        as before, but this reply can no longer be gone on with.
        """
        allowed = yield from reply_format(self, self.toolbox, begun)
        self.undo_reply(to_cut=True)
        turn = self._open_turn(self.state.reply)
        yield from self.begin_reply(interrupted, allowed=allowed, turn=turn).events()

    def undo_reply(self, *, to_cut: bool = False) -> None:
        """Undo the last reply, but not the message before; `to_cut`: only what ended its round.

        Raises LookupError, changing nothing, if more was read since, or if a token is lost.
        """
        last = self.last_reply
        point, at_end = last.cut if to_cut else last.before, last.at_end
        if point is None or at_end is None or at_end[0] != self.seen or not self.undo_points:
            raise LookupError("the state of the last reply is not known")
        self.engine.undo(point[0].checkpoint, keep_pins=True)
        self.state = point[0].restored_state(self.state, keep_pins=True)
        self.ledger.token_vectors = point[1]
        start = self.undo_points[-1].checkpoint.cache.seen
        self.recall.search.truncate(start)
        self.ledger.saved = min(self.ledger.saved, start)  # whose passages become others

    def retry(
        self, interrupted: Interrupted = lambda: False, text: str | None = None
    ) -> Iterator[Event]:
        """Undo the last user turn; ask it again with other random numbers, or ask `text` instead.

        Pinned tokens stay pinned. Raises UndoError, changing nothing, if the turn can't be undone.
        """
        text, attempt = (self.last_said, self.state.attempt + 1) if text is None else (text, 0)
        yield from reply_format(self, self.toolbox)  # it may be refused
        yield from self.undo(keep_pins=True)
        yield from self.ask(text, interrupted, attempt=attempt)

    def read_user(
        self,
        text: str,
        interrupted: Interrupted = lambda: False,
        *,
        before: str | None = None,
        given: TurnIds | None = None,
    ) -> Iterator[Event]:
        """Read a user turn without answering it; before the first one, read the system prompt.

        `before` is the role of the next message, if that is given and not generated; `given` are
        the ids of the turn, if they are not those of a user turn `text`.
        """
        text, state, closing = without_surrogates(text), self.state, self.template.closing
        if self.seen == 0:  # nothing was read: an earlier turn is treated as never begun
            state.pending_ids, state.turns, state.in_round, state.saved = [], [], False, 0
            system, ids = self.template.opening(text, self.profile.system)
        else:
            is_unanswered = state.in_round and state.header == []
            system, ids = None, given or self.template.user(text, after_user=is_unanswered)
        ids = self.template.before(ids, before)
        turn = yield from self.begin_message("user", ids, system, text)
        after = closing if ids.header is None else []
        if ids.header:  # without the given reply, there would be an empty one
            after = [*self.template.assistant("", ids.header).ids, *closing]
        with self.engine.evictor.recall_ends_at_error():
            yield from turn.recall(self.recall, ids)
            yield from turn.read(ids, interrupted, after=after)
            yield turn.finish(text)
            yield from self._events.take_problems()

    def begin_message(
        self, role: str, ids: TurnIds, system: TurnIds | None = None, said: str | None = None
    ) -> Generator[Event, None, OpenTurn]:
        """Begin the turn `ids`, for which there is room then; of the user, who `said` something."""
        state, closing = self.state, self.template.closing
        moves = self.engine.evictor.end_recall()  # of a turn that was not answered
        yield from self._events.moved(state.last_turn, moves)
        self._check_room(ids, system)
        if said is not None:
            self._note_undo_point(said)
        yield from self._read_pending()
        if system is not None:
            yield from self.read_system(system)
        state.round += 1
        state.in_round, state.header = True, ids.header
        if said is not None:
            state.attempt = 0
        turn = self._open_turn(role)
        yield from turn.make_room(len(ids.ids), self.profile.max_new_tokens + len(closing))
        return turn

    def read_reply(
        self,
        text: str,
        interrupted: Interrupted = lambda: False,
        given: TurnIds | None = None,
    ) -> Iterator[Event]:
        """Read `text` as the reply, instead of generating one; ContextFullError if it can't fit.

        `given` are the ids of the turn, if it has more than this text.
        """
        text = without_surrogates(text)
        ids = given or self.template.assistant(text, self.state.header)
        closing = self.template.closing if ids.closing is None else ids.closing
        self.engine.require_room(len(ids.ids) + len(closing))
        turn, at = self._open_turn("assistant"), range(self.seen, self.seen + len(ids.ids))
        with self.engine.evictor.recall_ends_at_error():
            yield from turn.read(ids, interrupted, after=closing)
            stream = self.template.reply_stream(is_given=True)
            stream.divide(ids.ids if self.seen == at.stop else ())
            yield from turn.close(closing, stream, at)
        thinking, said = split_tagged(text)
        yield turn.finish(said, thinking)
        yield from self._events.take_problems()

    def undo(self, *, keep_pins: bool = False) -> list[Event]:
        """Undo the last user turn, and all that was read, generated or pinned after it began.

        The settings stay, but for the system prompt; with `keep_pins`, all pins stay. Raises
        UndoError, changing nothing, if there is no such turn, or if a token is no longer archived.
        """
        text, point = self.last_said, self.undo_points[-1]
        own = self.ledger.own_pins(point.checkpoint.cache.seen) if keep_pins else ()
        try:
            self.engine.undo(point.checkpoint, keep_pins=keep_pins)
        except LookupError:
            why = "tokens that it evicted are no longer archived"
            raise UndoError(f"this message can't be undone: {why}") from None
        self.undo_points.pop()
        self.recall.undo()
        self.state = point.restored_state(self.state, keep_pins=keep_pins)
        self.state.pinned_since = text, tuple(own)
        prompt, pin_system = self.state.prompt, self.profile.pin_system
        if (prompt, point.pin_system) != (self.profile.system, pin_system) and self.seen:
            self.profile = self.profile.model_copy(update={"system": prompt})
            self.ledger.pin(self.state.system, pin_system)
            self.engine.evictor.exclude(np.asarray(self.state.system), excluded=False)
        return [Undone(len(self.turns), text, self.resident, self.seen)]

    def switch(
        self,
        source: str,
        interrupted: Interrupted = lambda: False,
        template: Template | None = None,
        /,
        **updates: Any,
    ) -> list[Event]:
        """Change the settings `updates`, and evict or restore tokens as the new settings require.

        If the system prompt of a begun chat changes, the old one is evicted and the new one read;
        an interrupt ends the reading; so it is with another `template`. Raises SettingError, which
        begins with `source`, for a value that is not allowed, changing nothing.
        """
        before, profile = self.profile, updated_profile(self.profile, self.model, source, updates)
        settings, state = build_cache_settings(profile, self._folder), self.state
        is_replaced = self.seen > 0 and (profile.system != before.system or template is not None)
        prompt, template = None, template or self.template
        if is_replaced and (profile.system or getattr(template, "tools", "")):
            prompt = template.system(profile.system or "")
        size = len(prompt.ids) if prompt is not None else 0
        with all_or_nothing(self.engine):
            events = fit_rules(self.engine, self._texts, settings)
            if is_replaced or profile.pin_system != before.pin_system:
                self.ledger.pin(state.system, profile.pin_system and not is_replaced)
            moves = self.engine.evictor.switch(settings, size if profile.pin_system else 0)
            if is_replaced:
                moves += self.engine.evictor.exclude(np.asarray(state.system))
            self.engine.require_room(size)
        self.profile, self.template = profile, template
        if settings.recall is None and before.recall != "off":
            self.recall.undo()  # what it found last is no longer reported
        if is_replaced:
            state.system, state.prompt = range(0), None
        events += self._events.moved(state.last_turn, moves)
        restored = sum(len(move.positions) for move in moves if isinstance(move, RestoredRows))
        events += self._events.switched(self.model, before, profile, restored, template)
        if prompt is not None:
            events += [*self._read_pending(), *self.read_system(prompt, interrupted)]
        return events

    def note_profile(self, profile: Profile) -> None:
        """Set settings that are in force already, or that neither engine nor model use."""
        self.profile = profile

    @contextmanager
    def temporary_reply_settings(self, settings: dict[str, Any]) -> Iterator[None]:
        """Context manager: in it, the `settings` of sampling and of a reply's length hold."""
        before = {name: getattr(self.profile, name) for name in settings}
        self.profile = self.profile.model_copy(update=settings)
        try:
            yield
        finally:
            self.profile = self.profile.model_copy(update=before)

    def restore(self, target: Target, around: int = 0) -> list[Event]:
        """Hold what `tokens_asked` says until the next reply ends; UsageError if it is nothing."""
        asked = tokens_asked(target, self.engine, self._texts, self.state, around, self.recall)
        moves = self.engine.evictor.begin_recall(asked, incoming=0)
        self.state.asked = asked.tolist()
        return [*self._events.moved(self.state.last_turn, moves), *self._events.take_problems()]

    def pin(self, target: Target, pinned: bool = True) -> list[Event]:
        """Pin or unpin `target` (text, `last` or `turn N`).

        Evicted tokens are restored when they are pinned. Raises UsageError if nothing matches, and
        SettingError, changing nothing, if the pins would leave too little room.
        """
        positions = self._positions_of(target, self.engine.store.recallable())
        moves = self.engine.evictor.pin(positions, pinned)
        self.ledger.release_rules(positions)  # from now on they are the user's choice
        said, before = sentences_at(self.ledger, self._texts, positions), self.state.unpinned
        self.state.unpinned = before - said if pinned else before | said
        events = self._events.moved(self.state.last_turn, moves)
        events += [Pinned(len(positions), pinned, self.resident), *self._events.take_problems()]
        if not self.engine.settings.policy.honours_pins:
            events.append(Notice(f"policy {self.profile.policy} ignores pins"))
        return events

    def erase(self, target: str) -> list[Event]:
        """Erase the tokens that `target` names from the cache, the archive and the turns' text.

        After this, no earlier turn can be undone. Later tokens stay, although they attended to the
        erased tokens. Raises UsageError if nothing matches.
        """
        chat = self.engine, self._texts, self.state, self.profile.system
        count, self.state.prompt = erase_target(target, *chat)
        self.profile = self.profile.model_copy(update={"system": self.state.prompt})
        self.undo_points, self._vectors = [], {}
        unpinned = [turn for turn, _ in self.state.unpinned]
        at = np.flatnonzero(np.isin(self.ledger.column("turn"), unpinned))
        self.state.unpinned &= sentences_at(self.ledger, self._texts, at)
        self.recall.erase_words()
        self.erasures += 1
        self.last_reply.cut = None
        return [Erased(count, self.resident)]

    def why(self, target: str) -> list[TokenRank]:
        """Score, rank and state of each token that `target` names; UsageError if none matches."""
        at, now = self._positions_of(target, np.arange(self.seen)), self.snapshot(strongest=0)
        return token_ranks(self.engine, self._texts, at, now, sinks=self.profile.sinks)

    def facts(self, words: str = "") -> list[StatedFact]:
        """The user's pinned rules, then the facts stated; if given, those that have all `words`."""
        chat = self.ledger, self._texts, self.turns, self._vectors
        return stated_in(self.model, self.template, *chat, words)

    def attention_paid(self, turn: int) -> AttentionPaid:
        """The attention that the reply with turn index `turn` paid to the held tokens before it."""
        return attention_paid(self.engine, turn, self.last_reply.at_end, self.profile.sinks)

    def score_continuations(self, replies: Sequence[str]) -> tuple[ContinuationScore, ...]:
        """For each reply, log-probabilities of its tokens, or of the end tokens if it is empty."""
        template, header = self.template, self.state.header
        ids = [template.assistant(reply, header).ids or template.closing for reply in replies]
        return score_continuations(self.engine.reader, ids)

    def tokens(self, positions: Sequence[int]) -> tuple[TokenRow, ...]:
        """A record of each token, held or evicted, at these stream positions (ascending)."""
        return self._events.tokens(np.asarray(positions, np.int64))

    def keys_values(self, layer: int) -> HeldKeysValues:
        """Copies of the held tokens' keys and values in a layer; UsageError for a wrong number."""
        return self.engine.store.held_keys_values(layer)

    def snapshot(self, strongest: int | None = None) -> Snapshot:
        """A snapshot of the cache; if `strongest` is given, a short one with so many tokens."""
        return take_snapshot(
            self.engine,
            self.profile,
            self._texts,
            self.state.roles,
            model=self.model.name,
            speed=self.speed,
            in_round=self.state.in_round,
            strongest=strongest,
            recalled_turns=self.recall.turns,
        )

    def opening_events(self) -> list[Event]:
        """The event `Started`, then a notice for each setting that does not suit this model."""
        return self._events.started(self.model, self.profile, self.template)

    def closing_event(self) -> Ended:
        """The event that ends the session."""
        return self._events.ended(self.state)

    def save(self, start: int = 0) -> EngineState:
        """The engine's state, without keys and values, and the ledger's rows from `start` on."""
        return self.engine.save(start)

    def load(
        self,
        saved: EngineState,
        state: ConversationState,
        rows: KeyValues | None,
        attention: AttentionCheckpoint | None = None,
        undo_points: Sequence[UndoPoint] = (),
        evicted: Iterable[KeyValues] = (),
    ) -> None:
        """Continue a saved session; if `rows` is None, keys and values are computed again.

        `evicted` are archived, too. Of the loaded turns, only those that have a point in
        `undo_points` can be undone.
        """
        self.reset()
        self.engine.load(saved, rows, attention, evicted)
        self.state, self.undo_points = state, list(undo_points)
        left_out = [number for number, turn in enumerate(state.turns) if turn.is_left_out]
        self.ledger.left_out = np.flatnonzero(np.isin(self.ledger.column("turn"), left_out))

    def _open_turn(self, turn: str | TurnStats) -> OpenTurn:
        """Go on with a turn, or begin one of this role."""
        stats = self.state.begin(turn) if isinstance(turn, str) else turn
        return OpenTurn(self.state, self.engine, self._events, stats, self.profile.evict_thinking)

    def _read_pending(self) -> list[Event]:
        """End a round without a whole reply: read the template ids that it still needs."""
        return self._open_turn(TurnStats(self.state.last_turn, "")).read_pending()

    def _check_room(self, ids: TurnIds, system: TurnIds | None = None) -> None:
        """Raise SettingError or ContextFullError if the turn `ids`, after `system`, can't fit."""
        before = len(system.ids) if system is not None else 0
        if system is not None and self.profile.pin_system:
            self.engine.evictor.check_pins(before)
        pending, closing = self.state.pending_ids, self.template.closing
        self.engine.require_room(len(pending) + before + len(ids.ids) + len(closing))

    def _note_undo_point(self, text: str) -> None:
        checkpoint, profile = self.engine.checkpoint(), self.profile
        point = UndoPoint.of(self.state, checkpoint, text, profile.pin_system, self.budget)
        depth = undo_depth(profile.archive != "off", self.engine.cache.state_nbytes)
        self.undo_points = [*self.undo_points, point][-depth:]

    def read_system(self, ids: TurnIds, interrupted: Interrupted = bool) -> Iterator[Event]:
        """Read the system prompt of the settings, as these ids."""
        turn, start, state = self._open_turn("system"), self.seen, self.state
        try:
            yield from turn.read(ids, interrupted, pinned=self.profile.pin_system)
        finally:  # also after an error: the part that was read is pinned, and can be unpinned
            state.system = range(start, self.seen)
            state.prompt = self.profile.system
        yield turn.finish(self.profile.system or "")

    def _positions_of(self, target: Target, among: Positions) -> Positions:
        return positions_of(target, self.ledger, self._texts, self.state.roles, among)
