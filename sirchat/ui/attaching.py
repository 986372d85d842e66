"""Puts the texts of files into messages (`@path` and `/read`), and completes the names of files.

A file is attached only if the user typed its name.
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
    expand_path,
    is_missing,
    load_text_files,
    make_code_block,
    matching_files,
    without_surrogates,
)
from sirchat.ui.text import displayable_line, shorten

if TYPE_CHECKING:  # a prompt must not import a model, nor `sirchat ask` a prompt
    from prompt_toolkit.completion import CompleteEvent, Completion

    from sirchat.chat.session import Session

# A path as a user types it, and as a terminal writes one that is dropped on it: maybe quoted, or
# with a backslash before each blank.
_PATH = r"""(?:"(?P<double>[^"\n]+)"{0}|'(?P<single>[^'\n]+)'{0}|(?P<word>(?:\\[^\S\n]|\S)+))"""
_MENTION = re.compile(r"(?<!\S)(?P<escape>\\?)@" + _PATH.format(""))
_FIRST = re.compile(rf"\s*{_PATH.format('?')}\s*")
_ESCAPED = re.compile(r"\\(.)")
_LIKE_A_PATH = re.compile(r"/|\w\.\w{1,5}$")
_OPEN = re.compile(r'(?<!\S)@(?:"[^"\n]*|[^\s"]*)$')
_CLOSING = ".,;:!?)]}'\"…"  # cut off at the end of an `@path` if no file has the full name
_BEGUN = re.compile(r'("[^"\n]*|[^\s"]*)$')


@dataclass(frozen=True)
class AttachedFile:
    """A file that is put into a message: its name as the user typed it, and its text."""

    name: str
    text: str

    @property
    def block(self) -> str:
        """The file's text as it stands in a message: a Markdown code block, its name on top."""
        return without_surrogates(make_code_block(displayable_line(self.name), self.text))


def attach_mentions(
    text: str, note: Callable[[str], None], pasted_at_signs: Collection[int] = ()
) -> tuple[str, list[AttachedFile]]:
    """Load the files that a typed `text` names by `@path`; return the message, and the files.

    `pasted_at_signs` has the index of each `@` that was pasted: it names no file. Remarks go to
    `note`. Raises UsageError if a file exists but can't be used.
    """
    files: dict[str, AttachedFile] = {}
    said = list[str]()  # the words of the message that are not names of files
    message, at = list[str](), 0
    for mention in _MENTION.finditer(text):
        if mention.end("escape") in pasted_at_signs:
            name, shown = "", mention[0]
            _note_pasted(mention, note)
        else:
            name, shown = _named(mention, note)
        if name and name not in files:
            files |= {file.name: file for file in load_attachments(name)}
        between = text[at : mention.start()]
        message += (between, shown)
        said += (between, shown.removeprefix(name) if name else shown)
        at = mention.end()
    message.append(text[at:])
    has_words = bool("".join([*said, text[at:]]).strip())
    if not files and (path := _as_path(text)):
        raise UsageError(
            f"{shorten(path, 60)} is a file, and nothing is sent",
            hint='@ before it sends its text; a name with blanks goes in quotes: @"a b.txt"',
        )
    attached = list(files.values())
    return _joined(attached, "".join(message) if has_words else ""), attached


def mentioned_names(text: str) -> list[str]:
    """The names after each `@` of a text, as they are typed, and without closing signs."""
    return [
        mention["double"] or mention["single"] or mention["word"].rstrip(_CLOSING)
        for mention in _MENTION.finditer(text)
        if not mention["escape"]
    ]


def unfinished_mention(before: str) -> str | None:
    """The unfinished name after an `@` at the end of `before`, with its opening quote, or None."""
    match = _OPEN.search(before)
    return match[0][1:] if match else None


def attach_named_files(rest: str) -> tuple[str, list[AttachedFile]]:
    """The message that `/read FILE [QUESTION]` sends, and its files; UsageError without a name."""
    name, question = split_leading_path(rest)
    if not name:
        raise UsageError(
            "/read: expected the name of a file", hint="type /read FILE, or /read FILE QUESTION"
        )
    files = load_attachments(name)
    return _joined(files, question), files


def load_attachments(name: str) -> list[AttachedFile]:
    """Load the file that a name means, or those of a folder or a pattern; UsageError as there."""
    return [AttachedFile(path, text) for path, text in load_text_files(name).items()]


