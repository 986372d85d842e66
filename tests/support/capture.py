"""Draw the README's picture, sirchat/ui/capture.svg: `python tests/support/capture.py`.

The chat runs in a pseudo-terminal with the bundled model; the picture is its screen at the end.
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import Any

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from terminal import Terminal

PICTURE = Path(__file__).parents[2] / "sirchat" / "ui" / "capture.svg"
COLUMNS, ROWS = 92, 34
FLAGS = ("--policy", "sink", "--decay", "0.9", "--budget", "128", "--theme", "dark")
TURNS = (
    "My name is Anna.",
    "I have a cat named Luna and I live in Lisbon.",
    "Tell me a joke.",
    "My favourite colour is green.",
    "/policy entropy",
    "What is my name?",
    "/budget 96",
    "/panel turn",
    "What is my cat called and where do I live?",
)

_THEME = TerminalTheme(
    (24, 26, 31),
    (208, 210, 214),
    [
        *((40, 44, 52), (224, 108, 117), (152, 195, 121), (229, 192, 123)),
        *((97, 175, 239), (198, 120, 221), (86, 182, 194), (190, 193, 199)),
    ],
    [
        *((110, 116, 128), (240, 130, 138), (170, 212, 140), (240, 206, 140)),
        *((120, 190, 250), (212, 140, 232), (105, 200, 212), (255, 255, 255)),
    ],
)


def main() -> None:
    """Run the chat and write the picture."""
    with tempfile.TemporaryDirectory() as home:
        chat = Terminal(*FLAGS, home=Path(home), rows=ROWS, columns=COLUMNS, screen=_Dimmed)
        with chat:
            for turn in TURNS:
                chat.say(turn)
            chat.wait_prompt()
            PICTURE.write_text(_svg(chat.screen), encoding="utf-8")
            chat.leave()


class _Dimmed(pyte.HistoryScreen):  # type: ignore[misc]
    """Marks faint text, which pyte does not support, as blinking, which nothing here uses."""

    def select_graphic_rendition(self, *attributes: int, **rest: Any) -> None:
        super().select_graphic_rendition(*attributes, **rest)
        codes = iter(attributes or (0,))
        for code in codes:
            if code in (38, 48):  # a colour follows, by number or by red, green, blue
                skip = 1 if next(codes) == 5 else 3
                codes = iter(list(codes)[skip:])
            elif code in (0, 2, 22):
                self.cursor.attrs = self.cursor.attrs._replace(blink=code == 2)


def _svg(screen: pyte.Screen) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    for y in range(ROWS):
        row = screen.buffer[y]
        line = Text(no_wrap=True)
        for x in range(COLUMNS):
            line.append(row[x].data, _style(row[x]))
        line.rstrip()
        console.print(line, soft_wrap=True)
    own_fonts = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="sirchat", theme=_THEME, code_format=own_fonts)


def _style(char: Any) -> Style:
    return Style(
        color=_colour(char.fg),
        bgcolor=_colour(char.bg),
        bold=char.bold,
        italic=char.italics,
        underline=char.underscore,
        strike=char.strikethrough,
        reverse=char.reverse,
        dim=char.blink,
    )


def _colour(name: str) -> Color:
    if len(name) == 6 and all(digit in "0123456789abcdef" for digit in name):
        return Color.parse(f"#{name}")
    bright = name.startswith("bright")
    plain = name.removeprefix("bright").replace("brown", "yellow")
    return Color.parse(f"bright_{plain}" if bright else plain)


if __name__ == "__main__":
    main()
