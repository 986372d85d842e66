"""Calls a function in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")

LOADER_THREAD = "loading a model"  # name of a thread that loads a model


def call_in_new_thread(
    work: Callable[[], Result], seconds: float | None = None, name: str = LOADER_THREAD
) -> Result:
    """Call `work` in a new thread and return its result; raises TimeoutError after `seconds`."""
    # A model is loaded so, because another thread will generate: OpenMP gives each thread that
    # computes its own workers until it ends. With more workers than cores, they sleep when they
    # wait for each other, and a token takes up to four times as long.
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future.result(seconds)
