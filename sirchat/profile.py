"""Every setting: its type, limits and default, and where its value comes from.

A value is taken from the first of: flag, environment `SIRCHAT_<KEY>`, the profile, the user's
`default.yaml`, the defaults below. Profiles are YAML files that hold only the keys they set.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sirchat import paths
from sirchat.errors import SettingError, nearest
from sirchat.memory import policies

_SPARE = 16  # the least number of cache slots beside the sinks
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
        description="The model: tiny (comes with sirchat), a local folder, or a Hugging Face name.",
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
    decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="What a token's importance is multiplied by after each round; 1 fades nothing.",
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
    protect: bool = Field(
        default=True,
        description="Keep the newest part of the current round, whatever the policy says.",
    )
    evict: Literal["room", "turn"] = Field(
        default="room",
        description="When to forget: whenever room is needed, or only when you speak (SirLLM).",
    )
    panel: Literal["off", "turn"] = Field(
        default="turn", description="Show what is remembered after each turn, or never."
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
        if ":" in name or name in policy_names():
            return name
        raise PydanticCustomError("policy", "unknown policy")

    @model_validator(mode="after")
    def _fits_the_budget(self) -> Profile:
        budget, least = self.budget, self.sinks + _SPARE
        if budget < least:
            rule = f"budget ({budget}) must be at least sinks + {_SPARE} ({least})"
            raise PydanticCustomError("fit", "{rule}", {"keys": ("budget", "sinks"), "rule": rule})
        if self.recent > budget:
            rule = f"recent ({self.recent}) must be at most the budget ({budget})"
            raise PydanticCustomError("fit", "{rule}", {"keys": ("recent", "budget"), "rule": rule})
        return self


@dataclass(frozen=True)
class ProfileInfo:
    """A profile that can be named: its file, what it says it is for, and whose it is."""

    name: str
    path: Path
    description: str
    shipped: bool


@dataclass(frozen=True)
class _Layer:
    """Values from one place; a later layer goes over an earlier one."""

    values: Mapping[str, object]
    origin: Origin


def resolve(
    profile: str | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> Profile:
    """The settings in force; `profile` is a name or file, else `SIRCHAT_PROFILE` names it.

    In `flags` None means not given, and text is parsed as by `parse_value`. Empty variables count
    as not set. A layer that names another policy drops the `policy_options` of those below it.
    Raises SettingError for the first problem.
    """
    chosen = profile or environ.get("SIRCHAT_PROFILE")
    default = paths.user_profiles_dir() / "default.yaml"
    layers = [_file_layer(default)] if default.is_file() else []
    if chosen:
        layers.append(_file_layer(profile_path(chosen)))
    return _merged([*layers, _environment_layer(environ), _flag_layer(flags)])


def changed(profile: Profile, source: str, /, **updates: object) -> Profile:
    """A copy of `profile` with `updates`; errors name `source`, such as `/budget`.

    Another policy drops the old one's `policy_options`. Raises SettingError for the first problem.
    """
    new = _Layer(updates, lambda key: source)
    _check(new)
    return _merged([_Layer(profile.model_dump(), lambda key: source), new])


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
    _refuse_unknown(key, "")
    kinds, word = _kinds(key), text.strip()
    if NoneType in kinds and word.lower() in ("none", "null"):
        return None
    if str in kinds:
        return text
    if bool in kinds:
        return _WORDS.get(word.lower(), text)
    if get_origin(kinds[0]) is dict:
        return _options(word)
    return _number(word) if get_origin(kinds[0]) is not Literal else word


def profile_path(name_or_file: str) -> Path:
    """The file of a profile. A `.yaml` ending or a slash makes it a file, which may be missing.

    A name is looked for in the user's folder, then among the shipped profiles. Raises SettingError
    when no profile has it.
    """
    if name_or_file.endswith((".yaml", ".yml")) or os.sep in name_or_file or "/" in name_or_file:
        return Path(os.path.expanduser(name_or_file))
    profiles = _named_profiles()
    if name_or_file not in profiles:
        hint = nearest(name_or_file, profiles) or f"there are {', '.join(sorted(profiles))}"
        raise SettingError(f"there is no profile {_shown(name_or_file)}", hint=hint)
    return profiles[name_or_file]


def load_profile(name_or_file: str) -> dict[str, object]:
    """The keys that a profile sets, each checked; it is found as by `profile_path`.

    Raises SettingError when there is no such profile, it isn't well-formed, or a key or value is
    not allowed.
    """
    return _read(profile_path(name_or_file))


def list_profiles() -> list[ProfileInfo]:
    """Every profile that has a name, sorted; the user's own hides a shipped one of that name."""
    shipped = paths.shipped_profiles_dir()
    return [
        ProfileInfo(name, path, _described(path), path.parent == shipped)
        for name, path in sorted(_named_profiles().items())
    ]


