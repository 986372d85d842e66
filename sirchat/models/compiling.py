"""Finds or makes a model's compiled decode step.

Programs are kept for the next start. They are machine code, so a file is loaded only if no other
user could have written it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock, Timeout

from sirchat.errors import ModelError
from sirchat.models import background
from sirchat.models.compile_worker import TEMPORARY, UNFINISHED
from sirchat.models.compiled_step import pickle_without_weights, program_name, without_weights
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel
from sirchat.models.packed import ANY_ROWS, matmul_method_of, set_matmul_method
from sirchat.models.processor import own_rows
from sirchat.models.products import (
    DamagedProgramError,
    WrongProgramError,
    compiler,
    library_name,
    load_library,
    suits_processor,
)
from sirchat.models.progress import Progress
from sirchat.paths import (
    abbreviated,
    changeable_by_others,
    compiled_dir,
    private_dir,
    write_private,
)

# `auto` uses a compiled program that exists; if there is none, a chat makes it in the background.
# `on` makes it before the chat starts.
Compile = Literal["auto", "on", "off"]

_LOOK = 0.5  # seconds between two looks whether something was compiled
_LEFT_AFTER = 3600  # seconds after which an unfinished program counts as abandoned


def use_compiled(model: LoadedModel, how: Compile, progress: Progress | None = None) -> None:
    """Make a model use its compiled or captured decode step, if the setting `compile` allows it.

    Raises ModelError if `how` is `on` and there is no such step, or it can't be loaded.
    """
    if model.device.type == "cuda":
        _use_captured(model, how, progress)
        return
    if how == "off":
        return
    _delete_leftovers(compiled_dir())
    if how == "on" and _wants_products(model) and has_compiler():
        if progress is not None:
            progress("compiling products of packed weights, some seconds", 0, None)
        _compile(compiled_dir() / library_name(), b"")
    _use_products(model)
    step = _step_of(model)
    if how == "auto":
        if step is not None:
            _use_program(step, _program_path(step))
        return
    if step is None:
        raise ModelError(
            f"--compile on: sirchat can't compile model {model.name!r}",
            hint="choose --compile auto, which compiles only if possible",
        )
    path = _program_path(step)
    problem = _use_program(step, path)
    if step.compiled is None and not path.exists():
        if not has_compiler():
            raise ModelError(
                "--compile on needs a C++ compiler (g++), and there is none",
                hint="install a compiler, or choose --compile auto",
            )
        if progress is not None:
            progress("compiling the model's decode step, about a minute", 0, None)
        pickled = pickle_without_weights(step.graph)
        problem = _compile(path, pickled) or _use_program(step, path)
    if problem:
        raise ModelError(f"--compile on: {problem}")


def _use_captured(model: LoadedModel, how: Compile, progress: Progress | None) -> None:
    if how == "off":
        model.__dict__["decode_step"] = None  # as if it were computed
        return
    if progress is not None:
        progress("preparing the decode step on the GPU", 0, None)
    if model.decode_step is None and how == "on":
        raise ModelError(
            f"--compile on: {model.name!r} has no decode step for a GPU: {model.captured.problems}",
            hint="choose --compile auto, which does so only if possible",
        )


class _Missing(NamedTuple):
    """The files that are to be compiled for a model: library, program, or both; and its graph."""

    paths: list[Path]
    pickled: bytes

    @property
    def is_being_made(self) -> bool:
        return background.is_running(background.lock_of(self.paths[-1]))


def compile_in_background(model: LoadedModel) -> threading.Thread | None:
    """Let another process compile products and decode step of a model, and use them once they are.

    Returns the thread that looks for them; None if `compile_for_later` would do nothing.
    """
    if not _lacks_something(model):
        return None
    step = _step_of(model)

    def work() -> None:
        missing = _missing_of(model)
        process = _begin_compiling(missing) if missing is not None else None
        while process and missing and (process.poll() is None or missing.is_being_made):
            time.sleep(_LOOK)
            _use_products(model)
        _use_products(model)
        if step is not None and step.compiled is None:
            _use_program(step, _program_path(step))

    thread = threading.Thread(target=work, name="compiling", daemon=True)
    thread.start()
    return thread


def compile_for_later(model: LoadedModel) -> None:
    """Let another process, which may outlive this one, compile for later starts with a model.

    Does nothing if there is no compiler, or if all is compiled, can't be, or failed before.
    """
    if _lacks_something(model) and (missing := _missing_of(model)) is not None:
        _begin_compiling(missing)


def _begin_compiling(missing: _Missing) -> subprocess.Popen[bytes] | None:
    """Begin the process, which ends at once if another one compiles the same; None if it can't."""
    with suppress(OSError), tempfile.TemporaryFile() as pickled:  # a pipe could end too early
        pickled.write(missing.pickled)
        pickled.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sirchat.models.compile_later", *map(str, missing.paths)],
            stdin=pickled,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return None


