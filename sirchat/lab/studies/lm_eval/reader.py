"""Reads contexts under one setting, each in a new engine, and scores or generates continuations.

A context is read as one user round, so that its end is protected like a question in a chat; or in
rounds of a fixed size, so that decay takes effect. Scoring a continuation evicts nothing. This
module knows ids, never text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.records import ContinuationScore, GeneratedToken, TurnRef
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.lab.studies.reading import open_engine, read_ids
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel


@dataclass(frozen=True)
class TextReader:
    """A model under a setting.

    Attributes:
        model, setting: the model and the profile.
        piece: number of tokens in a round; None reads a context as one round.
    """

    model: LoadedModel
    setting: Profile
    piece: int | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens that fit under a policy that evicts nothing; None under any other one."""
        return None if policy_class(self.setting.policy).bounded else self.model.context_length

    def read(self, ids: Sequence[int], reply: int = 0) -> Engine:
        """An engine that has read ids [n], n > 0; the last round has room for `reply` more ids.

        Raises ContextFullError when they do not fit under a policy that evicts nothing.
        """
        engine = open_engine(self.model, self.setting)
        size = self.piece or len(ids)
        for number, start in enumerate(range(0, len(ids), size), 1):
            if number > 1:
                engine.close_round()
            to_come = reply if start + size >= len(ids) else 0
            read_ids(engine, ids[start : start + size], number, to_come)
        return engine

    def score_continuation(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[ContinuationScore]:
        """The score of each continuation (not empty) after a context, which is read once."""
        engine = self.read(context)
        return [engine.reader.score_continuations([ids])[0] for ids in continuations]

    def log_probability(self, context: Sequence[int], ids: Sequence[int]) -> float:
        """The log-probability, in nats, of ids [n], n > 0, read after a context."""
        engine = self.read([*context, *ids[:-1]])
        surprisals = engine.ledger.column("surprisal")[len(context) : engine.ledger.seen]
        (last,) = engine.reader.score_continuations([ids[-1:]])[0].log_probabilities
        return last - float(surprisals.sum(dtype=np.float64))

    def reply(self, context: Sequence[int], longest: int) -> Iterator[int]:
        """Greedy ids after a context, one by one, up to a stop id or `longest` ids."""
        number = 1 + (len(context) - 1) // (self.piece or len(context))
        for record in self.read(context, longest).generate(
            Sampler(Sampling()),
            TurnRef(number, number),
            stop_ids=self._stop_ids,
            max_new_tokens=longest,
        ):
            if isinstance(record, GeneratedToken):
                yield record.id

    @property
    def _stop_ids(self) -> frozenset[int]:
        declared = getattr(self.model.module.generation_config, "eos_token_id", None)
        ids = [*(declared if isinstance(declared, list) else [declared])]
        ids.append(self.model.tokenizer.eos_token_id)
        return frozenset(one for one in ids if one is not None)
