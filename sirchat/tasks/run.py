"""Runs a study: unit by unit, noting each as it ends, and reports it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sirchat.model import LoadedModel
from sirchat.tasks.journal import Journal, Record
from sirchat.tasks.output import print_json, print_report, record_of, write_report
from sirchat.tasks.report import about, revision
from sirchat.tasks.study import Study


def run(study: Study, model: LoadedModel, *, command: str, out: Path | None, as_json: bool) -> None:
    """Run a study, with progress on stderr, and print its report to stdout.

    With `out`, a folder, an interrupted run goes on where it stopped, and the report is written
    there, too. Raises SettingError when the folder holds the results of another run.
    """
    found = findings(study, model, out)
    report, head = study.report(found), about(model, study.name, command)
    notes = write_report(report, head, out, study.name) if out is not None else []
    if as_json:
        print_json(record_of(report, head))
    else:
        print_report(report, head)
    for note in notes:
        Console(stderr=True).print(note, markup=False)


def findings(study: Study, model: LoadedModel, out: Path | None = None) -> dict[str, Record]:
    """What every unit found, by its key; what a journal in `out` knows is not done again."""
    asked = {"task": study.name, "model": model.name, "revision": revision(model)}
    path = out / f"{study.name}.jsonl" if out is not None else None
    journal = Journal(path, asked | study.asked())
    keys = study.keys()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        done = journal.run(keys, study.worker(model))
        return dict(progress.track(done, total=len(keys), description=study.name))
