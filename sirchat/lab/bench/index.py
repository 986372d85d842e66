"""Compares two ways to search an archive of evicted tokens: through an index, and without it.

An index proposes a part of the archived tokens, and only these are scored. Without an index, every
archived token is scored.

The archive is like that of a long chat. It has the tokens of generated conversations, such as the
bundled model was trained on. Plain forward passes read the conversations in batches, each
conversation from position 0. All of their tokens are archived except the first few (the sinks).
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
    """An archive of evicted tokens that is searched, and the queries and settings of the search."""

    archive: Archive
    surprisal_of: SurprisalOf
    asked: list[Query]
    model: LoadedModel
    recall: RecallSettings

    def search(self, query: Query, *, index: bool) -> Ranked:
        """Search the archive for one query; returns positions and scores of archived tokens.

        If `index` is true, only the tokens that the index proposes are scored, else all archived
        tokens.
        """
        archive, rotations = self.archive, self.model.rotations
        search = ArchiveSearch(
            archive, archive.positions, query, self.recall, rotations, self.surprisal_of
        )
        return search.proposed() if index else search.all()

    def seconds(self, best: list[Positions], *, index: bool) -> Iterator[float]:
        """Search the archive for one query after another; yields the seconds of each, forever.

        `index` says whether the search uses the index. After each search, the positions of the
        tokens of highest score are appended to `best`.
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
    """Compare the time of a search in an archive with an index and without it.

    The archive has `rows` tokens. Yields one ratio for each retriever that can use an index: the
    time with the index, divided by the time without it. Raises UsageError if faiss is not
    installed, or the model is not `tiny`.
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
        f"search by {side.recall.retriever} with an index, against one without",
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
    """The default recall settings, changed to use an index and the retriever `name`."""
    recall = build_cache_settings(changed(Profile(), "bench", recall=name)).recall
    assert recall is not None
    return replace(recall, n=_FOUND, index="on")


TOKENS, SINKS = 512, 4
"""Number of tokens in each conversation, and number of its first tokens that are not archived."""

_BATCH = 16
_MIX = Mix(
    tell=0.14, ask=0.13, repeat=0.02, game=0.02, story=0.12, quiz=0.5, untold=0.05, long_list=0.3
)

Surprisal = NDArray[np.float64]


def archived(model: LoadedModel, count: int, seed: int = 0) -> tuple[Archive, Surprisal]:
    """Make an archive of `count` tokens of generated dialogue, which the model reads.

    Returns the archive, and the surprisals [count] of its tokens in nats.
    """
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
    """Yield `count` queries for searches, from the user turns of conversations not in the archive.

    The model reads each conversation up to its last user turn with a reply. The query has the keys,
    the values and the query vectors of this turn.
    """
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
    """The first TOKENS ids of a generated conversation that has at least so many."""
    ids: list[int] = []
    while len(ids) < TOKENS:
        ids = renderer.render(dialogue(rng, 30, _MIX)).ids
    return ids[:TOKENS]


def _last_question(renderer: Renderer, ids: list[int]) -> tuple[int, int]:
    """Find the last user turn that has a reply; returns the indices of two tokens in `ids`.

    The first index is that of the turn's first token, the second that of the reply's first token.
    """
    end = max(at for at, one in enumerate(ids) if one == renderer.roles["assistant"])
    return max(at for at in range(end) if ids[at] == renderer.roles["user"]), end


@torch.inference_mode()
def _read(
    model: LoadedModel, ids: Tensor, start: int
) -> Iterator[tuple[Rows, NDArray[np.float32]]]:
    """Read the ids of B conversations [B, TOKENS] in one forward pass; yield the rows of each.

    For each conversation, yields the keys and values, and the surprisals in nats, of all tokens but
    the first SINKS ones. These tokens get successive stream positions, from `start` on.
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
