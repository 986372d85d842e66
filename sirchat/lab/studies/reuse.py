"""Which logged results a later run of a study can use: what all units share, what each depends on.

The first line of a results log has what all its units share, and must be the same in a later run.
The key of a unit names all else that its result depends on. So a study can be extended by further
settings, seeds and units, and finds those that are finished.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol, runtime_checkable

from sirchat.config.profile import Profile
from sirchat.errors import SettingError
from sirchat.lab.studies.report import setting_names
from sirchat.lab.studies.results_log import Record

WITHOUT_EFFECT = (
    "description",
    "panel",
    "theme",
    "markdown",
    "thinking",
    "save",
    "save_kv",
    "threads",
    "compile",
    "lookup",
)
"""Settings that no result depends on, but for rounding."""


@runtime_checkable
class Extensible(Protocol):
    """A study that can be extended with the same results log."""

    def shared(self) -> Record:
        """The parameters that every unit depends on."""

    def log_key(self, key: str) -> str:
        """The name of a unit in the results log; it says all else that the unit depends on."""


class ExtendedByLimit:
    """A study of numbered units that do not depend on `limit`: a greater one adds units."""

    def parameters(self) -> Record:
        """All that the findings depend on, except the model."""
        raise NotImplementedError

    def shared(self) -> Record:
        """The parameters that every unit depends on: all but `limit`."""
        return without(self.parameters(), ("limit",))

    def log_key(self, key: str) -> str:
        """The number of the unit."""
        return key


def without(parameters: Record, names: tuple[str, ...]) -> Record:
    """The parameters but those with these names."""
    return {name: value for name, value in parameters.items() if name not in names}


def setting_key(setting: Profile, **more: object) -> str:
    """A row of a table for people, such as `entropy 256`, and a hash of all that it depends on."""
    depends = without(setting.model_dump(mode="json"), WITHOUT_EFFECT) | more
    text = json.dumps(depends, sort_keys=True)
    return f"{setting_names([setting])[0]} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def data_name(path: Path) -> str:
    """A file or folder of data by its name and a hash of its contents, so that a change shows.

    Raises SettingError for a file that can't be read.
    """
    files = [one for one in path.rglob("*.json*") if one.is_file()] if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in sorted(files):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        raise SettingError(f"data {str(path)!r} can't be read: {error.strerror}") from None
    return f"{path.name} {digest.hexdigest()[:12]}"
