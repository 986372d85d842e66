"""A study in two processes finds what one process finds, and nothing listens on the network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import hostile_modules, run
from fatal_study import Fatal
from forked_chat import start_server
from sirchat.errors import SettingError, SirchatError
from sirchat.lab.studies.workers import run_in_processes


@pytest.fixture(autouse=True, scope="module")
def _server() -> None:
    start_server()  # a study would start it with only what studies need


def test_two_processes_find_what_one_finds(endless: str, tmp_path: Path) -> None:
    flags = ("--model", endless, "--limit", "2", "--policies", "random", "--budgets", "64")
    one = run("eval", "dailydialog", *flags, "--repeats", "1", "--json")
    apart = ("--workers", "2", "--out", str(tmp_path))
    two = run("eval", "dailydialog", *flags, "--repeats", "1", "--json", *apart)
    assert two.returncode == 0, two.stderr
    assert two.stdout.replace(" ".join(("", *apart)), "") == one.stdout


@pytest.mark.parametrize(
    ("dies", "kind", "message"),
    [(False, SettingError, "the third is refused"), (True, SirchatError, "a process .* died")],
)
def test_an_error_of_a_unit_is_raised_and_so_is_the_death_of_a_process(
    dies: bool, kind: type[SirchatError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    study = Fatal(dies=dies)
    with pytest.raises(kind, match=message):
        list(run_in_processes(study, study.keys(), dict, 2))  # type: ignore[arg-type]
    assert "Traceback" not in capfd.readouterr().err


def listening(pids: set[int]) -> set[str]:
    """Inodes of the sockets of these processes that accept connections from the network."""
    listens = set[str]()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        listens |= {line.split()[9] for line in lines if line.split()[3] == "0A"}
    found = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found & listens


def family(pid: int) -> set[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    known = {pid}
    for child in children.read_text().split() if children.exists() else ():
        known |= family(int(child))
    return known


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed on Linux only")
def test_processes_run_what_was_typed_listen_to_nobody_and_end_with_the_command(
    tmp_path: Path,
) -> None:
    hostile_modules(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import os\nfrom sirchat.memory.policies.by_position import Sink\n\n\n"
        "class Mine(Sink):\n    open(f'mine-{os.getpid()}', 'w').close()\n"
    )
    command = [sys.executable, "-P", "-m", "sirchat"]  # as the installed program: no folder on path
    study = ["eval", "dailydialog", "--workers", "2", "--limit", "50"]
    study += ["--policies", "mine:Mine,sink"]
    environ = os.environ | {"SIRCHAT_HOME": str(tmp_path), "PYTHONPATH": ""}
    with subprocess.Popen(
        [*command, *study],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        end, most = time.monotonic() + 60, set[int]()
        while len(most) < 5 or len(list(tmp_path.glob("mine-*"))) < 3:  # two help others start
            most |= family(process.pid)
            assert listening(family(process.pid)) == set()
            assert time.monotonic() < end
            time.sleep(0.1)
        process.kill()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in most):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert {int(path.name[5:]) for path in tmp_path.glob("mine-*")} <= most
    assert not (tmp_path / "ran").exists()
