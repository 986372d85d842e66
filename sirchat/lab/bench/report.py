"""Prints the results of the commands `sirchat bench` as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sirchat.lab.bench.archive import ArchiveUse, MemoryMeasure
from sirchat.lab.bench.ratio import BenchOptions, Ratio, bench_record
from sirchat.lab.bench.record import compare_records, machine, machine_in_words, values
from sirchat.lab.bench.start import StartMeasure
from sirchat.models.devices import threads_in_words
from sirchat.models.model import LoadedModel


def print_ratios(
    measured: Iterable[Ratio], model: LoadedModel, options: BenchOptions, *, as_json: bool
) -> None:
    """Run a benchmark that yields ratios of times, and print the ratios to stdout."""
    notes = Console(stderr=True, highlight=False)
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
    threads = threads_in_words(model.device)
    where = f"{model.name} on {model.device}{', ' * bool(threads)}{threads}"
    title = f"{where}, cache {options.cache}, {options.rounds} pairs"
    _print(table, title, machine_in_words(machine()), notes=[r.note for r in results])


def print_archive(
    measured: Iterable[ArchiveUse], model: LoadedModel, tokens: int, *, as_json: bool
) -> None:
    """Run the benchmark of the archive, and print its memory and disk space to stdout.

    `measured` is the running benchmark, in which `model` reads `tokens` tokens.
    """
    notes = Console(stderr=True, highlight=False)
    with notes.status("reading", spinner="line"):
        results = list(measured)
    if as_json:
        print_json({"model": model.name, "results": [asdict(one) for one in results]})
        return
    table = Table("archive", "limit", "most archived", "most on disk", "memory grew", box=None)
    for one in results:
        grew = "unknown" if one.memory is None else _mib(one.memory)
        table.add_row(one.place, _mib(one.limit), _mib(one.archive), _mib(one.disk), grew)
    _print(table, f"{model.name} on {model.device}, {tokens:,} tokens")


def print_start(measured: list[StartMeasure], model: str, note: str, *, as_json: bool) -> None:
    """Print the times and the memory of starting a model to stdout.

    `model` is the model's name, and `note` a text to print below the table.
    """
    if as_json:
        print_json(start_record(measured, model, note))
        return
    table = Table("start", "ours", "llama.cpp", "ratio", "quartiles", box=None)
    for one in measured:
        other = "" if one.other is None else f"{one.other:,.2f} {one.unit}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        quartiles = "" if one.low is None else f"{one.low:.2f} to {one.high:.2f}"
        table.add_row(one.name, f"{one.ours:,.2f} {one.unit}", other, ratio, quartiles)
    title = f"{model}, {threads_in_words(torch.device('cpu'))}"
    _print(table, title, machine_in_words(machine()), notes=[note])


def start_record(measured: list[StartMeasure], model: str, note: str) -> dict[str, object]:
    """Make a JSON object with the measurements of starting a model, and facts on the machine.

    `model` is the model's name, and `note` a text that belongs to the measurements.
    """
    results = [asdict(one) for one in measured]
    return {"model": model, "machine": machine(), "results": results, "note": note}


def print_record(record: dict[str, Any]) -> None:
    """Print the measurements in a record of `sirchat bench all` to stdout, as a table.

    A measurement is a ratio of times, or a value with its unit.
    """
    table = Table("measured", "value", box=None)
    for name, value in values(record):
        table.add_row(name, f"{value:.3f}")
    _print(table, f"{record['model']}, {machine_in_words(record['machine'])}")


def print_compared(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Print the measurements of two records of `sirchat bench all` side by side to stdout.

    The last column is the second value divided by the first.
    """
    table = Table("measured", "first", "second", "second / first", box=None)
    for one in compare_records(first, second):
        table.add_row(one.name, *(f"{x:.3f}" for x in (*one[1:], one.second / (one.first or 1))))
    both = (("first", first), ("second", second))
    titles = [f"{number}: {machine_in_words(record['machine'])}" for number, record in both]
    _print(table, *titles)


def print_memory(measured: list[MemoryMeasure], model: str, *, as_json: bool) -> None:
    """Print the memory that `sirchat models fit` states for a model, and the memory that it took.

    `model` is the model's name. The output goes to stdout.
    """
    if as_json:
        print_json({"model": model, "results": [asdict(one) for one in measured]})
        return
    table = Table("memory", "said", "its tensors", "said / tensors", "the process grew", box=None)
    for one in measured:
        ratio = f"{one.said / one.tensors:.3f}"
        table.add_row(one.name, _mib(one.said), _mib(one.tensors), ratio, _mib(one.grew))
    _print(table, model)


def _print(table: Table, *titles: str, notes: Sequence[str] = ()) -> None:
    console = Console(highlight=False)
    for title in titles:
        console.print(title, markup=False)
    console.print(table)
    for note in filter(None, notes):
        console.print(note, markup=False)


def print_json(record: dict[str, object]) -> None:
    """Print the results of a benchmark to stdout, as indented JSON."""
    Console(soft_wrap=True, highlight=False).print(json.dumps(record, indent=2), markup=False)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
