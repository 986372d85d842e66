"""Puts the texts of files that the user names by `@path` into messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from os.path import basename
from typing import TYPE_CHECKING

from sirchat.text.text_file import (
    is_missing,
    load_text_files,
    make_code_block,
    matching_files,
    without_surrogates,
)
from sirchat.ui.text import displayable_line, shorten

if TYPE_CHECKING:  # a prompt must not import a model, nor `sirchat ask` a prompt
    from prompt_toolkit.completion import CompleteEvent, Completion


# A path as a user types it, and as a terminal writes one that is dropped on it: maybe quoted, or
# with a backslash before each blank. `{0}` stands behind the closing quote.
_PATH = r"""(?:"(?P<double>[^"\n]+)"{0}|'(?P<single>[^'\n]+)'{0}|(?P<word>(?:\\[^\S\n]|\S)+))"""
_MENTION = re.compile(r"(?<!\S)(?P<escape>\\?)@" + _PATH.format(""))
_LEADING_PATH = re.compile(rf"\s*{_PATH.format('?')}\s*")  # a closing quote may be missing
_UNFINISHED_MENTION = re.compile(r'(?<!\S)@(?:"[^"\n]*|[^\s"]*)$')
_UNFINISHED_PATH = re.compile(r'("[^"\n]*|[^\s"]*)$')
_ESCAPED_CHAR = re.compile(r"\\(.)")
_LOOKS_LIKE_PATH = re.compile(r"/|\w\.\w{1,5}$")
_RESOURCE = re.compile(r"[^:\s]+:[A-Za-z]")  # how `server:uri` begins
_CLOSING_PUNCTUATION = ".,;:!?)]}'\"…"  # cut off an `@path` if no file has the full name


def attach_mentions(
    text: str,
    note: Callable[[str], None],
    read_resource: Callable[[str], str | None] = lambda name: None,
) -> str:
    """The message that a typed `text` sends, with what it mentions as `@path` or `@server:uri`.

    Remarks go to `note`. Raises UsageError if a file can't be used.
    """
    blocks: dict[str, str] = {}  # by path
    message = words = ""  # `words` lacks the names of attached files
    end = 0
    for mention in _MENTION.finditer(text):
        between, end = text[end : mention.start()], mention.end()
        name = _name_of(mention)
        resource = None if mention["escape"] else read_resource(name)
        if resource is not None:
            path, shown = name, mention[0][1:]
            blocks[name] = _make_block(name, resource)
        else:
            path, shown = _resolve_mention(mention, note)
        if path and path not in blocks:
            blocks |= load_blocks(path)
        message += between + shown
        words += between + shown.removeprefix(path)
    message, words = message + text[end:], words + text[end:]
    # The files come first: the oldest is usually evicted first.
    return "\n\n".join([*blocks.values(), *([message] if words.strip() else [])])


def escape_mentions(text: str, after: str = "") -> str:
    """The text, behind the character `after`, as it is typed to mention no file or resource."""

    def escape(mention: re.Match[str]) -> str:
        if mention["escape"] or mention.start() < len(after):
            return mention[0]
        is_meant = _find_mentioned(mention)[0] or _RESOURCE.match(_name_of(mention))
        return "\\" * bool(is_meant) + mention[0]

    return _MENTION.sub(escape, after + text).removeprefix(after)


def mentioned_names(text: str) -> list[str]:
    """The names after each `@` of a text, without closing punctuation."""
    return [_name_of(mention) for mention in _MENTION.finditer(text) if not mention["escape"]]


def unfinished_mention(before: str) -> str | None:
    """The name after an `@` at the end of `before`, with its opening quote; else None."""
    match = _UNFINISHED_MENTION.search(before)
    return match[0][1:] if match else None


def load_blocks(name: str) -> dict[str, str]:
    """The texts of a file, folder or pattern as Markdown code blocks, by path.

    Raises UsageError if a file can't be used.
    """
    return {path: _make_block(path, text) for path, text in load_text_files(name).items()}