def compile_missing(paths: Sequence[Path], pickled: bytes) -> None:
    """Compile the pickled graph to the last of `paths`, unless it is empty; products to others."""
    for path in paths:
        if _compile(path, pickled if path == paths[-1] else b"", background.LOWEST):
            return  # without the products, another step is compiled at a later start


def _missing_of(model: LoadedModel) -> _Missing | None:
    """What is to be compiled; the model, which may compute in another thread, stays as it is."""
    step, how, library = _step_of(model), matmul_method_of(model.module), _missing_library(model)
    paths, pickled = [library] if library else [], b""
    if step is not None and (library or _is_step_to_be_made(step)):
        graph = without_weights(step.graph)
        if library and how is not None:  # the step is compiled for it, though it is not loaded yet
            set_matmul_method(graph, how._replace(own=own_rows()))
        if _is_to_be_made(path := compiled_dir() / program_name(graph)):
            paths.append(path)
            pickled = pickle.dumps(graph)
    return _Missing(paths, pickled) if paths else None


def _missing_library(model: LoadedModel) -> Path | None:
    library = compiled_dir() / library_name()
    return library if _wants_products(model) and _is_to_be_made(library) else None


def _lacks_something(model: LoadedModel) -> bool:
    if model.device.type == "cuda" or not has_compiler():
        return False
    return _missing_library(model) is not None or _is_step_to_be_made(_step_of(model))


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler, and can compile as `compile_worker` does."""
    return sys.platform != "win32" and compiler() is not None


def compiled_in_words(model: LoadedModel) -> str:
    """Whether the model uses a compiled or captured decode step, as text; if not, why not."""
    if model.device.type == "cuda":
        return _captured_in_words(model)
    step = _step_of(model)
    if step is None:
        return "no: this model has no decode step that can be compiled on this machine"
    path = _program_path(step)
    return "yes" if step.compiled else _use_in_words(path, lambda: _use_program(step, path))


def products_in_words(model: LoadedModel) -> str:
    """Whether packed weights are multiplied by the library of `products.py`; if not, why not."""
    if not suits_processor():
        return "no: they need a processor with AVX2, AVX-512, or 64-bit ARM"
    said = _use_in_words(compiled_dir() / library_name(), lambda: _use_products(model))
    how = matmul_method_of(model.module)
    if said != "yes" or how is None or how.own >= ANY_ROWS:
        return said
    return f"yes, of up to {how.own} tokens at once" if how.own else "no: torch's are faster"


def _use_in_words(path: Path, use: Callable[[], str]) -> str:
    if problem := _read_failure(path):
        return f"no: {problem} (delete {abbreviated(_failure_file(path))} to try again)"
    if path.exists():
        problem = use()
        return f"no: {problem}" if problem else "yes"
    return "not yet" if has_compiler() else "no: there is no C++ compiler (g++)"


def _step_of(model: LoadedModel) -> DecodeStep | None:
    return model.decode_step if isinstance(model.decode_step, DecodeStep) else None


def _captured_in_words(model: LoadedModel) -> str:
    step, problems = model.captured
    if step is None:
        return f"no: {problems}"
    return f"a CUDA graph of {step.body.about}" + (f" ({problems})" if problems else "")


def _is_to_be_made(path: Path) -> bool:
    """Whether a file does not exist, and did not fail to be compiled before."""
    return not path.exists() and not _read_failure(path)


def _is_step_to_be_made(step: DecodeStep | None) -> bool:
    return step is not None and step.compiled is None and _is_to_be_made(_program_path(step))


def _wants_products(model: LoadedModel) -> bool:
    """Whether a model has packed weights that `products.cpp` can multiply, and does not yet."""
    how = matmul_method_of(model.module)
    return how is not None and not how.own and suits_processor()


def _use_products(model: LoadedModel) -> str:
    """Multiply a model's packed weights by our library, where that is faster, if it exists."""
    how, path = matmul_method_of(model.module), compiled_dir() / library_name()
    if how is None or not _wants_products(model):
        return ""
    problem = _load(path, lambda: load_library(path))
    if not problem and path.exists():
        set_matmul_method(model.module, how._replace(own=own_rows()))
    return problem


