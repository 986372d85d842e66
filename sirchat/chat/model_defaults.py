"""Defaults that depend on the model, for sampling, budget and recall. The user's settings win."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sirchat.config.profile import MIN_TEMPERATURE, Profile
from sirchat.config.values import format_setting
from sirchat.memory.policies import policy_class
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.paths import BUNDLED

if TYPE_CHECKING:  # the prompt appears before torch is loaded
    from sirchat.models.model import LoadedModel

# If the user sets any of these, those in the model's files are ignored.
SAMPLING_PARAMETERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "repetition_window",
)

# For a model whose files say nothing of sampling: likely tokens, with little repetition.
FALLBACK_SAMPLING: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}

MAX_DEFAULT_BUDGET = 4096  # tokens


def with_model_defaults(profile: Profile, model: LoadedModel) -> Profile:
    """The profile, in which settings that the user did not set have this model's defaults.

    A bundled model keeps the built-in defaults. Any other has `default_budget`, recall if it can
    work, and sampling from its files or else `FALLBACK_SAMPLING`.
    """
    if model.name in BUNDLED:
        return profile
    values: dict[str, Any] = {"budget": default_budget(profile, model.name, model.context_length)}
    if "recall" not in profile.model_fields_set and _can_recall(profile):
        values["recall"] = BEST_RETRIEVER
    sampling = dict[str, Any]()
    if profile.model_fields_set.isdisjoint(SAMPLING_PARAMETERS):
        sampling = _sampling_in_files(model)
        values |= sampling or FALLBACK_SAMPLING
    return profile.model_copy(update=values).with_origins(dict.fromkeys(sampling, "model"))


def sampling_in_words(profile: Profile) -> dict[str, str]:
    """The value and source of each sampling setting by name, such as `0.7 (model)`."""
    return {
        name: f"{format_setting(getattr(profile, name))} ({profile.origin(name)})"
        for name in SAMPLING_PARAMETERS
    }


def budget_follows_model(profile: Profile, name: str) -> bool:
    """Whether the budget depends on the model: it is not bundled, and the user set no budget."""
    return name not in BUNDLED and "budget" not in profile.model_fields_set


def default_budget(profile: Profile, name: str, context_length: int) -> int:
    """The budget, in tokens: what the user set, or half of the context, at most 4,096.

    A default is not below the built-in budget, or the whole context if that is shorter.
    """
    if not budget_follows_model(profile, name):
        return profile.budget
    least = min(profile.budget, context_length)
    return max(least, min(MAX_DEFAULT_BUDGET, context_length // 2))


def affordable_rows(profile: Profile, name: str, context_length: int) -> int:
    """Most tokens that the cache of a chat with the model `name` can hold."""
    if profile.policy == "full":
        return context_length
    return min(default_budget(profile, name, context_length), context_length)


def _can_recall(profile: Profile) -> bool:
    """Whether tokens are evicted and archived, and passages are searched for new turns."""
    evicts_words = policy_class(profile.policy).bounded and profile.policy != "anchor"
    return evicts_words and profile.recall_query == "turn" and profile.archive != "off"


def _sampling_in_files(model: LoadedModel) -> dict[str, Any]:
    """The sampling settings in the model's generation config, if it samples and all are allowed."""
    config = getattr(model.module, "generation_config", None)
    given = {} if config is None else config.to_diff_dict()
    if not given.get("do_sample"):
        return {}
    values = {name: given[name] for name in SAMPLING_PARAMETERS if given.get(name) is not None}
    if values.get("top_k") in (0, -1):  # off
        del values["top_k"]
    temperature = values.get("temperature")
    if isinstance(temperature, float) and 0 < temperature < MIN_TEMPERATURE:
        values["temperature"] = 0.0  # as some write "the likeliest"
    try:
        Profile.model_validate(values, strict=True)
    except ValueError:
        return {}
    return {"temperature": 1.0, **values}
