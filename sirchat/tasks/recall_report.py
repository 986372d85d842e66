"""Print what `sirchat eval recall` found, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from sirchat.model import LoadedModel
from sirchat.profile import Profile
from sirchat.tasks.interval import wilson
from sirchat.tasks.recall import Recalled, RecallOptions, recall
from sirchat.tasks.report import about, print_json, setting_name, setting_record, watched


def print_recall(
    model: LoadedModel,
    settings: Sequence[Profile],
    options: RecallOptions,
    *,
    command: str,
    as_json: bool,
) -> None:
    """Run the evaluation, with progress on stderr, and print it to stdout."""
    total = len(settings) * options.dialogues
    found = list(watched(recall(model, settings, options), total, "asking"))
    record = recall_record(model, settings, options, found, command)
    if as_json:
        print_json(record)
    else:
        _print_table(record, settings)


def recall_record(
    model: LoadedModel,
    settings: Sequence[Profile],
    options: RecallOptions,
    found: Sequence[Recalled],
    command: str,
) -> dict[str, Any]:
    """Shares right, with 95 % intervals, for each setting; and what is needed to repeat them."""
    return {
        **about(model, "recall", command),
        **asdict(options),
        "results": [
            _result(s, [one for one in found if one.setting is s], options) for s in settings
        ],
    }


def _result(setting: Profile, found: Sequence[Recalled], options: RecallOptions) -> dict[str, Any]:
    kinds = {kind: [one for one in found if one.kind == kind] for kind in options.asked_kinds}
    distances = {n: [one for one in found if one.between == n] for n in options.between}
    tokens = [one.tokens for one in found] or [0]
    quizzes = sum(one.quizzes for one in found)
    return {
        "setting": setting_record(setting),
        "recall": _recall(found),
        "kinds": {kind: _recall(ones) for kind, ones in kinds.items()},
        "between": {str(between): _recall(ones) for between, ones in distances.items()},
        "quiz": _share(sum(one.quizzes_right for one in found), quizzes) if quizzes else None,
        "tokens": {"least": min(tokens), "mean": sum(tokens) / len(tokens), "most": max(tokens)},
        "wrong": [
            {"kind": one.kind, "expected": one.expected, "said": one.said}
            for one in found
            if not one.right
        ],
    }


def _recall(found: Sequence[Recalled]) -> dict[str, Any]:
    return _share(sum(one.right for one in found), len(found))


def _share(right: int, asked: int) -> dict[str, Any]:
    low, high = wilson(right, asked)
    return {
        "share": right / max(1, asked),
        "right": right,
        "asked": asked,
        "low": low,
        "high": high,
    }


def _print_table(record: dict[str, Any], settings: Sequence[Profile]) -> None:
    results = record["results"]
    table = Table("", box=None)
    for setting in settings:
        words = setting_name(setting).replace(" decay", "\ndecay").replace(" ", "\n", 1)
        table.add_column(words, justify="right")
    for kind in results[0]["kinds"]:
        table.add_row(kind, *(f"{r['kinds'][kind]['share']:.2f}" for r in results))
    if len(record["between"]) > 1:
        for between in map(str, record["between"]):
            shares = (f"{r['between'][between]['share']:.3f}" for r in results)
            table.add_row(f"{between} rounds between", *shares)
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
        f"{' or '.join(map(str, record['between']))} rounds between; torch {record['torch']}\n"
        f"{record['command']}",
        markup=False,
    )
    console.print(table)
