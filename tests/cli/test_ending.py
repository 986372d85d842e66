"""What a command leaves behind when it is told to end, or is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command import run
from sirchat.cli import main
from sirchat.memory.archive import ArchiveFolder, remove_stale_folders
from warm_python import warm_python


def archived(home: Path) -> list[Path]:
    """What lies in the folder of archives, without the locks."""
    folder = home / "data" / "archives"
    return [path for path in folder.glob("*") if path.suffix != ".lock"]


@contextmanager
def replaying(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A replay that has begun to write its archive, and takes long."""
    talk = home / "talk.txt"
    talk.write_text("A line of some words that are soon evicted again.\n" * 9_000)
    flags = ["--feed", "--format", "lines", "--archive", "disk", "--budget", "128"]
    command = [*warm_python(), "-m", "sirchat", "replay", str(talk), *flags, "--json"]
    environ = os.environ | {"SIRCHAT_HOME": str(home)}
    before = archived(home)
    with subprocess.Popen(
        command,
        env=environ,
        stdout=(home / "out").open("wb"),
        stderr=subprocess.PIPE,
    ) as process:
        try:
            end = time.monotonic() + 120
            while not any([*new.glob("*")] for new in archived(home) if new not in before):
                assert time.monotonic() < end
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_told_to_end_leaves_no_archive(tmp_path: Path, number: int) -> None:
    with replaying(tmp_path) as process:
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list((tmp_path / "data" / "archives").iterdir()) == []
    assert b"Traceback" not in told
    lines = (tmp_path / "out").read_text("utf-8").splitlines()
    assert json.loads(lines[0])["event"] == "session"
    assert all(json.loads(line) for line in lines), "each is whole"


def test_the_archive_of_a_killed_command_goes_at_the_next_start(tmp_path: Path) -> None:
    with replaying(tmp_path) as killed:
        killed.kill()
        killed.wait()
    (left,) = archived(tmp_path)
    with replaying(tmp_path) as other:  # its start removes what the killed one left
        (present,) = archived(tmp_path)
        assert present != left
        run("ask", "Hello", SIRCHAT_HOME=str(tmp_path))
        assert archived(tmp_path) == [present]  # it is in use
        assert other.poll() is None


def test_a_sweep_removes_what_nobody_holds(tmp_path: Path) -> None:
    held, outside = ArchiveFolder(tmp_path / "12-held"), tmp_path.parent / "outside"
    held.make()
    (held.path / "one").touch()
    gone = tmp_path / "12-gone"  # the same process number
    gone.mkdir()
    (gone / "private").touch()
    outside.mkdir(exist_ok=True)
    (outside / "kept").touch()
    (tmp_path / "planted").symlink_to(outside)
    remove_stale_folders(tmp_path)
    assert not gone.exists()
    assert (held.path / "one").exists()
    assert (outside / "kept").exists()
    held.remove()
    assert [file.name for file in tmp_path.iterdir()] == ["planted"]
    remove_stale_folders(tmp_path / "nowhere")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(129), 129),
        (SystemExit(0), 0),
        (RuntimeError("of a library that a signal interrupted"), 1),
    ],
)
def test_however_a_command_ends_while_a_bar_is_drawn_the_cursor_is_shown(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()

    def draw(**options: object) -> None:
        terminal.write("\x1b[?25l")
        raise error

    monkeypatch.setattr("sirchat.cli.app.app", draw)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == code
    assert "\x1b[?25h" in terminal.getvalue()


BEGIN = """
import os, signal, sys, time
from contextlib import suppress
from sirchat.cli.signals import install_exit_handlers
signal.signal(signal.SIGHUP, signal.SIG_DFL)
install_exit_handlers()
"""
IGNORED = """
class Ending:
    def __del__(self):
        os.kill(os.getpid(), signal.{})
Ending()
try:
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""
SWALLOWED = """
with suppress(BaseException):
    os.kill(os.getpid(), signal.{})
    time.sleep(30)
time.sleep(30)
"""
IN_AN_EVENT_LOOP = """
import asyncio
usual = asyncio.Handle._run
def interrupted(handle):
    asyncio.Handle._run = usual
    os.kill(os.getpid(), signal.SIGTERM)
    usual(handle)
async def main():
    other = asyncio.create_task(asyncio.sleep(30))
    asyncio.get_running_loop().call_soon(time.sleep, {})
    asyncio.Handle._run = interrupted
    try:
        await asyncio.sleep(30)
    finally:
        with suppress(asyncio.CancelledError):
            await other
        print("closed")
asyncio.run(main())
"""
CLOSING = """
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
finally:
    with suppress(KeyError):
        {}
    time.sleep(2)
    print("closed")
"""
AWAITING_A_THREAD = """
import atexit, threading
from sirchat.cli.signals import restore_terminal
atexit.register(print, "closed")
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
finally:
    threading.Thread(target=time.sleep, args=({},)).start()
    restore_terminal()
"""


PROGRAMS = [
    *((IGNORED, name, 128 + getattr(signal, name), "") for name in ("SIGTERM", "SIGINT")),
    (SWALLOWED, "SIGTERM", 143, ""),
    (SWALLOWED, "SIGHUP", 129, ""),
    *((IN_AN_EVENT_LOOP, str(blocking), 143, "closed\n") for blocking in (0, 30)),
    (AWAITING_A_THREAD, "2", 143, "closed\n"),  # as that which writes the archive
    (CLOSING, "raise KeyError('of what is closed')", 143, "closed\n"),  # it takes long to end
    (CLOSING, "os.kill(os.getpid(), signal.SIGTERM)", 143, "closed\n"),  # twice at once is one
    (CLOSING, "time.sleep(1.2); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
]


def test_a_signal_is_never_lost_and_disturbs_no_ending_but_as_a_later_one() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + program.replace("{}", filled)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program, filled, _, _ in PROGRAMS
    ]
    for one, (program, filled, code, out) in zip(running, PROGRAMS, strict=True):
        told = one.communicate(timeout=60)
        assert (one.returncode, *told) == (code, out, ""), (filled, program)


def test_ctrl_c_before_the_commands_are_there_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sirchat.cli.prepare_streams", pressed)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "sirchat: interrupted\n"


def test_a_command_ends_at_once_while_a_thread_loads_a_model() -> None:
    program = """if True:
        import atexit, time
        from sirchat.cli.signals import exit_while_loading
        from sirchat.models.new_thread import call_in_new_thread

        atexit.register(print, "Python ended the threads")
        try:
            call_in_new_thread(lambda: time.sleep(60), 0.01)
        except TimeoutError:
            exit_while_loading(SystemExit(130))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
