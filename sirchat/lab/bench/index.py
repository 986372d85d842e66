"""Searching an archive through an index, against scoring every row: speed and recall."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sirchat.chat.settings import build_cache_settings
from sirchat.config.layers import changed
from sirchat.config.profile import Profile
from sirchat.errors import UsageError
from sirchat.lab.bench.archived import SINKS, TOKENS, archived, questions
from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare
from sirchat.memory.archive import Archive
from sirchat.memory.index import SurprisalOf, is_available
from sirchat.memory.ranking import Ranked, Ranking
from sirchat.memory.recall import Query, RecallSettings
from sirchat.memory.segments import Positions
from sirchat.models.model import LoadedModel

MEASURES = ("attention", "mips", "cosine", "cosine-pairwise")
"""The recall measures that are compared, each weighted by surprisal."""


@dataclass(frozen=True)
class _Searched:
    """An archive, queries to it, and the recall settings of the search."""

    archive: Archive
    surprisal_of: SurprisalOf
    asked: list[Query]
    model: LoadedModel
    recall: RecallSettings

    def search(self, query: Query, *, index: bool) -> Ranked:
        """The scores of all rows, or with `index` of those that the index proposes."""
        archive, rotations = self.archive, self.model.rotations
        ranking = Ranking(
            archive, archive.positions, query, self.recall, rotations, self.surprisal_of
        )
        return ranking.proposed() if index else ranking.all()

    def seconds(self, best: list[Positions], *, index: bool) -> Iterator[float]:
        """Seconds of one search after the other, without end; appends what each found to `best`."""
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
    """Seconds of a search through an index over those of an exact search, for each measure.

    The archive has `rows` rows. Raises UsageError where faiss is not installed, or the model is not
    `tiny`.
    """
    if not is_available():
        raise UsageError("faiss is not installed", hint="pip install 'sirchat[faiss]'")
    if model.name != "tiny":
        raise UsageError("the index is measured on conversations of tiny's world, by tiny alone")
    start = time.perf_counter()
    archive, surprisal = archived(model, rows)
    seconds = time.perf_counter() - start
    archive_note = (
        f"{rows:,} rows: {TOKENS - SINKS} of each of {-(-rows // (TOKENS - SINKS)):,} generated "
        f"conversations, read side by side in plain passes in {seconds:.0f} s, {model.dtype}, "
        f"{archive.nbytes / 2**20:,.0f} MiB; questions are the last user turns of others\n"
    )
    asked = list(questions(model, options.rounds))
    side = _Searched(archive, surprisal.__getitem__, asked, model, _recall(MEASURES[0]))
    for measure in MEASURES:
        result = _measure(replace(side, recall=_recall(measure)), options)
        yield replace(result, note=f"{archive_note}{result.note}")
        archive_note = ""


def _measure(side: _Searched, options: BenchOptions) -> Ratio:
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
    """The default recall settings for this measure, with the index on."""
    recall = build_cache_settings(changed(Profile(), "bench", recall=measure)).recall
    assert recall is not None
    return replace(recall, index="on")
