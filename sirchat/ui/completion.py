"""Completes commands, their arguments, and names of files at the prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from sirchat.chat.session import Session
from sirchat.chat.settings import options_of
from sirchat.config.profile import FIXED_SETTINGS, Profile
from sirchat.config.values import allowed_values, policy_choices
from sirchat.errors import SirchatError
from sirchat.memory.policies import policy_class
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.listing import model_names
from sirchat.paths import sessions_dir
from sirchat.recall.retrievers import retriever
from sirchat.saved.session_list import list_sessions
from sirchat.ui.attaching import complete_path, unfinished_path
from sirchat.ui.commands import Commands
from sirchat.ui.exporting import EXPORT_FORMATS
from sirchat.ui.text import class_summary, displayable_line, shorten

# A word that completion offers, and its help.
Suggestion = tuple[str, str]

# A word that can follow a command, such as `on` in its arguments `[NAME|on NAME]`.
_ARGUMENT_WORD = re.compile(r"(?<![A-Za-z-])(?:--)?[a-z][a-z0-9]*")
_PATH_COMMAND = re.compile(  # the start of a command whose argument is a path
    rf"/(?:export +(?:{'|'.join(EXPORT_FORMATS)})|set +(?:format|json_schema)) +"
)


_MAX_SHOWN_CHARS = 60


class SlashCompleter(Completer):
    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._lists: dict[str, list[Suggestion]] = {}  # what is on disk, by command

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        path = unfinished_path(text, _PATH_COMMAND)
        if path is not None:
            yield from complete_path(path, event)
            return
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        *words, word = text[1:].split(" ")
        words = list(filter(None, words))
        if words and words[0] == "load":  # several words are one
            words, word = words[:1], text.partition(" ")[2].lstrip()
        suggestions = self._suggest(words, is_begun=bool(word))
        for value, meaning in suggestions:
            if value.casefold().startswith(word.casefold()):
                shown = shorten(displayable_line(value), _MAX_SHOWN_CHARS)
                yield Completion(value, -len(word), display=shown, display_meta=meaning)

    def _suggest(self, words: list[str], *, is_begun: bool) -> Iterator[Suggestion]:
        """Yield what can follow `words` in a command; `is_begun`: a part of it is typed already."""
        match words:
            case [] | ["help" | "?"]:
                yield from ((name, Commands.help_of(name)[1]) for name in Commands.names())
                if words:
                    yield "all", "what each command does, in a line"
            case ["model" | "load" as command]:
                if not is_begun or command not in self._lists:
                    models = ((name, "") for name in model_names())
                    self._lists[command] = list(
                        models if command == "model" else _suggest_saved_chats()
                    )
                yield from self._lists[command]
            case ["policy"]:
                yield from self._policies
            case ["policy", name, *_]:
                yield from ((f"{option}=", help) for option, help in _suggest_options(name))
            case ["retry"]:
                yield "full", ""
            case ["show" | "set"]:
                yield from self._suggest_settings()
            case ["recall" as name] | ["set", name]:
                yield from self._suggest_values(name)
            case [name] if name in Commands.names():
                arguments = Commands.help_of(name)[0]
                yield from ((word, "") for word in _ARGUMENT_WORD.findall(arguments))

    @cached_property
    def _policies(self) -> list[Suggestion]:
        """Name and help of each eviction policy; cached, as searching for plugins is slow."""
        return [(name, class_summary(policy_class, name)) for name in policy_choices()]

    def _suggest_settings(self) -> Iterator[Suggestion]:
        for name, field in Profile.model_fields.items():
            if name not in FIXED_SETTINGS:
                yield name, field.description or ""
        yield from _suggest_options(self._session().profile.policy)

    def _suggest_values(self, setting: str) -> Iterator[Suggestion]:
        if setting == "policy":
            yield from self._policies
        elif setting in Profile.model_fields:
            for value in allowed_values(setting):
                yield value, _describe_value(setting, value)


def _suggest_saved_chats() -> Iterator[Suggestion]:
    """Yield names and ids of saved chats that are not open, with their first messages."""
    yield "last", "the chat that was saved last"
    listing = list_sessions(sessions_dir())
    sessions = [session for session in listing.sessions if not session.in_use]
    for session in sessions:
        if session.name and displayable_line(session.name) == session.name:
            yield session.name, shorten(displayable_line(session.first_message), 60)
    for session in sessions:
        yield session.id, shorten(displayable_line(session.first_message), 60)


def _describe_value(setting: str, value: str) -> str:
    if setting != "recall" or value == "off":
        return ""
    if value == "on":
        return f"the best retriever: {BEST_RETRIEVER}"
    return class_summary(retriever, value)


def _suggest_options(policy: str) -> Iterator[Suggestion]:
    try:
        options = options_of(policy)
    except SirchatError:
        return
    for option in options:
        yield option.name, displayable_line(str(option.metadata.get("help", "")))
