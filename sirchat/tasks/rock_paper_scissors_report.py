"""Print what `sirchat eval rock-paper-scissors` found, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from sirchat.model import LoadedModel
from sirchat.profile import Profile
from sirchat.tasks.interval import mean_interval
from sirchat.tasks.report import about, print_json, setting_name, setting_record, watched
from sirchat.tasks.rock_paper_scissors import PLAYERS, Match, MatchOptions, matches


def print_matches(
    model: LoadedModel,
    settings: Sequence[Profile],
    options: MatchOptions,
    *,
    command: str,
    as_json: bool,
) -> None:
    """Play, with progress on stderr, and print the result to stdout."""
    total = len(settings) * options.matches * len(PLAYERS)
    found = list(watched(matches(model, settings, options), total, "playing"))
    record = matches_record(model, settings, options, found, command)
    if as_json:
        print_json(record)
    else:
        _print_table(record, settings)


def matches_record(
    model: LoadedModel,
    settings: Sequence[Profile],
    options: MatchOptions,
    found: Sequence[Match],
    command: str,
) -> dict[str, Any]:
    """Win rates by player and setting, over matches, and the paired difference to the last setting.

    Pairs are matches against the same moves.
    """
    cells = [[one for one in found if one.setting is setting] for setting in settings]
    return {
        **about(model, "rock-paper-scissors", command),
        **asdict(options),
        "results": [
            _result(setting, cell, cells[-1]) for setting, cell in zip(settings, cells, strict=True)
        ],
    }


def _result(setting: Profile, found: Sequence[Match], others: Sequence[Match]) -> dict[str, Any]:
    pairs = zip(found, others, strict=True)
    rounds = sum(one.won + one.tied + one.lost for one in found) or 1
    return {
        "setting": setting_record(setting),
        "win": _mean([one.win_rate for one in found]),
        "tie": sum(one.tied for one in found) / rounds,
        "lose": sum(one.lost for one in found) / rounds,
        "silent": sum(one.silent for one in found),
        "players": {
            player: _mean([one.win_rate for one in found if one.player == player])
            for player in PLAYERS
        },
        "difference": _mean([one.win_rate - other.win_rate for one, other in pairs]),
        "tokens": max((one.tokens for one in found), default=0),
    }


def _mean(values: Sequence[float]) -> dict[str, float]:
    mean, low, high = mean_interval(values)
    return {"mean": mean, "low": low, "high": high}


def _print_table(record: dict[str, Any], settings: Sequence[Profile]) -> None:
    last = setting_name(settings[-1])
    table = Table("", *PLAYERS, "all", "95 %", "tie", "lose", f"against {last}", box=None)
    for setting, result in zip(settings, record["results"], strict=True):
        win, paired = result["win"], result["difference"]
        table.add_row(
            setting_name(setting),
            *(f"{result['players'][player]['mean']:.3f}" for player in PLAYERS),
            f"{win['mean']:.3f}",
            f"{win['low']:.3f} to {win['high']:.3f}",
            f"{result['tie']:.3f}",
            f"{result['lose']:.3f}",
            f"{paired['mean']:+.3f} ({paired['low']:+.3f} to {paired['high']:+.3f})",
        )
    console = Console(highlight=False)
    console.print(
        f"{record['model']} on {record['device']}, {record['dtype']}, seed {record['seed']}, "
        f"{record['matches']} matches of {record['rounds']} rounds against each player; "
        f"torch {record['torch']}\n{record['command']}",
        markup=False,
    )
    console.print(table)
