"""What follows the model where the user has set nothing: sampling, the budget, recall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

from chatting import tiny
from command import run
from sirchat.chat.model_defaults import FALLBACK_SAMPLING, sampling_in_words, with_model_defaults
from sirchat.config.profile import Profile
from sirchat.config.profile_files import Layer, merge_layers
from sirchat.models.model import LoadedModel


def profile(**values: object) -> Profile:
    """A profile in which these settings are set, and no others."""
    return merge_layers([Layer(values, str)])


@pytest.fixture
def model() -> LoadedModel:
    """The bundled model under another name, with a context of 8,192."""
    return replace(tiny(), name="./my-model", context_length=8192)


def says(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    monkeypatch.setattr(model.module, "generation_config", GenerationConfig(**values))


def drawing(profile: Profile) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(profile, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(Profile(), name)}


def test_sampling_follows_the_models_files(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    }
    says(model, monkeypatch, do_sample=True, **own)
    assert drawing(with_model_defaults(profile(), model)) == own
    says(model, monkeypatch, do_sample=True, **{**own, "top_k": 0})
    del own["top_k"]
    assert drawing(with_model_defaults(profile(), model)) == own


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"do_sample": False, "temperature": 0.7},
        *({"do_sample": True, "temperature": given} for given in (-3.0, "0.7", [0.7])),
        {"do_sample": True, "temperature": 0.6, "top_p": 7.0},
        {"do_sample": True, "temperature": 0.6, "top_k": 20.0},
    ],
)
def test_without_sound_settings_in_the_files_sampling_is_sound(
    said: dict[str, Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerationConfig()
    for name, value in said.items():
        setattr(config, name, value)
    monkeypatch.setattr(model.module, "generation_config", config)
    assert drawing(with_model_defaults(profile(), model)) == FALLBACK_SAMPLING


def test_a_tiny_temperature_in_the_files_is_the_likeliest_token(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(model, monkeypatch, do_sample=True, temperature=1e-6, top_k=1)
    assert drawing(with_model_defaults(profile(), model)) == {"top_k": 1}


@pytest.mark.parametrize("set_by_user", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_one_sampling_setting_of_the_user_replaces_all_of_the_model(
    set_by_user: dict[str, Any], model: LoadedModel
) -> None:
    changed = with_model_defaults(profile(**set_by_user), model)
    assert drawing(changed) == drawing(profile(**set_by_user))


def test_each_sampling_value_says_whether_the_models_files_set_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = sampling_in_words(with_model_defaults(profile(), model))
    assert (words["temperature"], words["top_k"]) == ("0.2 (default)", "none (default)")
    says(model, monkeypatch, do_sample=True, temperature=0.7, top_k=20)
    words = sampling_in_words(with_model_defaults(profile(), model))
    assert (words["temperature"], words["top_k"]) == ("0.7 (model)", "20 (model)")
    assert words["top_p"].endswith(" (default)")
    own = merge_layers([Layer({"top_p": 0.5}, lambda key: f"--{key}")])
    words = sampling_in_words(with_model_defaults(own, model))
    assert (words["temperature"], words["top_p"]) == ("0.0 (default)", "0.5 (flag)")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "meaning"),
        ({"policy": "entropy", "budget": 256}, "meaning"),
        ({"recall": "off"}, "off"),
        ({"recall": "words"}, "words"),
        ({"policy": "full"}, "off"),
        ({"policy": "anchor"}, "off"),
        ({"archive": "off"}, "off"),
        ({"recall_query": "recent"}, "off"),
    ],
)
def test_a_real_model_recalls_unless_other_settings_leave_nothing_to_recall(
    settings: dict[str, Any], expected: str, model: LoadedModel
) -> None:
    assert with_model_defaults(profile(**settings), model).recall == expected


def test_the_bundled_model_keeps_the_built_in_settings() -> None:
    assert with_model_defaults(profile(), tiny()) == Profile()


@pytest.mark.parametrize(
    ("context", "budget"),
    [(512, 512), (2_048, 1_024), (4_096, 2_048), (8_192, 4_096), (131_072, 4_096)],
)
def test_the_budget_is_half_of_the_context(context: int, budget: int, model: LoadedModel) -> None:
    model = replace(model, context_length=context)
    assert with_model_defaults(profile(), model).budget == budget
    assert with_model_defaults(profile(budget=300), model).budget == 300


def test_a_chat_says_which_settings_it_took() -> None:
    """The bundled model by its folder is any model."""
    from sirchat.paths import tiny_model_dir

    done = run("--json", "--model", str(tiny_model_dir()))
    assert f'"temperature": {FALLBACK_SAMPLING["temperature"]}' in done.stdout.splitlines()[0]
    assert '"temperature": 0.0' in run("--json").stdout.splitlines()[0]
