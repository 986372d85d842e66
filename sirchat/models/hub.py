"""Asks the Hugging Face hub once about a model, and downloads models into the hub's cache.

Weights come from safetensors or GGUF, never from pickles. The hub's library deletes an interrupted
download, so large files are downloaded here, into `blobs/ETAG.part`.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from sirchat.errors import ModelError, did_you_mean
from sirchat.models.names import cache_folder, cached_folder, locate, part_names, suggest_model
from sirchat.models.new_thread import call_in_new_thread
from sirchat.models.progress import Progress, bar_class, no_warnings

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_ANSWER_TIMEOUT = 1.5  # the longest wait for the hub's answer, the look-up of its address included
_MIN_RESUMABLE_BYTES = 8 * 2**20  # bytes; smaller files can be fetched again
_PULLED_FILES = re.compile(
    r"(?!consolidated)(\d_Pooling/)?[^/]+\.(safetensors|json|jinja|model)|(merges|vocab)\.txt"
)
_ETAG = re.compile(r"[\w-]{8,128}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What a user may type for OWNER/NAME: a link, or the path of a file.
_HUB_LINK = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)?(\w[\w.-]*/\w[\w.-]*)"
    r"(?:/(?:(?:blob|resolve)/[^/]+/)?([^?#]+\.gguf)|/|$)",
    re.ASCII,
)
# By the status of the hub's answer; 401 for a missing token means that there is no such model.
_STATUS_HINTS = {
    401: "the token is wrong or has expired: hf auth login",
    403: "the token may lack a permission: hf auth login",
    429: "wait some minutes",
}
_METADATA_TIMEOUT = 10.0  # seconds to wait for an answer
_MAX_SHOWN_FILES = 4  # most GGUF files that an error message names


@dataclass(frozen=True)
class PulledModel:
    """A downloaded model: its name for `--model`, and its bytes on disk."""

    name: str
    size: int


def require_available(name: str) -> None:
    """Raise ModelError if a model is neither on this machine nor on the hub."""
    source, _ = locate(name)
    if not Path(source).is_dir():
        must_use_cache(source)


def must_use_cache(name: str) -> bool:
    """Whether a model must be loaded from the cache, because the hub can't be asked or lacks it.

    Raises ModelError if it is not in the cache either.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError

    try:
        ask_hub(name)
    except ModelError as error:
        if isinstance(error.__cause__, GatedRepoError):
            return False  # the error from loading the model says how to get access
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return True
        raise
    return False


def ask_hub(name: str, *, with_files: bool = False) -> ModelInfo:
    """Ask the hub about a model; `with_files` also asks for the sizes of its files.

    Raises ModelError if the model is unknown or restricted, or if the hub can't be reached.
    """
    from huggingface_hub import HfApi, get_session

    api = HfApi()
    get_session()  # loads certificates, which must not count as network time
    with explain_hub_errors(name):
        # The library's own limit does not include the look-up of the hub's address.
        info = call_in_new_thread(
            lambda: api.model_info(name, timeout=_ANSWER_TIMEOUT, files_metadata=with_files),
            _ANSWER_TIMEOUT,
            "asking the hub",
        )
    names = {sibling.rfilename for sibling in getattr(info, "siblings", None) or ()}
    if "adapter_config.json" in names and "config.json" not in names:
        raise ModelError(
            f"model {name!r} is a LoRA adapter, which can't be used",
            hint="choose a repository with the merged model",
        )
    return info


