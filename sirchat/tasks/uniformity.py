"""Is a reservoir uniform? How often each token of a stream is still held, over many lots.

One stream is read under each policy with other lots each time. Of the tokens that are no sinks, and
older than the budget, so that nothing but the lots can have kept them, each should be held equally
often. The test is Pearson's, over tenths of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch

from sirchat.chat.session import Session
from sirchat.memory.policies import policy_class
from sirchat.tasks.asking import read
from sirchat.tasks.report import Plot, Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import Cell, Findings, Grid
from sirchat.world.dialogue import quiz

PARTS = 10


@dataclass(frozen=True)
class Uniformity(Grid):
    """The study; `limit` is the lots drawn for each setting.

    Attributes:
        rounds: of the stream; the same for every draw.
    """

    rounds: int = 8

    @property
    def name(self) -> str:
        """What it is called."""
        return "uniformity"

    def cells(self) -> list[Cell]:
        """A row for each setting, with all the lots; one where the policy draws none."""
        made = super().cells()
        return [replace(one, seeds=self._lots(one)) for one in made]

    def units(self) -> list[str]:
        """The one stream."""
        return ["stream"]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the stream: how many tokens of each tenth of it are held, and how many it has."""
        rng = Random(f"uniformity/{self.seed}")
        for _ in range(self.rounds):
            user, reply = quiz(rng, 5)
            read(session, user.text, reply.text)
        first, end = cell.setting.sinks, session.seen - session.budget
        held = np.array([row.position for row in session.snapshot().rows])
        edges = np.linspace(first, end, PARTS + 1).round()
        counts, _ = np.histogram(held[(held >= first) & (held < end)], edges)
        return {"held": counts.tolist(), "of": np.diff(edges).astype(int).tolist()}

    def report(self, found: Mapping[str, Record]) -> Report:
        """The share held of each tenth, and how likely such differences are by chance."""
        held = self.findings(found)
        columns = ("tenth of the stream", *(one.name for one in held))
        shares = {one.name: _shares(one) for one in held}
        tests = [_uniform(one) for one in held]
        rows: list[tuple[Value, ...]] = [
            (str(n + 1), *(one[n] for one in shares.values())) for n in range(PARTS)
        ]
        rows.append(("lots", *(len(one.by_seed) for one in held)))
        rows.append(("chi2, 9 degrees", *(chi2 for chi2, _ in tests)))
        rows.append(("p", *(p for _, p in tests)))
        lines = {
            name: tuple((float(n + 1), share) for n, share in enumerate(values))
            for name, values in shares.items()
        }
        seen = sum(next(iter(found.values()))["of"]) if found else 0
        facts = (
            f"seed {self.seed}",
            f"a stream of {seen:,} tokens that are no sinks and older than the budget",
        )
        table = Table("Share still held", columns, tuple(rows), digits=4)
        plot = Plot("share still held", "tenth of the stream", "share", lines)
        return Report(facts, (table,), (plot,), self.parameters())

    def _lots(self, cell: Cell) -> tuple[int, ...]:
        draws = "seed" in policy_class(cell.setting.policy).uses
        return tuple(range(self.seed, self.seed + self.limit)) if draws else (self.seed,)


def _shares(one: Findings) -> list[float]:
    held = np.sum([each["held"] for each in one.all], axis=0)
    return (held / np.sum([each["of"] for each in one.all], axis=0)).tolist()  # type: ignore[no-any-return]


def _uniform(one: Findings) -> tuple[float, float]:
    """Pearson's statistic over tenths and its p-value, that all tenths are held equally often.

    A sample without replacement varies less than independent draws by 1 - share held; the statistic
    is corrected for that.
    """
    held = np.sum([each["held"] for each in one.all], axis=0).astype(float)
    there = np.sum([each["of"] for each in one.all], axis=0).astype(float)
    share = held.sum() / there.sum()
    if not 0 < share < 1:
        return 0.0, 1.0
    chi2 = float(((held - there * share) ** 2 / (there * share)).sum() / (1 - share))
    return chi2, chi2_tail(chi2, PARTS - 1)


def chi2_tail(chi2: float, freedom: int) -> float:
    """The chance that chi squared, with so many degrees of freedom, is more than `chi2`."""
    half = torch.tensor([freedom, chi2], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
