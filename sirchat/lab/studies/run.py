"""Runs the units (independent runs) of a study, logs their results, and prints the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from sirchat.lab.progress import with_progress
from sirchat.lab.studies.report import (
    print_json,
    print_report,
    provenance,
    record_of,
    revision,
    write_report,
)
from sirchat.lab.studies.results_log import Record, ResultsLog
from sirchat.lab.studies.study import Extensible, Study
from sirchat.models.model import LoadedModel

RemoteRunner = Callable[[Study, list[str]], Iterator[tuple[str, Record]]]
"""A function that runs units (independent runs) of a study in other processes.

The function takes the study and the units' keys, and yields (key, record) as each unit finishes.
"""


def run(
    study: Study,
    model: LoadedModel,
    *,
    command: str,
    out: Path | None,
    as_json: bool,
    remote: RemoteRunner | None = None,
) -> None:
    """Run a study, with progress on stderr, and print its report to stdout.

    If `out` is a folder, the report is also written there, and units (independent runs) whose
    records an earlier run wrote there are not run again. The function `remote`, if given, runs the
    units in other processes or on a cluster. Raises SettingError if the folder holds results of a
    run with other parameters.
    """
    found = run_units(study, model, out, remote)
    report, head = study.report(found), provenance(model, study.name, command)
    notes = write_report(report, head, out, study.name) if out is not None else []
    if as_json:
        print_json(record_of(report, head))
    else:
        print_report(report, head)
    for note in notes:
        Console(stderr=True).print(note, markup=False)


def run_units(
    study: Study, model: LoadedModel, out: Path | None = None, remote: RemoteRunner | None = None
) -> dict[str, Record]:
    """Run all units (independent runs) of a study; returns their records (results), by key.

    Units whose records an earlier run wrote to the folder `out` are not run again.
    """
    about = {"task": study.name, "model": model.name, "revision": revision(model)}
    path = out / f"{study.name}.jsonl" if out is not None else None
    keys = study.keys()
    if isinstance(study, Extensible):
        log = ResultsLog(path, about | study.shared())
        names = {key: study.log_key(key) for key in keys}
    else:
        log = ResultsLog(path, about | study.parameters())
        names = {key: key for key in keys}
    missing = [key for key, name in names.items() if name not in log]
    done = _run(study, model, missing, remote)
    for key, one in with_progress(done, len(names), len(names) - len(missing), study.name):
        log.add(names[key], one)
    return {key: log[name] for key, name in names.items()}


def _run(
    study: Study, model: LoadedModel, keys: list[str], remote: RemoteRunner | None
) -> Iterator[tuple[str, Record]]:
    if remote is not None and keys:
        return remote(study, keys)
    run_unit = study.worker(model)
    return ((key, run_unit(key)) for key in keys)
