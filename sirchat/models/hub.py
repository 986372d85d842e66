"""Whether a model can be had from the Hugging Face hub: asked once, before a download begins.

The hub's library is imported only for names that are not those of a model that is here.
"""

from __future__ import annotations

from pathlib import Path

from sirchat.errors import ModelError
from sirchat.models.names import locate, suggestion

_SECONDS = 2.0


def require(name: str) -> None:
    """Raise ModelError if there is no such model, here or on the hub."""
    source, _ = locate(name)
    if not Path(source).is_dir():
        only_cached(source)


def only_cached(name: str) -> bool:
    """Whether the model must be loaded from the cache, since the hub can't be reached.

    Raises ModelError if it can't be had at all: it is unknown, or not in the cache either.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_SECONDS)
    except GatedRepoError:
        return False  # loading says how to get access
    except RepositoryNotFoundError:
        if _is_cached(name):
            return True
        raise ModelError(f"the hub has no model {name!r}", hint=suggestion(name)) from None
    except (HfHubHTTPError, OSError, ConnectionError) as error:
        return _cached_or_raise(name, error)
    except Exception as error:  # the library's own network errors have no common public base
        if "http" not in type(error).__module__:
            raise
        return _cached_or_raise(name, error)
    return False


def _cached_or_raise(name: str, error: Exception) -> bool:
    if _is_cached(name):
        return True
    raise ModelError(
        f"model {name!r} is not here, and the hub can't be reached", hint=suggestion(name)
    ) from error


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
