"""A conversation with one model, which reads and answers turns, and yields events.

Methods that return an iterator, such as `ask`, are generators: they work while the caller iterates
over the events. Other methods work at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from sirchat.chat.conversation import Conversation
from sirchat.chat.events import Ended, Erased, Event, Notice, Pinned, Restored, TokenRow, Undone
from sirchat.chat.panel_snapshot import Snapshot, take_snapshot
from sirchat.chat.settings import (
    all_or_nothing,
    build_cache_settings,
    started_events,
    switched_events,
    updated_profile,
)
from sirchat.chat.state import (
    ConversationState,
    GeneratedReply,
    RetriedMessage,
    SystemPrompt,
    Turn,
    UndoPoint,
)
from sirchat.chat.statements import (
    StatedFact,
    StatementCache,
    find_statements,
    in_one_line,
    pin_rules,
    rules_at,
    sentences_at,
    unpin_excess_rules,
    without_erased,
)
from sirchat.chat.targets import (
    Target,
    erase_target,
    positions_of,
    tokens_to_restore,
    without_generated,
)
from sirchat.chat.tool_loop import ChatTool, Toolbox, answer, reply_format
from sirchat.chat.turn import Interrupted, never
from sirchat.chat.why import AttentionPaid, TokenRank, attention_paid, token_ranks
from sirchat.config.profile import Profile
from sirchat.engine.sampling import TokenFilter
from sirchat.engine.types import EngineState
from sirchat.errors import ContextFullError, SettingError, UndoError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.key_value_store import HeldKeysValues
from sirchat.memory.key_values import KeyValues, LostTokensError, Positions
from sirchat.memory.ledger import Flag, Role
from sirchat.models.devices import DeviceMemory, memory_by_device
from sirchat.models.model import LoadedModel
from sirchat.recall.passages import note_torn_sentences
from sirchat.text.template import Template, TurnIds
from sirchat.text.text_file import without_surrogates

__all__ = ("Interrupted", "Session")

_LOST = "this message can't be undone: tokens that it evicted are no longer archived"


class Session(Conversation):
    """One conversation with one model. Raises SettingError for a setting that the model refuses.

    Callers may set `template`, `toolbox`, `stop_ids` and `opening_switch`, and read what is public.
    `rows_in_events`: whether events list the tokens themselves, and not only their positions.
    """

    def __init__(
        self, model: LoadedModel, profile: Profile, *, rows_in_events: bool = False
    ) -> None:
        super().__init__(model, profile, rows_in_events=rows_in_events)
        self.toolbox = Toolbox()
        self.erasures = 0  # calls of `erase`, after which saved text must be written again
        self.opening_switch = list[Event]()  # of settings for a resumed chat

    def reset(self) -> None:
        """Start an empty conversation; the settings stay."""
        super().reset()
        self._statement_cache = StatementCache()

    @property
    def memory(self) -> list[DeviceMemory]:
        """The bytes that model, cache and archive take on each device."""
        return memory_by_device(self.model.module, self.engine.cache, self.engine.store.archive)

    @property
    def undoable_message(self) -> str:
        """Text of the user turn that `undo` takes back; raises UndoError if there is none."""
        if not self.history.messages:
            is_off = self.seen and self.profile.archive == "off"
            hint = "more messages can be undone with /set archive ram" if is_off else ""
            raise UndoError("there is no message to undo", hint=hint)
        return self.history.messages[-1].text

    def ask(
        self,
        text: str,
        interrupted: Interrupted = never,
        *,
        attempt: int = 0,
        reply: GeneratedReply | None = None,
        allowed: TokenFilter | None = None,
        tools: Sequence[ChatTool | Callable[..., object]] | None = None,
    ) -> Iterator[Event]:
        """Read a user turn and answer it, with calls of `tools` (by default, of `toolbox`).

        Of a `reply`, the given ids come first; each `attempt` draws other ids. Raises
        ContextFullError, before reading, if the turn can't fit, and SettingError if the setting
        `json_schema` can't be kept.
        """
        box = self.toolbox if tools is None else Toolbox(tools)
        yield from self._tell_tools(box.tools_json)
        has_format = self.profile.json_schema != "off"
        if has_format and allowed is None and (reply is None or reply.finish is None):
            allowed = yield from reply_format(self, box, reply)
        yield from self.read_question(text, interrupted)
        self.state.attempt = attempt
        yield from answer(self, box, text, interrupted, reply, allowed)

    def read_question(
        self,
        text: str,
        interrupted: Interrupted = never,
        *,
        next_role: str | None = None,
        given: TurnIds | None = None,
    ) -> Iterator[Event]:
        """Read a user turn, as `read_user` does, and pin its rules and preferences.

        If it was undone to be asked again, what `undo` has kept of it holds again.
        """
        kept, self.state.retried = self.state.retried, RetriedMessage()
        try:
            yield from self.read_user(text, interrupted, next_role=next_role, given=given)
        except (ContextFullError, SettingError):  # it was not read: the user may send it again
            self.state.retried = kept
            raise
        self.mark_torn(self.state.last_turn, kept.torn)
        yield from pin_rules(self, kept, self._statement_cache)

    def _tell_tools(self, tools_json: str) -> list[Event]:
        """Let the model read the tools `tools_json`, in place of those that it was told before."""
        is_new = tools_json != self.state.tools_json
        template = self.template_with(tools_json or None) if tools_json or is_new else self.template
        events = self.switch("tools", never, template) if self.seen and is_new else []
        self.state.tools_json = tools_json
        self.template = template
        return events

    def retry(self, interrupted: Interrupted = never, text: str | None = None) -> Iterator[Event]:
        """Undo the last user turn; ask it again with other random numbers, or ask `text` instead.

        Summaries after it go. Pinned tokens stay pinned. Raises an error, changing nothing, if the
        turn can't be undone, or if there is no room for `text` or for the tools to be told.
        """
        point = self.asked_point()
        said = point.text if text is None else without_surrogates(text)
        allowed = yield from reply_format(self, self.toolbox)  # it may be refused
        self._check_room(said, point)
        notices = self.undo_summaries()
        attempt = self.state.attempt + 1 if text is None else 0
        yield from dict.fromkeys([*self.undo(to_ask_again=True), *notices])
        if self.toolbox.tools:  # which the template may have to tell first
            allowed = None
        yield from self.ask(said, interrupted, attempt=attempt, allowed=allowed)

    def _check_room(self, text: str, point: UndoPoint) -> None:
        """Raise an error if after an undo to `point` there is no room for `text` or its tools."""
        state, seen, told = point.state, point.checkpoint.seen, self.toolbox.tools_json
        placement = point.checkpoint.placement
        system, ids = self._user_turn(text, state, seen)
        if seen and told and told != state.tools_json:
            system = self.template_with(told).system_turn(self.profile.system or "")
            placement = placement.without(self._replaceable(state))
        size = len(state.pending_ids) + len(self.template.closing) + len(ids.ids)
        if system is not None:
            size += len(system.ids)
            if self.profile.pin_system:
                self.engine.choice.check_pins(len(system.ids) - len(self.state.system.positions))
        self.engine.require_room(size, len(placement.held), seen)

    def asked_point(self) -> UndoPoint:
        """The point before the user's last message that is no summary; UndoError without one."""
        for point in reversed(self.history.messages):
            later = (turn for turn in self.turns[point.turns :] if turn.role == "user")
            if not next((turn.is_summary for turn in later), False):
                return point
        _ = self.undoable_message  # raises an error if there is not even a summary
        raise UndoError("of your messages none can be undone, only a summary")

    def undo_summaries(self) -> list[Notice]:
        """Undo the summaries after the user's last message, and return what is to be told of it.

        Raises UndoError, changing nothing, if the message can't be undone.
        """
        point, events = self.asked_point(), list[Event]()
        if not self.engine.store.has(point.checkpoint.placement.held):
            raise UndoError(_LOST)
        while self.history.messages[-1] is not point:
            events += self.undo()
        return [event for event in events if isinstance(event, Notice)]

    def undo(self, *, to_ask_again: bool = False) -> list[Event]:
        """Undo the last user turn, and all reading and generating since it began.

        Settings except the system prompt, and pins of earlier turns, stay; `to_ask_again` also
        keeps the turn's own pins, for the same text. Raises UndoError, changing nothing, if there
        is no such turn, or if a token is no longer archived.
        """
        text = self.undoable_message
        point, turns = self.history.messages[-1], self.turns
        later = range(point.turns, len(turns))
        turn = next((index for index in later if turns[index].role == "user"), -1)
        pins = self.ledger.pins_except_rules(0)
        own = np.isin(self.ledger.of_turn(turn, Role.USER), pins).nonzero()[0]
        try:
            events = self.return_to(point, to_ask_again=to_ask_again)
        except LostTokensError:
            raise UndoError(_LOST) from None
        self.recall.undo()
        if to_ask_again:
            self.state.retried = RetriedMessage(text, tuple(own.tolist()), turns[turn].torn)
        return [Undone(len(self.turns), text, self.resident, self.seen), *events]

    def return_to(self, point: UndoPoint | None, *, to_ask_again: bool = False) -> list[Event]:
        """Undo all since `point`, one of `history`; returns events of pins that lack room now.

        `to_ask_again` is that of `undo`. Raises LostTokensError, changing nothing, if there is no
        such point, if more was read since a point of the last reply, or if a token is lost.
        """
        history, engine, undone = self.history, self.engine, self.turns
        if point is None or not history.messages:
            raise LostTokensError("there is nothing to return to")
        if point.vectors is not None and history.reply_seen != self.seen:
            raise LostTokensError("more was read since the last reply")
        engine.undo(point.checkpoint, keep_pins=True)
        self.state = point.restored_state(self.state, to_ask_again=to_ask_again)
        if point.vectors is not None:
            self.ledger.token_vectors = point.vectors
        round_start = history.messages[-1].checkpoint.seen
        self.recall.passage_search.truncate(round_start)
        self.ledger.saved = min(self.ledger.saved, round_start)  # whose passages become others
        # Those that were let go since are pinned again, but the budget may be smaller now.
        most, sinks = engine.choice.divide_budget().max_pins, engine.settings.honoured_sinks
        others = len(self.ledger.pins_except_rules(sinks))
        room = math.inf if most is None else most - others
        events = in_one_line(unpin_excess_rules(self, engine.settings, room))
        if point.vectors is None:
            history.messages = history.messages[:-1]
            events += self._pin_again(point, undone[point.turns :])
        engine.switcher.choose_unless_valid()
        return events

    def _pin_again(self, point: UndoPoint, undone: Sequence[Turn]) -> Iterator[Event]:
        """Pin former summaries and the system prompt, which the turns `undone` had replaced."""
        profile, switcher, pinned = self.profile, self.engine.switcher, point.checkpoint.pinned
        if any(turn.is_summary for turn in undone):
            former = [number for number, turn in enumerate(self.turns) if turn.is_summary]
            try:
                switcher.pin_held(pinned[np.isin(self.ledger.column("turn")[pinned], former)])
            except SettingError as error:  # other pins take the room
                yield Notice(f"the summary before is not pinned again: {error}")
        prompt = self.state.system
        is_other = prompt.text != profile.system or point.pin_system != profile.pin_system
        if is_other and self.seen:
            self.profile = profile.model_copy(update={"system": prompt.text})
            positions = np.asarray(prompt.positions)
            self.ledger.flag(Flag.EXCLUDED, positions, False)
            self.ledger.pin(positions, False)
            try:
                switcher.check_new_pins(positions if profile.pin_system else positions[:0])
                self.ledger.pin(positions, profile.pin_system)
            except SettingError as error:
                yield Notice(f"the system prompt is not pinned again: {error}")

    def switch(
        self,
        source: str,
        interrupted: Interrupted = never,
        template: Template | None = None,
        /,
        **updates: Any,
    ) -> list[Event]:
        """Change the settings `updates`; evicts or restores tokens as the new settings require.

        A new system prompt (or `template`) of a begun chat is read, unless interrupted, in place of
        the old one, which is evicted. Raises SettingError, beginning with `source` and changing
        nothing.
        """
        before, new_template = self.profile, template or self.template
        profile = updated_profile(before, self.model, source, updates)
        is_replaced = self.seen > 0 and (profile.system != before.system or template is not None)
        prompt = None
        if is_replaced and (profile.system or new_template.tools):
            prompt = new_template.system_turn(profile.system or "")
        events = self._switch_engine(profile, prompt, is_replaced=is_replaced)
        self.profile, self.template = profile, new_template
        if self.engine.settings.recall is None and before.recall != "off":
            self.recall.undo()  # what it found last is no longer reported
        if is_replaced:
            self.state.system = SystemPrompt()
        restored = sum(len(event.positions) for event in events if isinstance(event, Restored))
        changed = before, profile, restored, new_template
        events += switched_events(self.engine, self.model, *changed)
        if prompt is not None:
            events += [*self._read_pending(), *self.read_system(prompt, interrupted)]
        return events

    def _switch_engine(
        self, profile: Profile, prompt: TurnIds | None, *, is_replaced: bool
    ) -> list[Event]:
        """Put settings into force; if the system prompt `is_replaced`, evict it for `prompt`."""
        engine, old_prompt = self.engine, self.state.system.positions
        settings = build_cache_settings(profile, self._folder)
        size = len(prompt.ids) if prompt is not None else 0
        with all_or_nothing(engine):
            events = unpin_excess_rules(self, settings)
            if is_replaced or profile.pin_system != self.profile.pin_system:
                self.ledger.pin(old_prompt, profile.pin_system and not is_replaced)
            moves = engine.switcher.switch(settings, size if profile.pin_system else 0)
            if is_replaced:
                leaving = self._replaceable(self.state)
                engine.require_room(size, len(engine.store.placement.without(leaving).held))
                moves += engine.evictor.exclude(leaving)
        return events + self._events.moved(self.state.last_turn, moves)

    def _replaceable(self, state: ConversationState) -> Positions:
        """Stream positions of the system prompt of `state` but sinks, which no other replaces."""
        start, sinks = state.system.positions.start, self.engine.settings.honoured_sinks
        return np.arange(max(start, sinks), state.system.positions.stop)

    def note_profile(self, profile: Profile) -> None:
        """Store settings that are in force already, or that neither engine nor model uses."""
        self.profile = profile

    @contextmanager
    def temporary_reply_settings(self, settings: dict[str, Any]) -> Iterator[None]:
        """Context manager: `settings` of sampling and reply length hold in its block."""
        before = {name: getattr(self.profile, name) for name in settings}
        self.profile = self.profile.model_copy(update=settings)
        try:
            yield
        finally:
            self.profile = self.profile.model_copy(update=before)

    def restore(self, target: Target, around: int = 0) -> list[Event]:
        """Hold the tokens that `target` names, and `around` neighbours, until the next reply ends.

        Raises UsageError if `target` names no token.
        """
        asked = tokens_to_restore(self, target, around)
        moves = self.engine.evictor.begin_recall(asked, incoming=0)
        self.state.restored_by_user = asked.tolist()
        return [*self._events.moved(self.state.last_turn, moves), *self._events.take_problems()]

    def pin(self, target: Target, pinned: bool = True) -> list[Event]:
        """Pin or unpin `target` (text, `last`, `turn N`); evicted tokens are restored when pinned.

        If others wrote the text too, the model's own is not pinned; a rule is unpinned as a whole.
        Raises UsageError if nothing matches; SettingError, changing nothing, if the pins would
        leave too little room.
        """
        positions = positions_of(self, target, self.engine.store.recallable())
        if pinned and isinstance(target, str):  # all tokens of a turn are of one writer
            positions = without_generated(self, positions)
        rules = rules_at(self, positions, self._statement_cache)
        if not pinned:
            positions = np.union1d(positions, rules)
        moves = self.engine.switcher.pin(positions, pinned)
        self.ledger.flag(Flag.RULE, rules, False)  # from now on they are the user's choice
        said = sentences_at(self, positions)
        before = self.state.unpinned_sentences
        self.state.unpinned_sentences = before - said if pinned else before | said
        events = self._events.moved(self.state.last_turn, moves)
        events += [Pinned(len(positions), pinned, self.resident), *self._events.take_problems()]
        if not self.engine.settings.policy.honours_pins:
            events.append(Notice(f"policy {self.profile.policy} ignores pins"))
        return events

    def erase(self, target: str) -> list[Event]:
        """Erase the tokens that `target` names from the cache, the archive and the turns' text.

        No earlier turn can be undone afterwards. Later tokens stay, although they attended to the
        erased tokens. Raises UsageError if nothing matches.
        """
        count, prompt = erase_target(self, target)
        self.state.system = replace(self.state.system, text=prompt)
        self.profile = self.profile.model_copy(update={"system": prompt})
        self.history.messages = []
        self._statement_cache = without_erased(self, self._statement_cache)
        unpinned = [turn for turn, _ in self.state.unpinned_sentences]
        positions = np.flatnonzero(np.isin(self.ledger.column("turn"), unpinned))
        self.state.unpinned_sentences &= sentences_at(self, positions)
        self.recall.erase_words()
        asked = self.state.restored_by_user
        self.state.restored_by_user = np.setdiff1d(asked, self.ledger.torn).tolist()
        self.erasures += 1
        return [Erased(count, self.resident)]

    def why(self, target: str) -> list[TokenRank]:
        """Score, rank and state of each token that `target` names; UsageError if none matches."""
        positions = positions_of(self, target, np.arange(self.seen))
        now = self.snapshot(strongest=0)
        return token_ranks(self.engine, self.texts, positions, now)

    def facts(self, words: str = "", *, max_reads: float = math.inf) -> list[StatedFact]:
        """The user's pinned rules, then the stated facts; only those with all `words`, if given.

        The model reads at most `max_reads` sentences anew, the newest; others that it would have
        to read, as after a resume, are left out.
        """
        return find_statements(self, self._statement_cache, words, max_reads)

    def attention_paid(self, turn: int) -> AttentionPaid:
        """The attention of the reply with turn index `turn` to the tokens held before it."""
        is_last = self.history.reply_seen == self.seen
        placement = self.history.reply_placement if is_last else None
        return attention_paid(self.engine, turn, placement)

    def tokens(self, positions: Sequence[int]) -> tuple[TokenRow, ...]:
        """A record of each token, held or evicted, at these stream positions (ascending)."""
        return self._events.tokens(np.asarray(positions, np.int64))

    def keys_values(self, layer: int) -> HeldKeysValues:
        """Copies of the held keys and values of a layer; UsageError for a wrong layer number."""
        return self.engine.store.held_keys_values(layer)

    def snapshot(self, strongest: int | None = None) -> Snapshot:
        """A snapshot of the cache; with `strongest`, a short one of that many tokens."""
        return take_snapshot(self, strongest)

    def opening_events(self) -> list[Event]:
        """The event `Started`, then notices of what does not suit the model, and what it lacks."""
        told = [event for event in self.opening_switch if isinstance(event, Notice)]
        return [*started_events(self.engine, self.model, self.profile, self.template), *told]

    def closing_event(self) -> Ended:
        totals = self.state.totals
        return Ended(
            turns=len(self.turns),
            seen=self.seen,
            resident=self.resident,
            tokens_out=totals.tokens_out,
            seconds_prefill=totals.seconds_prefill,
            seconds_decode=totals.seconds_decode,
        )

    def load(
        self,
        saved: EngineState,
        state: ConversationState,
        rows: KeyValues | None,
        attention: AttentionCheckpoint | None = None,
        undo_points: Sequence[UndoPoint] = (),
    ) -> None:
        """Continue a saved session; if `rows` is None, keys and values are computed again.

        Only turns with a point in `undo_points` can be undone.
        """
        self.reset()
        self.engine.load(saved, rows, attention)
        self.state = state
        self.history.messages = undo_points
        left_out = [number for number, turn in enumerate(state.turns) if turn.is_left_out]
        self.ledger.left_out = np.flatnonzero(np.isin(self.ledger.column("turn"), left_out))
        note_torn_sentences(self.ledger, self.texts)
        for number, turn in enumerate(state.turns):
            self.mark_torn(number, turn.torn)
