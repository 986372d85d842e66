"""What a study tells: tables and plots as plain data, under what is needed to repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import transformers

from sirchat import __version__
from sirchat.chat.settings import has_effect
from sirchat.config.profile import Profile, as_typed, short
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import fingerprint
from sirchat.tasks.results_log import Record


@dataclass(frozen=True)
class Estimate:
    """A number, with its 95 % interval."""

    value: float
    low: float
    high: float


Value = Estimate | float | int | str | None
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


def provenance(model: LoadedModel, task: str, command: str) -> Record:
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


def setting_names(settings: Sequence[Profile]) -> list[str]:
    """Each setting in a few words, `entropy 256 decay 0.8`; what they differ in is among them."""
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
        parts.append(f"decay {short(setting.decay)}")
    if policy.bounded:
        told = [key for key in differ if has_effect(setting, key)]
        parts += [f"{key} {as_typed(getattr(setting, key))}" for key in told]
    parts += [f"{key} {as_typed(value)}" for key, value in setting.policy_options.items()]
    return " ".join(parts)
