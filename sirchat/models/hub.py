"""Asks the Hugging Face hub once about a model, before a download begins.

The hub's library is imported only if the model is not on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar, cast

from sirchat.errors import ModelError
from sirchat.models.names import locate, suggestion

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

Answer = TypeVar("Answer")

_SECONDS = 1.5
"""The longest wait for the hub's answer, in seconds; looking up the hub's address counts."""


def require(name: str) -> None:
    """Raise ModelError if a model is neither on this machine nor on the Hugging Face hub."""
    source, _ = locate(name)
    if not Path(source).is_dir():
        only_cached(source)


def only_cached(name: str) -> bool:
    """Whether to load a hub model only from the cache on this machine.

    This is true if the model is in the cache, and the hub can't be reached or does not know the
    model. If the model is not in the cache either, raises ModelError.
    """
    from huggingface_hub.errors import GatedRepoError

    try:
        ask_hub(name)
    except ModelError as error:
        if isinstance(error.__cause__, GatedRepoError):
            return False  # the error from loading the model says how to get access
        if _is_cached(name):
            return True
        raise
    return False


def ask_hub(name: str, *, with_files: bool = False) -> ModelInfo:
    """Ask the Hugging Face hub about a model; returns its information about the model.

    `with_files` adds the sizes of the model's files. Raises ModelError if the hub does not know the
    model, if access to the model is restricted, or if the hub can't be reached.
    """
    from huggingface_hub import HfApi, get_session

    api = HfApi()
    get_session()  # loads certificates, which must not count as network time
    with explained(name):
        return _within(
            _SECONDS,
            lambda: api.model_info(name, timeout=_SECONDS, files_metadata=with_files),
        )


@contextmanager
def explained(name: str, hint: str = "") -> Iterator[None]:
    """Context manager: turn errors of the hub and of the network into a ModelError.

    The error is about the model `name`; its `hint` says what to do if the hub can't be reached.
    Errors of the disk are raised unchanged.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is open only to those who have accepted its terms",
            hint=f"accept them at https://huggingface.co/{name}, then: hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {name!r}", hint=suggestion(name)) from error
    except (HfHubHTTPError, OSError) as error:
        is_network = isinstance(error, HfHubHTTPError | ConnectionError | TimeoutError)
        if not is_network and error.errno is not None:
            raise
        raise _unreachable(name, hint) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"invalid response from the hub for model {name!r}") from error
    except Exception as error:  # the library's own network errors have no common public base
        if "http" not in type(error).__module__:
            raise
        raise _unreachable(name, hint) from error


def _unreachable(name: str, hint: str) -> ModelError:
    return ModelError(
        f"model {name!r} is not on this machine, and the hub can't be reached",
        hint=hint or suggestion(name),
    )


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Call `ask` and return its result; raises TimeoutError if it takes longer than `seconds`.

    The time limits of the hub's library are not enough: they do not include the look-up of the
    hub's address.
    """
    answered = SimpleQueue[tuple[Answer | None, BaseException | None]]()

    def run() -> None:
        try:
            answered.put((ask(), None))
        except BaseException as error:
            answered.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        answer, error = answered.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"the hub did not answer within {seconds} s") from None
    if error is not None:
        raise error
    return cast(Answer, answer)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
