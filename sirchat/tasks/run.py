"""Runs a study unit by unit, logs the result of each, and prints the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sirchat.models.model import LoadedModel
from sirchat.tasks.output import print_json, print_report, record_of, write_report
from sirchat.tasks.report import provenance, revision
from sirchat.tasks.results_log import Record, ResultsLog
from sirchat.tasks.study import Study

RemoteRunner = Callable[[Study, list[str]], Iterator[tuple[str, Record]]]
"""Runs units of a study on other machines; yields (key, record) as they finish."""


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

    With `out`, a folder, an interrupted run resumes where it stopped, and the report is also
    written there. With `remote` the units run on a cluster. Raises SettingError when the folder
    holds the results of another run.
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
    study: Study,
    model: LoadedModel,
    out: Path | None = None,
    remote: RemoteRunner | None = None,
) -> dict[str, Record]:
    """The record of every unit, by key; units in the results log in `out` are not run again."""
    about = {"task": study.name, "model": model.name, "revision": revision(model)}
    path = out / f"{study.name}.jsonl" if out is not None else None
    log = ResultsLog(path, about | study.parameters())
    keys = study.keys()
    missing = log.missing(keys)
    for key, one in _with_progress(_run(study, model, missing, remote), keys, missing, study.name):
        log.add(key, one)
    return {key: log[key] for key in keys}


def _run(
    study: Study, model: LoadedModel, keys: list[str], remote: RemoteRunner | None
) -> Iterator[tuple[str, Record]]:
    if remote is not None and keys:
        return remote(study, keys)
    run_unit = study.worker(model)
    return ((key, run_unit(key)) for key in keys)


def _with_progress(
    done: Iterator[tuple[str, Record]], keys: list[str], missing: list[str], name: str
) -> Iterator[tuple[str, Record]]:
    """Pass records on as units finish, with a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        known = len(keys) - len(missing)
        bar = progress.add_task(name, total=len(keys), completed=known)
        for one in done:
            progress.advance(bar)
            yield one
