"""Changes the settings or the model of a running chat: `/set`, `/policy`, `/model` and others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sirchat.chat.events import Event, Evicted, Notice, Pinned, Restored, Switched, TurnDone
from sirchat.chat.model_defaults import SAMPLING_PARAMETERS, sampling_in_words, with_model_defaults
from sirchat.chat.rereading import pinned_text, read_again, repinned_note
from sirchat.chat.session import Session
from sirchat.chat.settings import options_of
from sirchat.chat.targets import Target
from sirchat.chat.token_rows import without_template
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve
from sirchat.config.values import allowed_values, format_setting, parse_option, parse_value
from sirchat.errors import SettingError, did_you_mean, format_value
from sirchat.memory.policies import import_typed
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.listing import model_names
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel
from sirchat.text.json_schema import load_schema
from sirchat.ui.interrupt import InterruptFlag
from sirchat.ui.screen import Screen
from sirchat.ui.status import loading_bar
from sirchat.ui.text import displayable_line, pluralize, shorten

if TYPE_CHECKING:  # loads the prompt, which a program in a pipe does not need
    from sirchat.ui.saved_chat import SavedChat

# Settings that can change which tokens are held; after a change, the evictions are reported.
_CACHE_SETTINGS = {
    *("policy", "policy_options", "budget", "sinks", "recent", "decay"),
    *("system", "pin_system", "protect", "evict", "recall", "recall_n"),
}

_MAX_PINNED_CHARS = 300  # shown of what was pinned or restored
_WHOSE = {"user": "of yours", "assistant": "of the model's", "system": "of the system"}


class Switching:
    """Changes the settings and pins of a chat, and prints what has changed."""

    def __init__(self, session: Session, screen: Screen) -> None:
        self._session = session
        self._screen = screen

    def change_setting(self, source: str, name: str, text: str) -> None:
        """Set a setting or an option of the policy to `text`; "": print its value."""
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
            unchanged = f"{name} is already {format_setting(value)}"
            self._switch_settings(source, unchanged, **{name: value})

    def change_policy(self, name: str, options: list[str]) -> None:
        """Switch to an eviction policy, with options as `NAME=VALUE`."""
        import_typed(name)
        updates: dict[str, object] = {"policy": name}
        if options:
            updates["policy_options"] = parse_value("policy_options", ",".join(options))
        self._switch_settings("/policy", f"policy is already {name}", **updates)

    def restore(self, target: Target, *, context_tokens: int = 0) -> None:
        """Restore `target` for the next message, with `context_tokens` on each side."""
        session = self._session
        held_before = set(session.ledger.held_positions.tolist())
        for event in session.restore(target, context_tokens):
            self._print_event(event)
        held = set(session.ledger.held_positions.tolist())
        positions = session.state.restored_by_user
        num_restored = len((held - held_before).intersection(positions))
        how = "restored" if num_restored else "held already, and stays"
        self._screen.note(f"{how} for your next message: “{self._text_of(positions)}”")
        size = pluralize(len(positions), "token")
        if num_restored:
            size += f", {num_restored:,} of them were evicted"
        if num_set_aside := len(held_before - held):
            size += f"; {num_set_aside:,} stepped aside until it is answered"
        self._screen.note(f"{size}; {_describe_held(session)}; /pin keeps words")

    def _text_of(self, positions: Sequence[int]) -> str:
        spans = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        texts = ["".join(row.text for row in self._session.tokens(list(s))) for s in spans]
        text = " … ".join(text.strip(" \n\ufffd") for text in texts)  # half a character
        return shorten(text, _MAX_PINNED_CHARS)

    def _by_message(self, positions: Sequence[int]) -> dict[tuple[int, str], list[int]]:
        """The positions of each message, by the index and the role of its turn."""
        session, turns = self._session, self._session.ledger.column("turn")[positions].tolist()
        prompt_end = session.snapshot(strongest=0).prompt  # of what the chat template adds
        messages = dict[tuple[int, str], list[int]]()
        for position, turn in zip(positions, turns, strict=True):
            role = "system" if position < prompt_end else session.state.roles[turn]
            messages.setdefault((turn, role), []).append(position)
        return messages

    def pin(self, target: Target) -> None:
        """Pin the tokens of `target` (words, or a turn), and say what this has changed."""
        changed, num_evicted, restored = self._set_pinned(target, is_pinned=True)
        num_restored = sum("pinned" in row.flags for row in self._session.tokens(restored))
        if not changed:
            parts = ["all of this is pinned already"]
        else:
            self._screen.note(f"pinned: “{self._text_of(changed)}”")
            size = pluralize(len(changed), "token")
            parts = [f"{size}, {num_restored:,} of them restored" if num_restored else size]
        if num_others := len(restored) - num_restored:
            reason = f"as policy {self._session.profile.policy} fills the budget anew"
            parts.append(f"{pluralize(num_others, 'other')} restored, {reason}")
        if num_evicted:
            parts.append(f"{num_evicted:,} evicted to make room")
        self._screen.note("; ".join([*parts, _describe_held(self._session)]))

    def show_pins(self) -> None:
        """List the pinned text by messages, and its tokens."""
        session, pinned = self._session, self._session.ledger.pinned_positions.tolist()
        for (turn, role), at in self._by_message(pinned).items():
            message = f"turn {turn}, {_WHOSE.get(role, role)}, {pluralize(len(at), 'token')}"
            said = [row.position for row in without_template(session.tokens(at))]
            self._screen.note(f"{message}: “{self._text_of(said or at)}”")
        total = f"{pluralize(len(pinned), 'token')} pinned; /unpin TEXT lets go"
        if not session.engine.settings.policy.honours_pins:
            total += f"; but policy {displayable_line(session.profile.policy)} ignores pins"
        self._screen.note(total if pinned else "nothing is pinned; /pin TEXT keeps words")

    def unpin(self, target: Target) -> None:
        """Unpin the tokens of `target` (words, or a turn), and say what this has changed."""
        changed, num_evicted, restored = self._set_pinned(target, is_pinned=False)
        size = pluralize(len(changed), "token")
        unpinned = f"{size} no longer pinned: “{self._text_of(changed)}”" if changed else ""
        self._screen.note(unpinned or "nothing of this was pinned")
        self._screen.note(_describe_moved_tokens(num_evicted, len(restored), self._session))

    def _set_pinned(self, target: Target, *, is_pinned: bool) -> tuple[list[int], int, list[int]]:
        """Returns positions that changed, the number of evicted tokens, and restored positions."""
        num_evicted, restored, ledger = 0, list[int](), self._session.ledger
        pinned_before = set(ledger.pinned_positions)
        for event in self._session.pin(target, is_pinned):
            if isinstance(event, Evicted):
                num_evicted += len(event.positions)
            elif isinstance(event, Restored):
                restored += event.positions
            elif not isinstance(event, Pinned):
                self._print_event(event)
        return sorted(pinned_before ^ set(ledger.pinned_positions)), num_evicted, restored

    def describe(self, name: str) -> str:
        """The value of a setting or policy option, what it means, and the allowed values."""
        profile = self._session.profile
        self._check_name(name)
        if name in Profile.model_fields:
            meaning = Profile.model_fields[name].description
            value = sampling_in_words(profile).get(name) or self._describe_value(name)
            allowed = ", ".join(allowed_values(name))
            return f"{name} is {value}: {meaning}{f' Allowed: {allowed}.' if allowed else ''}"
        option = profile.policy_options.get(name, "at its default")
        return f"{name} is {format_setting(option)}: an option of policy {profile.policy}"

    def _describe_value(self, name: str) -> str:
        """A setting's value in words; for `recall` also whether an encoder is missing."""
        value = format_setting(getattr(self._session.profile, name))
        if name == "recall" and value == BEST_RETRIEVER and not self._session.recall.by_meaning:
            now, yet = ("for now ", " yet") if self._session.profile.learn_encoder else ("", "")
            return f"{value}, {now}by words (this model has no encoder{yet})"
        return value

    def _check_name(self, name: str) -> None:
        options = options_of(self._session.profile.policy)
        known = [*Profile.model_fields, *(option.name for option in options)]
        if name not in known:
            hint = did_you_mean(name, known) or "/show lists all settings"
            raise SettingError(f"there is no setting {format_value(name)}", hint=hint)

    def _switch_settings(self, source: str, unchanged_note: str, **updates: object) -> None:
        """Change the settings; print what has changed, or else `unchanged_note`."""
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
    old, new = (shorten(format_setting(value), 60) for value in (event.old, event.new))
    return f"{event.what}: {old} -> {new}"


