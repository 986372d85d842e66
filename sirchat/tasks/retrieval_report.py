"""Print what `sirchat eval retrieval` found; in a folder, put a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sirchat.model import LoadedModel
from sirchat.profile import Profile
from sirchat.tasks.interval import wilson
from sirchat.tasks.journal import Journal, Record
from sirchat.tasks.report import about, print_json, watched
from sirchat.tasks.retrieval import (
    BASE,
    EVERYTHING,
    FULL,
    RetrievalOptions,
    cells,
    retrieval,
)


def print_retrieval(
    model: LoadedModel,
    profile: Profile,
    options: RetrievalOptions,
    *,
    command: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the study, with progress on stderr, and print it to stdout.

    With `out`, a folder, it can be interrupted and goes on; a table and a plot are put there too.
    """
    asked = {"task": "retrieval", "model": model.name, **asdict(options)}
    journal = Journal(out / f"{options.task}.jsonl" if out else None, asked)
    found = list(
        watched(retrieval(model, profile, options, journal), options.dialogues, options.task)
    )
    record = retrieval_record(model, options, found, command)
    if out is not None:
        (out / f"{options.task}.md").write_text(markdown(record), "utf-8")
        if not plot(record, out / f"{options.task}.svg"):
            Console(stderr=True).print("no plot: pip install 'sirchat[plots]'", markup=False)
    if as_json:
        print_json(record)
    else:
        _print_table(record)


def retrieval_record(
    model: LoadedModel, options: RetrievalOptions, found: Sequence[Record], command: str
) -> Record:
    """Shares right with 95 % intervals, by row and number of tokens that came back."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in cells(options):
        rows.setdefault(cell.row, {})[str(cell.count)] = _share(found, cell.key)
    tokens = [one["tokens"] for one in found] or [0]
    return {
        **about(model, "retrieval", command),
        **asdict(options),
        "name": options.task,
        "tokens": {"least": min(tokens), "mean": sum(tokens) / len(tokens), "most": max(tokens)},
        FULL: _share(found, FULL),
        EVERYTHING: _share(found, EVERYTHING),
        BASE: rows.pop(BASE)["0"],
        "rows": rows,
    }


def markdown(record: Record) -> str:
    """The table as Markdown, under the command that makes it."""
    lines = [f"{_told(record)}\n", f"`{record['command']}`\n"]
    lines += [f"- {name}: {_interval(record[name])}" for name in (FULL, EVERYTHING, BASE)]
    lines += ["", "| tokens back | " + " | ".join(map(str, record["counts"])) + " |"]
    lines.append("|---" * (len(record["counts"]) + 1) + "|")
    for name, row in record["rows"].items():
        shares = (f"{row[str(n)]['share']:.2f}" for n in record["counts"])
        lines.append(f"| {name} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def plot(record: Record, path: Path) -> bool:
    """Recall by the number of tokens brought back, one line for each way; SVG.

    False where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, row in record["rows"].items():
        shares = [row[str(n)]["share"] for n in record["counts"]]
        dashed = "span" in name
        axes.plot(record["counts"], shares, "--" if dashed else "-", marker=".", label=name)
    axes.axhline(record[FULL]["share"], color="black", linewidth=0.8, label=FULL)
    axes.set(xlabel="tokens brought back", ylabel="exact answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log")
    axes.set_xticks(record["counts"], [str(n) for n in record["counts"]])
    axes.set_title(record["name"])
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def _share(found: Sequence[Record], key: str) -> Record:
    right = sum(bool(one[key]) for one in found)
    low, high = wilson(right, len(found))
    return {"share": right / max(1, len(found)), "right": right, "low": low, "high": high}


def _interval(share: Record) -> str:
    return f"{share['share']:.2f} ({share['low']:.2f} to {share['high']:.2f})"


def _told(record: Record) -> str:
    tokens = record["tokens"]
    return (
        f"{record['name']}: {record['model']} on {record['device']}, {record['dtype']}, seed "
        f"{record['seed']}, {record['dialogues']} conversations of {tokens['least']:,} to "
        f"{tokens['most']:,} tokens, base budget {record['base']}; torch {record['torch']}"
    )


def _print_table(record: Record) -> None:
    console = Console(highlight=False)
    console.print(_told(record), markup=False)
    console.print(record["command"], markup=False)
    for name in (FULL, EVERYTHING, BASE):
        console.print(f"{name}: {_interval(record[name])}", markup=False)
    table = Table("tokens back", box=None)
    for n in record["counts"]:
        table.add_column(str(n), justify="right")
    for name, row in record["rows"].items():
        table.add_row(name, *(f"{row[str(n)]['share']:.2f}" for n in record["counts"]))
    console.print(table)
