"""The input history: a private file from which a text can be erased."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from sirchat import paths


class Typed(History):
    """Lines typed at the prompt, in this chat and in earlier ones.

    Attributes:
        typed_now: lines typed since the program began.
        typed_for: the typed line of each message that was sent with a file's text in it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # those of the other base class
        self.typed_now: set[str] = set()
        self.typed_for: dict[str, str] = {}

    def append_string(self, string: str) -> None:
        self.typed_now.add(string.strip())
        super().append_string(string)

    def lines(self) -> list[str]:
        """All lines, the newest first."""
        return list(self.load_history_strings())

    def forget(self, matches: Callable[[str], bool]) -> None:
        """Erase each line that matches; raises OSError."""
        self._loaded_strings = [one for one in self._loaded_strings if not matches(one)]
        self.typed_now = {one for one in self.typed_now if not matches(one)}
        self.typed_for = {m: one for m, one in self.typed_for.items() if not matches(one)}


class InMemory(Typed, InMemoryHistory):
    """A history that is lost when the chat ends."""

    def forget(self, matches: Callable[[str], bool]) -> None:
        self._storage = [one for one in self._storage if not matches(one)]
        super().forget(matches)


class _Private(Typed, FileHistory):
    """A file with private permissions, also when recreated; errors of writing are ignored."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            paths.open_private(paths.history_file(), "a").close()
            super().store_string(string)

    def forget(self, matches: Callable[[str], bool]) -> None:
        stays = [one for one in self.lines() if not matches(one)]
        path, self.filename = self.filename, f"{os.fsdecode(self.filename)}.new"
        try:
            paths.history_file().with_name("history.new").unlink(missing_ok=True)  # or a link
            paths.open_private(paths.history_file().with_name("history.new"), "x").close()
            for entry in reversed(stays):
                FileHistory.store_string(self, entry)
            os.replace(self.filename, path)
        finally:
            self.filename = path
            paths.history_file().with_name("history.new").unlink(missing_ok=True)
        super().forget(matches)


def input_history(complain: Callable[[str], None]) -> Typed:
    """The history file; in memory, with a complaint, if the folder can't be written."""
    path = paths.history_file()
    try:
        paths.private_dir(path.parent)
        paths.open_private(path, "a").close()
    except OSError as error:
        complain(f"the input history is not kept: {error}")
        return InMemory()
    return _Private(str(path))
