"""A study whose worker is killed once, for what runs studies in several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from sirchat.errors import SettingError
from sirchat.lab.studies.report import Record, Report
from sirchat.lab.studies.study import RunUnit, Study
from sirchat.models.model import LoadedModel


class Fatal(Study):
    """A study whose third unit kills its worker once, and whose last unit may raise an error."""

    name = "fatal"

    def __init__(self, marker: str, refuse: bool) -> None:
        self._marker, self._refuse = Path(marker), refuse

    def parameters(self) -> Record:
        return {}

    def keys(self) -> list[str]:
        return [str(number) for number in range(6)]

    def worker(self, model: LoadedModel) -> RunUnit:
        def work(key: str) -> Record:
            if key == "2" and not self._marker.exists():
                self._marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if key == "5" and self._refuse:
                raise SettingError("the sixth is refused")
            return {"square": int(key) ** 2}

        return work

    def report(self, found: object) -> Report:
        raise NotImplementedError
