"""Workers of pytest-xdist, forked from a process that has imported all tests and what they use.

Each would need six seconds of processor time to do that alone.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.pathlib import import_path
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from forked_chat import share_server


def fork_workers(config: pytest.Config, count: int) -> None:
    """Fork so many processes; execnet will take them in place of the first it would start."""
    gc.disable()  # searches for garbage would take as long as the imports
    for file in _files(config):
        with suppress(Exception, pytest.skip.Exception):  # the workers will say why
            import_path(
                file, mode="importlib", root=config.rootpath, consider_namespace_packages=False
            )
    share_server()
    gc.enable()
    gc.collect()
    gc.freeze()  # searched for garbage, it would be copied into each worker
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        forked = [_Forked() for _ in range(count)]
    starting = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        return forked.pop().opened(execmodel) if forked else starting(spec, execmodel)

    gateway_io.create_io = create_io


def _files(config: pytest.Config) -> Iterator[Path]:
    """The files of tests that are named by the command line."""
    for argument in config.args:  # by relative paths, modules would get other names
        path = config.invocation_params.dir / argument.partition("::")[0]
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


class _Forked(gateway_io.Popen2IOMaster):
    """A worker, and the pipes to it."""

    def __init__(self) -> None:
        its_input, write = os.pipe()
        read, its_output = os.pipe()
        self._process = get_context("fork").Process(target=_work, args=(its_input, its_output))
        self._process.start()
        os.close(its_input)
        os.close(its_output)
        self._pipes = os.fdopen(write, "wb"), os.fdopen(read, "rb")

    def opened(self, execmodel: Any) -> _Forked:
        Popen2IO.__init__(self, *self._pipes, execmodel)
        return self

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _work(its_input: int, its_output: int) -> None:
    """What `python -c` does with the line that execnet begins with."""
    os.dup2(its_input, 0)
    os.dup2(its_output, 1)
    sys.stdin = sys.__stdin__ = os.fdopen(its_input)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(its_output, "w")  # type: ignore[misc]
    main = sys.modules["__main__"] = ModuleType("__main__")  # new processes import nothing for it
    exec(eval(sys.stdin.readline()), vars(main))
    atexit._run_exitfuncs()
