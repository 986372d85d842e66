"""Defaults that depend on the model, for sampling, budget and recall; what the user sets wins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sirchat.config.profile import Profile
from sirchat.memory.policies import policy_class
from sirchat.memory.registry import BEST_RETRIEVER
from sirchat.models.names import BUNDLED

if TYPE_CHECKING:  # the prompt appears before torch is loaded
    from sirchat.models.model import LoadedModel

SAMPLING_PARAMETERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "repetition_window",
)
"""The sampling settings. If the user sets any of them, those in the model's files are ignored."""


SOUND: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
"""Sampling settings for a model whose files have none: likely tokens, with little repetition."""


MOST_BUDGET = 4096


def with_model_defaults(profile: Profile, model: LoadedModel) -> Profile:
    """This profile, in which settings that the user did not set have this model's defaults.

    A bundled model keeps the built-in defaults. For any other model, the following settings change,
    unless the user set them:

    - The budget becomes half of the model's context, but at most 4,096 tokens. It is at least the
      built-in budget, or the whole context if the context is shorter.
    - Recall is switched on, if it can work with the policy, the archive and its other settings.
    - Sampling uses the settings in the model's files, or `SOUND` if the files have none.
    """
    if model.name in BUNDLED:
        return profile
    values: dict[str, Any] = {"budget": budget_for(profile, model.name, model.context_length)}
    if "recall" not in profile.model_fields_set and _can_recall(profile):
        values["recall"] = BEST_RETRIEVER
    if profile.model_fields_set.isdisjoint(SAMPLING_PARAMETERS):
        values |= _own_drawing(model) or SOUND
    return profile.model_copy(update=values)


def _can_recall(profile: Profile) -> bool:
    """Whether recall can be switched on with these settings.

    The policy must evict whole words, not only compress them into anchors; evicted tokens must be
    archived; and recall must search for the text of the new turn in all layers at once.
    """
    searches_turns = profile.recall_scope == "token" and profile.recall_query == "turn"
    evicts_words = policy_class(profile.policy).bounded and profile.policy != "anchor"
    return evicts_words and searches_turns and profile.archive != "off"


def budget_for(profile: Profile, name: str, context_length: int) -> int:
    """The budget, in tokens, for the model `name`, whose context has `context_length` tokens.

    It is the budget that the user set. If the user set none, a bundled model has the built-in
    budget, and any other model has about half of its context (`with_model_defaults` gives the exact
    limits).
    """
    if not follows_model(profile, name):
        return profile.budget
    usual = min(profile.budget, context_length)
    return max(usual, min(MOST_BUDGET, context_length // 2))


def follows_model(profile: Profile, name: str) -> bool:
    """Whether the default budget follows from the length of the model's context.

    This is true if the user set no budget, and the model `name` is not bundled with sirchat.
    """
    return name not in BUNDLED and "budget" not in profile.model_fields_set


def most_rows(profile: Profile, name: str, context_length: int) -> int:
    """The largest number of tokens that the cache of a chat with the model `name` can hold."""
    if profile.policy == "full":
        return context_length
    return min(budget_for(profile, name, context_length), context_length)


def _own_drawing(model: LoadedModel) -> dict[str, Any]:
    """The sampling settings in the model's generation config, by name.

    Empty if the config has none, if it does not switch on sampling, or if a value is not allowed.
    """
    config = getattr(model.module, "generation_config", None)
    said = {} if config is None else config.to_diff_dict()
    if not said.get("do_sample"):
        return {}
    values = {name: said[name] for name in SAMPLING_PARAMETERS if said.get(name) is not None}
    values.setdefault("temperature", 1.0)
    if values.get("top_k") == 0:  # off, in transformers
        del values["top_k"]
    try:
        Profile.model_validate(values)
    except ValueError:
        return {}
    return values
