"""A study one of whose units kills its process or raises an error, for processes of studies."""

from __future__ import annotations

import os
import signal

from sirchat.errors import SettingError
from sirchat.lab.studies.report import Record, Report
from sirchat.lab.studies.study import RunUnit, Study
from sirchat.models.model import LoadedModel


class Fatal(Study):
    """A study whose third unit kills its worker, or raises an error."""

    name = "fatal"

    def __init__(self, *, dies: bool) -> None:
        self._dies = dies

    def parameters(self) -> Record:
        return {}

    def keys(self) -> list[str]:
        return [str(number) for number in range(4)]

    def worker(self, model: LoadedModel) -> RunUnit:
        def work(key: str) -> Record:
            if key != "2":
                return {"square": int(key) ** 2}
            if self._dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise SettingError("the third is refused")

        return work

    def report(self, found: object) -> Report:
        raise NotImplementedError
