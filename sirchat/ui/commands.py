"""The slash commands of a chat: methods of `Commands`, or settings of the same name.

What `/help` tells of each is in `help.yaml`. An unknown command is an error that names the nearest
one; it is never sent to the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import time
from typing import Any, Final

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.evicted_text import evicted_turns
from sirchat.chat.session import Session
from sirchat.chat.targets import without_quotes
from sirchat.config.values import format_number
from sirchat.errors import SettingError, UsageError, did_you_mean
from sirchat.memory.registry import RETRIEVERS
from sirchat.text.times import time_range
from sirchat.ui.attaching import attach_named_files, describe_size
from sirchat.ui.erasing import EraseCommand
from sirchat.ui.exporting import copy_reply, export_chat
from sirchat.ui.lists import ALSO_KEPT_NOTE, describe_memory, draw_policies, draw_settings
from sirchat.ui.panel import draw_full_panel
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.switching import ModelSwitching, Switching
from sirchat.ui.tables import (
    draw_evicted,
    draw_facts,
    draw_recalled_turns,
    draw_tokens,
)
from sirchat.ui.text import displayable, displayable_line, pluralize, shorten
from sirchat.ui.tool_use import run_tools_command
from sirchat.ui.turn_commands import Retry, parse_retry, undo
from sirchat.ui.typed_input import TypedHistory
from sirchat.ui.why import show_why

_AROUND = 12  # tokens before, and after, the words that `/recall WORDS` restores with them
_LONGEST = 40  # most characters shown of an unknown command

_ELSEWHERE = {  # commands that other programs have, and what does the same here
    **dict.fromkeys(("sessions", "chats", "list", "resume"), "/load lists the saved chats"),
    **dict.fromkeys(("delete", "rm"), "sirchat sessions rm ID deletes a saved chat"),
    "find": "/search WORDS finds messages of this chat, and other chats",
}
_ALIASES = {"?": "help", "quit": "exit", "bye": "exit", "regen": "retry"}
_FORMER = {"forget": "erase", "forgotten": "evicted"}  # they still work, but are not listed
_ALSO = {"format": "json_schema"}  # other names of settings; `--format` is that of a transcript

_MORE: Final = "/help COMMAND explains one of these, /help all tells what each does. "
_NAMES, _COLUMN = 16, 50  # cells: the names of commands; a column of groups and its gap
_MOST_COLUMNS = 3


@dataclass(frozen=True)
class Leave:
    """Asks the chat to end."""


@dataclass(frozen=True)
class Send:
    """Asks the chat to send the message `text` to the model."""

    text: str


@dataclass(frozen=True)
class Continue:
    """Asks the chat to go on with the last reply, which was cut."""


@dataclass(frozen=True)
class Edit:
    """Asks the chat to replace the user's last message by `text`; "" lets the user edit it."""

    text: str = ""


@dataclass(frozen=True)
class Summarize:
    """Asks the chat for a summary of itself."""


@dataclass(frozen=True)
class SwitchSession:
    """Asks the chat to go on with `session`: another chat, or the same chat in a new session."""

    session: Session
    is_other_chat: bool


# What a command asks the chat to do after the command has run.
Action = Leave | Send | Continue | Retry | Edit | Summarize | SwitchSession


