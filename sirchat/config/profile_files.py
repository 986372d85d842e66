"""Reads and writes profiles, and combines settings from flags, environment and profiles.

A value comes from the first of: the flag, the variable `SIRCHAT_<NAME>`, the profile that the user
chose, the user's `default.yaml`, the built-in default. A profile is a YAML file of some settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sirchat import paths
from sirchat.config.profile import Profile, rename_old_settings
from sirchat.config.values import (
    allowed_values,
    parse_value,
    parse_yaml,
    require_setting,
    yaml_line,
)
from sirchat.errors import SettingError, did_you_mean, format_value
from sirchat.memory import policies

_MAX_BYTES = 2**18  # of a profile
_HEADER = "# Remove the # in front of a setting to set it. The values shown are the defaults.\n"

Origin = Callable[[str], str]  # for a setting, the flag, variable or file that set its value


@dataclass(frozen=True)
class Layer:
    """The values that one source, such as a profile or the flags, sets, by setting."""

    values: Mapping[str, object]
    origin: Origin


@dataclass(frozen=True)
class ProfileInfo:
    name: str
    path: Path
    description: str
    is_shipped: bool  # whether it comes with sirchat


def changed_profile(profile: Profile, source: str, /, **updates: object) -> Profile:
    """A copy of `profile` with new values; a SettingError's message begins with `source`."""
    new = Layer(updates, lambda key: source)
    check_values(new)
    changed = merge_layers([Layer(profile.model_dump(), lambda key: source), new])
    kept = (key for key, value in profile if value == getattr(changed, key))
    return changed.with_origins({key: profile.origin(key) for key in kept})


def merge_layers(layers: Iterable[Layer]) -> Profile:
    """Combine layers, of which later ones win; a new policy drops the options of earlier layers.

    Raises SettingError if two settings conflict.
    """
    values: dict[str, object] = {}
    set_by: dict[str, tuple[int, Origin]] = {}
    for rank, layer in enumerate(layers):
        if _is_other_policy(values, layer.values):
            values.pop("policy_options", None)
        values |= layer.values
        set_by |= dict.fromkeys(layer.values, (rank, layer.origin))
    try:
        made = Profile.model_validate(values)
    except ValidationError as error:
        raise _conflict_error(error.errors()[0], values, set_by) from None
    return made.with_origins({key: set_by[key][1](key) for key in values})


def check_values(layer: Layer) -> None:
    """Raise SettingError for an unknown setting, or a value that is not allowed by itself."""
    for key in layer.values:
        require_setting(key, layer.origin(key))
    try:
        Profile.model_validate(layer.values)
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"]:
                raise _value_error(detail, layer.origin) from None


