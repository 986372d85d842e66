"""Checks whether settings suit a model, builds an engine with them, and tells their changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import torch

from sirchat.chat.events import Event, Notice, Started, Switched
from sirchat.chat.token_rows import is_measured
from sirchat.config.profile import FIXED_SETTINGS, Profile, parse_size
from sirchat.config.profile_files import changed_profile
from sirchat.config.values import format_setting, parse_value
from sirchat.engine.engine import Engine
from sirchat.engine.types import CacheSettings, RecallSettings
from sirchat.errors import SettingError, TranscriptError, did_you_mean
from sirchat.memory.policies import import_typed, policy_class, refuse_untrusted
from sirchat.memory.policies.base import Policy
from sirchat.models.model import LoadedModel, no_attention_reason
from sirchat.recall.retrievers import retriever
from sirchat.text.anchors import anchor_detector
from sirchat.text.detokenizer import word_continuation
from sirchat.text.json_schema import load_schema
from sirchat.text.template import Template
from sirchat.text.transcript import SettingsSwitch, TranscriptItem
from sirchat.version import __version__

_FOCUS = {"auto": None, "off": 0}
_MAX_COMPRESSION = 8  # from float32 to 4 bits, the least that a token takes in an archive
_RECALL_LIMITS = {"policy", "budget", "sinks", "recall", "recall_n"}


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
    except BaseException:  # a policy of the user's own may raise anything; or a signal
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


def started_events(
    engine: Engine, model: LoadedModel, profile: Profile, template: Template
) -> list[Event]:
    """The event `Started`, then a notice for each setting that does not suit this model."""
    started = Started(
        version=__version__,
        model=model.name,
        device=model.device_names,
        dtype=str(model.dtype).removeprefix("torch."),
        context_length=model.context_length,
        profile=profile.model_dump(),
    )
    texts = list(getattr(model.tokenizer, "notices", ()))
    if model.window is not None and engine.budget > model.window:
        texts.append(
            f"some layers of this model attend only to the newest {model.window} held tokens, "
            f"not to all {engine.budget} that the budget allows"
        )
    if model.has_state:
        texts.append(
            "some layers of this model keep no tokens but a state, which has read every token: "
            "a token that is evicted still has left its trace there"
        )
    if not model.tokenizer.chat_template:
        texts.append(
            "this model has no chat template: it reads lines that begin with USER: and "
            "ASSISTANT:, and its reply ends where it writes the next USER:"
        )
    texts += _mismatches(engine, model, profile, {*_RECALL_LIMITS, "reasoning"}, template)
    return [started, *map(Notice, texts)]


def switched_events(
    engine: Engine,
    model: LoadedModel,
    before: Profile,
    after: Profile,
    restored: int,
    template: Template,
) -> list[Event]:
    """An event for each changed setting, and notices of those that do not suit model or policy.

    The first event has `restored`, the number of archived tokens that the change restored.
    """
    events: list[Event] = []
    changed = [
        name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)
    ]
    for name in changed:
        old, new, resident = getattr(before, name), getattr(after, name), engine.resident
        events.append(Switched(name, old, new, restored=restored, resident=resident))
        restored = 0
        if not has_effect(after, name):
            policy = after.policy
            if after.policy_options:
                policy += f" with {format_setting(after.policy_options)}"
            events.append(Notice(f"{name} has no effect under policy {policy}"))
    return [*events, *map(Notice, _mismatches(engine, model, after, changed, template))]


def _mismatches(
    engine: Engine,
    model: LoadedModel,
    profile: Profile,
    changed: Collection[str],
    template: Template,
) -> Iterator[str]:
    """Notices of the `changed` settings that do not suit each other or this model."""
    settings, recall_n = engine.settings, profile.recall_n
    policy, is_limited = settings.policy, not _RECALL_LIMITS.isdisjoint(changed)
    if is_limited and settings.recall is not None and policy.bounded:
        room = engine.evictor.recall_room(0)
        if not isinstance(recall_n, str) and room < recall_n:
            yield (
                f"budget {engine.budget} leaves room to restore only {room} tokens, "
                f"not recall_n = {recall_n}; raise the budget or lower recall_n"
            )
    if "policy" in changed and policy.compacts_at_anchors and model.anchors is None:
        yield (
            "this model was not trained to compress text into anchor tokens, but policy anchor "
            "evicts nearly all others; choose the model tiny-anchor, train a model with "
            "`sirchat train anchor`, or use /policy anchor lazy=true, which evicts tokens "
            "only when the cache is full"
        )
    if "reasoning" in changed and profile.reasoning != "auto":
        problem = template.switches.problem(profile.reasoning)
        yield from [problem] if problem else []
    held, store = engine.ledger.held_positions, engine.store
    if "archive_limit" in changed and settings.archive and len(held):
        size = store.cache.first_written_rows(torch.arange(1), held[:1].copy()).nbytes
        if settings.archive < size // _MAX_COMPRESSION:
            yield (
                f"archive_limit {profile.archive_limit} holds no token: one takes {size:,} "
                "bytes; of what is evicted, only the text is kept"
            )
    lacks_attention = settings.attention_stats is not None and not model.exposes_attention()
    if "policy" in changed and lacks_attention:
        name = type(policy).__name__.lower()
        yield f"{no_attention_reason(model)}; policy {name} works without attention weights"
    elif "policy" in changed and len(held) and not is_measured(engine, held).any():
        yield (
            "attention is recorded from the next message on; until then, policy "
            f"{profile.policy} keeps the newest tokens"
        )
