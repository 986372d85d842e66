"""Checks whether settings suit a model, builds an engine with them, and changes them in a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from sirchat.chat.state import GeneratedReply
from sirchat.config.profile import FIXED_SETTINGS, Profile, parse_size
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import parse_value
from sirchat.engine.engine import Engine
from sirchat.engine.sampling import ForcedPrefixSampler, Sampler, Sampling, TokenFilter
from sirchat.engine.types import CacheSettings, RecallSettings
from sirchat.errors import SettingError, TranscriptError, did_you_mean
from sirchat.memory.policies import import_typed, policy_class, refuse_untrusted
from sirchat.memory.policies.base import Policy
from sirchat.models.model import LoadedModel, no_attention_reason
from sirchat.recall.retrievers import retriever
from sirchat.text.anchors import anchor_detector
from sirchat.text.detokenizer import word_continuation
from sirchat.text.json_schema import load_schema
from sirchat.text.transcript import SettingsSwitch, TranscriptItem

_FOCUS = {"auto": None, "off": 0}


def build_policy(profile: Profile) -> Policy:
    """Make the eviction policy that a profile names, with the options that the profile sets.

    Raises SettingError if the policy has no option of a given name, or can't have its value.
    """
    policy = policy_class(profile.policy)
    known = {field.name: field for field in fields(policy)}
    options: dict[str, Any] = dict(profile.policy_options)
    for name in options:
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise SettingError(
                f"policy {profile.policy} has no option {name!r}; it has: {allowed}",
                hint=did_you_mean(name, known),
            )
    if "recent" in options:
        raise SettingError("recent is a setting, not a policy option: use --recent or /recent")
    if "recent" in known:
        options["recent"] = profile.recent
    for name, value in options.items():
        default = known[name].default
        is_unset = default is None and value is None
        if not is_unset and not _fits(value, default):
            allowed = "true or false" if isinstance(default, bool) else "a whole number from 0"
            raise SettingError(
                f"option {name} of policy {profile.policy} can't be {value!r}; it must be {allowed}"
            )
    return policy(**options)


def options_of(policy: str) -> list[Field[Any]]:
    """The options of the policy named `policy`, without `recent`, which is a setting of its own."""
    return [field for field in fields(policy_class(policy)) if field.name != "recent"]


def has_effect(profile: Profile, setting: str) -> bool:
    """Whether the setting named `setting` has an effect under the profile's policy."""
    policy = policy_class(profile.policy)
    options = {field.name for field in fields(policy)}
    return setting not in ("budget", "sinks", "recent", "decay") or setting in {
        *options,
        *policy.uses,
    }


def build_cache_settings(profile: Profile, folder: Path | None = None) -> CacheSettings:
    """What of a profile the engine and its KV cache need; `folder` is for an archive on disk."""
    return CacheSettings(
        policy=build_policy(profile),
        budget=profile.budget,
        sinks=profile.sinks,
        decay=profile.decay,
        archive=(parse_size(profile.archive_limit) or 0) if profile.archive != "off" else 0,
        folder=folder if profile.archive == "disk" else None,
        protect=profile.protect,
        evict=profile.evict,
        absolute_positions=profile.positions == "stream",
        recall=_recall(profile),
        count_attention=profile.attention == "on",
    )


def build_engine(model: LoadedModel, settings: CacheSettings, seed: int = 0) -> Engine:
    """A new engine for this model, with an empty cache; `seed` is for its random numbers."""
    return Engine(
        model,
        settings,
        seed=seed,
        ends_sequence=anchor_detector(model.tokenizer, model.anchors),
        continues_word=word_continuation(model.tokenizer),
    )


def build_sampling(profile: Profile) -> Sampling:
    return Sampling(**{field.name: getattr(profile, field.name) for field in fields(Sampling)})


def build_sampler(
    profile: Profile, reply: GeneratedReply | None, attempt: int, allowed: TokenFilter | None
) -> tuple[Sampler, int]:
    """The sampler of a reply, and the most ids that it may choose.

    The ids of `reply`, if given, are chosen first; the reply goes on after them if it has no
    `finish`. Sampled ids are among those `allowed`.
    """
    sampling, most = build_sampling(profile), profile.max_new_tokens
    if reply is None:
        return Sampler(sampling, attempt, allowed), most
    more = most if reply.finish is None else 0
    return ForcedPrefixSampler(reply.ids, sampling, attempt, allowed), len(reply.ids) + more


def check_profile(profile: Profile, model: LoadedModel) -> None:
    """Raise SettingError if a setting of the profile does not work with this model."""
    check_budget(profile, model, "budget")
    check_policy(profile, model, "policy")


