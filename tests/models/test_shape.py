"""What a model's files say before it is loaded is what it is once it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from families import HELD, HYBRIDS, REFUSED, build, loaded
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models.model import wrap_model
from sirchat.models.shape import cache_bytes, shape_of_folder
from sirchat.paths import tiny_dir

# Families with keys for each head, whatever the tests' config says of it.
ALL_HEADS = ("gpt-neox", "persimmon")


def folder_with(path: Path, config: object) -> Path:
    path.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text, encoding="utf-8")
    return path


FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}  # caches keys for all its heads
MADE: dict[str, dict[str, Any]] = {
    "falcon": FALCON,
    **{name: HYBRIDS[name] for name in ("lfm2", "qwen3_next")},  # attention layers count only
}


@pytest.mark.parametrize("family", [*(name for name in HELD if name not in ALL_HEADS), *MADE])
def test_context_and_cache_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    made = family in MADE
    model = wrap_model(family, build(family, MADE[family]), None) if made else loaded(family)
    model.module.config.save_pretrained(tmp_path)
    cache = model.new_cache(24)
    model.forward([1], cache)
    shape = shape_of_folder(tmp_path)
    assert shape.context_length == model.context_length
    assert cache_bytes(shape, Profile(device="cpu"), 24) == cache.nbytes


# Those of which only a first pass tells.
_NOT_KNOWN = {"bart-decoder", "dory"}


@pytest.mark.parametrize("family", sorted(REFUSED.keys() - _NOT_KNOWN))
def test_a_model_that_will_be_refused_is_known_before(family: str, tmp_path: Path) -> None:
    build(*REFUSED[family][:2]).config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="can't be evicted from its cache"):
        shape_of_folder(tmp_path)


def test_a_model_that_writes_no_text_is_known_before(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    with pytest.raises(ModelError, match="a BertModel, which does not generate text"):
        shape_of_folder(folder_with(tmp_path, config))


def test_the_text_part_of_a_model_that_sees_counts(tmp_path: Path) -> None:
    config = json.loads((tiny_dir() / "config.json").read_text())
    outer = {"model_type": "seeing", "architectures": ["SeeingForConditionalGeneration"]}
    assert shape_of_folder(folder_with(tmp_path, {**outer, "text_config": config})) == (
        shape_of_folder(tiny_dir())
    )


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_parameters": {"rope_type": "dynamic"}}, 2048),
        (
            {
                "rope_scaling": {"type": "longrope"},
                "original_max_position_embeddings": 512,
                "rope_parameters": None,
            },
            512,
        ),
        ({"max_position_embeddings": "2048"}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 10**400}, None),
    ],
)
def test_context_lengths(changes: dict[str, Any], context: int | None, tmp_path: Path) -> None:
    config = json.loads((tiny_dir() / "config.json").read_text()) | changes
    assert shape_of_folder(folder_with(tmp_path, config)).context_length == context


NONSENSE: tuple[object, ...] = (None, True, -1, 0, 10**400, 1e308, "4", [], [4] * 9, {}, {"a": {}})


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", NONSENSE, ids=lambda one: str(one)[:20])
def test_sizes_without_sense_are_unknown_and_no_error(
    name: str, value: object, tmp_path: Path
) -> None:
    config = json.loads((tiny_dir() / "config.json").read_text()) | {name: value}
    shape = shape_of_folder(folder_with(tmp_path, config))
    assert name == "head_dim" or shape.row_elements is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "[" * 100_000, "{}", "\x00"),
        *('{"model_type": 3}', '{"architectures": [1]}'),
    ],
    ids=lambda one: one[:12],
)
def test_a_config_that_is_none_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        shape_of_folder(folder_with(tmp_path, text))
    assert "\n" not in str(caught.value)