def resolve(
    profile: str | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> Profile:
    """Make the profile of all settings; raises SettingError for the first that is not allowed.

    `flags` maps settings to values or texts; None means not given. Its key `trust_policy` lists
    policies `module:Class` that a file may name, besides the flag `policy`; their code then runs.
    """
    given = {k: v for k, v in flags.items() if v is not None and k != "trust_policy"}
    variables = {key: environ.get(_variable_name(key)) for key in Profile.model_fields}
    trust_named(flags)
    chosen = profile or environ.get("SIRCHAT_PROFILE")
    default = paths.user_profiles_dir() / "default.yaml"
    files = [default] if default.is_file() else []
    if chosen:
        files.append(profile_path(chosen))
    layers = [Layer(_load(path), _file_origin(path)) for path in files]
    layers.append(_parsed_layer({k: v for k, v in variables.items() if v}, _variable_name))
    return merge_layers([*layers, _parsed_layer(given, _flag_name)])


def trust_named(flags: Mapping[str, Any]) -> None:
    """Import the policies `module:Class` that two flags name, so that files may name them."""
    for name in filter(policies.is_path, flags.get("trust_policy") or ()):
        policies.policy_class(name)
    policies.import_typed(flags.get("policy") or "")


def profile_path(name_or_file: str) -> Path:
    """The path of a profile given by its name or path; SettingError for an unknown name."""
    if name_or_file.endswith((".yaml", ".yml")) or os.sep in name_or_file or "/" in name_or_file:
        return Path(os.path.expanduser(name_or_file))
    profiles = _profile_files()
    if name_or_file not in profiles:
        hint = did_you_mean(name_or_file, profiles) or f"profiles: {', '.join(sorted(profiles))}"
        raise SettingError(f"there is no profile {format_value(name_or_file)}", hint=hint)
    return profiles[name_or_file]


def load_profile(name_or_file: str) -> dict[str, object]:
    """The checked values that a profile sets."""
    return _load(profile_path(name_or_file))


def list_profiles() -> list[ProfileInfo]:
    """All profiles by name; a profile of the user hides a shipped one of the same name."""
    shipped = paths.shipped_profiles_dir()
    return [
        ProfileInfo(name, path, _profile_description(path), path.parent == shipped)
        for name, path in sorted(_profile_files().items())
    ]


def profile_as_yaml(profile: Profile, mark: str = "") -> str:
    """All settings as YAML, with descriptions as comments, and `mark` before each value."""
    values = profile.model_dump()
    return "\n".join(
        f"# {field.description}\n{mark}{yaml_line(key, values[key])}"
        for key, field in Profile.model_fields.items()
    )


def init_profile(name: str) -> Path:
    """Create a user's profile with every setting commented out; returns its path.

    Raises SettingError if the name is invalid or taken, or if the file can't be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise SettingError(
            f"a profile can't be named {format_value(name)}; use letters, digits, - and _"
        )
    path = paths.user_profiles_dir() / f"{name}.yaml"
    try:
        paths.make_private_dir(path.parent)
        text = f"{_HEADER}\n{profile_as_yaml(Profile(), mark='#')}"
        paths.write_private(path, text, replaces=False)
    except FileExistsError:
        raise SettingError(
            f"{path} already exists", hint="edit that file or choose another name"
        ) from None
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}") from None
    return path


def write_default_setting(key: str, value: object) -> Path:
    """Write one setting into the user's `default.yaml`; returns its path. Other lines stay.

    Raises SettingError if the value is not allowed, or if the file can't be changed.
    """
    path = paths.user_profiles_dir() / "default.yaml"
    values = {**(_load(path) if path.exists() else {}), key: value}
    check_values(Layer(values, _file_origin(path)))
    line = yaml_line(key, value)
    try:
        text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        text, replaced = re.subn(rf"(?m)^{key}[ \t]*:.*\n?", lambda _: line, text, count=1)
        if not replaced:
            text = f"{text}\n{line}" if text and not text.endswith("\n") else text + line
        try:
            is_changed = _parse_profile(text, path) == values
        except SettingError:
            is_changed = False
        if not is_changed:
            raise SettingError(
                f"sirchat can't change {path}", hint=f"write this line into it: {line}"
            )
        paths.make_private_dir(path.parent)
        paths.write_private(path, text, replaces=True)
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}") from None
    return path


def _is_other_policy(values: Mapping[str, object], updates: Mapping[str, object]) -> bool:
    old = values.get("policy", Profile.model_fields["policy"].default)
    new = updates.get("policy", old)
    return policies.ALIASES.get(str(old), old) != policies.ALIASES.get(str(new), new)


def _conflict_error(
    detail: ErrorDetails, values: Mapping[str, object], set_by: Mapping[str, tuple[int, Origin]]
) -> SettingError:
    """The error for settings that conflict; it names the one that was set last."""
    context = detail["ctx"]
    key = max(context["keys"], key=lambda key: set_by[key][0] if key in set_by else -1)
    source, value = set_by[key][1](key), format_value(values[key])
    return SettingError(f"{source}: {key} can't be {value}; {context['rule']}")


def _value_error(detail: ErrorDetails, origin: Origin) -> SettingError:
    key, *inner = (str(part) for part in detail["loc"])
    name = f"{key}.{inner[0]:.60}" if key == "policy_options" and inner else key
    value, must = detail["input"], detail["msg"].replace("Input should be", "it must be")
    if key == "policy_options" and not inner:
        must = "it must be NAME=VALUE, such as sample=192"
    hint = did_you_mean(value, allowed_values(key)) if isinstance(value, str) else ""
    message = f"{origin(key)}: {name} can't be {format_value(value)}; {must}"
    return SettingError(message, hint=hint)


def _file_origin(path: Path) -> Origin:
    return lambda key: str(path)


def _variable_name(key: str) -> str:
    return f"SIRCHAT_{key.upper()}"


def _parsed_layer(given: Mapping[str, object], origin: Origin) -> Layer:
    """Parse and check texts; imports the module of a policy `module:Class`."""
    for key in given:
        require_setting(key, origin(key))
    values = {
        key: parse_value(key, value) if isinstance(value, str) else value
        for key, value in given.items()
    }
    layer = Layer(values, origin)
    check_values(layer)
    policies.import_typed(str(values.get("policy", "")))
    return layer


def _flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def _profile_files() -> dict[str, Path]:
    folders = (paths.shipped_profiles_dir(), paths.user_profiles_dir())
    files = (path for folder in folders for path in folder.glob("*.yaml"))
    return {path.stem: path for path in files if path.is_file()}  # a pipe would block


def _profile_description(path: Path) -> str:
    try:
        return " ".join(str(_load(path).get("description", "")).split())
    except SettingError as error:
        return f"this profile can't be used: {error}"


def _load(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1).removeprefix(b"\xef\xbb\xbf")
        if len(data) > _MAX_BYTES:
            raise SettingError(f"{path} is too long; a profile has at most {_MAX_BYTES:,} bytes")
        values = _parse_profile(data.decode("utf-8"), path)
    except OSError as error:
        raise SettingError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingError(f"{path}, line {line}: not UTF-8") from None
    check_values(Layer(values, _file_origin(path)))
    policies.refuse_untrusted(values.get("policy"), str(path))
    return values


def _parse_profile(text: str, path: Path) -> dict[str, object]:
    values = parse_yaml(text, path) or {}
    if not isinstance(values, dict):
        raise SettingError(
            f"{path}: a profile must be a mapping, with one `setting: value` in each line"
        )
    known = Profile.model_fields
    parsed = {key: parse_value(key, v) if key in known else v for key, v in values.items()}
    return rename_old_settings(parsed)
