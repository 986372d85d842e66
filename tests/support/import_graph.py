"""What each module of the package imports, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import sirchat

ROOT = Path(sirchat.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


@cache
def imports(source: str, *, at_load: bool = False) -> frozenset[str]:
    """Dotted modules and names that a source imports; `at_load`: only those at load time."""
    names: set[str] = set()
    for node in statements(ast.parse(source), at_load):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


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
    """All modules that loading `module` loads, found through the imports of our own modules."""
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
