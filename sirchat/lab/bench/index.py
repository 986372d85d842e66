"""Compares searching an archive through an index with scoring every archived token.

The archive is like that of a long chat. It has the tokens of generated conversations, like those
that the bundled model was trained on. The conversations are read in batches by plain forward
passes, each from position 0. All of their tokens are archived, except the first few (the sinks).
So the keys, values and surprisals come from a real model, and no chat has to run. The queries are
user turns of other generated conversations, each read after the earlier turns of its conversation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from sirchat.chat.settings import build_cache_settings
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed
from sirchat.errors import UsageError
from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.training.rows import Renderer
from sirchat.memory.archive import Archive
from sirchat.memory.archive_search import ArchiveSearch, Ranked
from sirchat.memory.index import SurprisalOf, is_available
from sirchat.memory.recall import retriever, retriever_names
from sirchat.memory.retrieval import Query, RecallSettings
from sirchat.memory.segments import Positions, Rows
from sirchat.models.attention_hook import QueryRecorder
from sirchat.models.model import LoadedModel
from sirchat.models.probe import cache_argument
from sirchat.models.surprisal import surprisal

_FOUND = 200  # number of tokens that a search restores


@dataclass(frozen=True)
class _Searched:
    """An archive, queries to it, and the recall settings of the search."""

    archive: Archive
    surprisal_of: SurprisalOf
    asked: list[Query]
    model: LoadedModel
    recall: RecallSettings

    def search(self, query: Query, *, index: bool) -> Ranked:
        """Score all archived tokens or, if `index` is true, only those that the index proposes."""
        archive, rotations = self.archive, self.model.rotations
        search = ArchiveSearch(
            archive, archive.positions, query, self.recall, rotations, self.surprisal_of
        )
        return search.proposed() if index else search.all()

    def seconds(self, best: list[Positions], *, index: bool) -> Iterator[float]:
        """Search for one query after another, endlessly; yield the seconds of each search.

        The positions of the best tokens of each search are appended to `best`.
        """
        for query in itertools.cycle(self.asked):
            start = time.perf_counter()
            ranked = self.search(query, index=index)
            seconds = time.perf_counter() - start
            best.append(self._best(ranked))
            yield seconds

    def _best(self, ranked: Ranked) -> Positions:
        scores = ranked.scores.mean(0)
        best: Positions = ranked.positions[scores.topk(_FOUND).indices.numpy()]
        return best


def bench_index(model: LoadedModel, options: BenchOptions, rows: int) -> Iterator[Ratio]:
    """Compare, for each retriever, the time of a search with an index and of an exact search.

    The archive has `rows` tokens. Raises UsageError if faiss is not installed, or the model is not
    `tiny`.
    """
    if not is_available():
        raise UsageError("faiss is not installed", hint="pip install 'sirchat[faiss]'")
    if model.name != "tiny":
        raise UsageError(f"model {model.name!r} is not allowed: this benchmark needs tiny")
    start = time.perf_counter()
    archive, surprisal = archived(model, rows)
    seconds = time.perf_counter() - start
    archive_note = (
        f"{rows:,} rows: {TOKENS - SINKS} of each of {-(-rows // (TOKENS - SINKS)):,} generated "
        f"conversations, read side by side in plain passes in {seconds:.0f} s, {model.dtype}, "
        f"{archive.nbytes / 2**20:,.0f} MiB; questions are the last user turns of other "
        "conversations\n"
    )
    asked = list(questions(model, options.rounds))
    names = [name for name in retriever_names() if retriever(name).index_probes]
    side = _Searched(archive, surprisal.__getitem__, asked, model, _recall(names[0]))
    for name in names:
        result = _measure(replace(side, recall=_recall(name)), options)
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
        f"search by {side.recall.retriever} with an index against without",
        lambda: side.seconds(found, index=True),
        lambda: side.seconds(exact, index=False),
        options,
    )
    shares = [float(np.isin(a, b).mean()) for a, b in zip(exact, found, strict=True)]
    note = (
        f"{side.recall.retriever}: recall@{_FOUND} {np.mean(shares):.3f} "
        f"(worst of {len(shares)} {min(shares):.3f}), index {size:,.0f} MiB, "
        f"made in {seconds:.0f} s"
    )
    return replace(ratio, note=note, unit="search")


def _recall(name: str) -> RecallSettings:
    """The default recall settings with the retriever `name`, and with the index on."""
    recall = build_cache_settings(changed(Profile(), "bench", recall=name)).recall
    assert recall is not None
    return replace(recall, n=_FOUND, index="on")


TOKENS, SINKS = 512, 4
"""Number of tokens of a conversation, and number of its first tokens that are not archived."""

_BATCH = 16
_MIX = Mix(
    tell=0.14, ask=0.13, repeat=0.02, game=0.02, story=0.12, quiz=0.5, untold=0.05, long_list=0.3
)

Surprisal = NDArray[np.float64]


def archived(model: LoadedModel, count: int, seed: int = 0) -> tuple[Archive, Surprisal]:
    """An archive of `count` tokens of generated dialogue, and their surprisals [count] in nats."""
    archive, scores = Archive(), np.zeros(count)
    done, renderer, rng = 0, Renderer(model.tokenizer), Random(f"archived/{seed}")
    while done < count:
        ids = torch.tensor([_ids(renderer, rng) for _ in range(_BATCH)])
        for rows, surprisals in _read(model, ids.to(model.device), done):
            rows = rows.between(0, count - done)
            archive.add(rows)
            scores[done : done + len(rows)] = surprisals[: len(rows)]
            done += len(rows)
            if done == count:
                break
    return archive, scores


def questions(model: LoadedModel, count: int, seed: int = 0) -> Iterator[Query]:
    """Queries from `count` user turns of conversations that are not in the archive."""
    renderer, rng = Renderer(model.tokenizer), Random(f"asked/{seed}")
    for _ in range(count):
        ids = _ids(renderer, rng)
        start, end = _last_question(renderer, ids)
        cache = model.new_cache(TOKENS)
        model.forward(ids[:start], cache)
        cache.commit(start)
        recorder = QueryRecorder()
        model.forward(ids[start:end], cache, observer=recorder)
        cache.commit(end - start)
        slots = torch.arange(start, end)
        yield Query(cache.first_written(slots, slots.numpy()), recorder.queries(model.rotations))


def _ids(renderer: Renderer, rng: Random) -> list[int]:
    """The first TOKENS ids of a conversation."""
    ids: list[int] = []
    while len(ids) < TOKENS:
        ids = renderer.render(dialogue(rng, 30, _MIX)).ids
    return ids[:TOKENS]


def _last_question(renderer: Renderer, ids: list[int]) -> tuple[int, int]:
    """The indices in `ids` at which the last user turn with a reply, and this reply, begin."""
    end = max(at for at, one in enumerate(ids) if one == renderer.roles["assistant"])
    return max(at for at in range(end) if ids[at] == renderer.roles["user"]), end


@torch.inference_mode()
def _read(
    model: LoadedModel, ids: Tensor, start: int
) -> Iterator[tuple[Rows, NDArray[np.float32]]]:
    """Read conversations [B, TOKENS]; for each, yield the keys and values, and the surprisals.

    Both leave out the first SINKS tokens. Surprisals are in nats. The yielded tokens get successive
    stream positions from `start` on.
    """
    cache = DynamicCache(config=model.module.config)
    logits = model.module(
        input_ids=ids, **cache_argument(model.module, cache)
    ).logits  # [B, TOKENS, V]
    written_at = np.arange(SINKS, TOKENS)
    for number, one in enumerate(ids):
        scores = surprisal(logits[number, SINKS - 1 : -1], one[SINKS:])
        pairs = [(layer.keys[number], layer.values[number]) for layer in cache.layers]
        tensors = [tensor[:, SINKS:] for pair in pairs for tensor in pair]
        yield Rows(start + np.arange(len(scores)), written_at, tensors), scores.cpu().numpy()
        start += len(scores)
