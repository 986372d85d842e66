"""Progress of loading a model, taken from the bars that transformers would draw itself."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.std import tqdm
from transformers.utils import logging as transformers_logging

Progress = Callable[[str, int, int | None], None]
"""What is being done, how much of it is done, of how much if that is known."""


@contextmanager
def reporting(progress: Progress | None) -> Iterator[dict[str, Any]]:
    """While inside, transformers reports to `progress`, and draws nothing.

    Gives the options of `from_pretrained` with which downloads report, too.
    """
    transformers_logging.disable_progress_bar()
    if progress is None:
        yield {}
        return

    tell = progress

    class Bar(_Bar):
        def report(self, what: str, done: int, total: int | None) -> None:
            tell(what, done, total)

    def make(factory: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bar:
        return Bar(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(make)
    try:
        yield {"tqdm_class": Bar}
    finally:
        transformers_logging.set_tqdm_hook(before)


class _Bar(tqdm):  # type: ignore[misc]
    """Counts like tqdm, but reports instead of drawing."""

    def report(self, what: str, done: int, total: int | None) -> None:
        """Take note of the progress."""
        raise NotImplementedError

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"disable": False, "file": io.StringIO(), "leave": False}
        kwargs.pop("name", None)  # the hub's own
        super().__init__(*args, **kwargs)

    def display(self, *args: Any, **kwargs: Any) -> bool:
        self.report(self.desc.removesuffix(": "), int(self.n), self.total)
        return True
