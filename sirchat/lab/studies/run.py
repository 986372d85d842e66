"""Runs the units of a study, logs their results, and prints the report.

The results log is a file with a JSON line for each finished unit, from which a run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from sirchat.errors import SettingError, format_value
from sirchat.lab.progress import with_progress
from sirchat.lab.studies.report import (
    Record,
    print_json,
    print_report,
    provenance,
    record_of,
    revision,
    write_report,
)
from sirchat.lab.studies.study import Study
from sirchat.models.model import LoadedModel
from sirchat.paths import write_private

# Runs units elsewhere: takes a study and keys, yields (key, record) as each unit finishes.
RemoteRunner = Callable[[Study, list[str]], Iterator[tuple[str, Record]]]

_FORMAT = 3  # of the results log; until format 2, settings had other hashes


def run(
    study: Study,
    model: LoadedModel,
    *,
    command: str,
    out: Path | None,
    as_json: bool,
    remote: RemoteRunner | None = None,
) -> None:
    """Run a study, and print its report to stdout, or also write it to the folder `out`.

    Raises SettingError if the folder holds results of a run with other parameters.
    """
    found = run_units(study, model, out, remote)
    report, head = study.report(found), provenance(model, study.name, command)
    if out is not None:
        write_report(report, head, out, study.name)
    if as_json:
        print_json(record_of(report, head))
    else:
        print_report(report, head)


def run_units(
    study: Study, model: LoadedModel, out: Path | None = None, remote: RemoteRunner | None = None
) -> dict[str, Record]:
    """The records of all units by key, those of an earlier run in the folder `out` included."""
    about: Record = {"task": study.name, "model": model.name, "revision": revision(model)}
    if model.encoder.size and "bundled" not in model.encoder.about:
        about["encoder"] = model.encoder.checksum  # one learned since finds other passages
    path = out / f"{study.name}.jsonl" if out is not None else None
    log = ResultsLog(path, about | study.shared())
    keys = study.keys()
    names = {key: study.log_key(key) for key in keys}
    missing = [key for key, name in names.items() if name not in log]
    done = _run(study, model, missing, remote)
    for key, record in with_progress(done, len(names), len(names) - len(missing), study.name):
        log.add(names[key], record)
    return {key: log[name] for key, name in names.items()}


def _run(
    study: Study, model: LoadedModel, keys: list[str], remote: RemoteRunner | None
) -> Iterator[tuple[str, Record]]:
    if remote is not None and keys:
        return remote(study, keys)
    run_unit = study.worker(model)
    return ((key, run_unit(key)) for key in keys)


class ResultsLog:
    """The records of finished units, by name, in memory and in the file `path`.

    The file's first line is `about`. Raises SettingError if there is a file whose line differs.
    """

    def __init__(self, path: Path | None, about: Record) -> None:
        self._path = path
        self._done: dict[str, Record] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _whole_lines(path)
        first = json.loads(json.dumps({"format": _FORMAT, **about}))
        if lines and (difference := _difference(lines[0], first)):
            raise SettingError(
                f"{path} holds the results of another run: {difference}",
                hint="choose another folder with --out, or delete this file",
            )
        text = "".join(json.dumps(line) + "\n" for line in lines or [first])
        write_private(path, text, replaces=True)  # without an incomplete last line
        self._done = {line["key"]: line["found"] for line in lines[1:]}

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def __getitem__(self, name: str) -> Record:
        return self._done[name]

    def add(self, name: str, found: Record) -> None:
        self._done[name] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": name, "found": found}) + "\n")


def _difference(there: Record, here: Record) -> str:
    """The first difference between the first lines of two logs; '' if they are equal."""
    if there.get("format") != here["format"]:
        return "it was written by another version of sirchat"
    for name in {**here, **there}:
        if there.get(name) != here.get(name):
            theirs, ours = format_value(there.get(name)), format_value(here.get(name))
            return f"{name} is {theirs} there, not {ours}"
    return ""


def _whole_lines(path: Path) -> list[Record]:
    if not path.exists():
        return []
    whole, _, _ = path.read_text("utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
