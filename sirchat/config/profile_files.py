"""Profile files, and the precedence of flags, environment variables and profiles.

A setting's value comes from the first of these that sets it: flag, environment `SIRCHAT_<KEY>`,
the profile, the user's `default.yaml`, the built-in default. A profile is a YAML file with only the
keys that it sets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sirchat import paths
from sirchat.config.layers import Layer, Origin, check_values, merged
from sirchat.config.profile import Profile, with_new_names
from sirchat.config.values import parse_value, parse_yaml, require_setting, yaml_line
from sirchat.errors import SettingError, format_value, nearest
from sirchat.memory import policies

_OTHER_VARIABLES = ("PROFILE", "HOME", "DEBUG", "DATA")  # that are no settings
_MISSPELT = 0.8  # how alike a variable is to one that was meant
_MOST_BYTES = 2**18  # of a profile


@dataclass(frozen=True)
class ProfileInfo:
    """A profile in one of the two profile folders.

    `shipped` is true for one that comes with sirchat, false for one of the user's own.
    """

    name: str
    path: Path
    description: str
    shipped: bool


def resolve(
    profile: str | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> Profile:
    """The settings from all sources.

    `profile` is a name or a file; without it, `SIRCHAT_PROFILE` names one. In `flags`, None means
    not given, and text is parsed by `parse_value`. Empty environment variables count as not set. A
    source that sets another policy clears the `policy_options` of lower ones. Raises SettingError
    for the first problem.

    `flags` may also have `trust_policy`: the `module:Class` policies that files may name, beside
    that of the flag `policy`.
    """
    given = {key: value for key, value in flags.items() if key != "trust_policy"}
    trusted = trusted_policies(flags)
    chosen = profile or environ.get("SIRCHAT_PROFILE")
    default = paths.user_profiles_dir() / "default.yaml"
    files = [default] if default.is_file() else []
    if chosen:
        files.append(profile_path(chosen))
    layers = [Layer(_read(path, trusted), _named(path)) for path in files]
    return merged([*layers, _environment_layer(environ), _flag_layer(given)])


def trusted_policies(flags: Mapping[str, Any]) -> frozenset[str]:
    """The `module:Class` policies that files may name: those that the command line names."""
    return frozenset(filter(None, [*(flags.get("trust_policy") or ()), flags.get("policy")]))


def profile_path(name_or_file: str) -> Path:
    """The file of a profile.

    With a `.yaml` ending or a slash the argument is the path itself, which may not exist. A name is
    looked up in the user's folder, then among the shipped profiles. Raises SettingError for an
    unknown name.
    """
    if name_or_file.endswith((".yaml", ".yml")) or os.sep in name_or_file or "/" in name_or_file:
        return Path(os.path.expanduser(name_or_file))
    profiles = _named_profiles()
    if name_or_file not in profiles:
        hint = nearest(name_or_file, profiles) or f"there are {', '.join(sorted(profiles))}"
        raise SettingError(f"there is no profile {format_value(name_or_file)}", hint=hint)
    return profiles[name_or_file]


def load_profile(name_or_file: str, trusted: Collection[str] = ()) -> dict[str, object]:
    """The values that a profile sets, each checked; the file is found by `profile_path`.

    `trusted` are the `module:Class` policies that it may name. Raises SettingError when there is no
    such profile, it isn't well-formed, or a key or value is not allowed.
    """
    return _read(profile_path(name_or_file), trusted)


def list_profiles() -> list[ProfileInfo]:
    """Every profile in both folders, by name; the user's own hides a shipped one of that name."""
    shipped = paths.shipped_profiles_dir()
    return [
        ProfileInfo(name, path, _description(path), path.parent == shipped)
        for name, path in sorted(_named_profiles().items())
    ]


def show(profile: Profile) -> str:
    """Every setting as YAML, its description as a comment; `load_profile` can read it."""
    values = profile.model_dump()
    return "\n".join(
        f"# {field.description}\n{yaml_line(key, values[key])}"
        for key, field in Profile.model_fields.items()
    )


def init_profile(name: str) -> Path:
    """Write a private profile into the user's folder, with every setting commented out.

    Returns its path. Raises SettingError when the name is invalid or taken, or the file can't be
    written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise SettingError(
            f"a profile can't be named {format_value(name)}; use letters, digits, - and _"
        )
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


def _named(path: Path) -> Origin:
    return lambda key: str(path)


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    given = {key: environ.get(_variable(key)) for key in Profile.model_fields}
    _refuse_misspelt(environ)
    layer = Layer({key: parse_value(key, text) for key, text in given.items() if text}, _variable)
    check_values(layer)
    policies.import_typed(str(layer.values.get("policy", "")))
    return layer


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise SettingError for a variable that is nearly the name of a setting."""
    known = {*map(str.upper, Profile.model_fields), *_OTHER_VARIABLES}
    for variable in sorted(environ):
        name = variable.removeprefix("SIRCHAT_")
        if name in (variable, *known):
            continue
        if hint := nearest(name, known, "SIRCHAT_", alike=_MISSPELT):
            raise SettingError(f"{variable} is no setting", hint=hint)


def _variable(key: str) -> str:
    return f"SIRCHAT_{key.upper()}"


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        require_setting(key, _flag(key))
    values = {
        key: parse_value(key, value) if isinstance(value, str) else value
        for key, value in given.items()
    }
    layer = Layer(values, _flag)
    check_values(layer)
    policies.import_typed(str(values.get("policy", "")))
    return layer


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _named_profiles() -> dict[str, Path]:
    folders = (paths.shipped_profiles_dir(), paths.user_profiles_dir())
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def _description(path: Path) -> str:
    try:
        return " ".join(str(_read(path).get("description", "")).split())
    except SettingError as error:
        return f"not usable: {error}"


def _read(path: Path, trusted: Collection[str] = ()) -> dict[str, object]:
    try:
        data = _bytes_of(path).removeprefix(b"\xef\xbb\xbf")
        values = parse_yaml(data.decode("utf-8"), path)
    except OSError as error:
        raise SettingError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingError(f"{path}, line {line}: not UTF-8") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError(f"{path}: a profile must be a mapping, one `setting: value` a line")
    values = with_new_names(values)
    check_values(Layer(values, _named(path)))
    policies.refuse_untrusted(values.get("policy"), str(path), trusted)
    return values


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise SettingError(f"{path} is longer than a profile may be, {_MOST_BYTES:,} bytes")
    return data


def _commented_out() -> str:
    start = "# Take the # away from what you want to set; the values shown are the defaults.\n"
    return "\n".join(
        [
            start,
            *(
                f"# {field.description}\n#{yaml_line(key, field.get_default())}"
                for key, field in Profile.model_fields.items()
            ),
        ]
    )