@contextmanager
def explain_hub_errors(name: str, hint: str = "") -> Iterator[None]:
    """Context manager: turn errors of the hub and the network, not of the disk, into ModelErrors.

    `hint` says what to do if the hub can't be reached.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:  # before the hub was asked
        match = _HUB_LINK.match(name)
        repository, file = match.groups() if match is not None else (name, None)
        example = "a model on the hub is OWNER/NAME, such as Qwen/Qwen3-0.6B"
        option = f" --file {shlex.quote(file)}" if file else ""
        to_pull = f"sirchat models pull {repository}{option}"
        raise ModelError(
            f"{name!r} can't be a model on the hub", hint=example if repository == name else to_pull
        ) from error
    except GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is open only to those who have accepted its terms",
            hint=f"accept them at https://huggingface.co/{name}, then: hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {name!r}", hint=suggest_model(name)) from error
    except (HfHubHTTPError, OSError) as error:
        is_network = isinstance(error, HfHubHTTPError | ConnectionError | TimeoutError)
        if not is_network and error.errno is not None:
            raise
        raise _unreachable(name, error, hint) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"invalid response from the hub for model {name!r}: {error}") from error
    except Exception as error:  # the library's own network errors have no common public base
        if "http" not in type(error).__module__:
            raise
        raise _unreachable(name, error, hint) from error


def pull(name: str, file: str | None, progress: Progress) -> PulledModel:
    """Download a model from the hub, or only the GGUF file `file` and the other parts of its model.

    Complete files are kept. `progress` gets a file's name, and of all files together the bytes done
    and the total bytes. Raises ModelError if the download fails.
    """
    info = ask_hub(name, with_files=True)
    with explain_hub_errors(name):  # a size can be of a wrong type, for example
        files = _choose_files(name, info, file)
        total, done = sum(size for _, size in files), 0
    with no_warnings():
        for path, size in files:

            def report(
                _: str, now: int, __: int | None, path: str = path, before: int = done
            ) -> None:
                progress(path, min(before + now, total), total)

            report(path, 0, size)
            _fetch(name, path, size, report)
            report(path, size, size)
            done += size
    return PulledModel(f"{name}/{files[0][0]}" if file else name, total)


def _unreachable(name: str, error: BaseException, hint: str) -> ModelError:
    """A ModelError that says with which status the hub refused to answer, if it did."""
    from http.client import responses

    refusal = error if hasattr(error, "response") else error.__cause__
    response, what = getattr(refusal, "response", None), "can't be reached"
    if response is not None:
        status: int = response.status_code
        said = getattr(refusal, "server_message", None) or responses.get(status, "")
        what = f"answers {status} {said}"
        hint = _STATUS_HINTS.get(status) or hint or "try again later"
    return ModelError(
        f"model {name!r} is not on this machine, and the hub {what}",
        hint=hint or suggest_model(name),
    )


def _choose_files(name: str, info: ModelInfo, file: str | None) -> list[tuple[str, int]]:
    """Choose the files to download, as (name, bytes); raises ModelError without usable weights."""
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    ggufs = [path for path in sizes if path.lower().endswith(".gguf")]
    if file is not None:
        if file not in ggufs:
            hint = did_you_mean(file, ggufs) or _file_hint(ggufs)
            raise ModelError(f"model {name!r} has no GGUF file {file!r}", hint=hint)
        parts = part_names(file)
        if missing := [path for path in parts if path not in sizes]:
            raise ModelError(f"model {name!r} lacks parts of {file!r}: {', '.join(missing)}")
        return [(path, sizes[path]) for path in parts]
    wanted = [path for path in sizes if _PULLED_FILES.fullmatch(path)]
    if any(path.endswith(".safetensors") for path in wanted) and "config.json" in wanted:
        # The weights come last, so that a wrong model is noticed early.
        wanted.sort(key=lambda path: (path.endswith(".safetensors"), path))
        return [(path, sizes[path]) for path in wanted]
    if ggufs:
        raise ModelError(f"model {name!r} consists of GGUF files", hint=_file_hint(ggufs))
    raise ModelError(
        f"model {name!r} has no safetensors files",
        hint="other weight files could run code, so sirchat does not read them",
    )


def _file_hint(ggufs: Sequence[str]) -> str:
    if not ggufs:
        return "the model has no GGUF files; leave --file out"
    whole = list(dict.fromkeys(part_names(path)[0] for path in ggufs))
    more = f", and {len(whole) - _MAX_SHOWN_FILES} more" if len(whole) > _MAX_SHOWN_FILES else ""
    return f"choose a file with --file: {', '.join(whole[:_MAX_SHOWN_FILES])}{more}"


def _fetch(name: str, file: str, size: int, progress: Progress) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    bar = bar_class(progress)
    with explain_hub_errors(name, "run the same command again to continue"):
        # The library has another way for files that are too large for this one.
        if _MIN_RESUMABLE_BYTES < size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            url = hf_hub_url(name, file)
            etag = get_hf_file_metadata(url, timeout=_METADATA_TIMEOUT).etag or ""
            if not _ETAG.fullmatch(etag):  # the ETag becomes a file's name
                raise ModelError(f"the hub sent no ETag for {file!r} of {name!r}")
            blob, locks = cached_folder(name) / "blobs" / etag, cache_folder() / ".locks"
            for folder in (blob.parent, locks):
                folder.mkdir(parents=True, exist_ok=True)
            with FileLock(locks / f"{etag}.part.lock"):  # another process may do the same
                _fetch_large(url, blob, size, bar)
        hf_hub_download(name, file, cache_dir=cache_folder(), tqdm_class=bar)


def _fetch_large(url: str, blob: Path, size: int, bar: Any) -> None:
    """Download a large file to where huggingface_hub looks for it; resumes after an interrupt."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # it is lazy

    if blob.exists():
        return
    part = blob.with_name(f"{blob.name}.part")
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    with part.open("ab") as stream:
        start = stream.tell() if stream.tell() <= size else stream.truncate(0)
        get = partial(http_get, resume_size=start, expected_size=size, tqdm_class=bar)
        try:
            get(url, stream, headers=headers)
        except OSError as error:
            # Those of the disk have a number, and others than for a wrong length another type.
            if type(error) is not OSError or error.errno is not None:
                raise
    has_digest, is_whole = _SHA256.fullmatch(blob.name), part.stat().st_size == size
    if not is_whole or (has_digest and _digest(part) != blob.name):
        part.unlink()
        raise ModelError(
            f"the download of {url} is damaged", hint="run the same command to fetch it again"
        )
    part.replace(blob)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
