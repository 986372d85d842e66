"""What every report opens with: the model, the machine, the versions, how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sirchat import __version__
from sirchat.model import LoadedModel
from sirchat.profile import Profile

T = TypeVar("T")

_SHOWN = ("policy", "budget", "decay", "sinks", "recent")


def about(model: LoadedModel, task: str, command: str) -> dict[str, Any]:
    """What is needed to repeat an evaluation, for the top of its record."""
    return {
        "task": task,
        "command": command,
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "sirchat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def setting_record(setting: Profile) -> dict[str, Any]:
    """The settings that a cell of a comparison differs in."""
    return {name: getattr(setting, name) for name in _SHOWN} | setting.policy_options


def setting_name(setting: Profile) -> str:
    """A setting in a few words: `entropy 256 decay 0.8`."""
    decay = f" decay {setting.decay:g}" if setting.decay != 1 else ""
    budget = "" if setting.policy == "full" else f" {setting.budget}"
    return f"{setting.policy}{budget}{decay}"


def watched(ones: Iterable[T], total: int, name: str) -> Iterator[T]:
    """Pass `ones` on, with a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        yield from progress.track(ones, total=total, description=name)


def print_json(record: dict[str, Any]) -> None:
    """Print a record to stdout."""
    out = Console(soft_wrap=True, highlight=False)
    out.print(json.dumps(record, indent=2), markup=False)
