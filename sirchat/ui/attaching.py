"""Puts the texts of files into messages (`@path` and `/read`), and completes the names of files.

A file is attached only if the user typed its name. An `@path` in pasted text, in a transcript or in
a pipe stays plain text. Notes tell the user how many tokens the files take.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from os.path import basename
from typing import TYPE_CHECKING

from sirchat.errors import UsageError
from sirchat.text.text_file import (
    fenced,
    is_missing,
    load_text_file,
    path_named,
    without_surrogates,
)
from sirchat.ui.text import displayable_line, shorten

if TYPE_CHECKING:  # a prompt must not import a model, nor `sirchat ask` a prompt
    from prompt_toolkit.completion import CompleteEvent, Completion

    from sirchat.chat.session import Session

_MENTION = re.compile(r'(?<!\S)(?P<escape>\\?)@(?:"(?P<quoted>[^"\n]+)"|(?P<word>\S+))')
_LIKE_A_PATH = re.compile(r"/|\w\.\w{1,5}$")
_OPEN = re.compile(r'(?<!\S)@(?:"[^"\n]*|[^\s"]*)$')
_CLOSING = ".,;:!?)]}'\"…"
"""Punctuation marks that are cut off at the end of an `@path` if no file has the whole name."""


@dataclass(frozen=True)
class AttachedFile:
    """A file that is put into a message: its name as the user typed it, and its text."""

    name: str
    text: str

    @property
    def block(self) -> str:
        """The file's text as it stands in a message: a Markdown code block, its name on top."""
        return without_surrogates(fenced(displayable_line(self.name), self.text))


def with_files(
    text: str, note: Callable[[str], None], pasted_signs: Collection[int] = ()
) -> tuple[str, list[AttachedFile]]:
    """Load the files that a typed `text` names by `@path`; return the message, and the files.

    The message is the text of each file, once, and then `text` without the `@` before file names.
    If `text` has nothing but file names, the message is the texts of the files alone. A word with
    `@` that names no file is not changed; if the word is quoted or looks like a path, `note` is
    called with a remark. `\\@` stands for a plain `@`. `pasted_signs` has the index in `text` of
    each `@` that was pasted; such an `@` names no file.

    Raises UsageError, as `load_text_file` does, if a file exists but can't be used.
    """
    files: dict[str, AttachedFile] = {}
    said = list[str]()  # the words of the message that are not names of files
    message, at = list[str](), 0
    for found in _MENTION.finditer(text):
        if found.end("escape") in pasted_signs:
            name, shown = "", found[0]
            _note_pasted(found, note)
        else:
            name, shown = _named(found, note)
        if name and name not in files:
            files[name] = AttachedFile(name, load_text_file(name))
        between = text[at : found.start()]
        message += (between, shown)
        said += (between, shown.removeprefix(name) if name else shown)
        at = found.end()
    message.append(text[at:])
    has_words = bool("".join([*said, text[at:]]).strip())
    return _joined(list(files.values()), "".join(message) * has_words), list(files.values())


def open_mention(before: str) -> str | None:
    """The unfinished file name after an `@` at the end of `before`, the text before the cursor.

    The name includes its opening quote, if it has one, and is "" right after the `@`. Returns None
    if `before` does not end in an `@` or in the beginning of a file name after an `@`.
    """
    found = _OPEN.search(before)
    return found[0][1:] if found else None


def with_file(rest: str) -> tuple[str, list[AttachedFile]]:
    """The message that `/read FILE [QUESTION]` sends, and a list with the file as its only item.

    `rest` has the arguments, `FILE [QUESTION]`. Raises UsageError if `rest` names no file, and if
    the file can't be loaded.
    """
    name, question = first_name(rest)
    if not name:
        raise UsageError(
            "/read: expected the name of a file", hint="type /read FILE, or /read FILE QUESTION"
        )
    file = AttachedFile(name, load_text_file(name))
    return _joined([file], question), [file]


def first_name(text: str) -> tuple[str, str]:
    """Split a text into the file name at its start, and the text after the name.

    The name is the first word or, if the text begins with a quote, all words up to the closing
    quote. It is returned without quotes.
    """
    found = re.match(r'\s*(?:"([^"]*)"?|(\S*))\s*', text)
    if found is None:  # it matches any text
        return "", text
    return found[1] or found[2] or "", text[found.end() :]


def describe_size(files: list[AttachedFile], session: Session) -> str:
    """A line that says how many tokens each file takes, and how many tokens the budget has.

    The line also warns if a part of the files' text will be evicted while the model reads the
    message.
    """
    counts = [len(session.template.as_text(file.block)) for file in files]
    parts = [
        f"{displayable_line(file.name)}: {count:,} tokens"
        for file, count in zip(files, counts, strict=True)
    ]
    line, total = f"{', '.join(parts)}; the budget is {session.budget:,} tokens", sum(counts)
    room = session.division.evictable
    if room < session.budget // 2 and total <= 2 * session.budget:
        line += f", of which a message can take {room:,}"
    if total <= room or session.profile.policy == "full":
        return line
    share = "most" if total > 2 * room else "a part"
    return f"{line}, so {share} of the text will be evicted while it is read"


def _named(found: re.Match[str], note: Callable[[str], None]) -> tuple[str, str]:
    """Two texts for a match of `@path`: the file's name, and what the message has instead of it.

    The name is "" if no file has this name, or if a backslash stands before the `@`. `note` is
    called with a remark if the word seems to be meant as a file name, but there is no such file.
    """
    word = found["word"] or ""
    if found["escape"]:
        return "", found[0][1:]
    if found["quoted"] and not is_missing(found["quoted"]):
        return found["quoted"], found["quoted"]
    for name in (word, word.rstrip(_CLOSING)):
        is_plain_folder = "/" not in name and os.path.isdir(name)
        if name and not is_plain_folder and not is_missing(name):
            return name, word
    bare = found["quoted"] or word.rstrip(_CLOSING)
    if found["quoted"] or _LIKE_A_PATH.search(bare):
        note(f"there is no file {shorten(bare, 60)}, so the name is sent as plain text")
    return "", found[0]


def _note_pasted(found: re.Match[str], note: Callable[[str], None]) -> None:
    if not found["escape"] and os.path.isfile(path_named(found["quoted"] or found["word"])):
        word = shorten(found[0], 60)
        note(f"{word} was pasted, so it is sent as plain text; type the @ yourself to attach it")


def _joined(files: list[AttachedFile], message: str) -> str:
    """The text of a message to send: first the files' texts, then `message`.

    The message comes last because the text that comes first is usually evicted first.
    """
    return "\n\n".join([*(file.block for file in files), *([message] if message.strip() else [])])


_BEGUN = re.compile(r'("[^"\n]*|[^\s"]*)$')


def path_begun(text: str, commands: re.Pattern[str] = re.compile("/read +")) -> str | None:
    """The unfinished file name at the end of `text`, with its opening quote, if it has one.

    A file name stands after `@`, or after a command that `commands` matches, such as `/read`.
    Returns None if neither stands before the end of `text`.
    """
    command = commands.match(text)
    if command and (begun := _BEGUN.match(text, command.end())):
        return begun[1]
    return open_mention(text) if not text.startswith("/") or text.startswith("//") else None


def complete_path(begun: str, event: CompleteEvent) -> Iterator[Completion]:
    """Yield a completion for each file and each folder whose path begins with `begun`.

    A path with spaces is put in quotes. Hidden files are offered only if the user has typed the dot
    at the beginning of their name.
    """
    from prompt_toolkit.completion import Completion, PathCompleter
    from prompt_toolkit.document import Document

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