def split_leading_path(text: str) -> tuple[str, str]:
    """Split a text into the file name at its start, a word or a quoted text, and the rest."""
    match = _FIRST.match(text)
    if match is None:
        return "", text
    word = match["word"] or ""
    if is_missing(word):
        word = _ESCAPED.sub(r"\1", word)
    return match["double"] or match["single"] or word, text[match.end() :]


def describe_size(files: list[AttachedFile], session: Session) -> str:
    """How many tokens each file takes, and whether a part will be evicted while it is read."""
    counts = [len(session.template.as_text(file.block)) for file in files]
    parts = [
        f"{displayable_line(file.name)}: {count:,} tokens"
        for file, count in zip(files, counts, strict=True)
    ]
    line, total = f"{', '.join(parts)}; the budget is {session.budget:,} tokens", sum(counts)
    room = session.engine.evictor.divide_budget().evictable
    if room < session.budget // 2 and total <= 2 * session.budget:
        line += f", of which a message can take {room:,}"
    if total <= room or session.profile.policy == "full":
        return line
    share = "most" if total > 2 * room else "a part"
    return f"{line}, so {share} of the text will be evicted while it is read"


def unfinished_path(text: str, commands: re.Pattern[str] = re.compile("/read +")) -> str | None:
    """The unfinished file name at the end of `text`, after `@` or a command of a file, or None."""
    command = commands.match(text)
    if command and (begun := _BEGUN.match(text, command.end())):
        return begun[1]
    return unfinished_mention(text) if not text.startswith("/") or text.startswith("//") else None


def complete_path(begun: str, event: CompleteEvent) -> Iterator[Completion]:
    """Yield each file and folder whose path begins so; hidden ones only after a typed dot."""
    from prompt_toolkit.completion import Completion, PathCompleter
    from prompt_toolkit.document import Document

    name, is_quoted = begun.removeprefix('"'), begun.startswith('"')
    for entry in PathCompleter(expanduser=True).get_completions(Document(name), event):
        path, is_folder = name + entry.text, entry.display_text.endswith("/")
        if displayable_line(path) != path or '"' in path:  # can't be typed
            continue
        if entry.display_text.startswith(".") and not basename(name).startswith("."):
            continue
        quotes = is_quoted or " " in path
        text = f'"{path}' + ("" if is_folder else '"') if quotes else path
        yield Completion(text + ("/" if is_folder else ""), -len(begun), display=entry.display)


def _named(mention: re.Match[str], note: Callable[[str], None]) -> tuple[str, str]:
    """The file's name, "" if there is none, and what the message has in place of the `@path`."""
    word, quoted = mention["word"] or "", mention["double"] or mention["single"]
    if mention["escape"]:
        return "", mention[0][1:]
    if quoted and (not is_missing(quoted) or _matches(quoted)):
        return quoted, quoted
    plain = _ESCAPED.sub(r"\1", word)
    forms = word, word.rstrip(_CLOSING), plain, plain.rstrip(_CLOSING)
    names = [*dict.fromkeys(filter(None, forms))]
    there = [one for one in names if not is_missing(one) and ("/" in one or not os.path.isdir(one))]
    # A question mark behind a name is seldom a part of a pattern.
    if found := there or [one for one in names if "*" in one and _matches(one)]:
        return found[0], word if word.startswith(found[0]) else plain
    bare = quoted or word.rstrip(_CLOSING)
    if quoted or _LIKE_A_PATH.search(bare):
        is_address = "://" in bare
        what = "nothing is fetched" if is_address else f"there is no file {shorten(bare, 60)}"
        note(f"{what}, so the name is sent as plain text")
    return "", mention[0]


def _matches(pattern: str) -> bool:
    """Whether a file matches a pattern, which has a dot or a slash."""
    return re.search(r"[./]", pattern) is not None and any(matching_files(pattern))


def _as_path(text: str) -> str:
    """The path, from the root or the home folder, of a file whose name is all of `text`; or ""."""
    name, rest = split_leading_path(text)
    is_one = not rest and name.startswith(("/", "~/")) and "\n" not in name
    return name if is_one and os.path.isfile(expand_path(name)) else ""


def _note_pasted(mention: re.Match[str], note: Callable[[str], None]) -> None:
    named = mention["double"] or mention["single"] or mention["word"]
    if not mention["escape"] and os.path.isfile(expand_path(named)):
        word = shorten(mention[0], 60)
        note(f"{word} was pasted, so it is sent as plain text; type the @ yourself to attach it")


def _joined(files: list[AttachedFile], message: str) -> str:
    """The files' texts, and then the message: what comes first is usually evicted first."""
    return "\n\n".join([*(file.block for file in files), *([message] if message.strip() else [])])
