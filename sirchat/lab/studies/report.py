"""The report of a study: tables, and the command and versions to repeat the study.

A report is written to the terminal, as JSON, or as files in a folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable

from sirchat import __version__
from sirchat.chat.settings import has_effect
from sirchat.config.profile import Profile
from sirchat.config.values import format_setting
from sirchat.memory.policies import policy_class
from sirchat.models.captured_step import CapturedStep
from sirchat.models.devices import describe_threads
from sirchat.models.model import LoadedModel
from sirchat.models.native_step import NativeStep
from sirchat.paths import make_private_dir, write_private
from sirchat.saved.saved_state import model_fingerprint
from sirchat.text.text_file import without_surrogates

Record = dict[str, Any]  # the results of one unit of a study, or another JSON object


@dataclass(frozen=True)
class Estimate:
    """A number with the bounds of its 95 % interval, `low` and `high`.

    The number is NaN if there were no values from which to compute it.
    """

    value: float
    low: float
    high: float


# The content of a table cell; None for an empty cell, NaN if there was no data for the cell
Value = Estimate | float | int | str | None


@dataclass(frozen=True)
class Table:
    """A table of a report; the first column names the row, and numbers have `digits` decimals."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    digits: int = 3


@dataclass(frozen=True)
class Report:
    """The results of a study."""

    header: tuple[str, ...]  # short texts that say what was run, for the first line of the report
    tables: tuple[Table, ...]  # the results
    # further entries of the JSON record, such as the study's parameters
    details: Record = field(default_factory=dict)


def provenance(model: LoadedModel, task: str, command: str) -> Record:
    """The facts needed to repeat an evaluation: the command, the model and versions.

    They are the first entries of the evaluation's JSON record.
    """
    return {
        "task": task,
        "command": command,
        "model": model.name,
        "revision": revision(model),
        "device": str(model.device),
        "dtype": model.precision,
        "threads": describe_threads(model.device),
        "compiled": isinstance(model.decode_step, NativeStep | CapturedStep),
        "sirchat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def revision(model: LoadedModel) -> str:
    """The commit of a model from the hub, or a fingerprint (hash) of any other model."""
    return getattr(model.module.config, "_commit_hash", None) or model_fingerprint(model)


def setting_names(settings: Sequence[Profile]) -> list[str]:
    """A short name for each setting, such as `entropy 256 decay 0.8`."""
    differ = [
        key
        for key in Profile.model_fields
        if key not in _NAMED and any(getattr(s, key) != getattr(settings[0], key) for s in settings)
    ]
    return [_name(setting, differ) for setting in settings]


_NAMED = ("policy", "budget", "decay", "policy_options")


def _name(setting: Profile, differ: Sequence[str]) -> str:
    policy = policy_class(setting.policy)
    parts = [setting.policy]
    if policy.bounded:
        parts.append(str(setting.budget))
    if setting.decay != 1:
        parts.append(f"decay {setting.decay:g}")
    if policy.bounded:
        named = [key for key in differ if has_effect(setting, key)]
        parts += [f"{key} {format_setting(getattr(setting, key))}" for key in named]
    parts += [f"{key} {format_setting(value)}" for key, value in setting.policy_options.items()]
    return " ".join(parts)


def record_of(report: Report, head: Record) -> Record:
    """A report as one JSON object, which begins with the entries of `head` (see `provenance`)."""
    tables = {
        one.name: {"columns": [*one.columns], "rows": [[*map(_plain, row)] for row in one.rows]}
        for one in report.tables
    }
    return {**head, "tables": tables, **report.details}


def print_json(record: Record) -> None:
    """Print a record to stdout as JSON."""
    Console(soft_wrap=True, highlight=False).print(json.dumps(record, indent=2), markup=False)


def print_report(report: Report, head: Record) -> None:
    """Print a report's tables to stdout, below a heading that says what was run."""
    console = Console(highlight=False, markup=False)
    console.print("\n".join(_heading(report, head)), soft_wrap=True)
    for table in report.tables:
        rows = [[value_text(value, table.digits) for value in row] for row in table.rows]
        columns = [list(cells) for cells in zip(table.columns, *rows, strict=True)]
        widths = _widths(columns, console.width if console.is_terminal else None)
        drawn = RichTable(title=table.name, title_justify="left", box=None)
        for number, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
            drawn.add_column(column, justify="right" if number else "left", width=width)
        for row in rows:
            drawn.add_row(*row)
        console.width = max(console.width, sum(widths) + 2 * len(widths))
        console.print()
        console.print(drawn)


def _widths(columns: list[list[str]], room: int | None) -> list[int]:
    """The widths of table columns, in characters, so that rows fit into `room` if possible."""
    most = [max(map(cell_len, cells)) for cells in columns]
    if room is None:
        return most
    words = [[word for cell in cells for word in cell.split()] for cells in columns[1:]]
    widths = [most[0], *(max(map(cell_len, one), default=0) for one in words)]
    spare = max(0, room - sum(widths) - 2 * len(widths))
    for number, width in enumerate(widths):
        widths[number] += min(spare, most[number] - width)
        spare -= widths[number] - width
    return widths


def write_report(report: Report, head: Record, folder: Path, name: str) -> None:
    """Write a report into a folder, as JSON and as Markdown.

    Only their owner can read the files, which may quote a conversation.
    """
    make_private_dir(folder)
    record = json.dumps(record_of(report, head), indent=2)
    texts = {f"{name}.json": record + "\n", f"{name}.md": markdown(report, head)}
    for file, text in texts.items():  # a path in it need not be UTF-8
        write_private(folder / file, without_surrogates(text), replaces=True)


def markdown(report: Report, head: Record) -> str:
    """A report's tables as Markdown text, below a heading that says what was run."""
    title, command = _heading(report, head)
    parts = [f"{title}\n\n`{command}`\n"]
    for table in report.tables:
        lines = [table.columns, ("---",) + ("---:",) * (len(table.columns) - 1)]
        lines += [tuple(value_text(value, table.digits) for value in row) for row in table.rows]
        cells = (" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines)
        parts.append(f"**{table.name}**\n\n" + "".join(f"| {line} |\n" for line in cells))
    return "\n".join(parts)


def _heading(report: Report, head: Record) -> tuple[str, str]:
    model = f"{head['task']}: {head['model']} ({head['revision'][:12]}) on {head['device']}"
    versions = f"sirchat {head['sirchat']}, torch {head['torch']}"
    threads = [head["threads"]] if head.get("threads") else []
    compiled = ["compiled step"] if head.get("compiled") else []
    what = ", ".join([model, head["dtype"], *threads, *compiled, *report.header])
    return f"{what}; {versions}, transformers {head['transformers']}", head["command"]


def value_text(value: Value, digits: int) -> str:
    """A cell as text: a number with `digits` decimals, and its interval, if there is one."""
    if _is_empty(value):
        return "-"
    if isinstance(value, Estimate):
        if math.isinf(value.low):
            return f"{value.value:.{digits}f}"
        return f"{value.value:.{digits}f} ({value.low:.2f} to {value.high:.2f})"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


def _is_empty(value: Value) -> bool:
    """Whether a value is NaN, which means that there were no values to compute it from."""
    number = value.value if isinstance(value, Estimate) else value
    return isinstance(number, float) and math.isnan(number)


def _plain(value: Value) -> object:
    if _is_empty(value):
        return None
    if not isinstance(value, Estimate):
        return value
    return {key: one if math.isfinite(one) else None for key, one in asdict(value).items()}
