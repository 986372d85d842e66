"""A study on a local Ray cluster of two workers finds what one process finds."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from chatting import babbler
from command import run

from sirchat.errors import SettingError, SirchatError, UsageError
from sirchat.model import LoadedModel, load_model
from sirchat.profile import Profile
from sirchat.tasks.journal import Record
from sirchat.tasks.multiple_choice import MultipleChoice
from sirchat.tasks.run import findings
from sirchat.tasks.spread import LOCAL, Cluster, spread
from sirchat.tasks.study import Work

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import the tests

TWO = Cluster(LOCAL, 2)


class Fatal:
    """A study whose third unit kills its worker, the first time; its last may be refused."""

    name = "fatal"

    def __init__(self, marker: str, refuse: bool) -> None:
        self._marker, self._refuse = Path(marker), refuse

    def asked(self) -> Record:
        return {}

    def keys(self) -> list[str]:
        return [str(number) for number in range(6)]

    def worker(self, model: LoadedModel) -> Work:
        def work(key: str) -> Record:
            if key == "2" and not self._marker.exists():
                self._marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if key == "5" and self._refuse:
                raise SettingError("the sixth is refused")
            return {"square": int(key) ** 2}

        return work

    def report(self, found: object) -> None:
        raise NotImplementedError


def test_two_workers_find_what_one_process_finds(endless: str, tmp_path: Path) -> None:
    settings = (Profile(policy="sink", budget=64), Profile(policy="random", budget=64))
    study = MultipleChoice(settings, 2, task="dailydialog", repeats=2)
    elsewhere = partial(spread, load=partial(load_model, endless, device="cpu"), cluster=TWO)
    model = load_model(endless, device="cpu")
    assert findings(study, model, tmp_path, elsewhere) == findings(study, model)


@pytest.mark.parametrize("refuse", [False, True])
def test_a_lost_workers_unit_is_done_again_and_a_refusal_is_told(
    refuse: bool, endless: str, tmp_path: Path
) -> None:
    load = partial(load_model, endless, device="cpu")
    study = Fatal(str(tmp_path / "died"), refuse)
    found: dict[str, Record] = {}
    if refuse:
        with pytest.raises(SettingError, match="the sixth is refused"):
            found.update(spread(study, study.keys(), load, TWO))  # type: ignore[arg-type]
    else:
        found.update(spread(study, study.keys(), load, TWO))  # type: ignore[arg-type]
        assert {int(key): one["square"] for key, one in found.items()} == {
            n: n**2 for n in range(6)
        }
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere"])
def test_a_cluster_that_is_not_there_is_refused_at_once(address: str) -> None:
    study = Fatal("", refuse=False)
    with pytest.raises(UsageError, match="no Ray cluster"):
        list(spread(study, ["0"], babbler, Cluster(address, 2)))  # type: ignore[arg-type]


def test_a_worker_that_can_not_load_its_model_says_so_in_one_line() -> None:
    study, load = Fatal("", refuse=False), partial(load_model, "/nowhere/model", device="cpu")
    with pytest.raises(SirchatError, match="model '/nowhere/model' cannot be loaded"):
        list(spread(study, ["0"], load, TWO))  # type: ignore[arg-type]


def test_the_command_runs_on_a_cluster() -> None:
    flags = ("--limit", "1", "--policies", "sink", "--budgets", "64", "--json")
    one = run("eval", "dailydialog", *flags)
    two = run("eval", "dailydialog", *flags, "--ray", "local")
    assert two.returncode == 0, two.stderr
    assert two.stdout.replace(" --ray local", "") == one.stdout
