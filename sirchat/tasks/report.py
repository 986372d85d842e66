"""What a study tells: tables and plots as plain data, under what is needed to repeat them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from sirchat import __version__
from sirchat.memory.policies import policy_class
from sirchat.model import LoadedModel
from sirchat.profile import Profile, as_typed
from sirchat.saving import fingerprint

Record = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A number, with its 95 % interval."""

    value: float
    low: float
    high: float


Value = Measured | float | int | str | None
"""What stands in a table; None where there is nothing to tell."""


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    digits: int = 3


@dataclass(frozen=True)
class Plot:
    """Lines over x; `dashed` ones, and x on a logarithmic scale, where asked for."""

    name: str
    x: str
    y: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]
    dashed: tuple[str, ...] = ()
    log_x: bool = False


@dataclass(frozen=True)
class Report:
    """What a study found.

    Attributes:
        facts: what was asked, in a few words each, for the head of the report.
        tables, plots: what was found.
        details: whatever else the JSON record should have.
    """

    facts: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()
    details: Record = field(default_factory=dict)


def about(model: LoadedModel, task: str, command: str) -> Record:
    """What is needed to repeat an evaluation, for the top of its record."""
    return {
        "task": task,
        "command": command,
        "model": model.name,
        "revision": revision(model),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "sirchat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def revision(model: LoadedModel) -> str:
    """The hub's commit of a model, or a fingerprint of one from elsewhere."""
    return getattr(model.module.config, "_commit_hash", None) or fingerprint(model)


def setting_name(setting: Profile) -> str:
    """A setting in a few words: `entropy 256 decay 0.8`."""
    parts = [setting.policy]
    if policy_class(setting.policy).bounded:
        parts.append(str(setting.budget))
    if setting.decay != 1:
        parts.append(f"decay {setting.decay:g}")
    parts += [f"{key} {as_typed(value)}" for key, value in setting.policy_options.items()]
    return " ".join(parts)


def setting_record(setting: Profile) -> Record:
    """The settings that a row of a comparison may differ in."""
    names = ("policy", "budget", "decay", "sinks", "recent")
    return {name: getattr(setting, name) for name in names} | setting.policy_options
