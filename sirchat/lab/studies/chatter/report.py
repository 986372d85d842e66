"""The tables of the study `chatter`: one for each length, and the settings beside a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sirchat.config.profile import Profile
from sirchat.lab.studies.bootstrap import clustered_mean, paired_interval
from sirchat.lab.studies.report import Table, Value
from sirchat.lab.studies.study import Findings

REFERENCE = "entropy"
"""The policy that others are compared with at the same budget; without it, the first one."""

_COLUMNS = (
    "setting",
    "right of four",
    "less {reference}",
    "value held",
    "statement held",
    "nats gained",
    "nats below full",
    "nats a token",
)


def tables(
    findings: Sequence[Findings], settings: Sequence[Profile], lengths: Sequence[int]
) -> tuple[Table, ...]:
    """One table for each length.

    `nats gained` is by how much the right reply is less surprising than closed-book, `nats below
    full` by how much it is more surprising than under `full`, where that was run.
    """
    return tuple(_table(findings, settings, length) for length in lengths)


def _table(findings: Sequence[Findings], settings: Sequence[Profile], length: int) -> Table:
    full = next((f for f, s in zip(findings, settings, strict=True) if s.policy == "full"), None)
    rows: list[tuple[Value, ...]] = []
    for one, setting in zip(findings, settings, strict=True):
        reference = _reference(findings, settings, setting)
        right, nats = _values(one, length, "right"), _values(one, length, "nats")
        compared: Value = None
        if reference is not one and reference is not None:
            compared = paired_interval(right, _repeated(reference, one, length, "right"))
        below: Value = None
        if full is not None and full is not one:
            below = paired_interval(nats, _repeated(full, one, length, "nats"))
        of_length = [record for record in one.records if record["length"] == length]
        rows.append(
            (
                one.name,
                clustered_mean(right),
                compared,
                clustered_mean(_values(one, length, "held")),
                clustered_mean(_values(one, length, "told")),
                paired_interval(_values(one, length, "closed"), nats),
                below,
                math.fsum(record["nats"] for record in of_length) / len(of_length),
            )
        )
    columns = tuple(name.format(reference=_name(settings)) for name in _COLUMNS)
    return Table(f"{length:,} tokens", columns, tuple(rows), digits=2)


def _name(settings: Sequence[Profile]) -> str:
    return REFERENCE if any(one.policy == REFERENCE for one in settings) else settings[0].policy


def _reference(
    findings: Sequence[Findings], settings: Sequence[Profile], setting: Profile
) -> Findings | None:
    """The findings that a setting is compared with: the reference policy at the same budget."""
    if setting.policy == "full":
        return None
    wanted = _name(settings)
    for one, other in zip(findings, settings, strict=True):
        if other.policy == wanted and other.budget == setting.budget and not other.policy_options:
            return one
    return None


def _values(findings: Findings, length: int, key: str) -> list[list[float]]:
    """The values of each conversation, over all seeds."""
    return [
        [float(answer[key]) for answer in record["answers"]]
        for record in findings.records
        if record["length"] == length
    ]


def _repeated(reference: Findings, one: Findings, length: int, key: str) -> list[list[float]]:
    """The reference's values, once for each seed of the other setting."""
    first = Findings(reference.name, reference.by_seed[:1])
    return _values(first, length, key) * len(one.by_seed)
