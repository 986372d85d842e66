"""Measures how much slower decoding is while the live panel, which shows the memory, is drawn.

Decoding with the panel is compared with decoding without it. Both show an endless reply on a
terminal of 120 columns whose output is thrown away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TextIO, cast

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import UsageError
from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare
from sirchat.models.model import LoadedModel
from sirchat.ui.live import LiveView
from sirchat.ui.screen import Screen

# Width and height of the terminal on which the panel is drawn, in characters
COLUMNS, ROWS = 120, 40

# Shortest duration of a timed block, in seconds; the panel is drawn several times in a block
BLOCK_SECONDS = 1.0


def bench_panel(model: LoadedModel, options: BenchOptions) -> Iterator[Ratio]:
    """Compare the time of decoding a token with the live panel and without it; yields one ratio.

    Raises UsageError if the terminal is too plain for a panel, or the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise UsageError(f"the panel shows text, and {model.name} has no tokenizer")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        live, off = _screen(nowhere), _screen(nowhere)
        if live.is_plain:
            raise UsageError("this terminal can't show the panel", hint="unset NO_COLOR, set TERM")
        ratio = compare(
            "decode with the live panel against decode without",
            lambda: _blocks(model, options, live, "live"),
            lambda: _blocks(model, options, off, "off"),
            options,
        )
    seconds = BLOCK_SECONDS * (options.rounds + 1)
    kilobytes = [screen.written / seconds / 1000 for screen in (live, off)]
    note = "writes {:.1f} against {:.1f} kB/s to the terminal".format(*kilobytes)
    yield replace(ratio, note=note)


def _blocks(
    model: LoadedModel, options: BenchOptions, screen: Screen, panel: str
) -> Iterator[float]:
    """Show an endless reply on `screen`, and yield the seconds per token of each block of it."""
    settings: dict[str, Any] = {"panel": panel, "budget": options.cache, "policy": "entropy"}
    session = Session(model, Profile(**settings, decay=0.9, temperature=1.0, max_new_tokens=10**9))
    session.stop_ids = frozenset()
    with LiveView(session, screen) as view:
        events = session.ask("Tell me a story. " * (options.cache // 4))
        begun, seen = 0.0, 0
        for event in events:
            view.show(event)
            if not session.speed:
                continue  # the prompt is still being read
            now = time.perf_counter()
            if begun and now - begun >= BLOCK_SECONDS:
                yield (now - begun) / (session.seen - seen)
                now = time.perf_counter()  # the other side ran during the `yield`
            elif begun:
                continue
            begun, seen = now, session.seen


def _screen(nowhere: TextIO) -> Screen:
    screen = Screen(cast(TextIO, _Terminal(nowhere)), nowhere, theme="dark")
    screen.console.size = (COLUMNS, ROWS)
    return screen


class _Terminal:
    """An output stream that passes for a terminal: its method `isatty` returns True."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
