"""The input history: a private file from which a text can be erased."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from sirchat import paths


class Typed(History):
    """Lines typed at the prompt, in this chat and in earlier ones."""

    def forget(self, text: str, *, whole: bool = False) -> int:
        """Erase each entry that contains `text`, ignoring case; if `whole`, each that equals it.

        Returns the number of entries. Raises OSError.
        """
        before = len(self._loaded_strings)
        self._loaded_strings = [x for x in self._loaded_strings if not _has(x, text, whole)]
        return before - len(self._loaded_strings)


class InMemory(Typed, InMemoryHistory):
    """A history that is lost when the chat ends."""

    def forget(self, text: str, *, whole: bool = False) -> int:
        self._storage = [one for one in self._storage if not _has(one, text, whole)]
        return super().forget(text, whole=whole)


class _Private(Typed, FileHistory):
    """A file with private permissions, also when recreated; errors of writing are ignored."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            paths.open_private(paths.history_file(), "a").close()
            super().store_string(string)

    def forget(self, text: str, *, whole: bool = False) -> int:
        entries = [x for x in self.load_history_strings() if not _has(x, text, whole)]
        path, self.filename = self.filename, f"{os.fsdecode(self.filename)}.new"
        try:
            paths.open_private(paths.history_file().with_name("history.new"), "w").close()
            for entry in reversed(entries):
                FileHistory.store_string(self, entry)
            os.replace(self.filename, path)
        finally:
            self.filename = path
            paths.history_file().with_name("history.new").unlink(missing_ok=True)
        return super().forget(text, whole=whole)


def _has(entry: str, text: str, whole: bool) -> bool:
    if whole:
        return entry.strip() == text.strip()
    return bool(text) and text.lower() in entry.lower()


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
