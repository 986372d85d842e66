"""Names of files as they are typed, after `@` and `/read`, or another command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import basename

from prompt_toolkit.completion import CompleteEvent, Completion, PathCompleter
from prompt_toolkit.document import Document

from sirchat.ui.attaching import open_mention
from sirchat.ui.text import displayable_line

_BEGUN = re.compile(r'("[^"\n]*|[^\s"]*)$')


def path_begun(text: str, commands: re.Pattern[str] = re.compile("/read +")) -> str | None:
    """The beginning of a file's name before the cursor, a quote in front included, if any.

    `commands` matches the commands that a name may follow.
    """
    command = commands.match(text)
    if command and (begun := _BEGUN.match(text, command.end())):
        return begun[1]
    return open_mention(text) if not text.startswith("/") or text.startswith("//") else None


def complete_path(begun: str, event: CompleteEvent) -> Iterator[Completion]:
    """Files and folders whose names go on; those with spaces are put in quotes.

    Hidden ones are offered once the dot is typed.
    """
    name, is_quoted = begun.removeprefix('"'), begun.startswith('"')
    found = PathCompleter(expanduser=True).get_completions(Document(name), event)
    for one in found:
        path, is_folder = name + one.text, one.display_text.endswith("/")
        if displayable_line(path) != path or '"' in path:  # can't be typed
            continue
        if one.display_text.startswith(".") and not basename(name).startswith("."):
            continue
        quotes = is_quoted or " " in path
        text = f'"{path}' + '"' * (not is_folder) if quotes else path
        yield Completion(text + "/" * is_folder, -len(begun), display=one.display)
