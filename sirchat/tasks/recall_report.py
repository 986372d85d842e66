"""Print what `sirchat eval recall` found, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sirchat import __version__
from sirchat.model import LoadedModel
from sirchat.profile import Profile
from sirchat.tasks.interval import wilson
from sirchat.tasks.recall import Recalled, RecallOptions, recall

_SHOWN = ("policy", "budget", "decay", "sinks", "recent")


def print_recall(
    model: LoadedModel,
    settings: Sequence[Profile],
    options: RecallOptions,
    *,
    command: str,
    as_json: bool,
) -> None:
    """Run the evaluation, with progress on stderr, and print it to stdout."""
    notes = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    found: list[Recalled] = []
    with Progress(*columns, TimeRemainingColumn(), console=notes, transient=True) as progress:
        task = progress.add_task("asking", total=len(settings) * options.dialogues)
        for one in recall(model, settings, options):
            found.append(one)
            progress.update(task, advance=1, description=_name(one.setting))
    record = recall_record(model, settings, options, found, command)
    if as_json:
        out = Console(soft_wrap=True, highlight=False)
        out.print(json.dumps(record, indent=2), markup=False)
        return
    _print_table(record)


def recall_record(
    model: LoadedModel,
    settings: Sequence[Profile],
    options: RecallOptions,
    found: Sequence[Recalled],
    command: str,
) -> dict[str, Any]:
    """Shares right, with 95 % intervals, for each setting; and what is needed to repeat them."""
    return {
        "task": "recall",
        "command": command,
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "sirchat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **asdict(options),
        "results": [
            _result(s, [one for one in found if one.setting is s], options) for s in settings
        ],
    }


def _result(setting: Profile, found: Sequence[Recalled], options: RecallOptions) -> dict[str, Any]:
    kinds = {kind: [one for one in found if one.kind == kind] for kind in options.kinds}
    tokens = [one.tokens for one in found] or [0]
    quizzes = sum(one.quizzes for one in found)
    return {
        "setting": {name: getattr(setting, name) for name in _SHOWN},
        "options": setting.policy_options,
        "recall": _share(sum(one.right for one in found), len(found)),
        "kinds": {
            kind: _share(sum(o.right for o in ones), len(ones)) for kind, ones in kinds.items()
        },
        "quiz": _share(sum(one.quizzes_right for one in found), quizzes) if quizzes else None,
        "tokens": {"least": min(tokens), "mean": sum(tokens) / len(tokens), "most": max(tokens)},
        "wrong": [
            {"kind": one.kind, "expected": one.expected, "said": one.said}
            for one in found
            if not one.right
        ],
    }


def _share(right: int, asked: int) -> dict[str, Any]:
    low, high = wilson(right, asked)
    return {
        "share": right / max(1, asked),
        "right": right,
        "asked": asked,
        "low": low,
        "high": high,
    }


def _name(setting: Profile) -> str:
    decay = f" decay {setting.decay:g}" if setting.decay != 1 else ""
    budget = "" if setting.policy == "full" else f" {setting.budget}"
    return f"{setting.policy}{budget}{decay}"


def _print_table(record: dict[str, Any]) -> None:
    results = record["results"]
    table = Table("", box=None)
    for result in results:
        setting = result["setting"]
        budget = "" if setting["policy"] == "full" else f"\n{setting['budget']}"
        decay = f"\ndecay {setting['decay']:g}" if setting["decay"] != 1 else ""
        table.add_column(f"{setting['policy']}{budget}{decay}", justify="right")
    for kind in record["kinds"]:
        table.add_row(kind, *(f"{r['kinds'][kind]['share']:.2f}" for r in results))
    table.add_row("all", *(f"{r['recall']['share']:.3f}" for r in results), style="bold")
    interval = (f"{r['recall']['low']:.2f} to {r['recall']['high']:.2f}" for r in results)
    table.add_row("95 %", *interval)
    if any(r["quiz"] for r in results):
        table.add_row("quiz", *(f"{r['quiz']['share']:.3f}" for r in results))
    console = Console(highlight=False)
    tokens = results[0]["tokens"]
    console.print(
        f"{record['model']} on {record['device']}, {record['dtype']}, seed {record['seed']}, "
        f"{record['dialogues']} conversations of {tokens['least']:,} to {tokens['most']:,} tokens, "
        f"{record['between']} rounds between; torch {record['torch']}\n{record['command']}",
        markup=False,
    )
    console.print(table)
