"""Imports point downward only, and the command line starts without the heavy libraries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sirchat

ROOT = Path(sirchat.__file__).parent
HEAVY = {"torch", "transformers", "tokenizers", "safetensors"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


def imports(source: str, *, at_load: bool = False) -> set[str]:
    """Modules and names that a source imports, with dots; `at_load`: only when it is loaded."""
    names: set[str] = set()
    for node in statements(ast.parse(source), at_load):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def statements(node: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not (at_load and (later or typing)):
            yield child
            yield from statements(child, at_load)


def within(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def below(package: str) -> list[str]:
    return [name for name in SOURCES if within(name, package)]


def ours(module: str) -> set[str]:
    return {name for name in imports(SOURCES[module]) if within(name, "sirchat")}


def loaded_with(module: str) -> set[str]:
    """Everything that loading `module` loads, as far as our own modules tell."""
    loaded: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        if name in loaded:
            continue
        loaded.add(name)
        parents = name.split(".")
        todo |= {".".join(parents[:count]) for count in range(1, len(parents))}
        todo |= imports(SOURCES[name], at_load=True) if name in SOURCES else set()
    return loaded


EXAMPLE = """
import a.b
from c import d
if TYPE_CHECKING:
    import typing_only
try:
    import tried
except ImportError:
    pass
class C:
    import in_class
def f():
    import in_function
"""


def test_the_walker_sees_every_import() -> None:
    later = {"typing_only", "in_function"}
    assert imports(EXAMPLE) == {"a.b", "c.d", "tried", "in_class"} | later
    assert imports(EXAMPLE, at_load=True) == {"a.b", "c.d", "tried", "in_class"}
    assert {"sirchat.engine", "sirchat.memory.cache", "transformers.Cache"} <= loaded_with(
        "sirchat.engine"
    )


@pytest.mark.parametrize("module", below("sirchat.memory"))
def test_memory_knows_nothing_above_it(module: str) -> None:
    for name in ours(module):
        assert within(name, "sirchat.memory", "sirchat.errors"), name


@pytest.mark.parametrize("module", below("sirchat.memory"))
def test_in_memory_only_the_cache_knows_transformers(module: str) -> None:
    foreign = {name for name in imports(SOURCES[module]) if within(name, "transformers")}
    assert not foreign or module == "sirchat.memory.cache"


@pytest.mark.parametrize("module", below("sirchat.memory.policies"))
def test_policies_see_nothing_but_ledger_rows(module: str) -> None:
    allowed = ("attention", "ledger", "draws", "spans", "policies")
    for name in ours(module):
        assert within(name, "sirchat.errors", *(f"sirchat.memory.{part}" for part in allowed)), name


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("engine", {"errors", "memory", "reading", "records", "room", "sampling"}),
        ("reading", {"gaze", "memory", "records", "scoring", "watching"}),
        ("watching", {"gaze", "memory"}),
        ("gaze", {"memory"}),
        ("room", {"errors", "memory", "records"}),
    ],
)
def test_the_engine_knows_ids_only(module: str, allowed: set[str]) -> None:
    for name in ours(f"sirchat.{module}"):
        assert within(name, *(f"sirchat.{part}" for part in allowed)), name
    assert not {i for i in imports(SOURCES[f"sirchat.{module}"]) if within(i, *LIBRARIES)}


LIBRARIES = ("transformers", "tokenizers", "jinja2")

PARTS = ("conversation", "forgetting", "open_turn", "recollection", "reports", "switching")


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_a_session_do_not_know_it_nor_what_shows_or_saves_it(part: str) -> None:
    above = {"session", "saving", "saved", "ui", "tasks", "bench"}
    for name in ours(f"sirchat.{part}"):
        assert not within(name, *(f"sirchat.{one}" for one in above)), name


def test_a_file_of_a_session_knows_neither_engine_nor_session() -> None:
    allowed = {"errors", "paths", "saved", "transcript"}
    for module in below("sirchat.saved"):
        for name in ours(module):
            assert within(name, *(f"sirchat.{one}" for one in allowed)), (module, name)


@pytest.mark.parametrize(("package", "other"), [("ui", "tasks"), ("tasks", "ui")])
def test_screens_and_evaluations_do_not_know_each_other(package: str, other: str) -> None:
    for module in below(f"sirchat.{package}"):
        assert not {name for name in ours(module) if within(name, f"sirchat.{other}")}, module


def test_nothing_imports_the_command_line() -> None:
    users = {name for name in SOURCES if any(within(i, "sirchat.cli") for i in ours(name))}
    assert users <= {"sirchat.__main__"}


@pytest.mark.skipif("sirchat.cli" not in SOURCES, reason="there is no command line yet")
def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    heavy = {name for name in loaded_with("sirchat.cli") if name.split(".")[0] in HEAVY}
    assert not heavy


def test_listing_policies_loads_none_of_them() -> None:
    heavy = {name for name in loaded_with("sirchat.memory.policies") if within(name, *HEAVY)}
    assert not heavy
