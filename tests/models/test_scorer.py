"""Scorers: what they predict in every kind of forward pass, and the file that each is kept in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from chatting import tiny
from families import HELD, loaded
from scorers import predicted, random_scorer
from sirchat.errors import ModelError
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.readout import Readings
from sirchat.models.scorer import Scorer
from sirchat.paths import state_map_files

IDS = [1, *range(20, 50)]


@cache
def scored(family: str) -> LoadedModel:
    model = loaded(family)
    return replace(model, scorer=random_scorer(model, (1, 3)))


def read(model: LoadedModel, sizes: list[int]) -> list[float]:
    """The scores of `IDS`, read in pieces of these sizes."""
    cache, scores, start = model.new_cache(len(IDS)), list[float](), 0
    for size in sizes:
        readings = Readings()
        model.read(IDS[start : start + size], cache, readings=readings)
        scores += readings.scores
        cache.commit(size)
        start += size
    return scores


@pytest.mark.parametrize("family", HELD)
def test_scores_are_the_same_from_whole_pieces_and_single_tokens(family: str) -> None:
    model, readings = scored(family), Readings()
    wanted = predicted(model, IDS)
    model.forward(IDS, model.new_cache(len(IDS)), readings=readings)  # all logits
    assert readings.scores == pytest.approx(wanted, abs=1e-4)
    for sizes in ([31], [20, 11], [1] * 31):
        assert read(model, sizes) == pytest.approx(wanted, abs=1e-4)


def test_without_a_scorer_every_score_is_unknown() -> None:
    for sizes in ([31], [30, 1]):
        scores = read(loaded("llama"), sizes)
        assert len(scores) == len(IDS)
        assert all(map(math.isnan, scores))


def test_no_hook_stays_behind() -> None:
    model = scored("gemma2")
    layers = model.module.model.layers
    before = [len(layer._forward_hooks) for layer in layers]
    read(model, [31])
    assert [len(layer._forward_hooks) for layer in layers] == before


def test_a_saved_scorer_is_found_by_the_models_name(own_home: Path) -> None:
    model = loaded("llama")
    made = replace(random_scorer(model, (2, 4)), about={"r2": "0.8"})
    made.save(state_map_files("scorer", "some/model")[0])
    found = wrap_model("some/model", model.module, None).scorer
    assert found.layers == made.layers
    assert found.bias == pytest.approx(made.bias)
    assert torch.equal(found.weight, made.weight)
    assert found.about == {"r2": "0.8"}
    assert wrap_model("other/model", model.module, None).scorer.layers == ()


def test_the_users_own_scorer_comes_before_the_bundled_one(own_home: Path) -> None:
    assert state_map_files("scorer", "tiny")[1].is_file()
    own = random_scorer(tiny(), (2,))
    own.save(state_map_files("scorer", "tiny")[0])
    assert wrap_model("tiny", tiny().module, None).scorer.layers == (2,)


def test_two_folders_of_the_same_name_have_scorers_of_their_own(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for name in ("one", "two"):
        (own_home / name / "model").mkdir(parents=True)
        monkeypatch.chdir(own_home / name)
        found.add(state_map_files("scorer", "./model")[0])
        folder = str(own_home / name / "model")
        assert state_map_files("scorer", "./model") == state_map_files("scorer", folder)
    assert len(found) == 2


def test_a_scorer_of_another_model_is_refused_by_its_path(own_home: Path) -> None:
    path, model = state_map_files("scorer", "model")[0], loaded("llama")
    right = random_scorer(model, (1, 2))
    wrong = [
        replace(right, weight=right.weight[1:]),
        replace(right, layers=(2, 1)),
        replace(right, layers=(1, 9)),
        Scorer((), torch.zeros(0), torch.zeros(())),
    ]
    for scorer in wrong:
        scorer.save(path)
        with pytest.raises(ModelError, match="was trained for another model") as error:
            wrap_model("model", model.module, None)
        assert str(path) in str(error.value)


def test_a_damaged_scorer_is_refused_by_its_path(own_home: Path) -> None:
    path, weight = state_map_files("scorer", "model")[0], torch.ones(64)
    path.parent.mkdir(parents=True)
    about = {"layers": "[1]"}
    tensors = {"weight": weight, "bias": torch.ones(1)}

    def save(tensors: dict[str, Tensor], about: dict[str, str]) -> None:
        save_file(tensors, path, about)

    damages: list[Callable[[], object]] = [
        lambda: path.write_bytes(b"no tensors"),
        lambda: save(tensors, {}),
        lambda: save(tensors, {"layers": "x"}),
        lambda: save({"weight": weight}, about),
        lambda: save({**tensors, "weight": weight * math.nan}, about),
        lambda: save({**tensors, "bias": torch.ones(2)}, about),
    ]
    for damage in damages:
        damage()
        with pytest.raises(ModelError, match="is damaged") as error:
            wrap_model("model", loaded("llama").module, None)
        assert str(path) in str(error.value)


def test_a_scorer_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't be written"):
        random_scorer(loaded("llama"), (1,)).save(tmp_path / "file" / "scorer.safetensors")
