"""Shows one turn on the terminal: the reply as it is generated, with the compact panel below it.

The last rows are the live region, drawn anew with each frame. Without panel and Markdown, or on a
plain terminal, the reply is printed as it comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType

from sirchat.chat.events import Delta, Event, Evicted, Notice, Reading, Returned, TurnDone
from sirchat.chat.evicted_text import evicted_words, surprising_words
from sirchat.chat.panel_snapshot import Snapshot
from sirchat.chat.plain_reply import TaggedText, calls_tools, describe_excess
from sirchat.chat.session import Session
from sirchat.ui.interrupt import defer_signals
from sirchat.ui.panel import draw_compact_panel
from sirchat.ui.screen import Screen
from sirchat.ui.status import continue_hint, describe_recalled, describe_round, draw_progress_bar
from sirchat.ui.text import DisplayFilter
from sirchat.ui.tool_use import describe_result

if TYPE_CHECKING:
    from sirchat.ui.growing_reply import GrowingReply

MIN_FRAME_SECONDS = 1 / 8  # between two frames
_MIN_TEXT_SECONDS = 1 / 30  # the same, while no panel is drawn, only text
MAX_TIME_SHARE = 1 / 50  # of the time that may be spent on drawing

LIVE_PANEL_SETTINGS = ("auto", "live")  # of the setting `panel`: drawn while the model writes
_MAX_NAMED_WORDS = 3  # evicted words of the user that the status line names
_MAX_FRAME_TOKENS = 100  # the last evicted ones, of whose words a frame shows some
_MAX_REGION_ROWS = 10

_ERASE_BELOW = "\r\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
# Most new terminals show a frame, and a new window size, only when the frame is complete.
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"


class LiveView:
    """Context manager that shows the events of one turn; nothing else may write meanwhile."""

    def __init__(self, session: Session, screen: Screen) -> None:
        self._session = session
        self._screen = screen
        self._filter = DisplayFilter()
        self._tagged_text = TaggedText()  # as the reply is shown where nothing is dimmed
        self._is_streaming = False  # the reply is streamed; its line is unfinished
        self._reply: GrowingReply | None = None  # the reply that is not streamed
        self._has_begun = False
        self._reading: Reading | None = None
        self._user_turn: TurnDone | None = None
        self._notes: list[str] = []
        self._evicted_positions: list[int] = []  # positions evicted since the last frame
        self._evicted_words: tuple[str, ...] = ()  # words of the latest eviction that had any
        self._evicted_in_round: set[int] = set()  # positions evicted in this round
        self._pacer = FramePacer()
        self._region = LiveRegion(screen.console)
        self._size = screen.console.size  # of the window, at the last frame

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *error: object) -> None:
        with defer_signals():
            self._end_reply()

    @defer_signals()
    def show(self, event: Event) -> None:
        """Show one event of the turn, such as text of the reply, progress, or the turn's end."""
        match event:
            case Delta():
                self._show_delta(event)
            case Reading():
                self._reading = event if event.done < event.total else None
                if self._reading or self._draws_panel:
                    # One pass may read the whole message, so the first frame can't wait.
                    self._draw_when_due(at_once=not event.done)
            case Evicted():
                self._evicted_in_round.update(event.positions)
                if self._draws_panel:
                    positions = [*self._evicted_positions, *event.positions]
                    self._evicted_positions = positions[-_MAX_FRAME_TOKENS:]
                    self._draw_when_due()
            case Notice(text):
                self._note(text)
            case Returned():
                self._note(describe_result(event))
            case TurnDone():
                self._end_turn(event)

    @property
    def _draws_panel(self) -> bool:
        return self._session.profile.panel in LIVE_PANEL_SETTINGS and not self._screen.is_plain

    def _show_delta(self, new: Delta) -> None:
        text = self._filter.push(new.text)
        if not self._has_begun and text:
            self._begin_reply()
        if self._reply is None:
            self._stream(self._tagged_text.push(replace(new, text=text)))
            return
        tokens = self._session.state.last_reply_stats.tokens_out
        self._reply.push(text, tokens, is_reasoning=new.part == "thinking")
        if self._is_due():  # checked before anything slow: this runs for every token
            self._draw_frame()

    def _begin_reply(self) -> None:
        """Decide whether the reply is streamed as written, or laid out in rows as it grows."""
        self._has_begun = True
        profile = self._session.profile
        is_markdown = profile.markdown and profile.json_schema == "off"
        is_streamed = not (is_markdown or self._draws_panel) and profile.thinking == "show"
        if is_streamed or self._screen.is_plain:
            self._region.remove()
            return
        from sirchat.ui.growing_reply import GrowingReply

        layout = None
        if is_markdown:
            from sirchat.ui.markdown import MarkdownLayout  # loads a parser, which some never need

            layout = MarkdownLayout(self._screen.theme.name, self._screen.console.color_system)
        self._reply = GrowingReply(layout, profile.thinking)
        if not self._draws_panel:
            self._pacer = FramePacer(_MIN_TEXT_SECONDS)

    def _end_turn(self, turn: TurnDone) -> None:
        self._reading = None
        if turn.role in ("user", "tool"):
            self._user_turn = turn
            # After `/retry full`, the reply has begun, and had more than is held now.
            excess = describe_excess(turn, self._session, "/budget")
            if excess and not self._has_begun:
                self._region.remove()  # the note stands before the reply
                self._screen.note(excess)
        if turn.role != "assistant":
            return
        self._end_reply()
        evicted, self._evicted_in_round = sorted(self._evicted_in_round), set()
        self._has_begun, self._tagged_text = False, TaggedText()
        if not calls_tools(turn, self._session):  # else another reply follows
            self._show_round(turn, evicted)

    def _show_round(self, reply: TurnDone, evicted: list[int]) -> None:
        """Print the status line of a round, and the panel if it is shown once a turn."""
        session, screen = self._session, self._screen
        if not screen.is_quiet:
            words = evicted_words(session, evicted)[:_MAX_NAMED_WORDS] if evicted else ()
            recalled = describe_recalled(session.recall, reply.seen)
            self._note(describe_round(self._user_turn, reply, session.budget, words, recalled))
            if hint := continue_hint(reply.finish, session.profile):
                self._note(hint)
        if session.profile.panel == "turn" and not screen.is_plain:
            snapshot = self._snapshot()
            latest = surprising_words(session, evicted, snapshot.rows)
            screen.show(draw_compact_panel(snapshot, screen.theme, screen.width, evicted=latest))

    def _note(self, text: str) -> None:
        if not self._region.is_shown and self._reply is None:
            self._screen.note(text)
        else:
            self._notes.append(text)

    def _draw_when_due(self, *, at_once: bool = False) -> None:
        if (at_once or self._is_due()) and not (self._screen.is_plain or self._is_streaming):
            self._draw_frame()

    def _is_due(self) -> bool:
        return self._pacer.is_due() or self._screen.console.size != self._size

    def _draw_frame(self) -> None:
        start = time.perf_counter()
        self._draw()
        self._pacer.record_frame(time.perf_counter() - start)

    def _draw(self, *, is_end: bool = False) -> None:
        self._size = self._screen.console.size
        above, rows = list[str](), list[str]()
        if self._reply is not None:
            height = self._size.height - (_MAX_REGION_ROWS if self._draws_panel else 1)
            above, rows = self._reply.take_rows(self._size.width, height, is_end=is_end)
        if not is_end:
            with self._screen.console.capture() as captured:
                self._screen.show(Group(*self._region_parts()))
            rows = [*rows, *captured.get().splitlines()]
        self._region.draw(rows, above="".join(f"{row}\n" for row in above))

    def _region_parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = []
        theme, width = self._screen.theme, self._screen.width
        if (reading := self._reading) is not None:
            parts.append(draw_progress_bar("reading", reading.done, reading.total, theme, width))
        if self._draws_panel:
            snapshot = self._snapshot()
            if self._evicted_positions:
                latest = sorted(self._evicted_positions)
                words = surprising_words(self._session, latest, snapshot.rows)
                self._evicted_words = words or self._evicted_words
                self._evicted_positions = []
            evicted = self._evicted_words
            parts.append(draw_compact_panel(snapshot, theme, width, evicted=evicted))
        return parts

    def _snapshot(self) -> Snapshot:
        """A snapshot with only the tokens of highest score, as many as the screen has columns."""
        return self._session.snapshot(strongest=self._screen.width)

    def _stream(self, text: str) -> None:
        if text:
            self._screen.stream(text)
            self._is_streaming = True

    def _end_reply(self) -> None:
        if self._reply is not None:
            self._draw(is_end=True)
            self._reply = None
        self._region.remove()
        if self._is_streaming:
            self._screen.line(self._tagged_text.end())
            self._is_streaming = False
        for note in self._notes:
            self._screen.note(note)
        self._notes = []


