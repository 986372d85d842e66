"""Progress bars that the libraries would draw, made to report instead."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from tqdm.std import tqdm

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much (None if unknown)."""


def bar_class(progress: Progress) -> type[tqdm]:
    """A class that libraries can use for their bars, and that reports to `progress`."""

    class Bar(tqdm):  # type: ignore[misc]  # tqdm is untyped
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"disable": False, "file": io.StringIO(), "leave": False}
            kwargs.pop("name", None)  # an option that only the hub's own bars have
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> bool:
            progress(self.desc.removesuffix(": "), int(self.n), self.total)
            return True

    return Bar
