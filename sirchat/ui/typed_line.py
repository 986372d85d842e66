"""What a typed line means, and how a text must be typed to be sent as it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = '"""'  # opens and closes a block of typed lines
_LEADING_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
# Alone on a line, as in other programs. The first three are commands, too.
EXIT_WORDS = ("exit", "quit", "bye", "q", ":q")
EXIT_COMMANDS = EXIT_WORDS[:3]
_COMMAND_WITH_TEXT = re.compile(r"/(?:edit|(?:set\s+)?system)\s+")
_ESCAPED_SIGN = re.compile(r"(?<!\S)\\@")


@dataclass(frozen=True)
class InputLine:
    """One input of the user: a message, or a command, which begins with a slash."""

    text: str
    is_command: bool
    is_stopped: bool = False  # Ctrl-C came after Enter, before the prompt had closed

    @property
    def ends_chat(self) -> bool:
        return self.is_command and self.text.removeprefix("/") in EXIT_COMMANDS


def parse_line(typed: str) -> InputLine:
    """What a typed text means: `//x` is the message `/x`, a block the message within."""
    stripped = typed.strip()
    if stripped.startswith(FENCE) and stripped.endswith(FENCE) and len(stripped) >= 6:
        inner = stripped.removeprefix(FENCE).removesuffix(FENCE)
        return InputLine(inner.strip("\n"), is_command=False)
    if stripped.startswith("//"):
        return InputLine(stripped[1:], is_command=False)
    if stripped.startswith("/"):
        return InputLine(stripped, is_command=True)
    if stripped.casefold() in EXIT_WORDS:
        return InputLine("/exit", is_command=True)
    return InputLine(_LEADING_BLANK_LINES.sub("", typed).rstrip(), is_command=False)


def as_typed(message: str) -> str:
    """How a message must be typed to be sent as it is: `/x` as `//x`, others in a block."""
    if message.lstrip().startswith("/"):
        return f"/{message.lstrip()}"
    is_block = message.lstrip().startswith(FENCE) or message.endswith("\\")
    is_block |= message.strip().casefold() in EXIT_WORDS
    return f"{FENCE}\n{message}\n{FENCE}" if is_block else message


def sent_message(typed: str) -> str:
    """The message or system prompt that a typed line sends, but for the texts of files; or ""."""
    line = parse_line(typed)
    command = _COMMAND_WITH_TEXT.match(line.text) if line.is_command else None
    text = line.text[command.end() :] if command else "" if line.is_command else line.text
    return _ESCAPED_SIGN.sub("@", text).strip()
