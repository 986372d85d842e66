"""Progress of loading a model, taken from the bars that transformers would draw itself."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers.utils import logging as transformers_logging

from sirchat.models.bars import Progress, bar_class


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """While inside, transformers and the libraries below it draw, warn and log nothing.

    Their progress bars stay off afterwards, too. Also a decorator: `@quiet_libraries()`. What goes
    wrong is said by the exception alone.
    """
    transformers_logging.disable_progress_bar()  # also the hub's
    with suppress(ImportError):  # the GGUF loader calls tqdm itself, which no switch turns off
        from transformers import modeling_gguf_pytorch_utils

        modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm
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
    """While inside, the progress bars of transformers report to `progress`.

    Gives the options of `from_pretrained` with which downloads report, too.
    """
    if progress is None:
        yield {}
        return

    bar = bar_class(progress)

    def make(factory: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(make)
    try:
        yield {"tqdm_class": bar}
    finally:
        transformers_logging.set_tqdm_hook(before)
