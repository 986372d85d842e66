"""The READMEs name what there is, their links lead somewhere, and their tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

import traced_turn
from import_graph import below, ours
from sirchat.config.profile import Profile
from sirchat.config.profile_files import list_profiles
from sirchat.lab.commands.eval import eval_app
from sirchat.memory.policies import ALIASES, policy_names
from sirchat.memory.policies.check import contract_violations
from sirchat.ui.commands import Commands

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sirchat"
READMES = [ROOT / "README.md", *sorted(PACKAGE.rglob("*.md"))]
INSIDE = PACKAGE / "README.md"  # for those who change it

_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def links(path: Path) -> list[str]:
    """Targets of all links and pictures, but those to other sites."""
    targets: list[str] = _LINK.findall(_CODE.sub("", _CODE_BLOCK.sub("", text_of(path))))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def headings(path: Path) -> set[str]:
    """The fragments that lead to the headings of a file, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", _CODE_BLOCK.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


README = text_of(ROOT / "README.md")


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    found = links(path)
    assert len(found) > 20 or path.parent != ROOT, "links are not seen"
    for link in found:
        name, _, fragment = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{path}: {link}"
        if fragment:
            assert fragment in headings(target), f"{path}: {link}"


def test_the_table_of_policies_is_complete() -> None:
    text = text_of(PACKAGE / "memory" / "policies" / "README.md")
    rows = re.findall(r"^\| `(\w+)`(?: \(or `(\w+)`\))? \|", text, re.MULTILINE)
    assert {name for name, _ in rows} == set(policy_names())
    assert {other: name for name, other in rows if other} == ALIASES


def test_the_readme_shows_a_few_policies_and_counts_the_others() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|", README, re.MULTILINE)
    shown = [name for name in rows if name in policy_names()]
    others = {8: "Eight", 9: "Nine", 10: "Ten"}[len(policy_names()) - len(shown)]
    assert f"[{others} more](sirchat/memory/policies/README.md)" in README
    assert f"| `{Profile().policy}` (default) |" in README


def test_the_table_of_commands_is_complete() -> None:
    table = section(text_of(PACKAGE / "ui" / "README.md"), "Commands")
    named = set(re.findall(r"`/(\w+|\?)", table))
    assert named == set(Commands.names())


def test_shipped_profiles_are_named() -> None:
    for text in (README, text_of(PACKAGE / "config" / "README.md")):
        assert all(f"`{profile.name}`" in text for profile in list_profiles() if profile.is_shipped)


def test_the_table_of_studies_is_complete() -> None:
    table = section(text_of(PACKAGE / "lab" / "studies" / "README.md"), "The studies")
    named = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    studies = vars(get_command(eval_app))["commands"].items()
    assert set(named) == {name for name, command in studies if not command.hidden}


def test_every_package_is_in_the_tree_and_has_a_readme() -> None:
    tree = section(text_of(INSIDE), "The folders")
    for folder in sorted(one.parent for one in PACKAGE.glob("*/__init__.py")):
        assert f"| [`{folder.name}`]({folder.name}/README.md) |" in tree
    modules = [file.stem for file in PACKAGE.glob("*.py") if not file.name.startswith("__")]
    assert all(f"`{name}`" in tree for name in modules)


def test_the_table_of_imports_is_that_of_the_code() -> None:
    header, *rows = re.findall(r"^    +((?:server|\w+ +[x.] ).*)$", text_of(INSIDE), re.MULTILINE)
    rooms = header.split()
    for name, *marks in map(str.split, rows):
        imported = {
            one.split(".")[1] for module in below(f"sirchat.{name}") for one in ours(module)
        }
        told = {room for room, mark in zip(rooms, marks, strict=True) if mark == "x"}
        assert told == imported & set(rooms) - {name}, name
    assert len(rows) == len(rooms)


def test_threads_and_environment_variables_are_those_of_the_code() -> None:
    files = [*PACKAGE.rglob("*.py"), *ROOT.glob("tests/**/*.py")]
    code = "".join(map(text_of, files))
    threads = re.findall(
        r"^\| `([\w ]+)` \(`", section(text_of(INSIDE), "Which thread runs what"), re.M
    )
    assert len(threads) > 5
    variables = re.findall(r"`([A-Z]{3,}_[A-Z_]+)\b", "".join(map(text_of, READMES)))
    foreign = "CUDA_ OMP_ ANTHROPIC_ HF_ XDG_ TRITON_ MKL_ AWS_ NO_ OPENAI_"
    own = {one for one in variables if not one.startswith(tuple(foreign.split()))}
    assert not [one for one in (*threads, *sorted(own)) if one not in code]


def test_every_module_is_named_in_the_readme_of_its_package() -> None:
    for folder in sorted(one.parent for one in PACKAGE.glob("*/__init__.py")):
        if folder.name != "lab":  # whose tables are of commands
            text = text_of(folder / "README.md")
            names = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
            assert not [name for name in names if f"`{name}`" not in text], folder


def test_the_turn_with_real_numbers_is_what_the_program_prints() -> None:
    shown = "".join(f"    {line}\n" for line in traced_turn.lines())
    assert f"\n\n{shown}\n" in text_of(INSIDE)


@pytest.mark.parametrize("path", [INSIDE, PACKAGE / "memory" / "policies" / "README.md"])
def test_the_example_policy_keeps_the_contract(path: Path) -> None:
    (example,) = re.findall(r"^```python\n(# mine\.py\n.*?)^```", text_of(path), re.M | re.S)
    defined: dict[str, type] = {"__name__": "mine"}  # type: ignore[dict-item]
    exec(example, defined)
    assert contract_violations(defined["Loud"]()) == []
