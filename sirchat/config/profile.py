"""Every setting: its type, limits and default; values are checked once, and refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sirchat.config.yaml12 import parse_scalar
from sirchat.errors import SettingError, format_value, nearest
from sirchat.memory import policies

_SPARE = 16  # the least number of cache slots beside the sinks


BEST_RECALL = "attention"
"""What `recall: on` means: the measure that did best in `sirchat eval retrieval`."""

_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


Origin = Callable[[str], str]  # key -> what set it, as errors call it


class Profile(BaseModel):
    """Every setting of a conversation, checked; immutable.

    Made by `resolve` and `changed`, which raise SettingError for a bad value. Making one directly
    raises pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    description: str = Field(default="", description="What this profile is for, in one line.")
    model: str = Field(
        default="tiny",
        description="The model: tiny or tiny-anchor (which come with sirchat), a folder, a .gguf "
        "file, or a Hugging Face name.",
    )
    device: Literal["auto", "cuda", "mps", "cpu"] = Field(
        default="auto", description="Where the model runs; auto takes a GPU when there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Precision of the weights; auto is float32 on a CPU, bfloat16 on a GPU.",
    )
    policy: str = Field(
        default="entropy",
        description="Which tokens the model still remembers: a policy's name, or module:Class.",
    )
    policy_options: dict[str, int | float | bool | str | None] = Field(
        default={}, description="Options of the policy by name, such as {sample: 192}."
    )
    budget: int = Field(
        default=1024, description="The most tokens the model remembers at a time, sinks included."
    )
    sinks: int = Field(
        default=4, ge=0, description="The first tokens of the conversation, never forgotten."
    )
    recent: int = Field(
        default=32, ge=0, description="The newest tokens that the policy always keeps."
    )
    decay: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = Field(
        default=1.0,
        description="What surprisal and attention are multiplied by after each round; 1 fades "
        "nothing, auto fades when a round tells more than usual.",
    )
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Makes every random choice repeatable."
    )
    temperature: float = Field(
        default=0.0, ge=0, description="0 always takes the likeliest token; more is more varied."
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Sample only among this many likeliest tokens."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Sample only among the likeliest tokens that together have this probability.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Sample only tokens at least this likely, relative to the likeliest one.",
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="Above 1, tokens that were said before become less likely."
    )
    max_new_tokens: int = Field(
        default=512, ge=1, description="The most tokens of one reply; then it is cut."
    )
    system: str | None = Field(
        default=None, description="The system prompt: what the model is told before you speak."
    )
    pin_system: bool = Field(default=True, description="Never forget the system prompt.")
    archive: Literal["ram", "disk", "off"] = Field(
        default="ram",
        description="Where what left the memory waits to come back; off loses it.",
    )
    archive_limit: str = Field(
        default="1GiB", description="The most room that the archive takes, such as 512MiB."
    )
    recall: Literal["off", "mips", "cosine", "cosine-pairwise", "attention", "random"] = Field(
        default="off",
        description="Bring archived tokens back for each turn: by which measure they are chosen; "
        f"on is {BEST_RECALL}.",
    )
    recall_n: int = Field(
        default=200, ge=1, description="Tokens of the budget that are kept for what comes back."
    )
    recall_weight: Literal["none", "surprisal"] = Field(
        default="surprisal",
        description="Multiply a token's measure by how surprising it was, or leave it as it is.",
    )
    recall_soft: bool = Field(
        default=True,
        description="Under attention: share the root of a token's measure with its neighbours.",
    )
    recall_span: int = Field(
        default=0, ge=0, description="Neighbours on each side of a token that come back with it."
    )
    recall_scope: Literal["token", "layer"] = Field(
        default="token", description="One choice of tokens for all layers, or one for each."
    )
    recall_query: Literal["turn", "recent"] = Field(
        default="turn",
        description="Look for what the turn asks, read once to search; or for the recent tokens.",
    )
    recall_index: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Search through an index (faiss), or all; auto: above 100,000 archived tokens.",
    )
    attention: Literal["auto", "on"] = Field(
        default="auto",
        description="Count the attention that tokens get: if the policy looks at it, or always.",
    )
    protect: bool = Field(
        default=True,
        description="Keep the newest part of the current round, whatever the policy says.",
    )
    evict: Literal["room", "turn"] = Field(
        default="room",
        description="When to forget: whenever room is needed, or only when you speak (SirLLM).",
    )
    positions: Literal["cache", "stream"] = Field(
        default="cache",
        description="Where tokens stand for the model: close together in the cache, without end; "
        "or as in the stream, which ends with the model's context.",
    )
    save: bool = Field(default=True, description="Keep the chat on disk, turn by turn.")
    save_kv: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Save keys and values when the chat ends; auto does so below 256 MiB.",
    )
    panel: Literal["off", "turn", "live"] = Field(
        default="live",
        description="Show what is remembered while the model speaks, after each turn, or never.",
    )
    theme: Literal["auto", "dark", "light", "none"] = Field(
        default="auto", description="Colours for a dark or a light terminal, or none."
    )

    @field_validator("description", "model", "policy", "system")
    @classmethod
    def _text(cls, text: str | None) -> str | None:
        """Refuse half surrogate pairs: they come from bytes that are no UTF-8."""
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("text", "not text") from None
        return text

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        name = policies.ALIASES.get(name, name)
        if ":" in name or policies.is_policy(name):
            return name
        raise PydanticCustomError("policy", "unknown policy")

    @field_validator("recall", mode="before")
    @classmethod
    def _on_or_off(cls, value: object) -> object:
        """`on` is the measure that recalls best; YAML says true for it."""
        return {"on": BEST_RECALL, "true": BEST_RECALL, "false": "off"}.get(
            str(value).lower(), value
        )

    @field_validator("archive_limit")
    @classmethod
    def _size(cls, text: str) -> str:
        if parse_size(text) is None:
            raise PydanticCustomError("size", "not a size")
        return text

    @model_validator(mode="after")
    def _fits_the_budget(self) -> Profile:
        budget, least = self.budget, self.sinks + _SPARE
        if budget < least:
            rule = f"budget ({budget}) must be at least sinks + {_SPARE} ({least})"
            raise PydanticCustomError("fit", "{rule}", {"keys": ("budget", "sinks"), "rule": rule})
        if self.recent > budget:
            rule = f"recent ({self.recent}) must be at most the budget ({budget})"
            raise PydanticCustomError("fit", "{rule}", {"keys": ("recent", "budget"), "rule": rule})
        if self.recall != "off" and self.archive == "off":
            rule = "recall needs an archive (ram or disk) to bring tokens back from"
            keys = ("recall", "archive")
            raise PydanticCustomError("fit", "{rule}", {"keys": keys, "rule": rule})
        if self.recall == "attention" and self.recall_query == "recent":
            rule = "recall by attention hears what the turn asks: recall_query turn"
            keys = ("recall", "recall_query")
            raise PydanticCustomError("fit", "{rule}", {"keys": keys, "rule": rule})
        if self.recall_index == "on" and self.recall_scope == "layer":
            rule = "an index finds one choice for all layers: recall_scope token"
            keys = ("recall_index", "recall_scope")
            raise PydanticCustomError("fit", "{rule}", {"keys": keys, "rule": rule})
        return self


