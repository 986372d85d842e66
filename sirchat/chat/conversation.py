"""Reads and answers the messages of one conversation; the basis of tools, server and `Session`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields

import numpy as np

from sirchat.chat.events import Event, Reading
from sirchat.chat.formats import ModelFormats
from sirchat.chat.settings import build_cache_settings, build_engine, check_profile
from sirchat.chat.state import (
    ConversationState,
    GeneratedReply,
    SystemPrompt,
    Turn,
    TurnStats,
    UndoHistory,
    UndoPoint,
    undo_depth,
)
from sirchat.chat.turn import EventBuilder, Interrupted, OpenReply, OpenTurn, never
from sirchat.config.profile import Profile
from sirchat.engine.engine import Generation, PromptLookup
from sirchat.engine.extra_passes import score_continuations
from sirchat.engine.sampling import ForcedPrefixSampler, Sampler, Sampling, TokenFilter
from sirchat.engine.types import ContinuationScore
from sirchat.models.model import LoadedModel
from sirchat.paths import archives_dir
from sirchat.recall.passages import sentences_of
from sirchat.recall.recall import Recall
from sirchat.text.detokenizer import TokenTexts
from sirchat.text.loops import LoopCheck
from sirchat.text.other_templates import NoToolsError, PromptedTools, ToolTemplate
from sirchat.text.template import Template, TurnIds
from sirchat.text.text_file import without_surrogates
from sirchat.text.transcript import split_reasoning


class Conversation:
    """Reads and answers the messages of one conversation; the base class of `Session`.

    `rows_in_events`: whether events list the tokens themselves, and not only their positions.
    """

    def __init__(
        self, model: LoadedModel, profile: Profile, *, rows_in_events: bool = False
    ) -> None:
        self.model = model
        self.profile = profile
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        self.template = Template(model.tokenizer, model.anchors, declared)
        self.stop_ids = self.template.stop_ids(declared)
        self.formats = ModelFormats()  # of replies, for the setting `json_schema` and tools
        self.epoch = 0  # number of conversations begun; each `reset` begins one
        self._end_ids = self.template.end_ids(declared)
        self.texts = TokenTexts(model.tokenizer)
        self._rows_in_events = rows_in_events
        check_profile(profile, model)
        self.reset()

    def reset(self) -> None:
        """Start an empty conversation; the settings stay."""
        self.template = self.template_with(None)
        self._folder = archives_dir() / f"{os.getpid()}-{secrets.token_hex(4)}"
        settings = build_cache_settings(self.profile, self._folder)
        self.engine = build_engine(self.model, settings, self.profile.seed)
        self.epoch += 1
        self.state = ConversationState()
        self.ledger = self.engine.ledger
        # Whatever the settings: instructions and passages are told by them, also later.
        self.ledger.token_vectors.wanted = self.model.encoder.size > 0
        self.history = UndoHistory()
        self.recall = Recall(self.engine, self.model, self.texts)
        self._events = EventBuilder(self.engine, self.texts, self._rows_in_events)

    @property
    def template(self) -> Template:
        """The chat template under the setting `reasoning`."""
        return self._template.with_reasoning(self.profile.reasoning)

    @template.setter
    def template(self, template: Template) -> None:
        self._template = template

    def template_with(self, tools: str | None) -> Template:
        """The chat template for `tools` as JSON or ""; with None, for a chat without calls.

        Returns the current template if it has the same tools. Raises ModelError if the model's chat
        template can't have tools.
        """
        now, model = self.template, self.model
        if now.tools == tools:
            return now
        if tools is None:
            return Template(model.tokenizer, model.anchors, now.ends)
        try:
            return ToolTemplate(model.tokenizer, model.anchors, tools, now.ends)
        except NoToolsError:
            return PromptedTools(model.tokenizer, model.anchors, tools, now.ends)

    @property
    def turns(self) -> list[Turn]:
        return self.state.turns

    @property
    def resident(self) -> int:
        return self.engine.cache.length

    @property
    def seen(self) -> int:
        """Number of tokens read or generated since the conversation began."""
        return self.ledger.seen

    @property
    def speed(self) -> float:
        """Tokens per second of the current or the last reply; 0 before the first reply."""
        stats = self.state.last_reply_stats
        return stats.tokens_out / max(stats.seconds_decode, 1e-9)

    @property
    def budget(self) -> int:
        """The budget in tokens; the context length if the policy never evicts."""
        return self.engine.budget

    def read_user(
        self,
        text: str,
        interrupted: Interrupted = never,
        *,
        next_role: str | None = None,
        given: TurnIds | None = None,
    ) -> Iterator[Event]:
        """Read a user turn without answering it; before the first one, read the system prompt.

        `next_role` is the role of the next message if that message is given, not generated. `given`
        are the ids of the turn, if they differ from those of a user turn `text`.
        """
        text, system = without_surrogates(text), None
        if given is None or not self.seen:
            system, given = self._user_turn(text, self.state, self.seen)
        ids = self.template.followed_by(given, next_role)
        turn = yield from self.begin_message("user", ids, system, text)
        after = self.template.closing if ids.header is None else []
        if ids.header:  # without the given reply, there would be an empty one
            after = [*self.template.assistant_turn("", ids.header).ids, *self.template.closing]
        with self.engine.evictor.ending_recall_on_error():
            yield Reading(0, len(ids.ids))  # as the search of recall may read them, too
            yield from turn.restore_fitting(self.recall, ids)
            yield from turn.read(ids, interrupted, after=after)
            yield turn.finish(text)
            yield from self._events.take_problems()

    def _user_turn(
        self, text: str, state: ConversationState, seen: int
    ) -> tuple[TurnIds | None, TurnIds]:
        """A system prompt to be read first, or None, and a user turn in this `state`."""
        if seen == 0:
            return self.template.opening(text, self.profile.system)
        is_unanswered = state.in_round and state.reply_header == []
        return None, self.template.user_turn(text, after_user=is_unanswered)

    def mark_torn(self, number: int, torn: tuple[str, ...]) -> None:
        """Record the sentences `torn` of a turn that was read again without words erased before."""
        self.turns[number].torn, left = torn, tuple("".join(text.split()) for text in torn)
        for positions, pieces in sentences_of(self.ledger, self.texts, number) if torn else ():
            # One that lost its end goes on with the next.
            if "".join("".join(pieces).split()).startswith(left):
                self.ledger.torn = np.union1d(self.ledger.torn, positions)

    def begin_message(
        self, role: str, ids: TurnIds, system: TurnIds | None = None, said: str | None = None
    ) -> Generator[Event, None, OpenTurn]:
        """Begin the turn `ids` of `role`, and make room for it; `said` is a user's text.

        The system prompt `system` is read before the turn. Raises SettingError or ContextFullError,
        before anything is read, if both can't fit.
        """
        state, closing = self.state, self.template.closing
        moves = self.engine.evictor.end_recall()  # of a turn that was not answered
        yield from self._events.moved(state.last_turn, moves)
        before = len(system.ids) if system is not None else 0
        if system is not None and self.profile.pin_system:
            self.engine.choice.check_pins(before)
        pending = len(state.pending_ids) if self.seen else 0
        self.engine.require_room(pending + before + len(ids.ids) + len(closing))
        if self.seen == 0:  # a turn of which nothing was read is treated as never begun
            state.set_turns([])
            state.pending_ids, state.in_round = [], False
            state.round = state.saved_turns = 0
            self.history.messages = []
        if said is not None:
            self._note_undo_point(said)
        yield from self._read_pending()
        if system is not None:
            yield from self.read_system(system)
        state.round += 1
        state.in_round = True
        state.reply_header = ids.header
        if said is not None:
            state.attempt = 0
        turn = self._open_turn(role)
        self.turns[-1].text = said or ""  # also if reading fails
        yield from turn.make_room(len(ids.ids), self.profile.max_new_tokens + len(closing))
        return turn

    def read_system(self, ids: TurnIds, interrupted: Interrupted = never) -> Iterator[Event]:
        turn, start = self._open_turn("system"), self.seen
        try:
            yield from turn.read(ids, interrupted, pinned=self.profile.pin_system)
        finally:  # also after an error: the part that was read is pinned, and can be unpinned
            self.state.system = SystemPrompt(range(start, self.seen), self.profile.system)
        yield turn.finish(self.profile.system or "")

    def read_reply(
        self, text: str, interrupted: Interrupted = never, given: TurnIds | None = None
    ) -> Iterator[Event]:
        """Read `text` as the reply, in place of a generated one; ContextFullError if it can't fit.

        `given` are the ids of the turn, if it has more than this text.
        """
        text = without_surrogates(text)
        ids = given or self.template.assistant_turn(text, self.state.reply_header)
        closing = self.template.closing if ids.closing is None else ids.closing
        self.engine.require_room(len(ids.ids) + len(closing))
        turn = self._open_turn("assistant")
        positions = range(self.seen, self.seen + len(ids.ids))
        with self.engine.evictor.ending_recall_on_error():
            yield from turn.read(ids, interrupted, after=closing)
            stream = self.template.reply_stream(in_history=True)
            stream.push_ids(ids.ids if self.seen == positions.stop else ())
            yield from turn.close(closing, stream, positions)
        thinking, said = split_reasoning(text)
        yield turn.finish(said, thinking)
        yield from self._events.take_problems()

    def begin_reply(
        self,
        interrupted: Interrupted,
        reply: GeneratedReply | None = None,
        allowed: TokenFilter | None = None,
        *,
        begun: TurnStats | None = None,
        is_undoable: bool = False,
    ) -> OpenReply:
        """Begin the reply to the last message, or continue the `begun` one.

        The ids of `reply`, if given, come first; without `finish`, others follow, all `allowed`.
        The caller generates by `OpenReply.events`, or by `step` with other sessions. A reply that
        `is_undoable`, or that is another `attempt`, has a point in `history`.
        """
        profile, closing = self.profile, self.template.closing
        # Without an archive, a new checkpoint deletes what an undo needs.
        has_archive = profile.archive != "off"
        history = UndoHistory(self.history.messages)
        if (is_undoable or self.state.attempt) and has_archive and history.messages:
            history.before_reply = UndoPoint.in_round(self.state, self.engine)
        turn = self._open_turn(begun or "assistant")
        given, most = (build_sampling(profile), self.state.attempt, allowed), profile.max_new_tokens
        if reply is not None:
            most = len(reply.ids) + (most if reply.finish is None else 0)
        generation = Generation(
            self.engine,
            ForcedPrefixSampler(reply.ids, *given) if reply else Sampler(*given),
            turn.ref,
            stop_ids=self.stop_ids,
            max_new_tokens=most,
            closing_tokens=len(closing),
            lookup=PromptLookup() if profile.lookup else None,
        )
        opened = OpenReply(
            turn,
            generation,
            self.template.reply_stream(),
            closing,
            self._end_ids,
            stops=interrupted,
            loops=LoopCheck() if profile.stop_loops and not (reply or allowed) else None,
            finish=reply.finish if reply else None,
            history=history,
            can_go_on=has_archive,
        )
        self.history = history
        return opened

    def score_continuations(self, replies: Sequence[str]) -> tuple[ContinuationScore, ...]:
        """The log-probabilities of the tokens of each of `replies`; for "", of the end tokens."""
        template, header = self.template, self.state.reply_header
        ids = [template.assistant_turn(reply, header).ids or template.closing for reply in replies]
        return score_continuations(self.engine.reader, ids)

    def _open_turn(self, turn: str | TurnStats) -> OpenTurn:
        """Continue a turn, or begin one of this role."""
        stats = self.state.begin(turn) if isinstance(turn, str) else turn
        return OpenTurn(self.state, self.engine, self._events, stats, self.profile.evict_thinking)

    def _read_pending(self) -> list[Event]:
        """Read the pending ids of the template that end a round without a whole reply."""
        return self._open_turn(TurnStats(self.state.last_turn, "")).read_pending()

    def _note_undo_point(self, text: str) -> None:
        point = UndoPoint.now(self.state, self.engine, text, self.profile.pin_system)
        depth = undo_depth(self.profile.archive != "off", self.engine.cache.state_nbytes)
        self.history.messages = [*self.history.messages, point][-depth:]


def build_sampling(profile: Profile) -> Sampling:
    return Sampling(**{field.name: getattr(profile, field.name) for field in fields(Sampling)})
