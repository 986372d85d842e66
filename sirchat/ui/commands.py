"""The slash commands of a chat; `help.yaml` has what `/help` says of each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from time import time

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sirchat.chat.evicted_text import evicted_turns
from sirchat.chat.session import Session
from sirchat.chat.targets import without_quotes
from sirchat.errors import UsageError, did_you_mean, format_value
from sirchat.memory.registry import RETRIEVERS
from sirchat.paths import read_yaml
from sirchat.ui.erasing import EraseCommand
from sirchat.ui.exporting import copy_reply, export_chat
from sirchat.ui.lists import ALSO_KEPT, describe_memory, draw_policies, draw_settings
from sirchat.ui.panel import draw_full_panel
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.switching import Switching, show_models, switch_model
from sirchat.ui.tables import draw_evicted, draw_facts, draw_recalled_turns, draw_tokens
from sirchat.ui.text import displayable, displayable_line, pluralize, shorten
from sirchat.ui.tool_use import run_tools_command
from sirchat.ui.turn_commands import Retry, parse_retry, undo
from sirchat.ui.typed_input import TypedHistory
from sirchat.ui.typed_line import EXIT_COMMANDS
from sirchat.ui.why import show_why

_RECALL_CONTEXT_TOKENS = 12  # that `/recall WORDS` restores before the words, and as many after
_MAX_COMMAND_CHARS = 40  # shown of an unknown command
_TOP_TOKENS = 20  # of highest score, which `/tokens top` lists

_ALIASES = {"?": "help", **dict.fromkeys(EXIT_COMMANDS[1:], "exit"), "regen": "retry"}
# Old names, which still work.
_RENAMED_COMMANDS = {"forget": "erase", "forgotten": "evicted", "switch": "load"}
_SETTING_ALIASES = {"format": "json_schema"}  # the setting `format` is that of a transcript
_HELP_HINT = "/help COMMAND explains one of these, /help all tells what each does. "


@dataclass(frozen=True)
class Leave:
    """Asks the chat to end."""


@dataclass(frozen=True)
class Continue:
    """Asks the chat to continue the last reply, which was cut."""


@dataclass(frozen=True)
class Edit:
    """Asks the chat to replace the last message by `text`; "" lets the user edit the message."""

    text: str = ""


@dataclass(frozen=True)
class Summarize:
    """Asks the chat for a summary of itself."""


@dataclass(frozen=True)
class Greet:
    """Asks the chat to show how the other chat begins that was loaded."""


# What a command asks the chat to do after the command has run.
Action = Leave | Continue | Retry | Edit | Summarize | Greet


class Commands:
    """The slash commands of one session: `/NAME` calls `do_NAME`, or else changes a setting.

    Some let `saved_chat` go on with another session, which then needs commands of its own.
    """

    def __init__(
        self,
        session: Session,
        screen: Screen,
        history: TypedHistory,
        saved_chat: SavedChat,
    ) -> None:
        self._session = session
        self._history = history
        self._saved_chat = saved_chat
        self._screen = screen
        self._switching = Switching(session, screen)
        self._erasing = EraseCommand(session, screen, history, saved_chat)

    @classmethod
    def names(cls) -> list[str]:
        return [*read_yaml(__file__, "help")["commands"], *_ALIASES]

    @classmethod
    def help_of(cls, name: str) -> tuple[str, str]:
        """The arguments of the command `name`, such as `[NAME]`, and what it does."""
        if name in _ALIASES:
            return "", f"the same as /{_ALIASES[name]}"
        command = read_yaml(__file__, "help")["commands"][name]
        return command.get("arguments", ""), command["does"]

    def run(self, line: str) -> Action | None:
        """Run a command line, with its slash; return what the chat must do next, or None."""
        word, arguments = [*line[1:].split(None, 1), "", ""][:2]
        name, arguments = self._resolve_name(word), arguments.strip()
        allowed = self.help_of(name)[0]
        if arguments and not allowed:
            raise UsageError(f"/{word} takes no argument", hint=f"type /{word} alone")
        if not arguments and allowed and not allowed.startswith("["):
            hint = f"for example: {read_yaml(__file__, 'help')['commands'][name]['example']}"
            raise UsageError(f"/{word} needs {allowed}", hint=hint)
        command: Callable[[str], Action | None] | None = getattr(self, f"do_{name}", None)
        if command is None:
            self._switching.change_setting(f"/{name}", name, arguments)
        else:
            return command(arguments)
        return None

    def _resolve_name(self, word: str) -> str:
        """The name of the command that `word` means; raises UsageError if there is none."""
        word = word.removeprefix("/")
        if word in _RENAMED_COMMANDS:
            self._screen.note(f"/{word} is now called /{_RENAMED_COMMANDS[word]}")
            return _RENAMED_COMMANDS[word]
        if word not in self.names():
            hint = read_yaml(__file__, "help")["others"].get(word)
            hint = hint or did_you_mean(word, self.names(), "/")
            if os.path.isfile(f"/{word}"):
                hint = "@ before a path sends the file's text"
            raise UsageError(
                f"there is no command /{shorten(displayable_line(word), _MAX_COMMAND_CHARS)}",
                hint=hint or "/help lists all commands; //x sends /x as a message",
            )
        return _ALIASES.get(word, word)

    def do_help(self, arguments: str) -> None:
        keys, quiet = read_yaml(__file__, "help")["keys"], self._screen.theme.secondary
        if not arguments:
            self._screen.page(Group(_draw_command_names(), Text(_HELP_HINT + keys, quiet)))
        elif arguments == "all":
            self._screen.page(Group(draw_help(), Text(keys, quiet)))
        else:
            self._screen.page(_draw_command(self._resolve_name(arguments), quiet))

    def do_model(self, arguments: str) -> None:
        if arguments:
            name = without_quotes(arguments)
            switch_model(self._session, name, self._screen, self._saved_chat)
        else:
            show_models(self._session, self._screen)

    def do_policy(self, arguments: str) -> None:
        if arguments:
            name, *options = arguments.split()
            self._switching.change_policy(name, options)
        else:
            current = self._session.profile.policy
            self._screen.page(draw_policies(current, self._screen.theme))
            self._screen.note(
                f"policy is {displayable_line(current)}; /policy NAME chooses; {ALSO_KEPT}"
            )

    def do_recall(self, arguments: str) -> None:
        if arguments and self._is_text_of_chat(arguments):
            self._switching.restore(arguments, context_tokens=_RECALL_CONTEXT_TOKENS)
        elif arguments or not self._show_recalled():
            self._switching.change_setting("/recall", "recall", arguments)

    def _show_recalled(self) -> bool:
        """Show tokens restored for the last message, or held ones that match it; False if none."""
        recall, theme, screen = self._session.recall, self._screen.theme, self._screen
        held, held_turns = recall.found_but_held()
        if shown := recall.scores or held:
            rows, turns = self._session.tokens(list(shown)), recall.turns or held_turns
            screen.page(draw_recalled_turns(rows, turns, self._session.state.roles, theme))
        if held:
            more = f"{pluralize(len(held), 'more token')} fit, but needed no recall: they were held"
            screen.note(more if recall.scores else "nothing was restored: all of this was held")
        if (reason := recall.nothing_restored_reason) and not shown:
            screen.note(f"nothing was restored for your last message: {reason}")
        if recall.by_meaning:
            screen.note(f"sentence encoder: {self._session.model.encoder_description}")
        return bool(shown)

    def _is_text_of_chat(self, arguments: str) -> bool:
        """Whether `arguments` is text of the chat, and not a value of the setting `recall`."""
        names = ["on", "off", *RETRIEVERS.names()]
        if arguments.startswith('"'):
            return True
        if arguments in names:
            return False
        try:
            return bool(self._session.why(arguments))
        except UsageError:
            return not did_you_mean(arguments, names)

    def do_set(self, arguments: str) -> None:
        name, value = [*arguments.split(None, 1), "", ""][:2]
        if (name := _SETTING_ALIASES.get(name, name)) == "json_schema":
            value = without_quotes(value)
        if name and value.strip():
            self._switching.change_setting("/set", name, value.strip())
        else:
            self.do_show(name)

    def do_show(self, arguments: str) -> None:
        if arguments:
            self._screen.note(self._switching.describe(_SETTING_ALIASES.get(arguments, arguments)))
        else:
            self._screen.page(draw_settings(self._session.profile, self._screen.theme))

    def do_panel(self, arguments: str) -> None:
        if arguments in ("", "full"):
            snapshot, screen = self._session.snapshot(), self._screen
            screen.page(draw_full_panel(snapshot, screen.theme, screen.width))
        else:
            mode = "auto" if arguments == "on" else arguments
            self._switching.change_setting("/panel", "panel", mode)

    def do_thinking(self, arguments: str) -> None:
        if arguments:
            self._switching.change_setting("/thinking", "thinking", arguments)
            return
        thoughts = (turn.thinking for turn in reversed(self._session.turns))
        if text := next(filter(None, thoughts), ""):
            self._screen.page(Text(displayable(text), self._screen.theme.secondary))
        else:
            self._screen.note("no reply so far contains reasoning")

    def do_tokens(self, arguments: str) -> None:
        screen, snapshot = self._screen, self._session.snapshot()
        rows = list(snapshot.rows)
        if arguments == "top":
            rows = sorted(rows, key=lambda row: -row.shown_rank)[:_TOP_TOKENS]
        elif arguments == "next":
            leaving = set(snapshot.evicted_next)
            rows = [row for row in rows if row.position in leaving]
            rows.sort(key=lambda row: row.shown_rank)
        elif arguments not in ("", "all"):
            raise UsageError(
                f"/tokens: {format_value(arguments)} is not allowed; allowed: all, top, next",
                hint="/why turn N --all lists the tokens of a message",
            )
        if rows:
            screen.page(draw_tokens(rows, screen.theme, screen.width))
        else:
            screen.note(f"no held token matches /tokens {arguments}".rstrip())

    def do_stats(self, arguments: str) -> None:
        end, session = self._session.closing_event(), self._session
        speed = end.tokens_out / max(end.seconds_decode, 1e-9)
        self._screen.note(
            f"since the chat began, or was read anew: {pluralize(end.turns, 'message')}; "
            f"{end.seen - end.tokens_out:,} tokens read, "
            f"{end.tokens_out:,} written, {speed:,.0f} tok/s; {end.resident:,} of "
            f"{session.budget:,} held, {end.seen - end.resident:,} evicted; "
            f"policy {session.profile.policy}, "
            f"decay {session.profile.decay:g}"
        )
        self._screen.note(describe_memory(session))

    def do_tools(self, arguments: str) -> None:
        run_tools_command(self._session, arguments)

    def do_pin(self, arguments: str) -> None:
        if arguments:
            self._switching.pin(arguments)
        else:
            self._switching.show_pins()

    def do_unpin(self, arguments: str) -> None:
        self._switching.unpin(arguments)

    def do_erase(self, arguments: str) -> None:
        self._erasing.run(arguments)

    def do_evicted(self, arguments: str) -> None:
        screen, turns = self._screen, list(evicted_turns(self._session))
        listed = [turn for turn in turns if turn.words or not turn.held]
        if listed:
            screen.page(draw_evicted(listed, screen.theme, screen.width))
            screen.note('/recall "words" restores words, and the words around them')
        if others := len(turns) - len(listed):
            messages = pluralize(others, "more message" if listed else "message")
            screen.note(f"{messages} lost only punctuation and words that are held elsewhere")
        if not turns:
            screen.note("nothing is evicted")

    def do_facts(self, arguments: str) -> None:
        facts, screen = self._session.facts(without_quotes(arguments)), self._screen
        if facts:
            screen.page(draw_facts(facts, time(), screen.theme, screen.width))
        else:
            screen.note("you stated no facts" + (" with these words" if arguments else ""))

    def do_summarize(self, arguments: str) -> Action:
        return Summarize()

    def do_why(self, arguments: str) -> None:
        show_why(self._session, self._screen, arguments)

    def do_undo(self, arguments: str) -> None:
        undo(self._session, self._screen, self._saved_chat)

    def do_retry(self, arguments: str) -> Action:
        return parse_retry(arguments)

    def do_continue(self, arguments: str) -> Action:
        return Continue()

    def do_edit(self, arguments: str) -> Action:
        return Edit(arguments)

    def do_copy(self, arguments: str) -> None:
        copy_reply(self._session, self._screen, arguments)

    def do_export(self, arguments: str) -> None:
        export_chat(self._session, self._screen, arguments)

    def do_save(self, arguments: str) -> None:
        self._saved_chat.save_as(without_quotes(arguments) if arguments else None)

    def do_branch(self, arguments: str) -> None:
        name, _, count = arguments.rpartition(" ")
        if not name or not count.isdecimal():
            name, count = arguments, "0"
        self._saved_chat.branch(without_quotes(name), int(count))

    def do_branches(self, arguments: str) -> None:
        self._saved_chat.show_branches()

    def do_load(self, arguments: str) -> Action | None:
        if not arguments:
            self._saved_chat.list_chats()
            return None
        return Greet() if self._saved_chat.load(without_quotes(arguments)) else None

    def do_search(self, arguments: str) -> None:
        self._saved_chat.search(without_quotes(arguments))

    def do_reset(self, arguments: str) -> None:
        self._session.reset()
        self._screen.note("the conversation is empty now; the settings stay")

    def do_clear(self, arguments: str) -> None:
        self._screen.clear()

    def do_exit(self, arguments: str) -> Action:
        return Leave()


def _draw_command_names() -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for group, commands in read_yaml(__file__, "help")["groups"].items():
        table.add_row(Text(group, "bold"), Text(" ".join(re.findall(r"/\w+", " ".join(commands)))))
    return table


def _draw_command(name: str, quiet: Style) -> RenderableType:
    arguments, description = Commands.help_of(name)
    aliases = ", ".join(f"/{alias}" for alias, target in _ALIASES.items() if target == name)
    also = f" (also {aliases})" if aliases else ""
    usage = Text.assemble((f"/{name} {arguments}".rstrip(), "bold"), also)
    command = read_yaml(__file__, "help")["commands"][name]
    meaning = f"{description[:1].upper()}{description[1:]} {command['more']}"
    return Group(usage, Text(meaning), Text(f"Example: {command['example']}", quiet))


def draw_help() -> RenderableType:
    """Draw the help of all commands, in groups."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for group, commands in read_yaml(__file__, "help")["groups"].items():
        table.add_row(Text(group, style="bold"))
        for names, meaning in commands.items():
            table.add_row(Text(f" {names}", no_wrap=True), Text(meaning))
    return table