def describe_switch(events: Sequence[Event], session: Session, unchanged_note: str) -> str:
    """Say how many tokens a switch moved, by its events; "" for settings that move none."""
    switched = [event for event in events if isinstance(event, Switched)]
    if not switched:
        return unchanged_note
    if _CACHE_SETTINGS.isdisjoint(event.what for event in switched):
        return ""
    evicted = sum(len(event.positions) for event in events if isinstance(event, Evicted))
    return _describe_moved_tokens(evicted, sum(event.restored for event in switched), session)


def _describe_moved_tokens(num_evicted: int, num_restored: int, session: Session) -> str:
    evicted = f"{num_evicted:,} evicted" if num_evicted else "nothing evicted"
    restored = f", {num_restored:,} restored" if num_restored else ""
    return f"{evicted}{restored}, cache {_describe_held(session)}"


def _describe_held(session: Session) -> str:
    return f"holds {session.resident:,}/{session.budget:,}"


def show_models(session: Session, screen: Screen) -> None:
    """Print the names of the model in use and of the others on this machine."""
    name = session.model.name
    others = ", ".join(other for other in model_names() if other != name)
    screen.note(f"model is {name}; other models here: {others}; to get more: sirchat models pull")


def switch_model(session: Session, name: str, screen: Screen, saved_chat: SavedChat) -> None:
    """Load a model, and let `saved_chat` go on with a session in which it has read the chat.

    Raises SirchatError, with nothing changed, if it can't be loaded or can't hold the chat.
    """
    if name == session.model.name:
        screen.note(f"model is already {name}")
        return
    with loading_bar(screen, name) as report:
        model = load_model_of(session.profile.model_copy(update={"model": name}), progress=report)
        new = Session(model, _profile_for(model, name, session))
        pins, unpinned = pinned_text(session), session.state.unpinned_sentences
        read_again(new, session.turns, pins, unpinned, report)
    with InterruptFlag():  # Ctrl-C does not stop it halfway
        saved_chat.replace_session(new)
    screen.note(
        f"the model is now {new.model.name}; it read {new.seen:,} tokens, "
        f"the cache {_describe_held(new)}"
    )
    screen.note(repinned_note(new))
    for event in new.opening_events():
        if isinstance(event, Notice):
            screen.note(event.text)
    screen.note(f"/model {session.model.name} goes back")


def _profile_for(model: LoadedModel, name: str, session: Session) -> Profile:
    """The chat's settings, with the new model's defaults in place of the old model's."""
    profile, updates = session.profile, dict[str, Any](model=name)
    origins = dict[str, str]()
    from_user = resolve(None, {}, os.environ)
    old, new = (with_model_defaults(from_user, m) for m in (session.model, model))
    for group in (("budget",), SAMPLING_PARAMETERS):
        if all(getattr(profile, key) == getattr(old, key) for key in group):
            updates |= {key: getattr(new, key) for key in group}
            origins |= {key: new.origin(key) for key in group}
    return profile.model_copy(update=updates).with_origins(origins)
