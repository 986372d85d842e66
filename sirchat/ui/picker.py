"""Lets the user choose from a list by arrow keys, or answer a question by pressing one key."""

from __future__ import annotations

from collections.abc import Callable, Collection

from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import FormattedTextControl, Layout, Window
from prompt_toolkit.output import Output
from prompt_toolkit.styles import Style

Draw = Callable[[int, int], list[list[tuple[str, str]]]]
"""A function that takes the index of an item and a width in cells; it returns the item's lines.

A line is a list of parts: each is a style (`dim`, `bold`, `match` or "") and a text.
"""

_STYLE = Style.from_dict({"dim": "fg:ansibrightblack", "bold": "bold", "match": "bold underline"})
_PLAIN_STYLE = Style.from_dict({"dim": "", "bold": "bold", "match": "bold underline"})
_MOST = 10  # items shown at a time
_ESCAPE_SECONDS = 0.05
"""If no byte follows an Esc byte within this time, the user pressed Esc; arrows send more bytes."""


class Picker:
    """Lets the user choose an item of a list; a line below the list says which keys do what.

    Args:
        keys: the source of keys, shared with the prompt.
        output: the terminal.
        has_colours: returns whether colours may be used.
    """

    def __init__(self, keys: Input, output: Output, has_colours: Callable[[], bool]) -> None:
        self._keys, self._output, self._has_colours = keys, output, has_colours

    def pick(self, count: int, draw: Draw, more: str = "") -> int | None:
        """Let the user choose one of `count` items, which `draw` draws; return the item's index.

        Returns None after Esc, Ctrl-C or Ctrl-D. `more` is a remark for the line below the list.
        The list is removed from the screen at the end.
        """
        view = _View(count, draw, more)

        def content() -> FormattedText:
            size = self._output.get_size()
            return view.draw(size.rows, size.columns)

        window = Window(FormattedTextControl(content, focusable=True, show_cursor=False))
        app: Application[int | None] = Application(
            layout=Layout(window),
            key_bindings=_bindings(view),
            input=self._keys,
            output=self._output,
            style=_STYLE if self._has_colours() else _PLAIN_STYLE,
            erase_when_done=True,
        )
        app.ttimeoutlen = app.timeoutlen = _ESCAPE_SECONDS
        return app.run()

    def press(self, question: str, keys: Collection[str]) -> str:
        """Show `question`, wait until one of `keys` is pressed, and return it; see `pressed`."""
        return pressed(question, keys, self._output, self._keys)


def pressed(
    question: str, keys: Collection[str], output: Output, source: Input | None = None
) -> str:
    """Show `question`, wait until the user presses one of `keys`, and return that key.

    Keys are read from `source` or, if this is None, from the terminal. Ctrl-C and Ctrl-D raise
    KeyboardInterrupt. At the end, the question is removed from the screen.
    """
    bindings = KeyBindings()

    @bindings.add(Keys.Any)
    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        key = event.key_sequence[0].data.lower()
        if key in keys and not event.app.is_done:
            event.app.exit(result=key)

    @bindings.add("c-c")
    @bindings.add("c-d")
    @bindings.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if not event.app.is_done:
            event.app.exit(exception=KeyboardInterrupt())

    line: Application[str] = Application(
        layout=Layout(Window(FormattedTextControl(question), height=1)),
        key_bindings=bindings,
        input=source,
        output=output,
        erase_when_done=True,
    )
    line.ttimeoutlen = _ESCAPE_SECONDS
    return line.run()


class _View:
    """The part of a picker's list that the screen shows, and the index of the marked item."""

    def __init__(self, count: int, draw: Draw, more: str) -> None:
        self.count, self._draw, self._more = count, draw, more
        self.marked = self._first = 0
        self.shown = _MOST

    def move(self, by: int) -> None:
        """Move the mark by `by` items down the list (up if negative); stop at the list's ends."""
        self.marked = min(max(self.marked + by, 0), self.count - 1)

    def draw(self, rows: int, columns: int) -> FormattedText:
        """The text to show: the items around the marked item, and a line that explains the keys.

        The window has `rows` rows and `columns` columns.
        """
        width = columns - 3  # the last column stays free: some terminals wrap there
        height = len(self._draw(0, width))
        self.shown = max(1, min((rows - 2) // height, _MOST, self.count))
        self._first = min(self._first, self.marked, self.count - self.shown)
        self._first = max(self._first, self.marked - self.shown + 1)
        drawn: list[tuple[str, str]] = []
        for number in range(self._first, self._first + self.shown):
            for index, line in enumerate(self._draw(number, width)):
                is_marked = number == self.marked and not index
                drawn.append(("class:bold", "> ") if is_marked else ("", "  "))
                drawn += [(f"class:{style}" if style else "", text) for style, text in line]
                drawn.append(("", "\n"))
        keys = f"{self.marked + 1} of {self.count}{self._more}: arrows, Enter opens, Esc leaves"
        return FormattedText([*drawn, ("class:dim", keys[:width])])


def _bindings(view: _View) -> KeyBindings:
    keys = KeyBindings()

    def moves(key: str, by: Callable[[], int]) -> None:
        @keys.add(key)
        def _move(event: KeyPressEvent) -> None:
            view.move(by())

    for key, by in (("up", -1), ("c-p", -1), ("down", 1), ("c-n", 1)):
        moves(key, lambda by=by: by)  # type: ignore[misc]
    moves("pageup", lambda: -view.shown)
    moves("pagedown", lambda: view.shown)
    moves("home", lambda: -view.count)
    moves("end", lambda: view.count)

    @keys.add("enter")
    def _choose(event: KeyPressEvent) -> None:
        event.app.exit(result=view.marked)

    @keys.add("escape", eager=True)
    @keys.add("c-c")
    @keys.add("c-d")
    @keys.add("<sigint>")
    def _leave(event: KeyPressEvent) -> None:
        if not event.app.is_done:
            event.app.exit(result=None)

    return keys