class Commands:
    """The slash commands of one chat: `/NAME` is the method `do_NAME`, or changes that setting."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        history: TypedHistory,
        saved_chat: SavedChat,
        trusted_policies: Collection[str] = (),
        models: ModelSwitching | None = None,
    ) -> None:
        self._session = session
        self._models = models or ModelSwitching(screen, saved_chat, trusted_policies)
        self._history = history
        self._saved_chat = saved_chat
        self._screen = screen
        self._switching = Switching(session, screen, trusted_policies)
        self._erasing = EraseCommand(session, screen, history, saved_chat)

    @classmethod
    def names(cls) -> list[str]:
        """Names of all slash commands and of their aliases, without the slash."""
        return [*_help()["commands"], *_ALIASES]

    @classmethod
    def help_of(cls, name: str) -> tuple[str, str]:
        """The arguments of the command `name`, such as `[NAME]`, and what it does."""
        if name in _ALIASES:
            return "", f"the same as /{_ALIASES[name]}"
        told = _help()["commands"][name]
        return told.get("arguments", ""), told["does"]

    def run(self, line: str) -> Action | None:
        """Run the command `line`, with its slash; return what the chat must do next, or None."""
        word, rest = [*line[1:].split(None, 1), "", ""][:2]
        name, rest = self._known(word), rest.strip()
        needs = self.help_of(name)[0]
        if rest and not needs:
            raise UsageError(f"/{word} takes no argument", hint=f"type /{word} alone")
        if not rest and needs and not needs.startswith("["):
            hint = f"for example: {_help()['commands'][name]['example']}"
            raise UsageError(f"/{word} needs {needs}", hint=hint)
        command: Callable[[str], Action | None] | None = getattr(self, f"do_{name}", None)
        if command is None:
            self._switching.change_setting(f"/{name}", name, rest)
        elif (action := command(rest)) is not None:
            return action
        self._models.check(self._session)
        return None

    def _known(self, word: str) -> str:
        word = word.removeprefix("/")
        if word in _FORMER:
            self._screen.note(f"/{word} is now called /{_FORMER[word]}")
            return _FORMER[word]
        if word not in self.names():
            close = _ELSEWHERE.get(word) or did_you_mean(word, self.names(), "/")
            if os.path.isfile(f"/{word}"):
                close = "@ before a path sends the file's text"
            raise UsageError(
                f"there is no command /{shorten(displayable_line(word), _LONGEST)}",
                hint=close or "/help lists all commands; //x sends /x as a message",
            )
        return _ALIASES.get(word, word)

    def do_help(self, rest: str) -> None:
        if rest in ("", "all"):
            names = Table.grid(padding=(0, 2, 0, 0))
            for group, commands in _help()["groups"].items():
                named = re.findall(r"/\w+", " ".join(commands))
                names.add_row(Text(group, "bold"), Text(" ".join(named)))
            keys = Text(f"{'' if rest else _MORE}{_help()['keys']}", self._screen.theme.secondary)
            self._screen.page(Group(draw_help(self._screen.width) if rest else names, keys))
            return
        name = self._known(rest)
        arguments, description = self.help_of(name)
        others = ", ".join(f"/{alias}" for alias, target in _ALIASES.items() if target == name)
        also = f" (also {others})" if others else ""
        usage = Text.assemble((f"/{name} {arguments}".rstrip(), "bold"), also)
        told = _help()["commands"][name]
        example = Text(f"Example: {told['example']}", self._screen.theme.secondary)
        meaning = f"{description[:1].upper()}{description[1:]} {told['more']}"
        self._screen.page(Group(usage, Text(meaning), example))

    def do_model(self, rest: str) -> Action | None:
        if not rest:
            self._models.show(self._session)
        elif (session := self._models.switch(self._session, without_quotes(rest))) is not None:
            return SwitchSession(session, is_other_chat=False)
        return None

    def do_policy(self, rest: str) -> None:
        if rest:
            name, *options = rest.split()
            self._switching.change_policy(name, options)
        else:
            current = self._session.profile.policy
            self._screen.page(draw_policies(current, self._screen.theme))
            self._screen.note(
                f"policy is {displayable_line(current)}; /policy NAME chooses; {ALSO_KEPT_NOTE}"
            )

    def do_recall(self, rest: str) -> None:
        if (asked := time_range(rest, time())) and asked.words == rest:
            self._switching.restore_time(asked)
        elif rest and self._are_words(rest):
            self._switching.restore(rest, around=_AROUND)
        elif rest or not self._show_recalled():
            self._switching.change_setting("/recall", "recall", rest)

    def _show_recalled(self) -> bool:
        """Show what was restored for the last message, or else what fits it and was held."""
        recall, theme, screen = self._session.recall, self._screen.theme, self._screen
        held, held_turns = recall.found_but_held()
        if shown := recall.scores or held:
            rows, turns = self._session.tokens(list(shown)), recall.turns or held_turns
            screen.page(draw_recalled_turns(rows, turns, self._session.state.roles, theme))
        if held:
            more = pluralize(len(held), "more token") if recall.scores else "all of this"
            screen.note(f"held anyway, without recall: {more}")
        if recall.nothing_restored_reason and not shown:
            screen.note(
                f"nothing was restored for your last message: {recall.nothing_restored_reason}"
            )
        if recall.by_meaning:
            screen.note(f"sentence encoder: {self._session.model.encoder_description}")
        return bool(shown)

    def _are_words(self, rest: str) -> bool:
        """Whether `rest` is words of the chat, not a value of the setting `recall`."""
        names = ["on", "off", *RETRIEVERS.names()]
        if rest.startswith('"') or rest in names:
            return rest.startswith('"')
        try:
            return bool(self._session.why(rest))
        except UsageError:
            return not did_you_mean(rest, names)

    def do_set(self, rest: str) -> None:
        name, value = [*rest.split(None, 1), "", ""][:2]
        if (name := _ALSO.get(name, name)) == "json_schema":
            value = without_quotes(value)
        if name and value.strip():
            self._switching.change_setting("/set", name, value.strip())
        else:
            self.do_show(name)

    def do_show(self, rest: str) -> None:
        if rest:
            self._screen.note(self._switching.describe(_ALSO.get(rest, rest)))
        else:
            self._screen.page(draw_settings(self._session.profile, self._screen.theme))

    def do_profile(self, rest: str) -> None:
        self._switching.apply_profile(rest)

    def do_panel(self, rest: str) -> None:
        if rest in ("", "full"):
            snapshot, screen = self._session.snapshot(), self._screen
            screen.page(draw_full_panel(snapshot, screen.theme, screen.width))
        else:
            _one_of("/panel", rest, ("full", "live", "turn", "prompt", "auto", "on", "off"))
            self._switching.change_setting("/panel", "panel", "auto" if rest == "on" else rest)

    def do_thinking(self, rest: str) -> None:
        if rest:
            self._switching.change_setting("/thinking", "thinking", rest)
            return
        thoughts = (turn.thinking for turn in reversed(self._session.turns))
        if text := next(filter(None, thoughts), ""):
            self._screen.page(Text(displayable(text), self._screen.theme.secondary))
        else:
            self._screen.note("no reply so far contains reasoning")

    def do_tokens(self, rest: str) -> None:
        rows = self._rows_asked_for(*(rest.split() or ["all"]))
        if rows:
            self._screen.page(draw_tokens(rows, self._screen.theme, self._screen.width))
        else:
            self._screen.note(f"no held token matches /tokens {displayable_line(rest)}".rstrip())

    def do_stats(self, rest: str) -> None:
        end, session = self._session.closing_event(), self._session
        speed = end.tokens_out / max(end.seconds_decode, 1e-9)
        self._screen.note(
            f"since the chat began, or was read anew: {pluralize(end.turns, 'message')}; "
            f"{end.seen - end.tokens_out:,} tokens read, "
            f"{end.tokens_out:,} written, {speed:,.0f} tok/s; {end.resident:,} of "
            f"{session.budget:,} held, {end.seen - end.resident:,} evicted; "
            f"policy {session.profile.policy}, "
            f"decay {format_number(session.profile.decay)}"
        )
        self._screen.note(describe_memory(session))

    def do_tools(self, rest: str) -> None:
        run_tools_command(self._session, rest)

    def do_pin(self, rest: str) -> None:
        self._switching.pin(rest, pinned=True)

    def do_unpin(self, rest: str) -> None:
        self._switching.pin(rest, pinned=False)

    def do_erase(self, rest: str) -> None:
        self._erasing.run(rest)

    def do_evicted(self, rest: str) -> None:
        screen, turns = self._screen, list(evicted_turns(self._session))
        named = [turn for turn in turns if turn.words or not turn.held]
        if named:
            screen.page(draw_evicted(named, screen.theme, screen.width))
            screen.note('/recall "words" restores words, and the words around them')
        if others := len(turns) - len(named):
            messages = pluralize(others, "more message" if named else "message")
            screen.note(f"{messages} lost only punctuation and words that are held elsewhere")
        if not turns:
            screen.note("nothing is evicted")

    def do_facts(self, rest: str) -> None:
        facts = self._session.facts(without_quotes(rest))
        if facts:
            self._screen.page(draw_facts(facts, time(), self._screen.theme))
        else:
            self._screen.note("you stated no facts" + (" with these words" if rest else ""))

    def do_summarize(self, rest: str) -> Action:
        return Summarize()

    def do_why(self, rest: str) -> None:
        show_why(self._session, self._screen, rest)

    def do_undo(self, rest: str) -> Action | None:
        before = self._models.restore_previous_session(self._session)
        if before is None:
            before = undo(self._session, self._screen, self._saved_chat)
        return None if before is None else SwitchSession(before, is_other_chat=False)

    def do_retry(self, rest: str) -> Action:
        return parse_retry(rest)

    def do_continue(self, rest: str) -> Action:
        return Continue()

    def do_edit(self, rest: str) -> Action:
        return Edit(rest)

    def do_read(self, rest: str) -> Action:
        text, files = attach_named_files(rest)
        self._screen.note(describe_size(files, self._session))
        return Send(text)

    def do_copy(self, rest: str) -> None:
        copy_reply(self._session, self._screen, rest)

    def do_export(self, rest: str) -> None:
        export_chat(self._session, self._screen, rest)

    def do_save(self, rest: str) -> None:
        self._saved_chat.save_as(without_quotes(rest) if rest else None)

    def do_branch(self, rest: str) -> None:
        name, _, count = rest.rpartition(" ")
        if not name or not count.isdecimal():
            name, count = rest, "0"
        self._saved_chat.branch(without_quotes(name), int(count))

    def do_branches(self, rest: str) -> None:
        self._saved_chat.show_branches()

    def do_switch(self, rest: str) -> Action | None:
        if not rest:
            self._saved_chat.show_branches()
        elif (session := self._saved_chat.switch(without_quotes(rest))) is not None:
            return SwitchSession(session, is_other_chat=True)
        return None

    def do_load(self, rest: str) -> Action | None:
        ident = self._saved_chat.choose_chat(without_quotes(rest))
        if ident and (session := self._saved_chat.load(ident)) is not None:
            self._models.drop_previous_session()
            return SwitchSession(session, is_other_chat=True)
        return None

    def do_search(self, rest: str) -> None:
        self._saved_chat.search(without_quotes(rest))

    def do_reset(self, rest: str) -> None:
        self._session.reset()
        self._screen.note("the conversation is empty now; the settings stay")

    def do_clear(self, rest: str) -> None:
        self._screen.clear()

    def do_exit(self, rest: str) -> Action:
        return Leave()

    def _rows_asked_for(self, kind: str, *numbers: str) -> list[TokenRow]:
        snapshot = self._session.snapshot()
        _one_of("/tokens", kind, ("turn", "top", "next", "all"))
        if kind in ("next", "all") and numbers:
            raise SettingError(
                f"/tokens {kind} takes no number", hint="/tokens turn N and /tokens top N take one"
            )
        if kind == "turn":
            turn = _number("/tokens turn", *numbers, least=0)
            return [row for row in snapshot.rows if row.turn == turn]
        if kind == "top":
            count = _number("/tokens top", *(numbers or ("20",)), least=1)
            return sorted(snapshot.rows, key=lambda row: -row.shown_rank)[:count]
        if kind == "next":
            leaving = set(snapshot.evicted_next)
            rows = [row for row in snapshot.rows if row.position in leaving]
            return sorted(rows, key=lambda row: row.shown_rank)
        return list(snapshot.rows)


@cache
def _help() -> dict[str, Any]:
    """What `/help` tells: the commands by their groups, the keys, and all about each command."""
    file = Path(__file__).with_name("help.yaml")
    told: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return told


def draw_help(width: int) -> RenderableType:
    """Draw the help of all commands, in groups, in as many columns as fit into `width` cells."""
    count = max(1, min(_MOST_COLUMNS, (width + 2) // _COLUMN))
    names = list(_help()["groups"])
    share = -(-len(names) // count)
    columns = [names[start : start + share] for start in range(0, len(names), share)]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(*(Group(*map(_group, column)) for column in columns))
    return table


def _group(name: str) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_NAMES)
    for commands, meaning in _help()["groups"][name].items():
        table.add_row(Text(f" {commands}", no_wrap=True), Text(meaning))
    return Group(Text(name, style="bold"), table)


def _one_of(command: str, word: str, allowed: tuple[str, ...]) -> None:
    if word not in allowed:
        raise SettingError(
            f"{command}: {displayable_line(word)!r} is not allowed; allowed: {', '.join(allowed)}",
            hint=did_you_mean(word, allowed),
        )


def _number(command: str, *words: str, least: int) -> int:
    if len(words) != 1 or not words[0].isdecimal() or int(words[0]) < least:
        given = displayable_line(" ".join(words))
        raise SettingError(
            f"{command}: {given!r} is not allowed; allowed: a whole number, {least} or more"
        )
    return int(words[0])
