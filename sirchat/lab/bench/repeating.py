"""A reply that repeats a text word for word, with prompt lookup against without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

from torch import Tensor

from sirchat.engine.engine import Engine
from sirchat.engine.records import TurnRef
from sirchat.engine.sampling import PromptLookup, Sampler, Sampling
from sirchat.lab.bench.ratio import BenchOptions, some_ids, timed
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel

_TURN = TurnRef(turn=0, round=0)


def repeated_blocks(
    model: LoadedModel, options: BenchOptions, engine: Engine, *, lookup: bool
) -> Iterator[float]:
    """Seconds per token of blocks of a reply that says again what has just been read.

    `engine` has read nothing yet. The text fills a quarter of the cache.
    """
    text = some_ids(model, options.cache // 4)
    for _ in engine.feed(text, [Role.USER] * len(text), _TURN):
        pass
    sampler = _Reciting(text)

    def block() -> None:
        guesses = PromptLookup() if lookup else None
        for _ in engine.generate(
            sampler, _TURN, stop_ids=frozenset(), max_new_tokens=len(text), lookup=guesses
        ):
            pass

    while True:
        yield timed(block, model) / len(text)


class _Reciting(Sampler):
    """Draws the ids of a text over and over, whatever the logits."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(Sampling())
        self._ids = cycle(ids)

    def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
        super().pick(logits, said_ids, position)  # takes its time
        return next(self._ids)