def show(profile: Profile) -> str:
    """Every setting as YAML, its description as a comment; `load_profile` reads it back."""
    values = profile.model_dump()
    return "\n".join(
        f"# {field.description}\n{_yaml_line(key, values[key])}"
        for key, field in Profile.model_fields.items()
    )


def init_profile(name: str) -> Path:
    """Write a profile with every setting commented out into the user's folder; only they read it.

    Raises SettingError when the name is unfit, taken, or the file can't be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise SettingError(f"a profile can't be named {_shown(name)}; use letters, digits, - and _")
    path = paths.user_profiles_dir() / f"{name}.yaml"
    try:
        paths.private_dir(path.parent)
        with paths.open_private(path, "x") as file:
            file.write(_commented_out())
    except FileExistsError:
        raise SettingError(f"{path} exists", hint="edit it or choose another name") from None
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}") from None
    return path


def _file_layer(path: Path) -> _Layer:
    return _Layer(_read(path), lambda key: str(path))


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    given = {key: environ.get(_variable(key)) for key in Profile.model_fields}
    layer = _Layer({key: parse_value(key, text) for key, text in given.items() if text}, _variable)
    _check(layer)
    return layer


def _variable(key: str) -> str:
    return f"SIRCHAT_{key.upper()}"


def _flag_layer(flags: Mapping[str, object]) -> _Layer:
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        _refuse_unknown(key, _flag(key))
    values = {
        key: parse_value(key, value) if isinstance(value, str) else value
        for key, value in given.items()
    }
    layer = _Layer(values, _flag)
    _check(layer)
    return layer


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _merged(layers: Iterable[_Layer]) -> Profile:
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
    return SettingError(f"{origin(key)}: {key} can't be {_shown(values[key])}; {context['rule']}")


def _check(layer: _Layer) -> None:
    """Check each value by itself; whether they fit together is seen when all are known."""
    for key in layer.values:
        _refuse_unknown(key, layer.origin(key))
    try:
        Profile.model_validate(layer.values)
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"]:
                raise _refusal(detail, layer.origin) from None


def _refuse_unknown(key: object, source: str) -> None:
    if key not in Profile.model_fields:
        start = f"{source}: " if source else ""
        hint = nearest(str(key), Profile.model_fields)
        raise SettingError(f"{start}there is no setting {_shown(key)}", hint=hint)


def _refusal(detail: ErrorDetails, origin: Origin) -> SettingError:
    key, *inner = (str(part) for part in detail["loc"])
    name, allowed, value = key, _allowed(key), detail["input"]
    if inner:
        name, allowed = f"{key}.{inner[0]:.60}", "a finite number, true, false, text or null"
    if "[key]" in inner:
        name, allowed = f"{key}: a name", "text"
    hint = nearest(value, _choices(key)) if isinstance(value, str) and not inner else ""
    message = f"{origin(key)}: {name} can't be {_shown(value)}; it must be {allowed}"
    return SettingError(message, hint=hint)


def _choices(key: str) -> list[str]:
    if key == "policy":
        return policy_names()
    (kind, *_) = _kinds(key)
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _allowed(key: str) -> str:
    """What a setting may be, in words: `a number, above 0 and at most 1, or null`."""
    if key == "policy":
        return f"one of {', '.join(policy_names())}, or package.module:Class"
    if choices := _choices(key):
        return f"one of {', '.join(choices)}"
    kind, *others = _kinds(key)
    limits = _limits(key)
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number" if re.search("most|below", limits) else "a finite number",
        str: "text",
    }.get(kind, "a mapping of names to values, such as {sample: 192}")
    return ", ".join(part for part in (words, limits, "or null" if others else "") if part)


def _limits(key: str) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    metadata = Profile.model_fields[key].metadata
    return " and ".join(
        f"{word} {getattr(limit, sign)}"
        for sign, word in words.items()
        for limit in metadata
        if hasattr(limit, sign)
    )


def _kinds(key: str) -> tuple[Any, ...]:
    """The types of a setting, `None` last: `int | None` is (int, NoneType)."""
    annotation = Profile.model_fields[key].annotation
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def _shown(value: object) -> str:
    """A value as an error shows it: as in YAML, on one line, cut when long."""
    scalar = isinstance(value, str | int | float | None)
    text = json.dumps(value, ensure_ascii=False) if scalar else reprlib.repr(value)
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _options(text: str) -> object:
    if text.startswith("{"):
        return _number(text)
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        return text
    return {name.strip(): _number(value.strip()) for name, _, value in pairs}


def _number(text: str) -> object:
    """`text` as YAML reads it, or as it is where YAML reads nothing."""
    try:
        value: object = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text not in ("null", "~") else value


def _named_profiles() -> dict[str, Path]:
    folders = (paths.shipped_profiles_dir(), paths.user_profiles_dir())
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def _described(path: Path) -> str:
    try:
        return " ".join(str(_read(path).get("description", "")).split())
    except SettingError as error:
        return f"not usable: {error}"


def _read(path: Path) -> dict[str, object]:
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        values = _parsed(data.decode("utf-8"), path)
    except OSError as error:
        raise SettingError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingError(f"{path}, line {line}: not UTF-8") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError(f"{path}: a profile must be a mapping, one `setting: value` a line")
    _check(_Layer(values, lambda key: str(path)))
    return values


def _parsed(text: str, path: Path) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = mark.line + 1 if mark else 1, error.problem
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except (ValueError, RecursionError):
        line, problem = 1, "a number is too long or brackets are too deep"
    raise SettingError(f"{path}, line {line}: not valid YAML: {problem}")


def _yaml_line(key: str, value: object) -> str:
    document = {key: value}
    text: str = yaml.dump(document, Dumper=_Dumper, allow_unicode=True, width=2**31)
    return text


def _commented_out() -> str:
    start = "# Take the # away from what you want to set; the values shown are the defaults.\n"
    return "\n".join(
        [
            start,
            *(
                f"# {field.description}\n#{_yaml_line(key, field.get_default())}"
                for key, field in Profile.model_fields.items()
            ),
        ]
    )


# YAML 1.2's plain scalars. YAML 1.1, PyYAML's own, reads `panel: off` as false, `1e-3` as text.
_SCALARS = [
    (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
    for tag, pattern in {
        "null": r"~|null|Null|NULL|",
        "bool": r"true|True|TRUE|false|False|FALSE",
        "int": r"[-+]?(?:0|[1-9][0-9]*)",
        "float": r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    }.items()
]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars, and no key twice."""

    yaml_implicit_resolvers = {None: _SCALARS}  # noqa: RUF012  (not ours to annotate)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{_shown(key.value)} is set twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either version of YAML would read as something other than text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        **yaml.SafeDumper.yaml_implicit_resolvers,
        None: _SCALARS,
    }
