"""The report of a study: tables and plots as plain data, with what is needed to repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import transformers

from sirchat import __version__
from sirchat.chat.settings import has_effect
from sirchat.config.profile import Profile
from sirchat.config.values import as_typed, short
from sirchat.lab.studies.results_log import Record
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel
from sirchat.models.threads import threads_in_words
from sirchat.saved.autosave import fingerprint


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; NaN where there was nothing to count."""

    value: float
    low: float
    high: float


Value = Estimate | float | int | str | None
"""What a cell of a table holds; None for an empty cell, NaN for one without any data."""


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row. `digits` follow the decimal point."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    digits: int = 3


@dataclass(frozen=True)
class Plot:
    """Named lines of (x, y) points, some `dashed`; `log_x` makes the x axis logarithmic."""

    name: str
    x: str
    y: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]
    dashed: tuple[str, ...] = ()
    log_x: bool = False


@dataclass(frozen=True)
class Report:
    """The results of a study.

    Attributes:
        header: what was run, in a few words each, for the first line of the report.
        tables, plots: the results.
        details: further entries of the JSON record.
    """

    header: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()
    details: Record = field(default_factory=dict)


def provenance(model: LoadedModel, task: str, command: str) -> Record:
    """What is needed to repeat an evaluation: command, model and versions, for its JSON record."""
    step = model.decode_step
    return {
        "task": task,
        "command": command,
        "model": model.name,
        "revision": revision(model),
        "device": str(model.device),
        "dtype": model.precision,
        "threads": threads_in_words(model.device),
        "compiled": step is not None and step.compiled is not None,
        "sirchat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def revision(model: LoadedModel) -> str:
    """The hub's commit of a model, or a fingerprint of a model that is not from the hub."""
    return getattr(model.module.config, "_commit_hash", None) or fingerprint(model)


def setting_names(settings: Sequence[Profile]) -> list[str]:
    """Each setting in a few words, such as `entropy 256 decay 0.8`, with all that differs."""
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
        named = [key for key in differ if has_effect(setting, key)]
        parts += [f"{key} {as_typed(getattr(setting, key))}" for key in named]
    parts += [f"{key} {as_typed(value)}" for key, value in setting.policy_options.items()]
    return " ".join(parts)
