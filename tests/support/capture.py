"""Draw the README's picture, sirchat/ui/capture.svg: `python tests/support/capture.py`.

`sirchat tutorial` runs in a pseudo-terminal, tall enough for all of it; the picture has some steps.
"""

from __future__ import annotations

import io
import re
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from sirchat.ui.tutorial import STEPS
from terminal import Emulator, Terminal

PICTURE = Path(__file__).parents[2] / "sirchat" / "ui" / "capture.svg"
COLUMNS, ROWS = 86, 220
# Steps in the picture, and whether with what is said after them. A name is told, evicted under
# `sink`, back and kept under `entropy`.
SHOWN = {1: False, 5: True, 6: False, 8: True}

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
    """Run the tutorial and write the picture."""
    environ = {"SIRCHAT_THEME": "dark"}
    with (
        tempfile.TemporaryDirectory() as home,
        Terminal(
            *("--debug", "tutorial"),
            home=Path(home),
            rows=ROWS,
            columns=COLUMNS,
            environ=environ,
            screen=_Dimmed,
        ) as tutorial,
    ):
        for number, step in enumerate(STEPS, 1):
            tutorial.wait(_heading(number))
            tutorial.wait_suggested(step.line)
            tutorial.submit()
        tutorial.ended()
        PICTURE.write_text(_svg(tutorial.screen, _chosen(tutorial.lines)), encoding="utf-8")


def _heading(number: int) -> str:
    return f"── {number} of {len(STEPS)} ──"


def _chosen(lines: list[str]) -> list[int]:
    """The rows of the steps that the picture shows."""
    starts = [lines.index(_heading(number)) for number in range(1, len(STEPS) + 1)]
    rows: list[int] = []
    for number, is_whole in SHOWN.items():
        end = starts[number] - 1  # of the empty row before the next step
        while not is_whole and lines[end - 1].startswith("│"):
            end -= 1
        rows += [*range(starts[number - 1], end), starts[number] - 1]
    return rows[:-1]


class _Dimmed(Emulator):
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


def _svg(screen: pyte.Screen, rows: list[int]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    for y in rows:
        row = screen.buffer[y]
        line = Text(no_wrap=True)
        for style, chars in groupby((row[x] for x in range(COLUMNS)), key=_style):
            line.append("".join(char.data for char in chars), style)
        line.rstrip()
        console.print(line, soft_wrap=True)
    own_fonts = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="sirchat tutorial", theme=_THEME, code_format=own_fonts)


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
