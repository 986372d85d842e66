"""Ctrl-C while the model speaks: a flag that the engine looks at between tokens."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupt:
    """As a context, turns Ctrl-C into a flag; called, says whether it is set.

    So a forward pass is never cut in the middle. A third Ctrl-C raises KeyboardInterrupt, for a
    model that takes too long to look.
    """

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Interrupt:
        self._count = 0
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= 3:
            raise KeyboardInterrupt
