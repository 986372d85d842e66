"""A study on a local Ray cluster of two workers finds what one process finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

import fatal_study
from chatting import babbler
from command import run
from fatal_study import Fatal
from sirchat.errors import SettingError, SirchatError, UsageError
from sirchat.lab.studies.workers import Cluster, run_on_ray
from sirchat.models.load import load_model

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(fatal_study)  # workers can't import the tests


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Two workers on a cluster of this machine."""
    from ray.cluster_utils import Cluster as Started

    started = Started(initialize_head=True, head_node_args={"num_cpus": 2})
    yield Cluster(started.address, 2)
    started.shutdown()


@pytest.mark.slow
def test_two_workers_find_what_one_process_finds(
    endless: str, tmp_path: Path, two: Cluster
) -> None:
    flags = ("--model", endless, "--limit", "2", "--policies", "sink,random", "--budgets", "64")
    one = run("eval", "dailydialog", *flags, "--repeats", "2", "--json")
    on_ray = ("--ray", two.address, "--out", str(tmp_path))
    found = run("eval", "dailydialog", *flags, "--repeats", "2", "--json", *on_ray)
    assert found.returncode == 0, found.stderr
    assert found.stdout.replace(" ".join(("", *on_ray)), "") == one.stdout


@pytest.mark.slow
def test_a_dead_workers_unit_is_run_again_and_an_error_is_reported(
    endless: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], two: Cluster
) -> None:
    study = Fatal(str(tmp_path / "died"), refuse=True)
    load, alone = partial(load_model, endless, device="cpu"), replace(two, workers=1)
    units = run_on_ray(study, [*"0123465"], load, alone)
    found = {int(key): one["square"] for key, one in islice(units, 6)}
    assert found == {number: number**2 for number in (0, 1, 2, 3, 4, 6)}
    with pytest.raises(SettingError, match="the sixth is refused"):
        next(units)
    assert (tmp_path / "died").exists()
    assert capsys.readouterr().out == ""  # where reports go


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere"])
def test_a_cluster_that_is_not_there_is_refused_at_once(address: str) -> None:
    study = Fatal("", refuse=False)
    with pytest.raises(UsageError, match="no Ray cluster"):
        list(run_on_ray(study, ["0"], babbler, Cluster(address, 2)))


@pytest.mark.slow
def test_a_worker_that_can_not_load_its_model_says_so_in_one_line(two: Cluster) -> None:
    study, load = Fatal("", refuse=False), partial(load_model, "/nowhere/model", device="cpu")
    with pytest.raises(SirchatError, match="model folder '/nowhere/model' does not exist"):
        list(run_on_ray(study, ["0"], load, replace(two, workers=1)))
