"""Which families of transformers run, and that a wrong one is found.

`SIRCHAT_ATTACK=1` gives each family a padding token whose keys are zero, not a few alone.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import __version__ as installed

import family_checks
import sirchat.models
from attacking import MANY
from family_checks import FamilyCheck, check_families, check_family
from sirchat.memory.cache import LayerRotation
from sirchat.models.model import LoadedModel, wrap_model
from small_models import build_small, causal_families

TABLE = Path(sirchat.models.__file__).with_name("FAMILIES.md")
SAMPLE = [
    *causal_families()[::16],
    *("deepseek_v3", "doge", "gemma3", "gemma4_text", "glm_moe_dsa", "gpt2", "gptj"),
    *("helium", "jamba", "lfm2", "mamba", "minicpm3", "nanochat", "qwen3_next", "zamba2"),
]


def table() -> dict[str, str]:
    """For each family, what FAMILIES.md says of it."""
    rows = re.findall(
        r"^\| ((?:runs|refused|not built)[^|]*) \| (`.*`) \|$", TABLE.read_text(), re.M
    )
    return {name: said for said, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_table_names_every_family_of_the_installed_transformers() -> None:
    assert sorted(table()) == sorted(causal_families()), f"transformers {installed} has others"


@pytest.mark.parametrize("family", SAMPLE)
def test_what_the_table_says_of_a_family_is_so(family: str) -> None:
    """For all families: `python tests/support/family_checks.py`, which takes about a minute."""
    assert check_family(family).in_words == table()[family]


def test_keys_that_do_not_move_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_rotation(*args: object) -> LoadedModel:
        model = wrap_model(*args)  # type: ignore[arg-type]
        return replace(model, rotations=[*model.rotations[:-1], LayerRotation(None)])

    monkeypatch.setattr(family_checks, "wrap_model", without_a_rotation)
    found = check_family("llama")
    assert found.status == "wrong"
    assert found.note.startswith("differs from recomputation by")


def padded(family: str) -> FamilyCheck:
    """The check of a family in which the id that a probe reads first is that of the padding."""

    def build(name: str) -> Any:
        module = build_small(name, pad_token_id=5)
        with torch.no_grad():
            module.get_input_embeddings().weight[5] = 0
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family_checks, "build_small", build)
        return check_family(family)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_padding_token_whose_keys_are_zero_changes_nothing_of_what_the_table_says() -> None:
    names = list(table()) if MANY else ["gemma2", "phi3"]
    found = {one.family: one.in_words for one in check_families(names, check=padded, seconds=300)}
    assert found == {name: said for name, said in table().items() if name in names}


def difficult(family: str) -> FamilyCheck:
    """A check that dies, never ends, or takes too much memory, as the name says."""
    if family == "dies":
        os._exit(3)
    if family == "never ends":
        time.sleep(60)
    if family == "too large":
        return FamilyCheck(family, "runs", str(len(bytearray(1 << 36))))
    return FamilyCheck(family, "runs")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_family_that_dies_or_hangs_or_is_too_large_is_one_line_and_the_next_follows() -> None:
    names = ["dies", "never ends", "too large", "well"]
    found = list(check_families(names, check=difficult, seconds=0.5))
    assert [one.family for one in found] == names
    assert [one.in_words for one in found] == [
        "not built: the check did not end (exit code 3)",
        "not built: the check did not end (0.5 s)",
        "not built: the check did not end (MemoryError)",
        "runs",
    ]


def test_memory_that_was_taken_before_is_not_counted() -> None:
    taken = torch.empty(1 << 30)  # 4 GiB, which is never written to
    assert [one.in_words for one in check_families(["phi3"])] == ["runs"]
    del taken
