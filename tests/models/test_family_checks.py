"""Which families of transformers run, and that a wrong one is found.

`SIRCHAT_ATTACK=1` gives each family a padding token whose keys are zero, not a few alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import __version__ as installed

import family_checks
import sirchat.models
from family_checks import check_family
from sirchat.memory.cache import LayerRotation
from sirchat.models.model import LoadedModel, wrap_model
from small_models import causal_families

TABLE = Path(sirchat.models.__file__).with_name("FAMILIES.md")
SAMPLE = [
    *causal_families()[::32],
    *("deepseek_v3", "doge", "gemma3", "gemma3_text", "gemma4_text", "glm_moe_dsa", "gpt2"),
    *("gptj", "helium", "jamba", "lfm2", "mamba", "minicpm3", "nanochat", "qwen3_next"),
    *("smollm3", "zamba2"),
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
