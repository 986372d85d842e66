"""Perplexity by the length of the context (Anchor-based LLMs, appendix A.1, Table 4).

Synthetic conversations are read from their beginning. The perplexity at a length is that of all
tokens up to that length. Anchor tokens do not count: they carry no text, and are predictable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sirchat.chat.session import Session
from sirchat.errors import SettingError
from sirchat.lab.studies.perplexity import conversation, read, round_ids
from sirchat.lab.studies.report import Plot, Report, Table
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import Cell, Findings, Grid
from sirchat.models.model import LoadedModel
from sirchat.text.template import Template


@dataclass(frozen=True)
class Context(Grid):
    """The study; `limit` is the number of conversations.

    Attributes:
        lengths: context lengths in tokens, ascending.

    Raises SettingError for lengths that do not ascend.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] < 2 or sorted(set(self.lengths)) != [*self.lengths]:
            shown = ",".join(map(str, self.lengths))
            raise SettingError(f"lengths is {shown}, must ascend from 2 or more")

    @property
    def name(self) -> str:
        """The study's name, which also names its files."""
        return "context"

    def units(self) -> list[str]:
        """One unit for each conversation: its number."""
        return [str(number) for number in range(self.limit)]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Read a conversation: the sum of surprisals, in nats, and the token count, by length."""
        model = session.model  # a length may exceed the context that the model was trained for
        model = replace(model, context_length=max(model.context_length, self.lengths[-1]))
        rounds = list(self._rounds(model, unit))
        nats = read(model, session.profile, iter(rounds))
        ids = np.array([one for each in rounds for one in each])
        counts = ~np.isnan(nats)
        if model.anchors is not None and model.anchors.token_id is not None:
            counts &= ids != model.anchors.token_id
        up_to = [counts[:length] for length in self.lengths]
        return {
            "nats": [float(nats[: len(one)][one].sum()) for one in up_to],
            "tokens": [int(one.sum()) for one in up_to],
        }

    def report(self, found: Mapping[str, Record]) -> Report:
        """Perplexity at each length."""
        findings = self.findings(found)
        rows = {one.name: self._perplexities(one) for one in findings}
        columns = ("setting", *(f"{length:,} tokens" for length in self.lengths))
        table = Table("Perplexity by context", columns, tuple((n, *v) for n, v in rows.items()))
        lines = {
            name: tuple(zip(map(float, self.lengths), values, strict=True))
            for name, values in rows.items()
        }
        plot = Plot("perplexity by context", "tokens", "perplexity", lines, log_x=True)
        header = (f"seed {self.seed}", f"{self.limit} conversations")
        return Report(header, (table,), (plot,), self.parameters())

    def _rounds(self, model: LoadedModel, unit: str) -> Iterator[list[int]]:
        """The ids of a conversation, round by round, up to the longest length."""
        template, left = Template(model.tokenizer, model.anchors), self.lengths[-1]
        for number, (user, reply) in enumerate(
            conversation(f"context/{self.seed}/{unit}", left // 8)
        ):
            ids = round_ids(template, user, reply, first=not number)[:left]
            yield ids
            left -= len(ids)
            if not left:
                return

    def _perplexities(self, findings: Findings) -> list[float]:
        nats = np.sum([one["nats"] for one in findings.records], axis=0)
        tokens = np.sum([one["tokens"] for one in findings.records], axis=0)
        return [math.exp(each) for each in nats / tokens]
