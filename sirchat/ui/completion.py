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
from sirchat.chat.summary import WAYS
from sirchat.config.profile import FIXED, Profile
from sirchat.config.profile_files import list_profiles
from sirchat.config.values import choices, policy_choices
from sirchat.errors import SirchatError
from sirchat.memory.policies import policy_class
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.listing import model_names
from sirchat.paths import sessions_dir
from sirchat.recall.retrievers import retriever
from sirchat.saved.session_list import newest_sessions
from sirchat.ui.attaching import complete_path, path_begun
from sirchat.ui.commands import Commands
from sirchat.ui.exporting import FORMATS
from sirchat.ui.text import displayable_line, shorten

Selection = tuple[str, str]
"""A value that completion offers, and its meaning, which is shown as help."""

_PANEL = (
    ("full", "show all held tokens now"),
    ("live", "show some held tokens while the model writes"),
    ("turn", "show some held tokens after each reply"),
    ("on", "another name for live"),
    ("off", "never show the panel"),
)
_TOKENS = (
    ("all", "all held tokens"),
    ("turn", "the held tokens of one message: turn N"),
    ("top", "the held tokens of highest score: top N"),
    ("next", "the tokens that will be evicted next"),
)
_RETRIES = (
    ("full", "once with everything held"),
    ("recall", "once with recall on"),
)
_COPIED = (
    ("code", "the last code block of the last reply"),
    ("--osc52", "let the terminal copy; also works over ssh"),
)
_BEFORE_PATH = re.compile(rf"/(?:read|export +(?:{'|'.join(FORMATS)})) +")
_TARGETS = (("last", "your last message"), ("turn", "all of one turn: turn N"))


class SlashCompleter(Completer):
    """Completes slash commands, their arguments, and file names after `@`, `/read` and `/export`.

    `session` is a function that returns the chat's current session.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._profiles: list[Selection] = []  # read when the user types that command
        self._saved: list[Selection] = []  # likewise
        self._models: list[str] = []  # likewise

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        path = path_begun(text, _BEFORE_PATH)
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

    def _choices(self, before: list[str]) -> Iterator[Selection]:
        """Yield each value that can follow the words `before` in a command line, with its help.

        The first of these words is the command, without the slash. If there are no words, the
        values are the names of all commands.
        """
        before = [word for word in before if word]
        match before:
            case []:
                yield from ((name, Commands.help_of(name)[1]) for name in Commands.names())
            case ["help" | "?"]:
                yield from ((name, Commands.help_of(name)[1]) for name in Commands.names())
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
                yield from _RETRIES
                yield from ((f"--{name.replace('_', '-')}", help) for name, help in _drawing())
            case ["summarize"]:
                yield from WAYS.items()
            case ["panel"]:
                yield from _PANEL
            case ["tokens"]:
                yield from _TOKENS
            case ["copy"]:
                yield from _COPIED
            case ["export"]:
                yield from FORMATS.items()
            case ["pin" | "unpin" | "why" | "erase"]:
                yield from _TARGETS
            case ["show" | "set"]:
                yield from self._settings()
            case ["recall" | "decay" | "thinking" as name] | ["set", name]:
                yield from self._values(name)

    @cached_property
    def _policies(self) -> list[Selection]:
        """Name and help of each eviction policy; cached, because the search for plugins is slow."""
        return [(name, _class_help(policy_class, name)) for name in policy_choices()]

    def _settings(self) -> Iterator[Selection]:
        for name, field in Profile.model_fields.items():
            if name not in FIXED:
                yield name, field.description or ""
        yield from _options(self._session().profile.policy)

    def _values(self, setting: str) -> Iterator[Selection]:
        if setting == "policy":
            yield from self._policies
        elif setting in Profile.model_fields:
            yield from ((value, _value_help(setting, value)) for value in choices(setting))


def _saved_chats() -> Iterator[Selection]:
    """Yield what can follow `/load`: `last`, then the names and ids of saved chats, newest first.

    Each name and id comes with the first message of its chat. Chats that are open are left out.
    """
    yield "last", "the chat that was saved last"
    listed = newest_sessions(sessions_dir())[0].sessions
    sessions = [one for one in listed if not one.in_use]
    for one in sessions:
        if one.name and displayable_line(one.name) == one.name:
            yield one.name, shorten(displayable_line(one.first), 60)
    for one in sessions:
        yield one.id, shorten(displayable_line(one.first), 60)


def _drawing() -> Iterator[Selection]:
    """Yield pairs of name and help for the settings of sampling, such as the temperature."""
    for name in SAMPLING_PARAMETERS:
        yield name, Profile.model_fields[name].description or ""


def _value_help(setting: str, value: str) -> str:
    if setting != "recall" or value == "off":
        return ""
    if value == "on":
        return f"the best retriever: {BEST_RETRIEVER}"
    return _class_help(retriever, value)


def _class_help(find: Callable[[str], object], name: str) -> str:
    """The help of the policy or retriever `name`: the first paragraph of its class's docstring.

    `find` returns the class for a name. If `find` fails, the text of its error is returned.
    """
    try:
        text = find(name).__doc__ or ""
    except SirchatError as error:
        text = str(error)
    return displayable_line(text.strip().split("\n\n")[0])


def _options(policy: str) -> Iterator[Selection]:
    """Yield pairs of name and help for the options of a policy, except `recent`.

    The option `recent` is a setting of its own. Nothing is yielded if the policy can't be found.
    """
    try:
        options = options_of(policy)
    except SirchatError:
        return
    for option in options:
        yield option.name, displayable_line(str(option.metadata.get("help", "")))
