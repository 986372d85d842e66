"""Starts a background process that learns a sentence encoder for a model that has none.

The process is `sirchat train encoder`, which writes the whole file or nothing. While it runs, it
locks a file, which all homes of a user share: it takes whole processors. A log file of each model
has sirchat's version, a line for each start, and progress or an error after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from sirchat import paths
from sirchat.memory.free_memory import free_memory
from sirchat.models.hidden_states import layer_count
from sirchat.version import __version__

if sys.platform != "win32":
    import fcntl

# Of a smaller model, such as tiny, states know too little of what words mean: one or the other.
_MIN_HIDDEN_SIZE, _MIN_LAYERS = 512, 24
_BYTES_PER_MINUTE = 75 << 20  # bytes of weights in a minute of processor time
_SPARE_BYTES = 2 << 30  # bytes that must be free beside those of a second load
_MAX_STARTS = 3  # what failed, or was killed for want of memory, is not started for ever
_LOWEST_PRIORITY = 19  # niceness
# Whatever the environment says: `XDG_RUNTIME_DIR` differs between a session, cron and ssh.
_SHARED_FOLDER = Path("/dev/shm")
_PACKAGE = Path(__file__).parents[1]
_STARTED, _ERROR_PREFIX = "start", "sirchat: "


def learn_in_background(name: str, module: Any, *, trust_remote_code: bool = False) -> str:
    """Start to learn a model's encoder; returns what to tell the user, or "" if nothing started.

    Nothing starts for a small model, with too little memory, while another encoder is learned, or
    after three starts with this version.
    """
    log, parts = _read_log(name), module.state_dict().values()
    # A GGUF stays packed in the process, too; the weights of a folder become float32 there.
    is_gguf = name.lower().endswith(".gguf")
    weights = sum(part.nbytes if is_gguf else 4 * part.numel() for part in parts)
    size = module.config.get_text_config(decoder=True).hidden_size
    is_small = size < _MIN_HIDDEN_SIZE and layer_count(module) < _MIN_LAYERS
    failed = log.count(_STARTED) >= _MAX_STARTS
    can_run = sys.platform != "win32" and (_PACKAGE / "lab").is_dir()
    if is_small or failed or not can_run or (free_memory() or 0) < weights + _SPARE_BYTES:
        return ""
    if paths.encoder_files(name)[0].is_file():  # learned while the model was loaded
        return ""
    if (lock := _lock()) is None:
        return ""
    try:
        file = paths.encoder_attempts_file(name)
        paths.make_private_dir(file.parent)
        lines = "".join(f"{line}\n" for line in (__version__, *log, _STARTED))
        paths.write_private(file, lines, replaces=True)
        os.truncate(lock, 0)
        os.write(lock, os.fsencode(file))
        _start(name, trust_remote_code, file, lock)
    except OSError:  # no room for files, or for a process
        return ""
    finally:
        os.close(lock)
    minutes = max(1, round(weights / _BYTES_PER_MINUTE))
    return (
        "learning what words mean to this model, in the background, while processors are "
        f"free (some {minutes} min of their time): chats that begin after it recall what was "
        "said in other words, too; --no-learn-encoder prevents it"
    )


def _start(name: str, trust_remote_code: bool, file: Path, lock: int) -> None:
    """Start the process: errors go to `file`, and the process keeps `lock` until it ends."""
    command = ["train", "encoder", "--model", paths.name_or_absolute_path(name)]
    command += ["--teacher", "lesson", "--device", "cpu"]
    command += ["--trust-remote-code"] * trust_remote_code
    folders = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with file.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sirchat", *command],  # -P: not of the current folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # it outlives the chat
            pass_fds=[lock],
        )
    if sys.platform != "win32":  # where nothing starts
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
    with suppress(OSError):  # Linux shares processors among sessions first, by their own priority
        Path(f"/proc/{process.pid}/autogroup").write_text(str(_LOWEST_PRIORITY), encoding="ascii")
    threading.Thread(target=process.wait, name="learning", daemon=True).start()


def why_no_encoder(name: str) -> str:
    """Why a model has no encoder: it is being learned, learning failed, or was never started."""
    log, by_hand = _read_log(name), f"sirchat train encoder --model {name}"
    last = log[-1] if log else ""
    if is_learning():
        with suppress(OSError):
            file = _lock_file().read_bytes()
            if file == os.fsencode(paths.encoder_attempts_file(name)):
                done = f": {last}" if last != _STARTED else ""
                return f"none yet, it is learned in the background{done}"
    if last.startswith(_ERROR_PREFIX):
        problem = last.removeprefix(_ERROR_PREFIX)
        return f"none, it can't be learned: {problem}; {by_hand} tries again"
    stopped = "learning was stopped; " if log else ""
    return f"none; {stopped}{by_hand} makes one"


def is_learning() -> bool:
    if (descriptor := _lock()) is not None:
        os.close(descriptor)
    return descriptor is None


def _lock_file() -> Path:
    """The file that the process locks while it works; its text names the log."""
    if sys.platform != "win32" and os.access(_SHARED_FOLDER, os.W_OK | os.X_OK):
        shared = _SHARED_FOLDER / f"sirchat-{os.getuid()}-learning.lock"
        if not os.path.lexists(shared) or shared.lstat().st_uid == os.getuid():
            return shared  # others may write into that folder, too
    return paths.state_dir() / "learning.lock"


def _lock() -> int | None:
    """A descriptor of the locked file; None if another process holds it, or if that fails."""
    with suppress(OSError):
        paths.make_private_dir(_lock_file().parent)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # others may put one into a folder in memory
        descriptor = os.open(_lock_file(), os.O_CREAT | os.O_RDWR | no_link, 0o600)
        try:
            if sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def _read_log(name: str) -> list[str]:
    """The log of this version's attempts to learn a model's encoder, without the version line."""
    with suppress(OSError, ValueError):
        version, *lines = paths.encoder_attempts_file(name).read_text("utf-8").splitlines()
        if version == __version__:
            return lines
    return []