@dataclass(frozen=True)
class Layer:
    """Values from one place; a later layer goes over an earlier one."""

    values: Mapping[str, object]
    origin: Origin


def parse_size(text: str) -> int | None:
    """Bytes from a size such as `512MiB`, `1.5 GB` or `4096`; None if it is none, or nothing."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if not found:
        return None
    number, prefix, binary = found.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power) or None


def changed(profile: Profile, source: str, /, **updates: object) -> Profile:
    """A copy of `profile` with `updates`; errors name `source`, such as `/budget`.

    Another policy drops the old one's `policy_options`. Raises SettingError for the first problem.
    """
    new = Layer(updates, lambda key: source)
    check(new)
    return merged([Layer(profile.model_dump(), lambda key: source), new])


def setting_names() -> list[str]:
    """The name of every setting, in the order of help and `show`."""
    return list(Profile.model_fields)


def policy_names() -> list[str]:
    """Every policy name, sorted: ours, aliases, installed plugins; imports none of them."""
    return sorted({*policies.policy_names(), *policies.ALIASES})


def parse_value(key: str, text: str) -> object:
    """The value that `text`, from a command line or the environment, means for setting `key`.

    `none` or `null` empties a setting that may be empty; on, off, yes and no are booleans;
    `policy_options` is `{a: 1}` or `a=1,b=2`. Text that doesn't fit comes back as it is, and is
    refused where it is used. Raises SettingError for an unknown key.
    """
    refuse_unknown(key, "")
    kinds, word = _kinds(key), text.strip()
    if NoneType in kinds and word.lower() in ("none", "null"):
        return None
    if str in kinds:
        return text
    if bool in kinds:
        return _WORDS.get(word.lower(), text)
    if get_origin(kinds[0]) is dict:
        return _options(word)
    return parse_scalar(word) if get_origin(kinds[0]) is not Literal else word


def parse_option(text: str) -> object:
    """The value that `text` means for an option of a policy, as for a setting: a switch, say."""
    word = text.strip()
    if word.lower() == "none":
        return None
    return _WORDS.get(word.lower(), parse_scalar(word))


def as_typed(value: object) -> str:
    """A setting's value as it would be typed: `none`, `on`, `off`, `sample=192`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key}={as_typed(inner)}" for key, inner in value.items()) or "none"
    return str(value)


def short(value: float | str) -> str:
    """A number without needless digits, or a word."""
    return value if isinstance(value, str) else f"{value:g}"