class LiveRegion:
    """The last rows of the screen, drawn anew with each frame and removed at the end.

    The cursor stays in their first row, so erasing from there removes all rows, even after a change
    of the window, when terminals cut, wrap or move rows.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_shown = False

    def draw(self, rows: Sequence[str], above: str = "") -> None:
        """Write `above`, a text of whole rows, and draw `rows` below it, in one write."""
        if not rows:
            self.remove()
            self._write(above)
            return
        rows = rows[: self._console.size.height]
        up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        # The terminal wraps no row, even if the window has just become narrower.
        drawn = "\x1b[?7l" + "\n".join(rows) + f"{up}\r\x1b[?7h"
        begin = _ERASE_BELOW if self.is_shown else _HIDE_CURSOR
        self._write(f"{_BEGIN_FRAME}{begin}{above}{drawn}{_END_FRAME}")
        self.is_shown = True

    def remove(self) -> None:
        if self.is_shown:
            self._write(_ERASE_BELOW + _SHOW_CURSOR)
        self.is_shown = False

    def _write(self, text: str) -> None:
        """Write unfiltered, because `text` has escape sequences of our own."""
        self._console.file.write(text)
        self._console.file.flush()


class FramePacer:
    """Decides when a frame may be drawn: less often if a frame takes long, as on a slow line."""

    def __init__(self, seconds: float = MIN_FRAME_SECONDS) -> None:
        self._seconds = seconds
        self._due_time = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_time

    def record_frame(self, seconds: float) -> None:
        self._due_time = time.monotonic() + max(self._seconds, seconds / MAX_TIME_SHARE)
