"""Automatic decay: what was said before fades where the topic changes, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatting import session
from sirchat.config.profile import Profile
from sirchat.config.values import choices
from sirchat.memory.attention import PassAttention
from sirchat.memory.ledger import Ledger
from sirchat.memory.policies.scores import automatic_decay

nats = st.floats(0, 12, width=16)
rounds_of_nats = st.lists(st.lists(nats, min_size=1, max_size=12), max_size=20)


@given(rounds_of_nats)
def test_what_was_before_fades_as_a_round_tells_more_than_usual(talk: list[list[float]]) -> None:
    told = [sum(sorted(one)[-8:]) for one in talk]
    wanted = 1.0
    if len(told) > 4 and told[-1]:
        before = told[-17:-1]
        wanted = min(1, max(0.1, 1.5 * sum(before) / len(before) / told[-1]))
    assert automatic_decay(*columns(talk)) == pytest.approx(wanted)


def test_a_system_prompt_is_no_round_and_the_first_token_tells_nothing() -> None:
    surprisal, rounds = columns([[99.0], *[[1.0]] * 4, [3.0]])
    assert automatic_decay(surprisal, rounds - 1) == pytest.approx(0.5)
    assert automatic_decay(surprisal[:-1], rounds[:-1] - 1) == 1
    surprisal[1] = np.nan
    assert automatic_decay(surprisal, rounds - 1) == pytest.approx(1.5 * 0.75 / 3)


def test_few_of_many_tokens_are_looked_at() -> None:
    looked: list[int] = []

    class Rounds(Sequence[int]):
        """The rounds of a thousand million tokens, eight a round."""

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, at: Any) -> Any:
            looked.append(at)
            return range(len(self))[at] // 8

    class Surprisal:
        """Nothing new in any round."""

        def __getitem__(self, at: slice) -> np.ndarray[Any, Any]:
            return np.ones(at.stop - at.start, np.float32)

    assert automatic_decay(Surprisal(), Rounds()) == 1  # type: ignore[arg-type]
    assert len(looked) < 1000


def test_what_a_new_topic_tells_does_not_fade_with_what_was_before() -> None:
    ledger = Ledger()
    for number, score in ((1, 3.0), (2, 8.0)):
        ledger.append([5], [score], turn=0, round=number, roles=[1], flags=[0])
        looks = np.ones((1, number), np.float32)
        ledger.attention.add(
            np.arange(number), [PassAttention.from_weights(looks)], ledger.log_decay
        )
    ledger.close_round(0.25, spared=2)
    at = np.arange(2)
    assert np.exp(ledger.log_decayed_surprisal_of(at)) == pytest.approx([0.75, 8.0])
    assert ledger.attention.totals(at, ledger.log_decay) == pytest.approx([0.5, 1.0])


def test_a_chat_fades_when_something_new_is_told() -> None:
    chat = session(policy="entropy", decay="auto")
    for _ in range(6):
        list(chat.ask("Tell me a joke."))
    before = chat.ledger.log_decay
    list(chat.ask("My name is Zebulon and my locker code is 8231, remember both."))
    assert chat.ledger.log_decay < before - 0.3
    list(chat.undo())
    assert chat.ledger.log_decay == before


def test_the_setting_takes_a_number_or_the_word() -> None:
    assert Profile(decay="auto").decay == "auto"
    assert choices("decay") == ["auto"]


def columns(talk: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Surprisal and round of each token; rounds are numbered from 1."""
    rounds = [number for number, one in enumerate(talk, 1) for _ in one]
    surprisal = [score for one in talk for score in one]
    return np.array(surprisal, np.float32), np.array(rounds, np.int32)
