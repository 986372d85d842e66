"""Asks the Hugging Face hub once about a model, before a download begins.

The hub's library is imported only if the model is not on this machine.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

from filelock import FileLock, Timeout

from sirchat.errors import ModelError, nearest
from sirchat.models.names import cache_folder, locate, suggestion
from sirchat.models.progress import Progress, bar_class, no_logs

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

Answer = TypeVar("Answer")

# The longest wait for the hub's answer, in seconds; looking up the hub's address counts.
_SECONDS = 1.5


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


if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_LARGE = 8 * 2**20  # bytes; smaller files can be fetched again
_WANTED = re.compile(
    r"(?!consolidated)[^/]+\.(safetensors|json|jinja|model)|merges\.txt|vocab\.txt"
)
_ETAG = re.compile(r"[\w-]{8,128}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ANSWER_SECONDS = 10.0  # seconds to wait for an answer
_PAUSE = 1.0  # seconds before another try
_TRIES = 3  # failures in a row, without progress, before it gives up
_CHUNK = 2**20
_PARTIAL = 206  # HTTP: the answer is the range that was requested
_SHOWN = 4  # most GGUF files that an error message names


@dataclass(frozen=True)
class PulledModel:
    """A model that was downloaded into the cache: its name for `--model`, and its bytes on disk."""

    name: str
    size: int


def pull(name: str, file: str | None, progress: Progress) -> PulledModel:
    """Download a model from the hub, or only the GGUF file `file` of its repository.

    Files that are complete are not downloaded again. `progress` is called with a file's name, and
    the done and the total bytes of all files. Raises ModelError if the model can't be downloaded.
    """
    info = ask_hub(name, with_files=True)
    with explained(name):  # a size can be of a wrong type, for example
        files = _chosen(name, info, file)
        total, done = sum(size for _, size in files), 0
    _check_space(name, total)
    with no_logs():
        for one, size in files:

            def report(
                _: str, now: int, __: int | None, file: str = one, before: int = done
            ) -> None:
                progress(file, min(before + now, total), total)

            report(one, 0, size)
            _fetch(name, one, size, report)
            report(one, size, size)
            done += size
    return PulledModel(f"{name}/{file}" if file else name, total)


def _chosen(name: str, info: ModelInfo, file: str | None) -> list[tuple[str, int]]:
    """Choose the files of a model to download: name and size, in bytes, of each file.

    Raises ModelError if the model has no files that sirchat can read.
    """
    there = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    ggufs = [one for one in there if one.lower().endswith(".gguf")]
    if file is not None:
        if file not in ggufs:
            hint = nearest(file, ggufs) or _listed(ggufs)
            raise ModelError(f"model {name!r} has no GGUF file {file!r}", hint=hint)
        return [(file, there[file])]
    wanted = [one for one in there if _WANTED.fullmatch(one)]
    if any(one.endswith(".safetensors") for one in wanted) and "config.json" in wanted:
        # The weights come last, so that a wrong model is noticed early.
        wanted.sort(key=lambda one: (one.endswith(".safetensors"), one))
        return [(one, there[one]) for one in wanted]
    if ggufs:
        raise ModelError(f"model {name!r} consists of GGUF files", hint=_listed(ggufs))
    raise ModelError(
        f"model {name!r} has no safetensors files",
        hint="other weight files could run code, so sirchat does not read them",
    )


def _listed(ggufs: Sequence[str]) -> str:
    if not ggufs:
        return "the model has no GGUF files; leave --file out"
    more = f", and {len(ggufs) - _SHOWN} more" if len(ggufs) > _SHOWN else ""
    return f"choose a file with --file: {', '.join(ggufs[:_SHOWN])}{more}"


def _check_space(name: str, total: int) -> None:
    folder = cache_folder()
    there = next(one for one in (folder, *folder.parents) if one.is_dir())
    free = shutil.disk_usage(there).free
    if total > free + sum(one.stat().st_size for one in _blobs(name).glob("*")):
        raise ModelError(
            f"model {name!r} needs {total / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free",
            hint="set HF_HUB_CACHE to a folder on another disk",
        )


def _blobs(name: str) -> Path:
    return cache_folder() / f"models--{name.replace('/', '--')}" / "blobs"


def _fetch(name: str, file: str, size: int, progress: Progress) -> None:
    """Download one file of a model into the Hugging Face cache."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    with explained(name, "run the same command again to continue"):
        if size > _LARGE:
            url = hf_hub_url(name, file)
            etag = get_hf_file_metadata(url, timeout=_ANSWER_SECONDS).etag or ""
            if not _ETAG.fullmatch(etag):  # the ETag becomes a file's name
                raise ModelError(f"the hub sent no ETag for {file!r} of {name!r}")
            with _only_one(name, etag):
                _fetch_large(url, _blobs(name) / etag, size, progress)
        hf_hub_download(name, file, cache_dir=cache_folder(), tqdm_class=bar_class(progress))


def _fetch_large(url: str, blob: Path, size: int, progress: Progress) -> None:
    """Download a large file to the path `blob` in the Hugging Face cache.

    An earlier attempt that was interrupted is continued. huggingface_hub looks for the file at this
    path.
    """
    if blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.part")
    part.touch()
    most, failures = part.stat().st_size, 0
    while (there := part.stat().st_size) < size:
        broken: Exception = ConnectionError(f"{url} ends too early")
        try:
            _continue(url, part, there, size, progress)
        except Exception as error:
            if not isinstance(error, ConnectionError | TimeoutError) and not _is_transport(error):
                raise
            broken = error
        now = part.stat().st_size
        most, failures = max(most, now), 0 if now > most else failures + 1
        if failures == _TRIES:
            raise broken
        if now < size:
            time.sleep(_PAUSE)
    digest = blob.name if _SHA256.fullmatch(blob.name) else ""
    if part.stat().st_size > size or (digest and _digest(part) != digest):
        part.unlink()
        raise ModelError(
            f"the download of {url} is damaged", hint="run the same command to fetch it again"
        )
    part.replace(blob)


def _is_transport(error: Exception) -> bool:
    """Whether a download failed because of a broken connection.

    The errors of broken connections have no common public base class.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return "http" in type(error).__module__ and not isinstance(error, HfHubHTTPError)


def _continue(url: str, part: Path, there: int, size: int, progress: Progress) -> None:
    """Download the file at `url` from byte `there` on, and append the bytes to the file `part`.

    If the server sends the whole file, `part` is written anew.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but imported lazily
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={there}-"}
    options: dict[str, Any] = {
        "headers": headers,
        "timeout": _ANSWER_SECONDS,
        "follow_redirects": True,
    }
    with (
        get_session().stream("GET", url, **options) as response,
        part.open("r+b") as stream,
    ):
        hf_raise_for_status(response)
        start = (
            there if response.status_code == _PARTIAL else 0
        )  # else the answer is the whole file
        stream.truncate(start)
        stream.seek(start)
        for chunk in response.iter_bytes(_CHUNK):
            stream.write(chunk)
            if stream.tell() > size:  # the answer may be endless
                return
            progress("", stream.tell(), size)


@contextmanager
def _only_one(name: str, etag: str) -> Iterator[None]:
    """Context manager: hold the lock for the download of one file.

    Raises ModelError if another process holds the lock, because it downloads the same file.
    """
    folder = cache_folder() / ".locks" / _blobs(name).parent.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{etag}.part.lock", timeout=0):
            yield
    except Timeout:
        raise ModelError(
            f"another process is downloading {name!r}", hint="wait until that process has finished"
        ) from None


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
