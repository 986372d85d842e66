"""Loads the model of a profile, and finds or makes its compiled decode step.

Compiled programs are kept for the next start. They are machine code that torch writes and loads,
so a file is loaded only if no other user could have written it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.compiled_step import CompiledStep, program_name, without_weights
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel, load_model
from sirchat.models.progress import Progress
from sirchat.paths import abbreviated, compiled_dir, private_dir

Compile = Literal["auto", "on", "off"]
"""Whether single tokens are read by a compiled step.

`auto` uses the compiled program if it exists; if not, a chat compiles it in the background. `on`
compiles a missing program before the start; `off` uses none.
"""


def load_model_of(
    profile: Profile, *, trust_remote_code: bool = False, progress: Progress | None = None
) -> LoadedModel:
    """Load the model of a profile; the setting `compile` says whether it gets a compiled step.

    `progress` is called with the progress of loading. Raises ModelError if the model can't
    be loaded, or if `compile` is `on` and the model can't be compiled.
    """
    model = load_model(
        profile.model,
        device=profile.device,
        dtype=profile.dtype,
        threads=profile.threads,
        quantize=profile.quantize,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    use_compiled(model, profile.compile, progress)
    return model


def use_compiled(model: LoadedModel, how: Compile, progress: Progress | None = None) -> None:
    """Make a model use its compiled decode step, if `how` (see `Compile`) allows it.

    Raises ModelError if `how` is `on` and the step can't be compiled or loaded.
    """
    step = model.decode_step
    if how == "off":
        return
    if how == "auto":
        if step is not None:
            _use(step, _path(step))
        return
    if step is None:
        raise ModelError(
            f"--compile on: sirchat can't compile model {model.name!r}",
            hint="choose --compile auto, which compiles only if possible",
        )
    path = _path(step)
    if not _use(step, path):
        if not has_compiler():
            raise ModelError(
                "--compile on needs a C++ compiler (g++), and there is none",
                hint="install a compiler, or choose --compile auto",
            )
        if progress is not None:
            progress("compiling the model's decode step, about a minute", 0, None)
        problem = _make(step, path)
        if problem or not _use(step, path):
            raise ModelError(f"--compile on: compiling fails: {problem or _problem(path)}")


def compile_in_background(model: LoadedModel) -> threading.Thread | None:
    """Compile a model's decode step in a process of low priority, and use it when it is ready.

    Returns the thread that waits for the process; None if there is no step or no compiler,
    the step is compiled already, or compiling failed before. The process ends when sirchat ends.
    """
    step = model.decode_step
    if step is None or step.compiled is not None or not has_compiler():
        return None
    path = _path(step)
    if _problem(path):
        return None

    def work() -> None:
        if not _make(step, path, niceness=19):
            _use(step, path)

    thread = threading.Thread(target=work, name="compiling", daemon=True)
    thread.start()
    return thread


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compiled_in_words(model: LoadedModel) -> str:
    """Whether the model uses a compiled step, or why not, as text for `sirchat doctor`."""
    step = model.decode_step
    if step is None:
        return "no: this model has no decode step that can be compiled on this machine"
    if step.compiled is not None:
        return "yes"
    path = _path(step)
    if problem := _problem(path):
        return f"no: {problem} (delete {abbreviated(_failure(path))} to try again)"
    if path.exists():
        return "no, but a program for this model has been compiled"
    return "not yet" if has_compiler() else "no: there is no C++ compiler (g++)"


def _path(step: DecodeStep) -> Path:
    return compiled_dir() / program_name(step.graph)


def _use(step: DecodeStep, path: Path) -> bool:
    """Make `step` use the program at `path`; returns whether it exists and can be used."""
    if not path.exists() or not _is_own(path):
        return False
    try:
        step.compiled = CompiledStep(path, step.graph)
    except Exception as error:  # for a damaged file, torch raises all kinds of errors
        _fail(path, error)
        return False
    return True


def _make(step: DecodeStep, path: Path, niceness: int = 0) -> str:
    """Compile the program at `path`; returns what went wrong, in one line, or empty text."""
    worker = ["-P", "-m", "sirchat.models.compile_worker", str(path), str(niceness)]
    try:
        _failure(path).unlink(missing_ok=True)
        private_dir(path.parent)
        process = subprocess.Popen(
            [sys.executable, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, stderr = process.communicate(without_weights(step.graph))
        except BaseException:  # Ctrl-C: the process removes its files
            process.terminate()
            process.wait()
            raise
    except OSError as error:
        return error.strerror or str(error)
    if process.returncode == 0 and path.exists():
        return ""
    said = stderr.decode(errors="replace").strip().splitlines()
    _fail(path, said[-1] if said else f"exit status {process.returncode}")
    return _problem(path)


def _is_own(path: Path) -> bool:
    """Whether nobody but this user and the system's administrator could have written the file."""
    for one in (path, path.parent):
        about = one.stat()
        if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
            return False
    return True


def _failure(path: Path) -> Path:
    return path.with_suffix(".failed")


def _fail(path: Path, error: object) -> None:
    """Delete the program and save the reason `error`, so that later starts don't try it again."""
    path.unlink(missing_ok=True)
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    _failure(path).write_text(text[:500], encoding="utf-8")


def _problem(path: Path) -> str:
    try:
        return _failure(path).read_text(encoding="utf-8")
    except OSError:
        return ""
