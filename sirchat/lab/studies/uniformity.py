"""Tests whether random policies are uniform: how often each token is held, over many seeds.

The same stream is read under each policy with many seeds. Sinks and system prompt, which are never
evicted, and the newest `budget` tokens are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.reading import read
from sirchat.lab.studies.report import Record, Report, Table, Value
from sirchat.lab.studies.study import ON_SCREEN, SAMPLING, Cell, Findings, Grid
from sirchat.lab.synthetic.rounds import quiz
from sirchat.memory.policies import policy_class

PARTS = 10


@dataclass(frozen=True)
class Uniformity(Grid):
    """The study that tests whether random policies are uniform (hold all tokens equally often).

    `limit` is the number of seeds for each setting.
    """

    rounds: int = 8  # number of rounds of the stream, which is the same for every seed

    without_effect = (*ON_SCREEN, *SAMPLING, "repeats")

    name = "uniformity"

    def units(self) -> list[str]:
        """The name of the only unit (run) for each setting and seed, which reads the stream."""
        return ["stream"]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read the stream; the record has each tenth's number of tokens, and how many are held."""
        rng = Random(f"uniformity/{self.seed}")
        for _ in range(self.rounds):
            user, reply = quiz(rng, 5)
            read(session, user.text, reply.text)
        pinned, end = session.ledger.pinned_positions, session.seen - session.budget
        first = max(cell.setting.sinks, 1 + int(pinned.max(initial=-1)))  # after a system prompt
        if end - first < PARTS:
            raise SettingError(
                f"rounds is {self.rounds}, too few: {session.seen} tokens under a budget of "
                f"{session.budget} leave none to compare",
                hint="choose a greater --rounds, or a smaller budget",
            )
        held = np.array([row.position for row in session.snapshot().rows])
        edges = np.linspace(first, end, PARTS + 1).round()
        counts, _ = np.histogram(held[(held >= first) & (held < end)], edges)
        return {"held": counts.tolist(), "of": np.diff(edges).astype(int).tolist()}

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table of the share of each tenth of the stream that is held.

        The table also has the result of the test whether every tenth is held equally often.
        """
        findings = self.findings(found)
        columns = ("tenth of the stream", *(one.name for one in findings))
        shares = {one.name: _shares(one) for one in findings}
        tests = [_uniformity_test(one) for one in findings]
        rows: list[tuple[Value, ...]] = [
            (str(n + 1), *(one[n] for one in shares.values())) for n in range(PARTS)
        ]
        rows.append(("seeds", *(len(one.by_seed) for one in findings)))
        rows.append(("chi2, 9 degrees", *(chi2 for chi2, _ in tests)))
        rows.append(("p", *(p for _, p in tests)))
        seen = sum(next(iter(found.values()))["of"]) if found else 0
        header = (
            f"seed {self.seed}",
            f"shares are of {seen:,} tokens: all but sinks, system prompt and the newest",
        )
        table = Table("Share still held", columns, tuple(rows), digits=4)
        return Report(header, (table,), self.parameters())

    def _seeds(self, setting: Profile) -> tuple[int, ...]:
        is_random = "seed" in policy_class(setting.policy).uses
        return tuple(range(self.seed, self.seed + self.limit)) if is_random else (self.seed,)


def _shares(one: Findings) -> list[float]:
    held = np.sum([each["held"] for each in one.records], axis=0)
    return (held / np.sum([each["of"] for each in one.records], axis=0)).tolist()  # type: ignore[no-any-return]


def _uniformity_test(one: Findings) -> tuple[float, float]:
    """Pearson's chi-squared over tenths of the stream, and its p-value."""
    held = np.sum([each["held"] for each in one.records], axis=0).astype(float)
    total = np.sum([each["of"] for each in one.records], axis=0).astype(float)
    share = held.sum() / total.sum()
    if not 0 < share < 1:
        return 0.0, 1.0
    chi2 = float(((held - total * share) ** 2 / (total * share)).sum() / (1 - share))
    return chi2, chi2_tail(chi2, PARTS - 1)


def chi2_tail(chi2: float, freedom: int) -> float:
    """The p-value of a chi-squared test: the probability of a statistic greater than `chi2`.

    `freedom` is the number of degrees of freedom.
    """
    half = torch.tensor([freedom, chi2], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