def _make_block(name: str, text: str) -> str:
    return without_surrogates(make_code_block(displayable_line(name), text))


def split_leading_path(text: str) -> tuple[str, str]:
    """Split a text into the file name at its start, a word or a quoted text, and the rest."""
    match = _LEADING_PATH.match(text)
    if match is None:
        return "", text
    word = match["word"] or ""
    if is_missing(word):
        word = _ESCAPED_CHAR.sub(r"\1", word)
    return match["double"] or match["single"] or word, text[match.end() :]


def unfinished_path(text: str, commands: re.Pattern[str]) -> str | None:
    """The file name typed at the end of `text`, after `@` or one of `commands`, or None."""
    command = commands.match(text)
    if command and (path := _UNFINISHED_PATH.match(text, command.end())):
        return path[1]
    return unfinished_mention(text) if not text.startswith("/") or text.startswith("//") else None


def complete_path(typed: str, event: CompleteEvent) -> Iterator[Completion]:
    """Yield each file and folder whose path begins as typed; hidden ones only after a dot."""
    from prompt_toolkit.completion import Completion, PathCompleter
    from prompt_toolkit.document import Document

    name, is_quoted = typed.removeprefix('"'), typed.startswith('"')
    for entry in PathCompleter(expanduser=True).get_completions(Document(name), event):
        path, is_folder = name + entry.text, entry.display_text.endswith("/")
        if displayable_line(path) != path or '"' in path:  # can't be typed
            continue
        if entry.display_text.startswith(".") and not basename(name).startswith("."):
            continue
        if is_quoted or " " in path:
            path = f'"{path}' if is_folder else f'"{path}"'
        yield Completion(path + "/" * is_folder, -len(typed), display=entry.display)


def _resolve_mention(mention: re.Match[str], note: Callable[[str], None]) -> tuple[str, str]:
    """The path that an `@path` means, or "" if it does not exist; and the text to send instead."""
    path, shown = _find_mentioned(mention)
    name = _name_of(mention)
    if mention["escape"]:  # a backslash that is in no file's way is text
        return "", mention[0][1:] if path or _RESOURCE.match(name) else mention[0]
    if path:
        return path, shown
    if "://" in name:
        note("nothing is fetched, so the name is sent as plain text")
    elif mention["double"] or mention["single"] or _LOOKS_LIKE_PATH.search(name):
        note(f"there is no file {shorten(name, 60)}, so the name is sent as plain text")
    return "", mention[0]


def _name_of(mention: re.Match[str]) -> str:
    """The quoted name of a mention, or its word without closing punctuation."""
    return mention["double"] or mention["single"] or mention["word"].rstrip(_CLOSING_PUNCTUATION)


def _find_mentioned(mention: re.Match[str]) -> tuple[str, str]:
    """The path that a mention means, or "" if it does not exist; and the text to send instead."""
    quoted, word = mention["double"] or mention["single"], mention["word"] or ""
    if quoted:
        is_there = not is_missing(quoted) or _matches_files(quoted)
        return (quoted, quoted) if is_there else ("", "")
    unescaped = _ESCAPED_CHAR.sub(r"\1", word)
    path = _find_path(word, unescaped)
    return path, word if word.startswith(path) else unescaped


def _find_path(*spellings: str) -> str:
    """The first spelling, with or without closing punctuation, that matches a file."""
    paths = [path for word in spellings for path in (word, word.rstrip(_CLOSING_PUNCTUATION))]
    for path in filter(None, paths):
        if not is_missing(path) and ("/" in path or not os.path.isdir(path)):
            return path
    for path in paths:  # a question mark behind a name is seldom a part of a pattern
        if "*" in path and _matches_files(path):
            return path
    return ""


def _matches_files(pattern: str) -> bool:
    """Whether a text is a pattern, with a dot or a slash, that matches a file."""
    return re.search(r"[./]", pattern) is not None and any(matching_files(pattern))
