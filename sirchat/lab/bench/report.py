"""Prints the results of the commands `sirchat bench` as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from sirchat.lab.bench.ratio import BenchOptions, Ratio, bench_record
from sirchat.lab.bench.record import machine, machine_in_words
from sirchat.lab.bench.start import StartMeasure
from sirchat.lab.studies.report import print_json
from sirchat.models.devices import describe_threads
from sirchat.models.model import LoadedModel


def print_ratios(
    measured: Iterable[Ratio], model: LoadedModel, options: BenchOptions, *, as_json: bool
) -> None:
    """Run a benchmark that yields ratios of times, and print the ratios to stdout."""
    notes = Console(stderr=True, highlight=False, markup=False)
    results = []
    with notes.status("measuring", spinner="line"):
        for result in measured:
            results.append(result)
            notes.print(f"{result.name}: {result.median:.3f}", style="dim")
    if as_json:
        print_json(bench_record(results, model, options))
        return
    table = Table("measured", "ours", "other", "ratio", "quartiles", box=None)
    for r in results:
        ours, other = f"{r.ours_ms:.3f} ms/{r.unit}", f"{r.other_ms:.3f} ms/{r.unit}"
        table.add_row(r.name, ours, other, f"{r.median:.3f}", f"{r.low:.3f} to {r.high:.3f}")
    threads = describe_threads(model.device)
    where = f"{model.name} on {model.device}{', ' if threads else ''}{threads}"
    title = f"{where}, cache {options.cache}, {options.rounds} pairs"
    _print(table, title, [r.note for r in results])


def print_start(measured: list[StartMeasure], model: str, note: str, *, as_json: bool) -> None:
    """Print the times and the memory of starting a model to stdout.

    `model` is the model's name, and `note` a text to print below the table.
    """
    if as_json:
        results = [asdict(one) for one in measured]
        print_json({"model": model, "machine": machine(), "results": results, "note": note})
        return
    table = Table("start", "ours", "llama.cpp", "ratio", "quartiles", box=None)
    for one in measured:
        other = "" if one.other is None else f"{one.other:,.2f} {one.unit}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        quartiles = "" if one.low is None else f"{one.low:.2f} to {one.high:.2f}"
        table.add_row(one.name, f"{one.ours:,.2f} {one.unit}", other, ratio, quartiles)
    title = f"{model}, {describe_threads(torch.device('cpu'))}"
    _print(table, title, [note])


def _print(table: Table, title: str, notes: Sequence[str]) -> None:
    console = Console(highlight=False, markup=False)
    console.print(title)
    console.print(machine_in_words(machine()))
    console.print(table)
    for note in filter(None, notes):
        console.print(note)
