"""The slash commands: one method each, found by name; the docstring is the help.

The first line of a docstring is `ARGUMENTS: what it does`. A command is one whole word; what is not
one is an error that names the nearest, and is never sent to the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from rich.table import Table
from rich.text import Text

from sirchat.errors import SettingError, UsageError, nearest
from sirchat.events import Event, Forgot, Notice, Switched
from sirchat.memory.policies import policy_names
from sirchat.profile import parse_value
from sirchat.session import Session
from sirchat.ui.panel import draw_panel
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable

_PREFIX = "do_"


class Leave(Exception):
    """The user wants to leave the chat."""


class Commands:
    """The commands of one chat."""

    def __init__(self, session: Session, screen: Screen) -> None:
        self._session = session
        self._screen = screen

    @classmethod
    def names(cls) -> list[str]:
        """All commands, without the slash."""
        return [name.removeprefix(_PREFIX) for name in vars(cls) if name.startswith(_PREFIX)]

    @classmethod
    def help_of(cls, name: str) -> tuple[str, str]:
        """A command's arguments and what it does."""
        text = inspect.cleandoc(getattr(cls, _PREFIX + name).__doc__ or "")
        arguments, _, what = text.partition(":")
        return arguments.strip().strip("-"), " ".join(what.split())

    @staticmethod
    def values(name: str) -> list[str]:
        """What can follow a command, for completion."""
        return {"policy": policy_names(), "panel": ["on", "off"]}.get(name, [])

    def run(self, line: str) -> None:
        """Run one command line, slash included; raises UsageError for a wrong one."""
        word, _, rest = line[1:].strip().partition(" ")
        if word not in self.names():
            known = [f"/{name}" for name in self.names()]
            raise UsageError(
                f"there is no command /{word}",
                hint=nearest(f"/{word}", known) or "/help lists them; // sends a text with a slash",
            )
        command: Callable[[str], None] = getattr(self, _PREFIX + word)
        command(rest.strip())

    def do_help(self, rest: str) -> None:
        """-: list the commands."""
        table = Table.grid(padding=(0, 2))
        for name in self.names():
            arguments, what = self.help_of(name)
            table.add_row(Text(f"/{name} {arguments}", style="bold"), Text(what))
        self._screen.show(table)

    def do_policy(self, rest: str) -> None:
        """[NAME]: what the model remembers by; without a name, the present one and the others."""
        self._set("policy", rest, f"others: {', '.join(policy_names())}")

    def do_budget(self, rest: str) -> None:
        """[TOKENS]: how many tokens are held at most."""
        self._set("budget", rest)

    def do_decay(self, rest: str) -> None:
        """[FACTOR]: what every score is multiplied by after a round, above 0 and up to 1."""
        self._set("decay", rest)

    def do_sinks(self, rest: str) -> None:
        """[TOKENS]: how many first tokens of the conversation always stay."""
        self._set("sinks", rest)

    def do_recent(self, rest: str) -> None:
        """[TOKENS]: how many newest tokens always stay, for policies that have such a window."""
        self._set("recent", rest)

    def do_panel(self, rest: str) -> None:
        """[on|off]: show the memory now, or after every turn, or not."""
        if rest in ("on", "off"):
            self._report(self._session.switch("/panel", panel="turn" if rest == "on" else "off"))
        elif rest:
            raise SettingError(f"/panel: {rest!r} is not allowed; allowed: on, off, or nothing")
        else:
            self._screen.show(draw_panel(self._session.snapshot()))

    def do_tokens(self, rest: str) -> None:
        """[COUNT]: the held tokens of highest score, with their numbers."""
        count = parse_value("budget", rest) if rest else 20
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingError(f"/tokens: {rest!r} is not allowed; allowed: a number from 1")
        rows = sorted(self._session.snapshot().rows, key=lambda row: -row.score)[:count]
        table = Table("position", "turn", "role", "token", "surprisal", "score", "flags", box=None)
        for row in rows:
            surprisal = "-" if row.surprisal is None else f"{row.surprisal:.2f}"
            cells = [str(row.position), str(row.turn), row.role, repr(displayable(row.text))]
            cells += [surprisal, f"{row.score:.3g}", " ".join(row.flags)]
            table.add_row(*(Text(cell) for cell in cells))
        self._screen.show(table)

    def do_stats(self, rest: str) -> None:
        """-: counts and speed of this conversation."""
        end, session = self._session.end(), self._session
        speed = end.tokens_out / max(end.seconds_decode, 1e-9)
        self._screen.note(
            f"{end.turns} turns; {end.seen:,} tokens seen, {end.resident:,} of {session.budget:,} "
            f"held, {end.seen - end.resident:,} forgotten; {end.tokens_out:,} said, "
            f"{speed:,.0f} tok/s; policy {session.profile.policy}, decay {session.profile.decay:g}"
        )

    def do_reset(self, rest: str) -> None:
        """-: forget the whole conversation; the settings stay."""
        self._session.reset()
        self._screen.note("the conversation starts anew")

    def do_exit(self, rest: str) -> None:
        """-: leave (Ctrl-D does, too)."""
        raise Leave

    def _set(self, key: str, text: str, more: str = "") -> None:
        present = getattr(self._session.profile, key)
        if not text:
            self._screen.note(f"{key} is {present}" + (f"; {more}" if more else ""))
            return
        value = text if key == "policy" else parse_value(key, text)
        if not self._report(self._session.switch(f"/{key}", **{key: value})):
            self._screen.note(f"{key} is {present} already")

    def _report(self, events: Iterable[Event]) -> int:
        """Say what changed and what was forgotten; returns the number of changes."""
        changes, gone = 0, 0
        for event in events:
            if isinstance(event, Switched):
                changes += 1
                self._screen.note(f"{event.what}: {event.old} -> {event.new}")
            elif isinstance(event, Forgot):
                gone += len(event.positions)
            elif isinstance(event, Notice):
                self._screen.note(event.text)
        if changes:
            held = f"holds {self._session.resident:,}/{self._session.budget:,}"
            self._screen.note(f"forgot {gone:,}, {held}" if gone else f"nothing forgotten, {held}")
        return changes