def choices(key: str) -> list[str]:
    """The values that a setting may have, where they can be listed; on and off for a switch."""
    if key == "policy":
        return policy_names()
    kinds = _kinds(key)
    if bool in kinds:
        return ["on", "off"]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def is_option(name: str, text: str, policy: str) -> bool:
    """Whether a value is for an option of a policy, not for a setting: also of the same name.

    So `attention=false` means the option of `salience`, `attention=on` the setting.
    """
    if name not in Profile.model_fields:
        return True
    own = name in (field.name for field in fields(policies.policy_class(policy)))
    listed = choices(name)
    return own and bool(listed) and text not in listed


def merged(layers: Iterable[Layer]) -> Profile:
    """The profile that layers make, later over earlier; raises SettingError for a misfit."""
    values: dict[str, object] = {}
    setters: dict[str, tuple[int, Origin]] = {}
    for rank, layer in enumerate(layers):
        if _other_policy(values, layer.values):
            values.pop("policy_options", None)
        values |= layer.values
        setters |= dict.fromkeys(layer.values, (rank, layer.origin))
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise _misfit(error.errors()[0], values, setters) from None


def _other_policy(values: Mapping[str, object], over: Mapping[str, object]) -> bool:
    old = values.get("policy", Profile.model_fields["policy"].default)
    new = over.get("policy", old)
    return policies.ALIASES.get(str(old), old) != policies.ALIASES.get(str(new), new)


def _misfit(
    detail: ErrorDetails, values: Mapping[str, object], setters: Mapping[str, tuple[int, Origin]]
) -> SettingError:
    """Two settings that don't fit together: blame the one that was set last."""
    context = detail["ctx"]
    key = max(context["keys"], key=lambda key: setters[key][0] if key in setters else -1)
    origin = setters[key][1]
    return SettingError(
        f"{origin(key)}: {key} can't be {format_value(values[key])}; {context['rule']}"
    )


def check(layer: Layer) -> None:
    """Check each value by itself; whether they fit together is seen when all are known."""
    for key in layer.values:
        refuse_unknown(key, layer.origin(key))
    try:
        Profile.model_validate(layer.values)
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"]:
                raise _refusal(detail, layer.origin) from None


def refuse_unknown(key: object, source: str) -> None:
    """Raise SettingError, naming the nearest, unless `key` is a setting."""
    if key not in Profile.model_fields:
        start = f"{source}: " if source else ""
        hint = nearest(str(key), Profile.model_fields)
        raise SettingError(f"{start}there is no setting {format_value(key)}", hint=hint)


def _refusal(detail: ErrorDetails, origin: Origin) -> SettingError:
    key, *inner = (str(part) for part in detail["loc"])
    if get_origin(_kinds(key)[0]) is not dict:
        inner = []  # which of several types it is not
    name, may_be, value = key, allowed(key), detail["input"]
    if inner:
        name, may_be = f"{key}.{inner[0]:.60}", "a finite number, true, false, text or null"
    if "[key]" in inner:
        name, may_be = f"{key}: a name", "text"
    hint = nearest(value, choices(key)) if isinstance(value, str) and not inner else ""
    message = f"{origin(key)}: {name} can't be {format_value(value)}; it must be {may_be}"
    return SettingError(message, hint=hint)


def allowed(key: str) -> str:
    """What a setting may be, in words: `a number, above 0 and at most 1, or null`."""
    if key == "policy":
        return f"one of {', '.join(policy_names())}, or package.module:Class"
    if key == "archive_limit":
        return "a size such as 512MiB or 2GiB"
    kind, *others = _kinds(key)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(choices(key))}"
    limits = _limits(key)
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number" if re.search("most|below", limits) else "a finite number",
        str: "text",
    }.get(kind, "a mapping of names to values, such as {sample: 192}")
    others = [f"or {'null' if other is NoneType else get_args(other)[0]}" for other in others]
    return ", ".join(part for part in (words, limits, *others) if part)


def _limits(key: str) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    metadata = _metadata(key)
    return " and ".join(
        f"{word} {getattr(limit, sign)}"
        for sign, word in words.items()
        for limit in metadata
        if hasattr(limit, sign)
    )


def _kinds(key: str) -> tuple[Any, ...]:
    """The types of a setting, `None` last: `int | None` is (int, NoneType)."""
    return tuple(get_args(kind)[0] if _is_limited(kind) else kind for kind in _annotations(key))


def _metadata(key: str) -> list[Any]:
    """What limits a setting."""
    limited = [get_args(kind)[1] for kind in _annotations(key) if _is_limited(kind)]
    return [*Profile.model_fields[key].metadata, *(one for f in limited for one in f.metadata)]


def _annotations(key: str) -> tuple[Any, ...]:
    annotation = Profile.model_fields[key].annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_limited(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _options(text: str) -> object:
    if text.startswith("{"):
        return parse_scalar(text)
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        return text
    return {name.strip(): parse_option(value) for name, _, value in pairs}
