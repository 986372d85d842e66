"""The README names what there is."""

from __future__ import annotations

from pathlib import Path

from sirchat.config.profile_files import list_profiles
from sirchat.memory.policies import policy_names
from sirchat.ui.commands import Commands

_README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_every_policy_command_and_profile_is_in_the_readme() -> None:
    assert all(f"| `{name}`" in _README for name in policy_names())
    assert all(f"`/{name}" in _README for name in Commands.names())
    assert all(f"`{p.name}`" in _README for p in list_profiles() if p.shipped)


def test_every_module_of_the_architecture_is_named() -> None:
    package = Path(__file__).parents[2] / "sirchat"
    names = [p.name for p in package.glob("*.py") if not p.name.startswith("__")]
    own = {"errors.py", "paths.py", "yaml12.py", "events.py"}  # told in passing, or plain support
    assert all(f"`{name}`" in _README for name in set(names) - own)
