"""Changes the settings or the model of a running chat: `/set`, `/policy`, `/model` and others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sirchat.chat.events import Event, Evicted, Notice, Pinned, Restored, Switched, TurnDone
from sirchat.chat.model_defaults import (
    SAMPLING_PARAMETERS,
    sampling_in_words,
    with_model_defaults,
)
from sirchat.chat.rereading import pinned_text, read_again, repinned_note
from sirchat.chat.session import Session
from sirchat.chat.settings import hint_for_fixed, options_of
from sirchat.chat.targets import Target
from sirchat.config.profile import FIXED, Profile
from sirchat.config.profile_files import list_profiles, load_profile, resolve
from sirchat.config.values import allowed_in_words, as_typed, parse_option, parse_value
from sirchat.errors import SettingError, UsageError, format_value, nearest
from sirchat.memory.free_memory import trim_memory
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Role
from sirchat.memory.policies import import_typed
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.listing import model_names
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel
from sirchat.models.progress import Progress
from sirchat.text.json_schema import load_schema
from sirchat.text.times import TimeRange, ago
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.screen import Screen
from sirchat.ui.status import loading_bar
from sirchat.ui.text import counted, shorten

if TYPE_CHECKING:  # loads the prompt, which a program in a pipe does not need
    from sirchat.ui.saved_chat import SavedChat

# Settings that `/profile` does not change unless the profile names them.
_SCREEN_SETTINGS = ("panel", "theme", "editing", "bell", "markdown", "thinking")

# Settings that can change which tokens are held; after a change, the evictions are reported.
_CACHE_SETTINGS = {
    *("policy", "policy_options", "budget", "sinks", "recent", "decay"),
    *("system", "pin_system", "protect", "evict", "recall", "recall_n"),
}

_MAX_PINNED_CHARS = 300  # characters of what was pinned that are shown
# Settings that `/model` changes to the new model's default, if they have the old one's default.
_SETTINGS_OF_MODEL = ("budget", *SAMPLING_PARAMETERS)


class Switching:
    """Changes the settings and pins of a chat, as commands ask, and prints what has changed.

    `trusted_policies` are the `module:Class` policies that profiles may name.
    """

    def __init__(
        self, session: Session, screen: Screen, trusted_policies: Collection[str] = ()
    ) -> None:
        self._trusted = trusted_policies
        self._session = session
        self._screen = screen

    def change_setting(self, source: str, name: str, text: str) -> None:
        """Set a setting or policy option to the value in `text`, or print its value if "" is given.

        A SettingError names the command, `source`.
        """
        profile = self._session.profile
        self._check_name(name)
        if not text:
            self._screen.note(f"{name} is {self._describe_value(name)}")
        elif name not in Profile.model_fields:
            options = {**profile.policy_options, name: parse_option(text)}
            self._switch_settings(source, f"{name} is already {text}", policy_options=options)
        else:
            value = parse_value(name, text)
            if name == "policy":
                import_typed(str(value))
            self._switch_settings(source, f"{name} is already {as_typed(value)}", **{name: value})

    def change_policy(self, name: str, options: list[str]) -> None:
        """Switch to an eviction policy; each of its `options` is a text `NAME=VALUE`."""
        import_typed(name)
        updates: dict[str, object] = {"policy": name}
        if options:
            updates["policy_options"] = parse_value("policy_options", ",".join(options))
        self._switch_settings("/policy", f"policy is already {name}", **updates)

    def apply_profile(self, name: str) -> None:
        """Apply a profile, or print the names of all if "" is given.

        What it does not name gets the user's default; settings of the screen stay.
        """
        if not name:
            names = ", ".join(profile.name for profile in list_profiles())
            self._screen.note(f"profiles: {names}")
            return
        current = self._session.profile
        trusted_policies = [*self._trusted, current.policy]
        named, profile = (
            load_profile(name, trusted_policies),
            resolve(name, {"trust_policy": trusted_policies}, {}),
        )
        kept = {*FIXED, *(key for key in _SCREEN_SETTINGS if key not in named)}
        values = {k: v for k, v in profile.model_dump().items() if k not in kept}
        self._switch_settings(
            "/profile", f"all settings already have the values of profile {name}", **values
        )
        for key in FIXED:
            old, new = getattr(current, key), getattr(profile, key)
            if key in named and key != "description" and old != new:
                self._screen.note(
                    f"{key} stays {as_typed(old)}, not {as_typed(new)}: {hint_for_fixed(key, new)}"
                )

    def restore(self, target: Target, *, context_tokens: int = 0) -> None:
        """Restore the tokens of `target`, and `context_tokens` on each side, for the next message."""
        session = self._session
        before = set(session.ledger.held_positions.tolist())
        for event in session.restore(target, context_tokens):
            self._print_event(event)
        now, asked = set(session.ledger.held_positions.tolist()), session.state.asked
        num_restored, aside = len((now - before).intersection(asked)), len(before - now)
        how = "restored" if num_restored else "held already, and stays"
        self._screen.note(f"{how} for your next message: “{self._text_of(asked)}”")
        evicted = f", {num_restored:,} of them were evicted" if num_restored else ""
        price = counted(len(asked), "token") + evicted
        who = "1 other steps" if aside == 1 else f"{aside:,} others step"
        others = f"; {who} aside until it is answered" if aside else ""
        held = f"holds {session.resident:,}/{session.budget:,}; /pin keeps words"
        self._screen.note(f"{price}{others}; {held}")

    def _text_of(self, positions: Sequence[int]) -> str:
        spans = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        texts = ["".join(row.text for row in self._session.tokens(list(s))) for s in spans]
        text = " … ".join(text.strip(" \n\ufffd") for text in texts)  # half a character
        return shorten(text, _MAX_PINNED_CHARS)

    def _describe_messages(self, positions: Sequence[int]) -> str:
        """Of how many messages, and whose, the tokens at these positions are."""
        session, turns = self._session, self._session.ledger.column("turn")[positions].tolist()
        own = session.snapshot(strongest=0).prompt  # the end of what the chat template adds
        messages = {
            (turn, "system" if position < own else session.state.roles[turn])
            for position, turn in zip(positions, turns, strict=True)
        }
        roles = Counter(role for _, role in sorted(messages))
        whose = {"user": "of yours", "assistant": "of the model's", "system": "of the system"}
        return " and ".join(
            f"{counted(count, 'message')} {whose.get(role, f'({role})')}"
            for role, count in roles.items()
        )

    def pin(self, target: Target, *, pinned: bool) -> None:
        """Pin or unpin the tokens of `target` (words, or a turn), and say what this has changed."""
        evicted, restored = 0, list[int]()
        session, ledger = self._session, self._session.ledger
        before = set(ledger.pinned_positions)
        for event in session.pin(target, pinned):
            if isinstance(event, Evicted):
                evicted += len(event.positions)
            elif isinstance(event, Restored):
                restored += event.positions
            elif not isinstance(event, Pinned):
                self._print_event(event)
        changed = sorted(before ^ set(ledger.pinned_positions))  # others were as they are already
        count = len(changed)
        if not pinned:
            unpinned = f"{counted(count, 'token')} no longer pinned"
            self._screen.note(unpinned if count else "nothing of this was pinned")
            self._screen.note(_describe_moved_tokens(evicted, len(restored), self._session))
            return
        num_restored = sum("pinned" in row.flags for row in self._session.tokens(restored))
        if not count:
            price = ["all of this is pinned already"]
        else:
            self._screen.note(f"pinned: “{self._text_of(changed)}”")
            price = [
                counted(count, "token")
                + (f", {num_restored:,} of them restored" if num_restored else "")
            ]
            price.append(f"in {self._describe_messages(changed)}")
        if others := len(restored) - num_restored:
            why = f"as policy {session.profile.policy} fills the budget anew"
            price.append(f"{counted(others, 'other')} restored, {why}")
        if evicted:
            price.append(f"{evicted:,} evicted to make room")
        held = f"holds {self._session.resident:,}/{self._session.budget:,}"
        self._screen.note("; ".join([*price, held]))

    def restore_time(self, asked: TimeRange) -> None:
        """Restore what the user said at a time for the next message, and say what that was.

        Of a long time, only the newest messages that take a quarter of the budget.
        """
        session, room = self._session, self._session.budget // 4
        chosen = dict[int, Positions]()
        for index in session.state.user_turns_at(asked):
            column = session.ledger.column
            said = np.flatnonzero((column("turn") == index) & (column("role") == Role.USER))
            if len(said) and room > 0:  # of a message that is too long, its end
                chosen[index] = said[-room:]
                room -= len(said)
        if not chosen:
            raise UsageError(f"you said nothing at this time: {asked.words}")
        for index in sorted(chosen):
            when = ago(session.turns[index].time, time()) or f"turn {index}"
            self._screen.note(f"{when}: {shorten(session.turns[index].text, 200)}")
        self.restore(np.sort(np.concatenate(list(chosen.values()))))

    def describe(self, name: str) -> str:
        """The value of a setting or policy option, what it means, and the allowed values."""
        profile = self._session.profile
        self._check_name(name)
        if name in Profile.model_fields:
            meaning = Profile.model_fields[name].description
            value = sampling_in_words(profile).get(name) or self._describe_value(name)
            return f"{name} is {value}: {meaning} Allowed: {allowed_in_words(name)}."
        option = profile.policy_options.get(name, "at its default")
        return f"{name} is {as_typed(option)}: an option of policy {profile.policy}"

    def _describe_value(self, name: str) -> str:
        """A setting's value; of `recall` also that it can't go by meaning, if so."""
        value = as_typed(getattr(self._session.profile, name))
        if name == "recall" and value == BEST_RETRIEVER and not self._session.recall.by_meaning:
            return f"{value} (by words: no encoder for this model yet)"
        return value

    def _check_name(self, name: str) -> None:
        options = options_of(self._session.profile.policy)
        known = [*Profile.model_fields, *(option.name for option in options)]
        if name not in known:
            hint = nearest(name, known) or "/show lists all settings"
            raise SettingError(f"there is no setting {format_value(name)}", hint=hint)

    def _switch_settings(self, source: str, unchanged_note: str, **updates: object) -> None:
        """Change the settings; print what has changed, or `unchanged_note` if nothing has changed."""
        load_schema(str(updates.get("json_schema", "off")))  # raises SettingError
        with InterruptFlag() as interrupted:
            events = self._session.switch(source, interrupted, **updates)
        for event in events:
            self._print_event(event)
        self._screen.use_theme(self._session.profile.theme)
        self._screen.note(describe_switch(events, self._session, unchanged_note))

    def _print_event(self, event: Event) -> None:
        if isinstance(event, Switched):
            self._screen.note(describe_change(replace(event, new=self._describe_value(event.what))))
        elif isinstance(event, TurnDone):
            self._screen.note(f"the system prompt was read: {event.tokens_in:,} tokens")
        elif isinstance(event, Notice):
            self._screen.note(event.text)


def describe_change(event: Switched) -> str:
    """A changed setting in words: its name, its old and its new value."""
    old, new = (shorten(as_typed(value), 60) for value in (event.old, event.new))
    return f"{event.what}: {old} -> {new}"


def describe_switch(events: Sequence[Event], session: Session, unchanged_note: str) -> str:
    """What a switch evicted and restored, if that was possible; `unchanged_note` if it changed nothing.

    `events` are those of the switch.
    """
    switched = [event for event in events if isinstance(event, Switched)]
    if not switched:
        return unchanged_note
    if _CACHE_SETTINGS.isdisjoint(event.what for event in switched):
        return ""
    evicted = sum(len(event.positions) for event in events if isinstance(event, Evicted))
    return _describe_moved_tokens(evicted, sum(event.restored for event in switched), session)


def _describe_moved_tokens(evicted: int, restored: int, session: Session) -> str:
    now = f"cache holds {session.resident:,}/{session.budget:,}"
    left = [f"{evicted:,} evicted" if evicted else "nothing evicted"]
    num_restored = [f"{restored:,} restored"] if restored else []
    return ", ".join([*left, *num_restored, now])


class ModelSwitching:
    """Changes the model of a chat.

    The session with the previous model stays in memory, for `/undo`, until the next message, or
    until something is reset or erased.
    """

    def __init__(
        self, screen: Screen, saved_chat: SavedChat, trusted_policies: Collection[str] = ()
    ) -> None:
        self._screen, self._saved_chat, self._trusted = screen, saved_chat, trusted_policies
        self._previous: _PreviousSession | None = None

    def show(self, session: Session) -> None:
        """Print the name of the model in use, and the names of the other models on this machine."""
        name = session.model.name
        others = ", ".join(other for other in model_names() if other != name)
        self._screen.note(
            f"model is {name}; other models here: {others}; to get more: sirchat models pull"
        )

    def switch(self, session: Session, name: str) -> Session | None:
        """Load a model, and return a new session in which it has read the chat; None if in use.

        Raises SirchatError, with nothing changed, if it can't be loaded or can't hold the chat.
        """
        if name == session.model.name:
            self._screen.note(f"model is already {name}")
            return None
        with loading_bar(self._screen, name) as report:
            model = self._load_model(name, session.profile, report)
            new = Session(model, self._adapt_profile(session, model, name))
            read_again(new, session.turns, pinned_text(session), session.state.unpinned, report)
        self._previous = _PreviousSession(session, new.profile, (new.epoch, new.erasures))
        self._replace_session(new)
        self._print_event(session, new)
        return new

    def restore_previous_session(self, session: Session) -> Session | None:
        """Return to the session from before the last change of the model, with later settings.

        None if there is none. Raises SettingError if it can't have one of these settings.
        """
        if self._previous is None:
            return None
        previous, at_first = self._previous.session, self._previous.profile.model_dump()
        now = session.profile.model_dump()
        changed = {k: v for k, v in now.items() if k not in FIXED and v != at_first[k]}
        if changed:
            previous.switch("/undo", **changed)
        self._replace_session(previous)
        self.drop_previous_session()
        self._screen.note(
            f"back to {previous.model.name}, with the chat as it was; "
            f"the cache holds {previous.resident:,}/{previous.budget:,}"
        )
        return previous

    def drop_previous_session(self) -> None:
        """Drop the session from before the last change of the model, and free its memory."""
        if self._previous is not None:
            self._previous = None
            trim_memory()

    def drop_outdated_session(self, session: Session) -> None:
        """Drop the previous session if the user has reset `session` or erased something from it."""
        if self._previous and self._previous.stamp != (session.epoch, session.erasures):
            self.drop_previous_session()

    def _load_model(self, name: str, profile: Profile, report: Progress | None) -> LoadedModel:
        if self._previous is not None and self._previous.session.model.name == name:
            return self._previous.session.model
        return load_model_of(profile.model_copy(update={"model": name}), progress=report)

    def _adapt_profile(self, session: Session, model: LoadedModel, name: str) -> Profile:
        """The chat's settings, with the new model's defaults in place of the old model's."""
        profile, updates = session.profile, dict[str, Any](model=name)
        origins = dict[str, str]()
        trusted_policies = [*self._trusted, profile.policy]
        given = resolve(None, {"trust_policy": trusted_policies}, os.environ)
        before, usual = (with_model_defaults(given, m) for m in (session.model, model))
        for group in (("budget",), SAMPLING_PARAMETERS):
            if all(getattr(profile, key) == getattr(before, key) for key in group):
                updates |= {key: getattr(usual, key) for key in group}
                origins |= {key: usual.origin(key) for key in group}
        return profile.model_copy(update=updates).with_origins(origins)

    def _replace_session(self, session: Session) -> None:
        with InterruptFlag():  # Ctrl-C does not stop it halfway
            self._saved_chat.replace_session(session)

    def _print_event(self, before: Session, now: Session) -> None:
        self._screen.note(
            f"the model is now {now.model.name}; it read {now.seen:,} tokens, "
            f"the cache holds {now.resident:,}/{now.budget:,}"
        )
        changed = [
            f"{key} {as_typed(old)} -> {as_typed(new)}"
            for key in _SETTINGS_OF_MODEL
            if (old := getattr(before.profile, key)) != (new := getattr(now.profile, key))
        ]
        if changed:
            self._screen.note(f"using {now.model.name}'s defaults: {', '.join(changed)}")
        self._screen.note(repinned_note(now))
        for event in now.opening_events():
            if isinstance(event, Notice):
                self._screen.note(event.text)
        previous = f"{before.model.name}, which stays in memory until the next message"
        self._screen.note(f"/undo goes back to {previous}")


@dataclass(frozen=True)
class _PreviousSession:
    """The session before the last change of the model, and how the new session began."""

    session: Session
    profile: Profile  # of the new session at its beginning
    stamp: tuple[int, int]  # resets and erasures of the new session at its beginning
