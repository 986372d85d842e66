"""A terminal without a process, and a live view that shows a reply on it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyte
import pytest

from sirchat.chat.events import Delta, TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.config.profile import Profile
from sirchat.text.reply_parts import Marks, PartSplitter
from sirchat.ui.live import LiveView
from sirchat.ui.screen import Screen
from terminal import Emulator, resize


class FakeTerminal(io.StringIO):
    """A stream that `Screen` takes for a terminal, read by a terminal emulator."""

    def __init__(self, rows: int = 30, columns: int = 80) -> None:
        super().__init__()
        self.screen = Emulator(columns, rows, history=10_000, ratio=0.5)
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return super().write(text)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window."""
        resize(self.screen, rows, columns)

    def clear(self) -> None:
        """Forget all that was written, and what scrolled off."""
        self.seek(0)
        self.truncate()
        self.screen.reset()
        self.screen.history.top.clear()
        self.screen.set_mode(pyte.modes.LNM)

    def size(self, *descriptor: int) -> os.terminal_size:
        """Replaces `os.get_terminal_size`."""
        return os.terminal_size((self.screen.columns, self.screen.lines))


def stub_session(panel: str = "live", text: str = "held", **settings: Any) -> Any:
    """The parts of a session that a live view uses; it holds one token with this text."""
    row = TokenRow(0, 1, text, 0, "user", 2.0, 1.0, 1.0, 0.5, ())
    view = Snapshot(
        model="model",
        policy="entropy",
        decay=1.0,
        budget=64,
        resident=1,
        seen=1,
        recalled=0,
        speed=1.0,
        threshold=1.0,
        evicted_next=(0,),
        rows=(row,),
        slots=(0,),
        turns=(HeldShare(0, "user", 1, 1, 2.0, 1),),
    )
    return SimpleNamespace(
        profile=Profile(panel=panel, **settings),  # type: ignore[arg-type]
        state=SimpleNamespace(last_reply_stats=SimpleNamespace(tokens_out=0)),
        budget=64,
        seen=1,
        snapshot=lambda strongest=None: view,
        tokens=lambda positions: (row,),
    )


def show_reply(
    terminal: FakeTerminal,
    chunks: list[str],
    panel: str = "live",
    *sizes: tuple[int, int],
    opens_reasoning: bool = False,
    **settings: Any,
) -> None:
    """Show a reply that comes in these chunks; the window changes to these sizes on the way.

    `opens_reasoning`: the template writes the first `<think>`. Each chunk counts as a token.
    """
    changes = {(i + 1) * len(chunks) // (len(sizes) + 1): size for i, size in enumerate(sizes)}
    session = stub_session(panel, **settings)
    splitter = PartSplitter(Marks("<think>", "</think>", opens_reasoning))
    with LiveView(session, Screen(terminal, terminal)) as view:
        for i, chunk in enumerate(chunks):
            if i in changes:
                terminal.resize(*changes[i])
            session.state.last_reply_stats.tokens_out += 1
            for piece in splitter.push(chunk, is_end=i + 1 == len(chunks)):
                view.show(Delta(piece.text, piece.part))


def fake_terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """A fake terminal of the size that the system reports, and an environment for colours."""
    terminal = FakeTerminal()
    monkeypatch.setattr("os.get_terminal_size", terminal.size)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return terminal


@contextmanager
def every_frame_drawn() -> Iterator[None]:
    """Within, a live view draws after every event, however fast they come."""
    with patch("sirchat.ui.live.FramePacer.is_due", lambda self: True):
        yield
