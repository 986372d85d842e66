"""An archive as a long chat leaves it, and questions to it; made fast, for measuring searches.

Conversations of the bundled model's world are read side by side in plain forward passes, each by
itself from position 0, and all of their rows but the sinks are archived: real keys, values and
surprisals, without the evictions of a chat. The questions are user turns of other conversations,
read behind what came before them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from sirchat.engine.scoring import surprisal
from sirchat.memory.archive import Archive
from sirchat.memory.recall import Query
from sirchat.memory.segments import Rows
from sirchat.models.attention_hook import QueryRecorder
from sirchat.models.model import LoadedModel
from sirchat.training.rows import Renderer
from sirchat.world.dialogue import Mix, dialogue

TOKENS, SINKS = 512, 4
"""Length of each conversation, and how many of its first rows are left out."""

_SIDE_BY_SIDE = 16
_MIX = Mix(0.14, 0.13, 0.02, game=0.02, story=0.12, quiz=0.5, untold=0.05, long_list=0.3)

Surprisal = NDArray[np.float64]


def archived(model: LoadedModel, count: int, seed: int = 0) -> tuple[Archive, Surprisal]:
    """An archive of `count` rows of generated conversations, and their surprisals [count]."""
    archive, scores = Archive(), np.zeros(count)
    done, renderer, rng = 0, Renderer(model.tokenizer), Random(f"archived/{seed}")
    while done < count:
        ids = torch.tensor([_ids(renderer, rng) for _ in range(_SIDE_BY_SIDE)])
        for rows, told in _read(model, ids.to(model.device), done):
            rows = rows.between(0, count - done)
            archive.add(rows)
            scores[done : done + len(rows)] = told[: len(rows)]
            done += len(rows)
            if done == count:
                break
    return archive, scores


def questions(model: LoadedModel, count: int, seed: int = 0) -> Iterator[Query]:
    """`count` user turns of conversations that are not in the archive, as a search reads them."""
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
    """One conversation, cut at TOKENS."""
    ids: list[int] = []
    while len(ids) < TOKENS:
        ids = renderer.render(dialogue(rng, 30, _MIX)).ids
    return ids[:TOKENS]


def _last_question(renderer: Renderer, ids: list[int]) -> tuple[int, int]:
    """Where the last whole user turn begins, and where the reply to it does."""
    end = max(at for at, one in enumerate(ids) if one == renderer.roles["assistant"])
    return max(at for at in range(end) if ids[at] == renderer.roles["user"]), end


@torch.inference_mode()
def _read(
    model: LoadedModel, ids: Tensor, start: int
) -> Iterator[tuple[Rows, NDArray[np.float32]]]:
    """Read conversations [B, TOKENS]; each one's rows, from position `start`, and surprisals."""
    cache = DynamicCache(config=model.module.config)
    logits = model.module(input_ids=ids, past_key_values=cache).logits  # [B, TOKENS, V]
    written_at = np.arange(SINKS, TOKENS)
    for number, one in enumerate(ids):
        told = surprisal(logits[number, SINKS - 1 : -1], one[SINKS:])
        pairs = [(layer.keys[number], layer.values[number]) for layer in cache.layers]
        tensors = [tensor[:, SINKS:] for pair in pairs for tensor in pair]
        yield Rows(start + np.arange(len(told)), written_at, tensors), told.cpu().numpy()
        start += len(told)
