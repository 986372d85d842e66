"""Completes what the user types at the prompt: commands and their values, and names of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from sirchat.chat.model_defaults import SAMPLING_PARAMETERS
from sirchat.chat.session import Session
from sirchat.chat.settings import options_of
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.config.profile_files import list_profiles
from sirchat.config.values import allowed_values, policy_choices
from sirchat.errors import SirchatError
from sirchat.memory.policies import policy_class
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.listing import model_names
from sirchat.paths import sessions_dir
from sirchat.recall.retrievers import retriever
from sirchat.saved.session_list import MAX_LISTED, list_sessions
from sirchat.ui.attaching import complete_path, unfinished_path
from sirchat.ui.commands import Commands
from sirchat.ui.exporting import EXPORT_FORMATS
from sirchat.ui.text import class_summary, displayable_line, shorten

# A value that completion offers, and its meaning, which is shown as help.
Suggestion = tuple[str, str]

# A word that can follow a command, such as `on` in its arguments `[NAME|on NAME]`.
_WORD = re.compile(r"(?<![A-Za-z-])(?:--)?[a-z][a-z0-9]*")
_PATHS = f"read|export +(?:{'|'.join(EXPORT_FORMATS)})|set +(?:format|json_schema)"
_BEFORE_PATH = re.compile(rf"/(?:{_PATHS}) +")


class SlashCompleter(Completer):
    """Completes slash commands, their arguments, and names of files after `@` and commands."""

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._profiles: list[Suggestion] = []  # read when the user types that command
        self._saved: list[Suggestion] = []  # likewise
        self._models: list[str] = []  # likewise

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        path = unfinished_path(text, _BEFORE_PATH)
        if path is not None:
            yield from complete_path(path, event)
            return
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        *before, word = text[1:].split(" ")
        if before == ["profile"] and not (word and self._profiles):
            infos = list_profiles()
            self._profiles = [(info.name, displayable_line(info.description)) for info in infos]
        if before[:1] in (["load"], ["switch"]):
            before, word = before[:1], " ".join([*before[1:], word])  # a name may be several words
            self._saved = self._saved if word and self._saved else list(_saved_chats())
        if before == ["model"] and not (word and self._models):
            self._models = model_names()
        for value, meaning in self._choices(before):
            if value.startswith(word):
                yield Completion(
                    value, -len(word), display=displayable_line(value), display_meta=meaning
                )

    def _choices(self, before: list[str]) -> Iterator[Suggestion]:
        """Yield each value that can follow the words `before` in a command line, with its help."""
        before = [word for word in before if word]
        match before:
            case [] | ["help" | "?"]:
                yield from ((name, Commands.help_of(name)[1]) for name in Commands.names())
                if before:
                    yield "all", "what each command does, in a line"
            case ["policy"]:
                yield from self._policies
            case ["policy", name, *_]:
                yield from ((f"{option}=", help) for option, help in _options(name))
            case ["profile"]:
                yield from self._profiles
            case ["model"]:
                yield from ((name, "") for name in self._models)
            case ["load" | "switch"]:
                yield from self._saved
            case ["retry"]:
                yield from (("full", ""), ("recall", ""))
                for name in SAMPLING_PARAMETERS:
                    yield f"--{name.replace('_', '-')}", _description(name)
            case ["show" | "set"]:
                yield from self._settings()
            case ["recall" as name] | ["set", name]:
                yield from self._values(name)
            case [name] if name in Commands.names():
                yield from ((word, "") for word in _WORD.findall(Commands.help_of(name)[0]))

    @cached_property
    def _policies(self) -> list[Suggestion]:
        """Name and help of each eviction policy; cached, because the search for plugins is slow."""
        return [(name, class_summary(policy_class, name)) for name in policy_choices()]

    def _settings(self) -> Iterator[Suggestion]:
        yield from (
            (name, _description(name))
            for name in Profile.model_fields
            if name not in FIXED_SETTINGS
        )
        yield from _options(self._session().profile.policy)

    def _values(self, setting: str) -> Iterator[Suggestion]:
        if setting == "policy":
            yield from self._policies
        elif setting in Profile.model_fields:
            yield from ((value, _value_help(setting, value)) for value in allowed_values(setting))


def _saved_chats() -> Iterator[Suggestion]:
    """Yield what can follow `/load`, with first messages; chats that are open are left out."""
    yield "last", "the chat that was saved last"
    listed = list_sessions(sessions_dir(), MAX_LISTED).sessions
    sessions = [session for session in listed if not session.in_use]
    for session in sessions:
        if session.name and displayable_line(session.name) == session.name:
            yield session.name, shorten(displayable_line(session.first_message), 60)
    for session in sessions:
        yield session.id, shorten(displayable_line(session.first_message), 60)


def _description(setting: str) -> str:
    return Profile.model_fields[setting].description or ""


def _value_help(setting: str, value: str) -> str:
    if setting != "recall" or value == "off":
        return ""
    if value == "on":
        return f"the best retriever: {BEST_RETRIEVER}"
    return class_summary(retriever, value)


def _options(policy: str) -> Iterator[Suggestion]:
    try:
        options = options_of(policy)
    except SirchatError:
        return
    for option in options:
        yield option.name, displayable_line(str(option.metadata.get("help", "")))
