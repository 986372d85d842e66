"""A large archive like that of a long chat, and queries to it, for measuring searches.

The conversations are generated ones, as the bundled model was trained on. They are read in batches
by plain forward passes, each from position 0, and all of their rows but the sinks are archived. So
keys, values and surprisals are real, and no chat has to run. The queries are user turns of other
conversations, read after the turns before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.training.rows import Renderer
from sirchat.memory.archive import Archive
from sirchat.memory.recall import Query
from sirchat.memory.segments import Rows
from sirchat.models.attention_hook import QueryRecorder
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import surprisal

TOKENS, SINKS = 512, 4
"""Tokens of each conversation, and how many of its first rows are not archived."""

_BATCH = 16
_MIX = Mix(
    tell=0.14, ask=0.13, repeat=0.02, game=0.02, story=0.12, quiz=0.5, untold=0.05, long_list=0.3
)

Surprisal = NDArray[np.float64]


def archived(model: LoadedModel, count: int, seed: int = 0) -> tuple[Archive, Surprisal]:
    """An archive of `count` rows of generated conversations; their surprisals [count] in nats."""
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
    """Index of the first id of the last user turn that has a reply, and of that reply."""
    end = max(at for at, one in enumerate(ids) if one == renderer.roles["assistant"])
    return max(at for at in range(end) if ids[at] == renderer.roles["user"]), end


@torch.inference_mode()
def _read(
    model: LoadedModel, ids: Tensor, start: int
) -> Iterator[tuple[Rows, NDArray[np.float32]]]:
    """Read conversations [B, TOKENS]; the rows of each and their surprisals, in nats.

    The rows are numbered from stream position `start` on.
    """
    cache = DynamicCache(config=model.module.config)
    logits = model.module(input_ids=ids, past_key_values=cache).logits  # [B, TOKENS, V]
    written_at = np.arange(SINKS, TOKENS)
    for number, one in enumerate(ids):
        scores = surprisal(logits[number, SINKS - 1 : -1], one[SINKS:])
        pairs = [(layer.keys[number], layer.values[number]) for layer in cache.layers]
        tensors = [tensor[:, SINKS:] for pair in pairs for tensor in pair]
        yield Rows(start + np.arange(len(scores)), written_at, tensors), scores.cpu().numpy()
        start += len(scores)