def _program_path(step: DecodeStep) -> Path:
    return compiled_dir() / program_name(step.graph)


def _use_program(step: DecodeStep, path: Path) -> str:
    """Make `step` use the program in `path`, if it exists; returns why that fails, or ""."""
    return _load(path, lambda: step.use_program(path))


def _load(path: Path, load: Callable[[], None]) -> str:
    """Load the machine code in `path`, if it exists; returns why that fails, or "".

    A damaged or wrong program is deleted. After any other error the next start may succeed.
    """
    try:
        if not path.exists():
            return ""
        if foreign := changeable_by_others(path):
            return f"{abbreviated(foreign)} could have been changed by others, so it is not loaded"
        load()
    except DamagedProgramError:
        with suppress(OSError):
            path.unlink()
        return "its program was damaged and has been deleted; it will be compiled again"
    except WrongProgramError as error:
        _record_failure(path, error)
        return str(error)
    except Exception as error:  # torch raises all kinds of errors
        return f"its program can't be loaded now: {_first_line(error)}"
    return ""


def _compile(path: Path, pickled: bytes, niceness: int = 0) -> str:
    """Compile a graph to `path`, or wait for a process that does; returns an error or ""."""
    lock = FileLock(path.with_suffix(".lock"), mode=0o600, thread_local=False)
    try:
        private_dir(path.parent)
        try:
            lock.acquire(blocking=False)
        except Timeout:  # another chat is making it now
            lock.acquire()
        else:
            _failure_file(path).unlink(missing_ok=True)
        try:
            if path.exists():
                return ""
            return _read_failure(path) or _run_worker(pickled, path, niceness)
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
    except OSError as error:
        return f"compiling fails: {error.strerror or error}"


def _run_worker(pickled: bytes, path: Path, niceness: int) -> str:
    worker = ["-P", "-m", "sirchat.models.compile_worker", str(path), str(niceness)]
    process = subprocess.Popen(
        [sys.executable, *worker, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(pickled)
    except BaseException:  # Ctrl-C: the process removes its files
        process.terminate()
        process.wait()
        raise
    if process.returncode == 0 and path.exists():
        return ""
    code = process.returncode if process.returncode < 128 else 128 - process.returncode
    ended_from_outside = code in (-9, -15)  # SIGKILL, which Windows lacks, and SIGTERM
    if code < 0 and not ended_from_outside:
        said = [f"the process crashed ({signal.Signals(-code).name})"]
    else:
        said = stderr.decode(errors="replace").strip().splitlines()
    problem = f"compiling fails: {said[-1] if said else f'exit status {code}'}"
    if code != TEMPORARY and not ended_from_outside:
        _record_failure(path, problem)
    return problem


def _delete_leftovers(folder: Path) -> None:
    """Delete what processes that were killed have left, and programs of an older format."""
    for left in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # another process sweeps, too
            if time.time() - left.stat().st_mtime > _LEFT_AFTER:
                shutil.rmtree(left, ignore_errors=True)
    for old in folder.glob("*.pt2"):
        with suppress(OSError):
            old.unlink(missing_ok=True)


def _failure_file(path: Path) -> Path:
    return path.with_suffix(".failed")


def _record_failure(path: Path, error: object) -> None:
    """Delete a program and write its error to a file, so that no later start compiles it again."""
    with suppress(OSError):  # if nothing can be written, later starts try again
        path.unlink(missing_ok=True)
        write_private(_failure_file(path), _first_line(error), replaces=True)


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:500]


def _read_failure(path: Path) -> str:
    try:
        return _failure_file(path).read_text(encoding="utf-8")
    except OSError:
        return ""
