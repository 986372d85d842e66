"""Print what `sirchat bench` measured, as a table or as JSON."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from sirchat.bench.index import bench_index
from sirchat.bench.panel import bench_panel
from sirchat.bench.speed import BenchOptions, bench_attention, bench_record, run_bench
from sirchat.bench.training import bench_training
from sirchat.models.model import LoadedModel


def print_bench(
    model: LoadedModel,
    options: BenchOptions,
    *,
    panel: bool,
    attention: bool,
    archived: int,
    training: int,
    as_json: bool,
) -> None:
    """Run the benchmark, or another, and print it to stdout; progress on stderr.

    That of the live panel with `panel`, that of counting `attention`, that of the search index
    where rows are `archived`, and that of a training step on rows of `training` tokens.
    Raises UsageError where the terminal wants no drawing, or faiss is not installed.
    """
    notes = Console(stderr=True, highlight=False)
    results = []
    if archived:
        measured = bench_index(model, options, archived)
    elif training:
        measured = bench_training(model, options, training)
    elif attention:
        measured = bench_attention(model, options)
    else:
        measured = bench_panel(model, options) if panel else run_bench(model, options)
    with notes.status("measuring", spinner="line"):
        for result in measured:
            results.append(result)
            notes.print(f"{result.name}: {result.median:.3f}", style="dim")
    if as_json:
        Console(soft_wrap=True, highlight=False).print(
            json.dumps(bench_record(results, model, options), indent=2), markup=False
        )
        return
    table = Table("measured", "ours", "other", "ratio", "quartiles", box=None)
    for r in results:
        ours, other = f"{r.ours_ms:.3f} ms/{r.unit}", f"{r.other_ms:.3f} ms/{r.unit}"
        table.add_row(r.name, ours, other, f"{r.median:.3f}", f"{r.low:.3f} to {r.high:.3f}")
    console = Console()
    title = f"{model.name} on {model.device}, cache {options.cache}, {options.rounds} pairs"
    console.print(title, markup=False)
    console.print(table)
    for note in (r.note for r in results if r.note):
        console.print(note)
