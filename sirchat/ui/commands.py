"""The slash commands of a chat: each is a method of `Commands`, whose docstring is its help.

The help has the form `ARGUMENTS: what it does`. An unknown command is an error that names the
nearest one; it is never sent to the model.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import time
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.evicted_text import evicted_turns
from sirchat.chat.session import Session
from sirchat.chat.targets import without_quotes
from sirchat.config.values import short_number
from sirchat.errors import SettingError, UsageError, nearest
from sirchat.memory.registry import RETRIEVERS
from sirchat.text.times import time_range
from sirchat.ui.attaching import attach_file, describe_size
from sirchat.ui.erasing import Erasing
from sirchat.ui.exporting import copy_reply, export_chat
from sirchat.ui.lists import ALSO_KEPT, draw_policies, draw_settings, help_text, memory_in_words
from sirchat.ui.panel import draw_panel
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen
from sirchat.ui.switching import ModelSwitching, Switching
from sirchat.ui.tables import (
    draw_evicted,
    draw_facts,
    draw_recalled,
    draw_recalled_turns,
    draw_tokens,
)
from sirchat.ui.text import counted, displayable, displayable_line, shorten
from sirchat.ui.tool_use import run_tools_command
from sirchat.ui.turn_commands import Retry, parse_retry, undo
from sirchat.ui.typed_input import TypedHistory
from sirchat.ui.why import show_why

_PREFIX = "do_"
_AROUND = 12  # tokens before, and after, the words that `/recall WORDS` restores with them
_LONGEST = 40  # most characters shown of an unknown command

_ELSEWHERE = {  # commands that other programs have, and what does the same here
    **dict.fromkeys(("sessions", "chats", "list", "resume"), "/load lists the saved chats"),
    **dict.fromkeys(("delete", "rm"), "sirchat sessions rm ID deletes a saved chat"),
    "find": "/search WORDS finds messages of this chat, and other chats",
}
_ALIASES = {"?": "help", "quit": "exit", "bye": "exit", "regen": "retry"}
_ALSO = {"format": "json_schema"}  # other names of settings; `--format` is that of a transcript
_FORMER = {"forget": "erase", "forgotten": "evicted"}  # they still work, but are not listed

# What `/help` lists. The text before the colon may have arguments, and may name two commands.
GROUPS: Final[dict[str, dict[str, str]]] = {
    "Talk": {
        "/edit": "change your last message",
        "/retry": "replace the last reply",
        "/continue": "go on with a reply that was cut",
        "/undo": "remove last message and reply",
        "/tools": "let the model call tools",
        "/read FILE": "send a file's text, like @FILE",
        "/copy, /export": "copy a reply; write the chat",
        "/thinking": "show a reply's reasoning",
    },
    "Memory": {
        "/evicted": "list evicted words",
        '/recall "WORDS"': "restore evicted words",
        "/facts": "list what you stated",
        "/pin, /unpin": "never evict words; allow it",
        "/summarize": "pin a summary of the chat",
        "/erase": "erase words for good",
        "/sinks, /recent": "first, newest tokens to keep",
    },
    "Look": {
        "/panel, /theme": "show all held tokens; colours",
        "/why WORDS": "tell whether words were held",
        "/tokens, /stats": "list held tokens; counts, speed",
        "/clear": "clear the screen only",
    },
    "Chats": {
        "/save, /load": "name this chat; open another",
        "/search WORDS": "find words in all your chats",
        "/branch NAME": "go on in a copy of this chat",
        "/branches": "list the branches of this chat",
        "/switch NAME": "go on with another branch",
        "/reset": "start an empty conversation",
    },
    "Settings": {
        "/model NAME": "go on with another model",
        "/policy NAME": "choose how tokens are evicted",
        "/budget, /decay": "tokens held; how fast old ones fade",
        "/reasoning": "let the model reason first, or not",
        "/system TEXT": "set the system prompt",
        "/profile NAME": "apply a set of settings",
        "/set, /show": "set one setting; list all",
    },
    "Help": {"/help COMMAND": "explain one command", "/exit": "leave sirchat, as Ctrl-D does"},
}

KEYS: Final = (
    "Alt-Enter, Ctrl-J, or Enter after \\ begins a new line; "
    '""" opens and closes a block of lines; // sends a text that begins with a slash. '
    "Esc or Ctrl-C stops a reply; Ctrl-D leaves the chat. What is taller than the "
    "window opens in a pager; q leaves it."
)
_MORE: Final = "/help COMMAND explains one of these, /help all tells what each does."
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
    """The slash commands of one chat; each method `do_NAME` is the command `/NAME`."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        history: TypedHistory,
        saved_chat: SavedChat,
        trusted: Collection[str] = (),
        models: ModelSwitching | None = None,
    ) -> None:
        self._session = session
        self._models = models or ModelSwitching(screen, saved_chat, trusted)
        self._history = history
        self._saved_chat = saved_chat
        self._screen = screen
        self._switching = Switching(session, screen, trusted)
        self._erasing = Erasing(session, screen, history, saved_chat)

    @classmethod
    def names(cls) -> list[str]:
        """Names of all slash commands and of their aliases, without the slash."""
        names = [name.removeprefix(_PREFIX) for name in vars(cls) if name.startswith(_PREFIX)]
        return [*names, *_ALIASES]

    @classmethod
    def help_of(cls, name: str) -> tuple[str, str]:
        """The arguments of the command `name`, such as `[NAME]`, and what it does."""
        if name in _ALIASES:
            return "", f"the same as /{_ALIASES[name]}"
        text = inspect.cleandoc(getattr(cls, _PREFIX + name).__doc__ or "")
        arguments, _, description = text.partition(":")
        return arguments.strip().strip("-"), " ".join(description.split())

    def run(self, line: str) -> Action | None:
        """Run the command `line`, with its slash; return what the chat must do next, or None."""
        word, rest = [*line[1:].split(None, 1), "", ""][:2]
        name, rest = self._known(word), rest.strip()
        needs = self.help_of(name)[0]
        if rest and not needs:
            raise UsageError(f"/{word} takes no argument", hint=f"type /{word} alone")
        if not rest and needs and not needs.startswith("["):
            hint = f"for example: {help_text(name)['example']}"
            raise UsageError(f"/{word} needs {needs}", hint=hint)
        command: Callable[[str], Action | None] = getattr(self, _PREFIX + name)
        action = command(rest)
        if action is None:
            self._models.check(self._session)
        return action

    def _known(self, word: str) -> str:
        word = word.removeprefix("/")
        if word in _FORMER:
            self._screen.note(f"/{word} is now called /{_FORMER[word]}")
            return _FORMER[word]
        if word not in self.names():
            close = _ELSEWHERE.get(word) or nearest(word, self.names(), "/")
            if os.path.isfile(f"/{word}"):
                close = "@ before a path sends the file's text"
            raise UsageError(
                f"there is no command /{shorten(displayable_line(word), _LONGEST)}",
                hint=close or "/help lists all commands; //x sends /x as a message",
            )
        return _ALIASES.get(word, word)

    def do_help(self, rest: str) -> None:
        """[COMMAND|all]: list all commands; with all, a line about what each does; with COMMAND,
        all about one of them."""
        if rest in ("", "all"):
            names = Table.grid(padding=(0, 2, 0, 0))
            for group, commands in GROUPS.items():
                named = re.findall(r"/\w+", " ".join(commands))
                names.add_row(Text(group, "bold"), Text(" ".join(named)))
            keys = Text(KEYS if rest else f"{_MORE} {KEYS}", self._screen.theme.quiet)
            self._screen.page(Group(draw_help(self._screen.width) if rest else names, keys))
            return
        name = self._known(rest)
        arguments, description = self.help_of(name)
        others = ", ".join(f"/{alias}" for alias, target in _ALIASES.items() if target == name)
        also = f" (also {others})" if others else ""
        usage = Text.assemble((f"/{name} {arguments}".rstrip(), "bold"), also)
        told = help_text(name)
        example = Text(f"Example: {told['example']}", self._screen.theme.quiet)
        meaning = f"{description[:1].upper()}{description[1:]} {told['more']}"
        self._screen.page(Group(usage, Text(meaning), example))

    def do_model(self, rest: str) -> Action | None:
        """[NAME]: go on with another model, which reads the whole chat; alone, list the models."""
        if not rest:
            self._models.show(self._session)
        elif (session := self._models.switch(self._session, without_quotes(rest))) is not None:
            return SwitchSession(session, is_other_chat=False)
        return None

    def do_policy(self, rest: str) -> None:
        """[NAME [OPTION=VALUE ...]]: choose the policy, which decides which tokens stay; alone,
        list the policies."""
        if rest:
            name, *options = rest.split()
            self._switching.change_policy(name, options)
        else:
            current = self._session.profile.policy
            self._screen.page(draw_policies(current, self._screen.theme))
            self._screen.note(
                f"policy is {displayable_line(current)}; /policy NAME chooses; {ALSO_KEPT}"
            )

    def do_budget(self, rest: str) -> None:
        """[TOKENS]: set how many tokens may be held in the cache."""
        self._switching.change_setting("/budget", "budget", rest)

    def do_decay(self, rest: str) -> None:
        """[FACTOR|auto]: set the factor, at most 1, on surprisal and attention after each round."""
        self._switching.change_setting("/decay", "decay", rest)

    def do_reasoning(self, rest: str) -> None:
        """[auto|on|off|low|medium|high]: let the model reason before it answers, or not; auto is as
        the model has it, and an effort says how long, where its chat template has these."""
        self._switching.change_setting("/reasoning", "reasoning", rest)

    def do_sinks(self, rest: str) -> None:
        """[TOKENS]: set how many first tokens of the conversation always stay."""
        self._switching.change_setting("/sinks", "sinks", rest)

    def do_recent(self, rest: str) -> None:
        """[TOKENS]: set how many newest tokens always stay, if the policy keeps such a window."""
        self._switching.change_setting("/recent", "recent", rest)

    def do_recall(self, rest: str) -> None:
        """[on|off|RETRIEVER|WORDS|TIME]: restore archived tokens for each of your messages; alone,
        show what was restored; WORDS of the chat, or what you said at a TIME, such as yesterday or
        first, are restored for your next message."""
        if (asked := time_range(rest, time())) and asked.words == rest:
            self._switching.restore_time(asked)
        elif rest and self._are_words(rest):
            self._switching.restore(rest, around=_AROUND)
        elif rest or not self._show_recalled():
            self._switching.change_setting("/recall", "recall", rest)

    def _show_recalled(self) -> bool:
        """Show what was restored for the last message, or else what fits it and was held."""
        recall, theme, screen = self._session.recall, self._screen.theme, self._screen
        held, held_turns = recall.held_anyway()
        if shown := recall.scores or held:
            rows, turns = self._session.tokens(list(shown)), recall.turns or held_turns
            table = draw_recalled_turns(rows, turns, self._session.state.roles, theme)
            screen.page(Group(table, Text(), draw_recalled(rows, shown, theme)))
        if held:
            more = counted(len(held), "more token") if recall.scores else "all of this"
            screen.note(f"held anyway, without recall: {more}")
        if recall.nothing and not shown:
            screen.note(f"nothing was restored for your last message: {recall.nothing}")
        if recall.by_meaning:
            screen.note(f"sentence encoder: {self._session.model.encoder_in_words}")
        return bool(shown)

    def _are_words(self, rest: str) -> bool:
        """Whether `rest` is words of the chat, not a value of the setting `recall`."""
        names = ["on", "off", *RETRIEVERS.names()]
        if rest.startswith('"') or rest in names:
            return rest.startswith('"')
        try:
            return bool(self._session.why(rest))
        except UsageError:
            return not nearest(rest, names)

    def do_set(self, rest: str) -> None:
        """[NAME [VALUE]]: change any setting, or an option of the policy; `none` empties it.
        `format FILE` lets replies be JSON by the JSON schema in a file, until `format off`."""
        name, value = [*rest.split(None, 1), "", ""][:2]
        if (name := _ALSO.get(name, name)) == "json_schema":
            value = without_quotes(value)
        if name and value.strip():
            self._switching.change_setting("/set", name, value.strip())
        else:
            self.do_show(name)

    def do_show(self, rest: str) -> None:
        """[NAME]: show all settings, or one setting with its allowed values."""
        if rest:
            self._screen.note(self._switching.describe(_ALSO.get(rest, rest)))
        else:
            self._screen.page(draw_settings(self._session.profile, self._screen.theme))

    def do_system(self, rest: str) -> None:
        """[TEXT|none]: show the system prompt, or replace it; the new one is read and pinned."""
        self._switching.change_setting("/system", "system", rest)

    def do_profile(self, rest: str) -> None:
        """[NAME]: apply all settings of a profile; alone, list the profiles."""
        self._switching.apply_profile(rest)

    def do_panel(self, rest: str) -> None:
        """[full|live|turn|prompt|on|off]: show all held tokens now, or set when some are shown:
        live, while the model writes; turn, after a reply; prompt, above the prompt; on: both."""
        if rest in ("", "full"):
            snapshot, screen = self._session.snapshot(), self._screen
            screen.page(draw_panel(snapshot, screen.theme, screen.width))
        else:
            _one_of("/panel", rest, ("full", "live", "turn", "prompt", "auto", "on", "off"))
            self._switching.change_setting("/panel", "panel", "auto" if rest == "on" else rest)

    def do_theme(self, rest: str) -> None:
        """[auto|dark|light|none]: choose the colours of panel and text."""
        self._switching.change_setting("/theme", "theme", rest)

    def do_thinking(self, rest: str) -> None:
        """[show|fold|hide]: set how replies show reasoning; alone, show the last reasoning."""
        if rest:
            self._switching.change_setting("/thinking", "thinking", rest)
            return
        thoughts = (turn.thinking for turn in reversed(self._session.turns))
        if text := next(filter(None, thoughts), ""):
            self._screen.page(Text(displayable(text), self._screen.theme.quiet))
        else:
            self._screen.note("no reply so far contains reasoning")

    def do_tokens(self, rest: str) -> None:
        """[all|turn N|top [N]|next]: list held tokens with surprisal, score and flags."""
        rows = self._rows_asked_for(*(rest.split() or ["all"]))
        if rows:
            self._screen.page(draw_tokens(rows, self._screen.theme, self._screen.width))
        else:
            self._screen.note(f"no held token matches /tokens {displayable_line(rest)}".rstrip())

    def do_stats(self, rest: str) -> None:
        """-: show the token counts, the speed, and the memory that this conversation takes."""
        end, session = self._session.closing_event(), self._session
        at_control = sum(turn.finish == "control" for turn in session.turns)
        hidden = f"; {at_control} replies ended at a control token, which is not shown"
        hidden = hidden if at_control else ""
        speed = end.tokens_out / max(end.seconds_decode, 1e-9)
        self._screen.note(
            f"since the chat began, or was read anew: {counted(end.turns, 'message')}; "
            f"{end.seen - end.tokens_out:,} tokens read, "
            f"{end.tokens_out:,} written, {speed:,.0f} tok/s; {end.resident:,} of "
            f"{session.budget:,} held, {end.seen - end.resident:,} evicted; "
            f"policy {session.profile.policy}, "
            f"decay {short_number(session.profile.decay)}" + hidden
        )
        self._screen.note(memory_in_words(session))

    def do_tools(self, rest: str) -> None:
        """[NAME|on NAME|off NAME]: list the servers of --tools FILE, or the tools of one; let the
        model call these, or one of them, or no longer. Each call is shown, and asked about."""
        run_tools_command(self._session, rest)

    def do_pin(self, rest: str) -> None:
        """TEXT|last|turn N: never evict these words, your last message, or message number N."""
        self._switching.pin(rest, pinned=True)

    def do_unpin(self, rest: str) -> None:
        """TEXT|last|turn N: allow again that these words or this message are evicted."""
        self._switching.pin(rest, pinned=False)

    def do_erase(self, rest: str) -> None:
        """TEXT|last|turn N: show what would be erased for good (memory, archive, saved chat, typed
        lines); with --yes, erase it; with --everywhere, erase typed lines of other chats, too."""
        self._erasing.run(rest)

    def do_evicted(self, rest: str) -> None:
        """-: list the evicted words of each message, the most surprising words first."""
        screen, turns = self._screen, list(evicted_turns(self._session))
        named = [turn for turn in turns if turn.words or not turn.held]
        if named:
            screen.page(draw_evicted(named, screen.theme, screen.width))
            screen.note('/recall "words" restores words, and the words around them')
        if others := len(turns) - len(named):
            messages = counted(others, "more message" if named else "message")
            screen.note(f"{messages} lost only punctuation and words that are held elsewhere")
        if not turns:
            screen.note("nothing is evicted")

    def do_facts(self, rest: str) -> None:
        """[WORDS]: list your pinned rules, and what you stated of yourself or of your world,
        when, whether it is held, and which later turn may replace it; with WORDS, what has all."""
        facts = self._session.facts(without_quotes(rest))
        if facts:
            self._screen.page(draw_facts(facts, time(), self._screen.theme))
        else:
            self._screen.note("you stated no facts" + (" with these words" if rest else ""))

    def do_summarize(self, rest: str) -> Action:
        """-: sum up the whole chat, evicted or not, by its most telling sentences; if you keep the
        summary, it is read as a message and pinned, in place of the former one."""
        return Summarize()

    def do_why(self, rest: str) -> None:
        """[TEXT|last|turn N] [--all]: tell whether the last reply had these words and paid
        attention to them, and why they are held or not; alone, about the last reply; --all adds
        each token's surprisal, decays, score and rank."""
        show_why(self._session, self._screen, rest)

    def do_undo(self, rest: str) -> Action | None:
        """-: take back your last message and its reply, or the last change of the model."""
        before = self._models.go_back(self._session)
        if before is None:
            before = undo(self._session, self._screen, self._saved_chat)
        return None if before is None else SwitchSession(before, is_other_chat=False)

    def do_retry(self, rest: str) -> Action:
        """[full|recall [RETRIEVER]] [--temperature X]: replace the last reply by another; full
        holds everything for which the model has room, recall restores tokens that fit; --top-p and
        other sampling settings can be given; all of this holds for this reply only."""
        return parse_retry(rest)

    def do_continue(self, rest: str) -> Action:
        """-: go on with the last reply, which was cut at the length limit, stopped by you, or
        ended because it repeated itself, as if it had not been; /undo then takes back the whole."""
        return Continue()

    def do_edit(self, rest: str) -> Action:
        """[TEXT]: replace your last message by TEXT, and go on from there; alone, change it in
        $EDITOR or at the prompt, where Ctrl-C leaves it unchanged."""
        return Edit(rest)

    def do_read(self, rest: str) -> Action:
        """FILE [QUESTION]: send a file's text and a question; @FILE in a message does the same."""
        text, files = attach_file(rest)
        self._screen.note(describe_size(files, self._session))
        return Send(text)

    def do_copy(self, rest: str) -> None:
        """[code|N] [--osc52]: put the last reply on the clipboard, its last code, or the Nth reply
        before it; --osc52 lets the terminal do it, which also works over ssh."""
        copy_reply(self._session, self._screen, rest)

    def do_export(self, rest: str) -> None:
        """md|html|json FILE [--force]: write the chat to a file."""
        export_chat(self._session, self._screen, rest)

    def do_save(self, rest: str) -> None:
        """[NAME]: save the chat now and after each reply; /load NAME finds the chat again."""
        self._saved_chat.save_as(without_quotes(rest) if rest else None)

    def do_branch(self, rest: str) -> None:
        """NAME [N]: go on in a copy of this chat, without your last N messages and the replies."""
        name, _, count = rest.rpartition(" ")
        if not name or not count.isdecimal():
            name, count = rest, "0"
        self._saved_chat.branch(without_quotes(name), int(count))

    def do_branches(self, rest: str) -> None:
        """-: list this chat and its branches (copies made by /branch)."""
        self._saved_chat.show_branches()

    def do_switch(self, rest: str) -> Action | None:
        """[NAME|ID|main]: leave this chat and go on with one of its branches; alone, list them."""
        if not rest:
            self._saved_chat.show_branches()
        elif (session := self._saved_chat.switch(without_quotes(rest))) is not None:
            return SwitchSession(session, is_other_chat=True)
        return None

    def do_load(self, rest: str) -> Action | None:
        """[ID|NAME|WORDS|last]: leave this chat and go on with a saved chat; WORDS that are no
        name find chats in which they were said; alone, list all."""
        ident = self._saved_chat.choose(without_quotes(rest))
        if ident and (session := self._saved_chat.load(ident)) is not None:
            self._models.drop_former()
            return SwitchSession(session, is_other_chat=True)
        return None

    def do_search(self, rest: str) -> None:
        """WORDS: find the messages of this chat, held or evicted, and the saved chats that have
        these words."""
        self._saved_chat.search(without_quotes(rest))

    def do_reset(self, rest: str) -> None:
        """-: start an empty conversation; the settings stay."""
        self._session.reset()
        self._screen.note("the conversation is empty now; the settings stay")

    def do_clear(self, rest: str) -> None:
        """-: clear the screen; the conversation stays (/reset ends it)."""
        self._screen.clear()

    def do_exit(self, rest: str) -> Action:
        """-: leave sirchat, as Ctrl-D does."""
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


def draw_help(width: int) -> RenderableType:
    """Draw the help of all commands, in groups, in as many columns as fit into `width` cells."""
    count = max(1, min(_MOST_COLUMNS, (width + 2) // _COLUMN))
    names = list(GROUPS)
    share = -(-len(names) // count)
    columns = [names[start : start + share] for start in range(0, len(names), share)]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(*(Group(*map(_group, column)) for column in columns))
    return table


def _group(name: str) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_NAMES)
    for commands, meaning in GROUPS[name].items():
        table.add_row(Text(f" {commands}", no_wrap=True), Text(meaning))
    return Group(Text(name, style="bold"), table)


def _one_of(command: str, word: str, allowed: tuple[str, ...]) -> None:
    if word not in allowed:
        raise SettingError(
            f"{command}: {displayable_line(word)!r} is not allowed; allowed: {', '.join(allowed)}",
            hint=nearest(word, allowed),
        )


def _number(command: str, *words: str, least: int) -> int:
    if len(words) != 1 or not words[0].isdecimal() or int(words[0]) < least:
        given = displayable_line(" ".join(words))
        raise SettingError(
            f"{command}: {given!r} is not allowed; allowed: a whole number, {least} or more"
        )
    return int(words[0])
