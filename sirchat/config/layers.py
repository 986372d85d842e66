"""Merging of values from several sources into one profile, with errors that name the source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sirchat.config.profile import Profile
from sirchat.config.values import allowed, choices, require_setting, setting_types
from sirchat.errors import SettingError, format_value, nearest
from sirchat.memory import policies

Origin = Callable[[str], str]
"""Returns the name of the source that set a key, for errors: a flag, a variable, a file."""


@dataclass(frozen=True)
class Layer:
    """Setting values from one source; later layers override earlier ones."""

    values: Mapping[str, object]
    origin: Origin


def changed(profile: Profile, source: str, /, **updates: object) -> Profile:
    """A copy of `profile` with `updates`; errors name `source`, such as `/budget`.

    Another policy clears `policy_options`. Raises SettingError for the first problem.
    """
    new = Layer(updates, lambda key: source)
    check_values(new)
    return merged([Layer(profile.model_dump(), lambda key: source), new])


def merged(layers: Iterable[Layer]) -> Profile:
    """The profile with the values of all layers, later ones overriding earlier ones.

    A layer that sets another policy clears the `policy_options` of those before it. Raises
    SettingError where two settings conflict.
    """
    values: dict[str, object] = {}
    set_by: dict[str, tuple[int, Origin]] = {}
    for rank, layer in enumerate(layers):
        if _is_other_policy(values, layer.values):
            values.pop("policy_options", None)
        values |= layer.values
        set_by |= dict.fromkeys(layer.values, (rank, layer.origin))
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise _conflict_error(error.errors()[0], values, set_by) from None


def check_values(layer: Layer) -> None:
    """Raise SettingError for the first unknown key or the first value that is not allowed.

    Conflicts between two settings are found later, by `merged`.
    """
    for key in layer.values:
        require_setting(key, layer.origin(key))
    try:
        Profile.model_validate(layer.values)
    except ValidationError as error:
        for detail in error.errors():
            if detail["loc"]:
                raise _value_error(detail, layer.origin) from None


def _is_other_policy(values: Mapping[str, object], updates: Mapping[str, object]) -> bool:
    old = values.get("policy", Profile.model_fields["policy"].default)
    new = updates.get("policy", old)
    return policies.ALIASES.get(str(old), old) != policies.ALIASES.get(str(new), new)


def _conflict_error(
    detail: ErrorDetails, values: Mapping[str, object], set_by: Mapping[str, tuple[int, Origin]]
) -> SettingError:
    """The error for two settings that conflict; it names the one that was set last."""
    context = detail["ctx"]
    key = max(context["keys"], key=lambda key: set_by[key][0] if key in set_by else -1)
    origin = set_by[key][1]
    return SettingError(
        f"{origin(key)}: {key} can't be {format_value(values[key])}; {context['rule']}"
    )


def _value_error(detail: ErrorDetails, origin: Origin) -> SettingError:
    key, *inner = (str(part) for part in detail["loc"])
    if get_origin(setting_types(key)[0]) is not dict:
        inner = []  # pydantic names the member of a union here, not a key of a mapping
    name, may_be, value = key, allowed(key), detail["input"]
    if inner:
        name, may_be = f"{key}.{inner[0]:.60}", "a finite number, true, false, text or null"
    if "[key]" in inner:
        name, may_be = f"{key}: a name", "text"
    hint = nearest(value, choices(key)) if isinstance(value, str) and not inner else ""
    message = f"{origin(key)}: {name} can't be {format_value(value)}; it must be {may_be}"
    return SettingError(message, hint=hint)
