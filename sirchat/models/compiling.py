"""Finds or makes a model's compiled decode step.

Programs are kept for the next start. They are machine code, so a file is loaded only if no other
user could have written it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from sirchat.errors import ModelError
from sirchat.models.compile_worker import TEMPORARY, UNFINISHED
from sirchat.models.compiled_step import (
    DamagedProgramError,
    WrongProgramError,
    pickle_without_weights,
    program_name,
)
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel
from sirchat.models.progress import Progress
from sirchat.paths import abbreviated, compiled_dir, private_dir, write_private

# `auto` uses a compiled program that exists; if there is none, a chat makes it in the background.
# `on` makes it before the chat starts.
Compile = Literal["auto", "on", "off"]

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
    step = _step_of(model)
    _delete_leftovers(compiled_dir())
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
        problem = _compile_program(step, path) or _use_program(step, path)
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


def compile_in_background(model: LoadedModel) -> threading.Thread | None:
    """Compile a model's decode step in a process of low priority; the model uses it when ready.

    Returns the thread that waits for the process; None if there is no compiler, or if the step is
    compiled, can't be compiled, or failed to compile before.
    """
    step = _step_of(model)
    if step is None or step.compiled is not None or not has_compiler():
        return None
    path = _program_path(step)
    if _read_failure(path) or path.exists():  # it failed before, or can't be used now
        return None

    def work() -> None:
        if not _compile_program(step, path, niceness=19):
            _use_program(step, path)

    thread = threading.Thread(target=work, name="compiling", daemon=True)
    thread.start()
    return thread


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler, and can compile as `compile_worker` does."""
    return sys.platform != "win32" and shutil.which(os.environ.get("CXX", "g++")) is not None


def compiled_in_words(model: LoadedModel) -> str:
    """Whether the model uses a compiled or captured decode step, as text; if not, why not."""
    if model.device.type == "cuda":
        return _captured_in_words(model)
    step = _step_of(model)
    if step is None:
        return "no: this model has no decode step that can be compiled on this machine"
    if step.compiled is not None:
        return "yes"
    path = _program_path(step)
    if problem := _read_failure(path):
        return f"no: {problem} (delete {abbreviated(_failure_file(path))} to try again)"
    if path.exists():
        problem = _use_program(step, path)
        return f"no: {problem}" if problem else "yes"
    return "not yet" if has_compiler() else "no: there is no C++ compiler (g++)"


def _step_of(model: LoadedModel) -> DecodeStep | None:
    return model.decode_step if isinstance(model.decode_step, DecodeStep) else None


def _captured_in_words(model: LoadedModel) -> str:
    step, problems = model.captured
    if step is None:
        return f"no: {problems}"
    return f"a CUDA graph of {step.body.about}" + (f" ({problems})" if problems else "")


def _program_path(step: DecodeStep) -> Path:
    return compiled_dir() / program_name(step.graph)


def _use_program(step: DecodeStep, path: Path) -> str:
    """Make `step` use the program in `path`, if it exists; returns why that fails, or "".

    A damaged or wrong program is deleted. After any other error the next start may succeed.
    """
    try:
        if not path.exists():
            return ""
        if foreign := _writable_by_others(path):
            return f"{abbreviated(foreign)} could have been changed by others, so it is not loaded"
        step.use_program(path)
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


def _compile_program(step: DecodeStep, path: Path, niceness: int = 0) -> str:
    """Compile a decode step to `path`, or wait for a process that does; returns an error or ""."""
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
            return "" if path.exists() else _read_failure(path) or _run_worker(step, path, niceness)
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
    except OSError as error:
        return f"compiling fails: {error.strerror or error}"


def _run_worker(step: DecodeStep, path: Path, niceness: int) -> str:
    worker = ["-P", "-m", "sirchat.models.compile_worker", str(path), str(niceness)]
    process = subprocess.Popen(
        [sys.executable, *worker, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(pickle_without_weights(step.graph))
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


def _writable_by_others(path: Path) -> Path | None:
    """The file or its folder, whichever another user may write to; None if neither."""
    for place in (path, path.parent):
        about = place.stat()
        if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
            return place
    return None


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
