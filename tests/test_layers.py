"""Imports point downward only, and the command line starts without the heavy libraries."""

from __future__ import annotations

import ast
import os
import sys
from graphlib import TopologicalSorter

import pytest

from import_graph import SOURCES, below, imports, loaded_with, ours, within

IMPORTED_BY = os.getpid()

HEAVY = ("torch", "transformers", "tokenizers", "safetensors")

TOP = {"errors", "paths", "version"}
MODELS = {"models", "text", "config", "memory"}
CHAT = {"recall", "engine", *MODELS}
SAVED = {"saved", "chat", *CHAT}
# The packages that each package may import, beside itself, and those of `TOP`.
MAY_IMPORT = {
    "memory": set(),
    "text": {"memory"},
    "config": {"memory"},
    "models": {"text", "config", "memory"},
    "engine": {"models", "memory"},
    "recall": {"text", "engine", "models", "memory"},
    "chat": CHAT,
    "saved": {"chat", *CHAT},
    "tools": {"chat", *CHAT},
    "ui": {"tools", *SAVED},
    "server": SAVED,
    "cli": {"server", "ui", "tools", *SAVED},
    "lab": {"cli", "ui", "tools", *SAVED},
}


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
    assert {"sirchat.engine.engine", "sirchat.memory.cache", "torch.Tensor"} <= loaded_with(
        "sirchat.engine.engine"
    )


def test_every_package_has_a_rule_and_the_top_holds_nothing_else() -> None:
    parts = {name.split(".")[1] for name in SOURCES if "." in name}
    assert parts == {*MAY_IMPORT, *TOP, "__main__"}


@pytest.mark.slow
@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    allowed = [f"sirchat.{part}" for part in {package, *MAY_IMPORT[package], *TOP}]
    wrong = {
        f"{module} imports {name}"
        for module in below(f"sirchat.{package}")
        for name in ours(module)
        if not within(name, *allowed, "sirchat.__version__")
    }
    assert not wrong


def test_no_two_packages_import_each_other() -> None:
    for package, others in MAY_IMPORT.items():
        assert not [other for other in others if package in MAY_IMPORT[other]]


def test_no_modules_import_each_other_in_a_circle_not_even_for_types() -> None:
    graph = {
        module: {name if name in SOURCES else name.rpartition(".")[0] for name in ours(module)}
        for module in SOURCES
    }
    TopologicalSorter(graph).prepare()  # a CycleError names the modules


@pytest.mark.parametrize("module", below("sirchat.memory"))
def test_in_memory_only_the_cache_for_the_hubs_models_knows_transformers(module: str) -> None:
    foreign = {name for name in imports(SOURCES[module]) if within(name, "transformers")}
    assert not foreign or module == "sirchat.memory.hub_cache"


@pytest.mark.parametrize("module", below("sirchat.memory.policies"))
def test_policies_see_nothing_but_ledger_rows(module: str) -> None:
    allowed = (
        "attention",
        "ledger",
        "random_numbers",
        "policies",
        "registry",
    )
    for name in ours(module):
        assert within(name, "sirchat.errors", *(f"sirchat.memory.{part}" for part in allowed)), name


@pytest.mark.parametrize("module", below("sirchat.engine"))
def test_the_engine_knows_no_text(module: str) -> None:
    foreign = imports(SOURCES[module])
    assert not {name for name in foreign if within(name, "tokenizers", "jinja2", "sirchat.text")}


def test_a_file_of_a_session_knows_neither_engine_nor_session() -> None:
    allowed = {"errors", "paths", "saved", "text.times", "text.transcript"}
    others = {
        "sirchat.saved.saved_tensors": {"memory.attention", "memory.key_values"},
    }
    knowing = ("autosave", "resume", "saved_state")
    for module in set(below("sirchat.saved")) - {f"sirchat.saved.{name}" for name in knowing}:
        for name in ours(module):
            known = allowed | others.get(module, set())
            assert within(name, *(f"sirchat.{one}" for one in known)), (module, name)


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    heavy = {name for name in loaded_with("sirchat.cli.app") if name.split(".")[0] in HEAVY}
    assert not heavy


@pytest.mark.parametrize("module", ["ui.repl", "ui.replay", "models.load"])
def test_a_chat_loads_transformers_only_for_a_model_that_needs_it(module: str) -> None:
    loaded = loaded_with(f"sirchat.{module}")
    assert not {name for name in loaded if within(name, "transformers", "accelerate", "gguf")}


def test_only_the_registry_of_commands_names_the_laboratory() -> None:
    naming = {name for name in SOURCES if "sirchat.lab" in SOURCES[name]}
    assert {name for name in naming if not within(name, "sirchat.lab")} == {"sirchat.cli.registry"}


@pytest.mark.parametrize("module", below("sirchat.recall.retrievers"))
def test_settings_are_checked_against_a_retriever_without_the_heavy_libraries(module: str) -> None:
    assert not {name for name in loaded_with(module) if within(name, *HEAVY)}


def test_listing_policies_loads_none_of_them() -> None:
    heavy = {name for name in loaded_with("sirchat.memory.policies") if within(name, *HEAVY)}
    assert not heavy


def test_no_two_public_classes_have_one_name() -> None:
    """But for policies and retrievers, which are named as their users call them: `random`."""
    retrievers = set(below("sirchat.recall.retrievers"))
    named = [
        f"retriever {node.name}" if module in retrievers else node.name
        for module, source in SOURCES.items()
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(named) == sorted(set(named))


@pytest.mark.skipif(
    sys.platform != "linux" or "PYTEST_XDIST_WORKER" not in os.environ, reason="no forked worker"
)
def test_the_process_that_forks_workers_has_imported_the_tests() -> None:
    assert os.getppid() == IMPORTED_BY
