"""Settings that follow the model where the user has set none: how replies are drawn, the budget."""

from __future__ import annotations

from typing import Any

from sirchat.config.profile import Profile
from sirchat.models.model import LoadedModel
from sirchat.models.names import BUNDLED

DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")
"""Settings that say how the next token is drawn; they belong together."""

SOUND: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
"""For a model that says nothing itself: near the likeliest words, but not in circles."""

MOST_BUDGET = 4096


def with_model_defaults(profile: Profile, model: LoadedModel) -> Profile:
    """The profile with the model's own settings in the place of built-in defaults.

    The bundled models are made for the built-in ones. The budget is half of the model's context, at
    most 4,096 tokens and not less than the built-in one, if the context is that long.
    """
    if model.name in BUNDLED:
        return profile
    given, values = profile.model_fields_set, dict[str, Any]()
    if given.isdisjoint(DRAWING):
        values |= _own_drawing(model) or SOUND
    if "budget" not in given:
        usual = min(profile.budget, model.context_length)
        values["budget"] = max(usual, min(MOST_BUDGET, model.context_length // 2))
    return profile.model_copy(update=values)


def _own_drawing(model: LoadedModel) -> dict[str, Any]:
    """What the model's files say of drawing; empty if that is nothing, or makes no sense."""
    config = getattr(model.module, "generation_config", None)
    said = {} if config is None else config.to_diff_dict()
    if not said.get("do_sample"):
        return {}
    values = {name: said[name] for name in DRAWING if said.get(name) is not None}
    values.setdefault("temperature", 1.0)
    if values.get("top_k") == 0:  # off, in transformers
        del values["top_k"]
    try:
        Profile.model_validate(values)
    except ValueError:
        return {}
    return values