def updated_profile(
    before: Profile, model: LoadedModel, source: str, updates: dict[str, Any]
) -> Profile:
    """A copy of the settings `before`, with the new values `updates`.

    Raises SettingError if a value is not allowed, does not work with this model, or can't be set
    during a chat. The message begins with `source`, such as "/budget", as in all checks here.
    """
    after = changed_profile(before, source, **updates)
    _refuse_fixed(before, source, dict(after))
    check_budget(after, model, source)
    if any(
        getattr(after, name) != getattr(before, name)
        for name in ("policy", "policy_options", "attention")
    ):
        check_policy(after, model, source)
    return after


def checked_switches(
    items: Iterable[TranscriptItem], name: str, profile: Profile
) -> Iterator[TranscriptItem]:
    """Yield a transcript's items, with the values of its switches parsed as `/set` does.

    Values are checked as far as possible without a model. Raises TranscriptError with `name`, the
    line and the problem.
    """
    for item in items:
        if isinstance(item, SettingsSwitch):
            given, new = item.settings.items(), dict[str, Any]()
            try:
                new |= {k: parse_value(k, v) if isinstance(v, str) else v for k, v in given}
                # A budget that is not given may follow from the model: none is too small here.
                free = {} if "budget" in profile.model_fields_set else {"budget": 10**9}
                changed_profile(profile.model_copy(update=free), "switch", **new)
                _refuse_fixed(profile, "switch", new)
                policy = new.get("policy", profile.policy)
                refuse_untrusted(policy, "switch")
                import_typed(policy)
                build_policy(Profile(policy=policy, policy_options=new.get("policy_options", {})))
                load_schema(new.get("json_schema", "off"))
            except SettingError as error:
                problem = f"{name}, line {item.line}: {error.args[0]}"
                raise TranscriptError(problem, hint=error.hint) from None
            item, profile = replace(item, settings=new), profile.model_copy(update=new)
        yield item


def _refuse_fixed(before: Profile, source: str, new: Mapping[str, Any]) -> None:
    for name in FIXED_SETTINGS:
        if name in new and new[name] != getattr(before, name):
            hint = hint_for_fixed(name, new[name])
            raise SettingError(f"{source}: {name} can't change in a running chat", hint=hint)


def hint_for_fixed(name: str, value: object) -> str:
    """A hint how to get this value of a setting that can't change in a chat."""
    if name == "save":
        return "/save saves this chat from now on" if value else "start sirchat with --no-save"
    return f"start sirchat with --{name}"


def check_budget(profile: Profile, model: LoadedModel, source: str) -> None:
    """Raise SettingError if the budget exceeds the model's context length."""
    if policy_class(profile.policy).bounded and profile.budget > model.context_length:
        raise SettingError(
            f"{source}: budget {profile.budget} is above the context length of {model.name}; "
            f"allowed: {profile.sinks + 16} to {model.context_length}",
            hint=f"for example: {model.context_length}",
        )


def check_policy(profile: Profile, model: LoadedModel, source: str) -> None:
    """Raise SettingError if the policy, or `attention`, needs what this model does not have."""
    name = "attention" if profile.attention == "on" else "policy"
    cls, policy = policy_class(profile.policy), build_policy(profile)
    if (cls.needs_attention or name == "attention") and not model.exposes_attention():
        raise SettingError(
            f"{source}: {name} can't be {getattr(profile, name)!r}: {no_attention_reason(model)}",
            hint="set attention to 'auto': it is then counted only if the model exposes it"
            if name == "attention"
            else "choose policy entropy, which does not use attention",
        )
    if model.caches_latents and (policy.key_value_stats or policy.needs == "keys"):
        raise SettingError(
            f"{source}: policy {profile.policy} with these options doesn't work with "
            f"{model.name}, because this model caches compressed keys and values",
            hint="choose policy entropy, which does not use keys and values",
        )
    # An anchor attends only to its own sequence, and then stands for it; a recurrent layer's state
    # depends on all tokens.
    if model.has_state and policy.compacts_at_anchors:
        raise SettingError(
            f"{source}: policy can't be {profile.policy}: {model.name} has layers with a state, "
            "which read every token",
            hint="choose policy entropy, which works with any model",
        )


@contextmanager
def all_or_nothing(engine: Engine) -> Iterator[None]:
    """Context manager: restores the engine's pins and settings if its block fails."""
    settings, pinned = engine.settings, engine.ledger.pinned_positions
    try:
        yield
    except Exception:  # a policy of the user's own may raise anything
        engine.ledger.pin_only(pinned)
        engine.switcher.switch(settings)
        raise


def _fits(value: object, default: object) -> bool:
    """Whether an option may have this `value`: a bool if its `default` is one, or a number."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int) and value >= 0


def _recall(profile: Profile) -> RecallSettings | None:
    if profile.recall == "off":
        return None
    chosen = retriever(profile.recall)
    return RecallSettings(
        retriever=profile.recall,
        weight=profile.recall_weight if chosen.takes_weight else "none",
        n=None if profile.recall_n == "auto" else profile.recall_n,
        query=profile.recall_query,
        focus=profile.focus if isinstance(profile.focus, int) else _FOCUS[profile.focus],
    )
