"""Breaks what is typed at the prompt between words, as prompt_toolkit breaks rows anywhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from prompt_toolkit.formatted_text import OneStyleAndTextTuple
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.utils import get_cwidth

from sirchat.ui.text import WORD_OR_SIGN

_TAB_CELLS = 2  # it is shown as ^I
_MAX_CHARS = 20_000  # of a line; a longer one, which was pasted, would make each key slow


class WordWrap(Processor):
    """Fills a row with blanks where the next word does not fit, so that it begins the next row.

    `prefix_cells` returns the widths of what stands before the first row and before each other.
    """

    def __init__(self, prefix_cells: Callable[[], tuple[int, int]]) -> None:
        self._prefix_cells = prefix_cells

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        if sum(len(one[1]) for one in transformation_input.fragments) > _MAX_CHARS:
            return Transformation(transformation_input.fragments)
        first, other = self._prefix_cells()
        room = transformation_input.width - (other if transformation_input.lineno else first)
        next_room = transformation_input.width - other
        source = explode_text_fragments(transformation_input.fragments)
        cells = [_TAB_CELLS if one[1] == "\t" else get_cwidth(one[1]) for one in source]
        if sum(cells) <= room or min(room, next_room) < _TAB_CELLS:
            return Transformation(transformation_input.fragments)
        shown, column = list[OneStyleAndTextTuple](), 0
        at = list[int]()  # by index in the source, that in what is shown
        for match in WORD_OR_SIGN.finditer("".join(one[1] for one in source)):
            start, end = match.span()
            whole = sum(cells[start:end])
            for index in range(start, end):
                needs = whole if index == start and whole <= next_room else cells[index]
                is_next_row = column + needs > room
                if is_next_row:
                    shown += [("", " ")] * (room - column)
                    column, room = 0, next_room
                at.append(len(shown))
                if not is_next_row or source[index][1] != " ":  # no row begins with a blank
                    shown.append(source[index])
                    column += cells[index]
        at.append(len(shown))
        return Transformation(
            shown,
            source_to_display=lambda index: at[min(index, len(source))],
            display_to_source=lambda index: max(0, bisect_right(at, index) - 1),
        )
