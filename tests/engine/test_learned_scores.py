"""The ledger's learned scores: recorded whatever policy is active, in every way to read a token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from chatting import tiny
from engine_steps import generate, prefill, some_ids
from families import loaded
from scorers import predicted, random_scorer
from sirchat.chat.settings import check_policy, updated_profile
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings
from sirchat.errors import SettingError
from sirchat.memory.policies.learned import Learned
from sirchat.memory.policies.sink import Sink
from sirchat.models.model import LoadedModel
from sirchat.models.scorer import Scorer


@cache
def scored() -> LoadedModel:
    model = loaded("llama")
    return replace(model, scorer=random_scorer(model, (1, 2, 3)))


def scores(engine: Engine) -> Any:
    return engine.ledger.column("learned_score")


def ids_read(engine: Engine) -> list[int]:
    found: list[int] = engine.ledger.column("token_id").tolist()
    return found


@pytest.mark.parametrize("policy", [Sink(), Learned()])
def test_they_are_recorded_while_text_is_read_in_pieces_and_generated(policy: Any) -> None:
    engine = Engine(scored(), CacheSettings(policy=policy, budget=200))
    prefill(engine, some_ids(90))
    engine.decay_at_round_end()
    generate(engine, 12)
    assert len(scores(engine)) == 102
    assert scores(engine) == pytest.approx(predicted(scored(), ids_read(engine)), abs=1e-4)


def test_tokens_that_were_guessed_ahead_have_the_same_scores() -> None:
    engine = Engine(scored(), CacheSettings(policy=Sink(), budget=100))
    ids = some_ids(30)
    prefill(engine, ids[:25])
    engine.reader.look_ahead(ids[25:28])
    for token_id in ids[25:]:
        prefill(engine, [token_id])
    assert engine.reader.drop_ahead() is None  # the last two were not guessed
    assert scores(engine) == pytest.approx(predicted(scored(), ids), abs=1e-4)


def test_undo_and_erasing_change_no_other_score() -> None:
    engine = Engine(scored(), CacheSettings(policy=Learned(recent=0), budget=40, archive=2**20))
    prefill(engine, some_ids(30))
    before, point = scores(engine).copy(), engine.checkpoint()
    prefill(engine, some_ids(60), 2)
    assert np.array_equal(scores(engine)[:30], before)
    engine.undo(point)
    assert np.array_equal(scores(engine), before)
    engine.evictor.erase(np.arange(5, 8))
    assert np.isnan(scores(engine)[5:8]).all()
    assert np.array_equal(scores(engine)[8:], before[8:])


def test_a_loaded_state_keeps_them_even_if_the_model_has_no_scorer_now() -> None:
    settings = CacheSettings(policy=Sink(), budget=100)
    engine = Engine(scored(), settings)
    prefill(engine, some_ids(50))
    other = Engine(loaded("llama"), settings)
    other.load(engine.save(), None)
    assert np.array_equal(scores(other), scores(engine))
    prefill(other, some_ids(10), 2)
    assert np.isnan(scores(other)[50:]).all()


def test_the_rows_of_highest_predicted_score_stay() -> None:
    engine = Engine(scored(), CacheSettings(policy=Learned(recent=0), budget=40, protect=False))
    prefill(engine, some_ids(40))
    prefill(engine, some_ids(8), 2)
    best = np.argsort(scores(engine)[4:40])[::-1][:28] + 4  # beside 4 sinks and 8 new tokens
    assert engine.ledger.held_positions[:32].tolist() == [0, 1, 2, 3, *sorted(best.tolist())]


def test_the_policy_is_refused_in_one_line_with_the_command_that_trains_a_scorer() -> None:
    model = replace(tiny(), scorer=Scorer())
    wanted = changed_profile(Profile(), "flag", policy="learned")
    with pytest.raises(SettingError) as error:
        check_policy(wanted, model, "--policy")
    text = (
        "--policy: policy can't be 'learned': there is no scorer for tiny "
        "(train a scorer: sirchat train scorer --model tiny)"
    )
    assert str(error.value) == text
    with pytest.raises(SettingError, match="there is no scorer"):
        updated_profile(Profile(), model, "/policy", {"policy": "learned"})
    check_policy(Profile(), model, "--policy")
    check_policy(wanted, scored(), "--policy")
