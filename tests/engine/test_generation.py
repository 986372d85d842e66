"""Generation: where a reply ends, and that a seed fixes every draw."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine_steps import generate, prefill
from families import BigramModel
from sirchat.engine.engine import Engine
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, GeneratedToken, Stopped, TurnRef
from sirchat.memory.ledger import Role
from sirchat.memory.policies.entropy import Entropy


def test_generation_ends_at_a_stop_id_which_is_not_read() -> None:
    probe = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    prefill(probe, [5])
    drawn = [record.id for record in generate(probe, 10) if isinstance(record, GeneratedToken)]
    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    prefill(engine, [5])
    records = generate(engine, 10, stop_ids=frozenset([drawn[4]]))
    until = drawn.index(drawn[4])
    assert [r.id for r in records if isinstance(r, GeneratedToken)] == drawn[:until]
    assert records[-1] == Stopped("stop", drawn[4])
    assert engine.ledger.column("token_id").tolist() == [5, *drawn[:until]]


def test_generation_ends_at_its_length() -> None:
    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    prefill(engine, [5])
    assert generate(engine, 3)[-1] == Stopped("length")
    assert generate(engine, 0) == [Stopped("length")]
    assert [type(record) for record in generate(engine, 2)] == [*[GeneratedToken] * 2, Stopped]


def test_only_recent_words_count_as_said_before_and_never_the_templates() -> None:
    asked: list[list[int]] = []

    class Asking(Sampler):
        is_plain = False

        def pick(self, logits: Tensor, said_ids: Callable[[int], list[int]], position: int) -> int:
            asked.extend(said_ids(count) for count in (0, 2, 64))
            return 0

    engine = Engine(BigramModel(), CacheSettings(Entropy(), budget=64))
    roles = [Role.TEMPLATE, Role.USER, Role.USER, Role.TEMPLATE, Role.ASSISTANT, Role.TEMPLATE]
    list(engine.prefill([5, 6, 7, 8, 9, 10], roles, TurnRef(0, 0)))
    generate(engine, 1, sampler=Asking(Sampling()), stop_ids=frozenset([0]))
    assert asked == [[6, 7, 9], [7, 9], [6, 7, 9]]
