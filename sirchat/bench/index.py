"""Searching an archive through an index, against looking at every row: speed, and what is found."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sirchat.bench.archived import SINKS, TOKENS, archived, questions
from sirchat.bench.speed import BenchOptions, Ratio, compare
from sirchat.chat.settings import build_cache_settings
from sirchat.config.layers import changed
from sirchat.config.profile import BEST_RECALL, Profile
from sirchat.errors import UsageError
from sirchat.memory.archive import Archive
from sirchat.memory.index import SurprisalOf, is_available
from sirchat.memory.ranking import Ranked, Ranking
from sirchat.memory.recall import Query, RecallSettings
from sirchat.memory.segments import Positions
from sirchat.models.model import LoadedModel

MEASURES = ("attention", "mips", "cosine", "cosine-pairwise")
"""What is measured, weighted by surprisal."""


@dataclass(frozen=True)
class _Side:
    """Archive and questions, and the settings under which they are searched."""

    archive: Archive
    surprisal_of: SurprisalOf
    asked: list[Query]
    model: LoadedModel
    recall: RecallSettings

    def search(self, query: Query, *, index: bool) -> Ranked:
        """The scores of all rows, or of those that the index proposes."""
        archive, rotations = self.archive, self.model.rotations
        ranking = Ranking(
            archive, archive.positions, query, self.recall, rotations, self.surprisal_of
        )
        return ranking.proposed() if index else ranking.all()

    def seconds(self, best: list[Positions], *, index: bool) -> Iterator[float]:
        """Seconds of one search after the other, the questions in turn; notes each one's `best`."""
        for query in itertools.cycle(self.asked):
            start = time.perf_counter()
            ranked = self.search(query, index=index)
            seconds = time.perf_counter() - start
            best.append(self._best(ranked))
            yield seconds

    def _best(self, ranked: Ranked) -> Positions:
        scores = ranked.scores.mean(0)
        best: Positions = ranked.positions[scores.topk(self.recall.n).indices.numpy()]
        return best


def bench_index(model: LoadedModel, options: BenchOptions, rows: int) -> Iterator[Ratio]:
    """Seconds a search through an index over those of an exact one, for each measure.

    Raises UsageError where faiss is not installed, or the model has no tokenizer of ours.
    """
    if not is_available():
        raise UsageError("faiss is not installed", hint="pip install 'sirchat[faiss]'")
    if model.name != "tiny":
        raise UsageError("--index reads conversations of tiny's world", hint="--model tiny")
    start = time.perf_counter()
    archive, surprisal = archived(model, rows)
    seconds = time.perf_counter() - start
    made = (
        f"{rows:,} rows: {TOKENS - SINKS} of each of {-(-rows // (TOKENS - SINKS)):,} generated "
        f"conversations, read side by side in plain passes in {seconds:.0f} s, {model.dtype}, "
        f"{archive.nbytes / 2**20:,.0f} MiB; questions are the last user turns of others\n"
    )
    asked = list(questions(model, options.rounds))
    side = _Side(archive, surprisal.__getitem__, asked, model, _recall(BEST_RECALL))
    for measure in sorted(MEASURES, key=lambda one: one != BEST_RECALL):
        result = _measure(replace(side, recall=_recall(measure)), options)
        yield replace(result, note=f"{made}{result.note}")
        made = ""


def _measure(side: _Side, options: BenchOptions) -> Ratio:
    start = time.perf_counter()
    side.search(side.asked[0], index=True)
    seconds = time.perf_counter() - start
    size = side.archive.index.nbytes / 2**20 if side.archive.index is not None else 0.0
    found: list[Positions] = []
    exact: list[Positions] = []
    ratio = compare(
        f"search by {side.recall.measure} with an index against without",
        lambda: side.seconds(found, index=True),
        lambda: side.seconds(exact, index=False),
        options,
    )
    shares = [float(np.isin(a, b).mean()) for a, b in zip(exact, found, strict=True)]
    note = (
        f"{side.recall.measure}: recall@{side.recall.n} {np.mean(shares):.3f} "
        f"(worst of {len(shares)} {min(shares):.3f}), index {size:,.0f} MiB, "
        f"made in {seconds:.0f} s"
    )
    return replace(ratio, note=note, unit="search")


def _recall(measure: str) -> RecallSettings:
    """The settings of recall by this measure, as they are by default."""
    recall = build_cache_settings(changed(Profile(), "bench", recall=measure)).recall
    assert recall is not None
    return replace(recall, index="on")
