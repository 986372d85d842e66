"""Reports the progress of loading and of downloads; replaces the progress bars of libraries."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.std import tqdm

# A function that gets a task's name, the amount done, and the total amount (None if unknown).
Progress = Callable[[str, int, int | None], None]


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Context manager or decorator: no warnings or logs; progress bars stay off even afterwards."""
    switch_off_bars()
    with no_warnings():
        yield


def switch_off_bars() -> None:
    """Switch off bars and warnings of transformers and the hub's library permanently."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # and those of the hub's library


@contextmanager
def no_warnings() -> Iterator[None]:
    """Context manager or decorator: no library shows warnings or logs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def reporting(progress: Progress | None) -> Iterator[dict[str, Any]]:
    """Context manager: transformers' progress bars call `progress`, if given, and draw nothing.

    Yields options for `from_pretrained`.
    """
    if progress is None:
        yield {}
        return
    from transformers.utils import logging as transformers_logging

    bar = bar_class(progress)

    def make(factory: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(make)
    try:
        yield {"tqdm_class": bar}
    finally:
        transformers_logging.set_tqdm_hook(before)


def bar_class(progress: Progress) -> type[tqdm]:
    """Make a progress bar class for libraries that calls `progress` and draws nothing."""

    class Bar(tqdm):  # type: ignore[misc]  # tqdm is untyped
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"disable": False, "file": io.StringIO(), "leave": False, "mininterval": 0}
            kwargs.pop("name", None)  # an option of the hub's own bars only
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> bool:
            progress(self.desc.removesuffix(": "), int(self.n), self.total)
            return True

    return Bar
