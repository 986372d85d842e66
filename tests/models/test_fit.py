"""What a model's files say before it is loaded is what it is and takes once it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacking import MANY
from chatting import tiny
from command import run
from families import HELD, HYBRIDS, REFUSED, TELLING, build, loaded
from plain_model import load_model
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.memory.free_memory import free_memory
from sirchat.models.fit import PROGRAM_BYTES, ModelFit, compute_fit, recommend_model
from sirchat.models.listing import find_model
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.names import split_gguf_name
from sirchat.models.shape import cache_bytes, shape_of_folder, uses_cpu
from sirchat.paths import tiny_model_dir

SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"quantize": "int8"},
    {"quantize": "int4"},
    {"quantize": "int8", "dtype": "bfloat16"},
]


def held_bytes(model: LoadedModel) -> int:
    """The sum of the sizes of all tensors of a loaded model, each counted once."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    storages = {one.data_ptr(): one.numel() * one.element_size() for one in tensors}
    return sum(storages.values())


def fit(path: Path, free: int | None = None, **settings: Any) -> ModelFit:
    return compute_fit(find_model(str(path)), Profile(device="cpu", **settings), free)


GB = 10**9


@pytest.mark.parametrize(
    ("free", "on_cpu", "file"),
    [
        (64 * GB, False, "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"),
        (64 * GB, True, "Qwen3-4B-Instruct-2507-Q4_K_M.gguf"),
        (5 * GB, False, "Llama-3.2-3B-Instruct-Q4_K_M.gguf"),
        (3 * GB, True, "qwen2.5-1.5b-instruct-q4_k_m.gguf"),
        (GB, True, "qwen2.5-0.5b-instruct-q4_k_m.gguf"),  # nothing fits
        (None, True, "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
    ],
)
def test_the_largest_model_that_fits_is_recommended(
    free: int | None, on_cpu: bool, file: str
) -> None:
    model = recommend_model(free, on_cpu=on_cpu)
    assert model["file"] == file
    assert split_gguf_name(f"{model['name']}/{file}") == (model["name"], file)
    assert (
        PROGRAM_BYTES + model["download"] < model["memory"] < PROGRAM_BYTES + 3 * model["download"]
    )


def test_recommend_prints_the_command_that_gets_it_and_asks_no_network(tmp_path: Path) -> None:
    done = run("models", "recommend", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    about, get = done.stdout.splitlines()
    model = recommend_model(free_memory(), on_cpu=uses_cpu(Profile()))
    assert model["use"] in about
    assert "free here" in about
    assert get.endswith(f": sirchat models pull {model['name']} --file {model['file']}")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_weights_take_what_is_said(settings: dict[str, Any]) -> None:
    model = load_model(str(tiny_model_dir()), device="cpu", **settings)
    said = fit(tiny_model_dir(), **settings).choices[0]
    assert said.weights == pytest.approx(held_bytes(model), rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_that_is_the_embedding_is_counted_once(tied: bool, tmp_path: Path) -> None:
    module = build("llama", {"tie_word_embeddings": tied})
    module.save_pretrained(tmp_path)
    said = fit(tmp_path).choices[0].weights
    assert said == 4 * sum(one.numel() for one in module.parameters())


def test_the_cache_and_the_archive_take_what_a_chat_allocates() -> None:
    model = tiny()
    cache = model.new_cache(1024)
    model.forward([1], cache)
    cache.commit(1)
    row = cache.first_written_rows(torch.arange(1), np.arange(1))
    said = fit(tiny_model_dir()).choices[0]
    assert said.cache == cache.nbytes
    assert said.archive == 10_000 * row.nbytes


def test_the_first_choice_is_what_the_settings_give_and_the_others_are_what_to_type() -> None:
    said = fit(tiny_model_dir()).choices
    assert [one.setting for one in said[:3]] == ["", "--dtype bfloat16", "--quantize int8"]
    assert said[0].precision == "float32"
    assert fit(tiny_model_dir(), quantize="int8").choices[0].precision == "int8"


def test_the_largest_budget_is_what_the_free_memory_has_room_for() -> None:
    whole = fit(tiny_model_dir()).choices[0]
    row = (whole.cache or 0) // 1024
    taken = PROGRAM_BYTES + whole.weights

    def largest(free: int | None) -> int | None:
        return fit(tiny_model_dir(), free).choices[0].largest_budget

    assert largest(taken + 1500 * row) == 1500
    assert largest(taken + 10**9) == 2048  # the model's context
    assert largest(taken) == 0
    assert largest(None) is None


def test_nothing_fits_where_loading_takes_more_than_is_free() -> None:
    """Weights are loaded whole before they are rounded to eight bits."""
    needed = PROGRAM_BYTES + fit(tiny_model_dir(), quantize="int8").choices[0].loading
    assert fit(tiny_model_dir(), needed, quantize="int8").choices[0].largest_budget == 2048
    assert fit(tiny_model_dir(), needed - 1, quantize="int8").choices[0].largest_budget == 0


def test_the_free_memory_of_a_gpu_is_not_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirchat.models.shape._has_accelerator", lambda: True)
    said = compute_fit(find_model("tiny"), Profile(device="auto"), 10**12)
    assert said.choices[0].precision == "bfloat16"
    assert {one.largest_budget for one in said.choices} == {None}
    settings = ["", "--dtype float32", "--quantize int8", "--quantize int4"]
    assert [one.setting for one in said.choices] == settings


def test_only_the_files_that_the_index_names_are_counted(tmp_path: Path) -> None:
    """Some repositories hold the same weights twice, such as in consolidated.safetensors."""
    whole = (tiny_model_dir() / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((tiny_model_dir() / "config.json").read_bytes())
    for name in ("model-1.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(whole)
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fit(tmp_path).choices[0].weights == fit(tiny_model_dir()).choices[0].weights


@pytest.mark.parametrize(
    "odd", [{"num_kv_shared_layers": 6}, {"num_attention_heads": 1000, "head_dim": None}]
)
def test_sizes_that_leave_a_cache_of_nothing_limit_no_budget(
    tmp_path: Path, odd: dict[str, object]
) -> None:
    folder = shutil.copytree(tiny_model_dir(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | odd), "utf-8")
    assert fit(folder, 2**40).choices[0].largest_budget is None


def test_sizes_that_a_config_does_not_state_are_unknown(tmp_path: Path) -> None:
    config = json.loads((tiny_model_dir() / "config.json").read_text())
    del config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_model_dir() / "model.safetensors")
    assert shape_of_folder(tmp_path).row_elements is None
    said = fit(tmp_path, 10**12).choices[0]
    assert said.weights == fit(tiny_model_dir()).choices[0].weights
    assert said.cache is None
    assert said.largest_budget is None


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


@pytest.mark.parametrize(
    "family", [*(name for name in (HELD if MANY else TELLING) if name not in ALL_HEADS), *MADE]
)
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
    config = json.loads((tiny_model_dir() / "config.json").read_text())
    outer = {"model_type": "seeing", "architectures": ["SeeingForConditionalGeneration"]}
    assert shape_of_folder(folder_with(tmp_path, {**outer, "text_config": config})) == (
        shape_of_folder(tiny_model_dir())
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
    config = json.loads((tiny_model_dir() / "config.json").read_text()) | changes
    assert shape_of_folder(folder_with(tmp_path, config)).context_length == context


NONSENSE: tuple[object, ...] = (None, True, -1, 0, 10**400, 1e308, "4", [], [4] * 9, {}, {"a": {}})


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", NONSENSE, ids=lambda one: str(one)[:20])
def test_sizes_without_sense_are_unknown_and_no_error(
    name: str, value: object, tmp_path: Path
) -> None:
    config = json.loads((tiny_model_dir() / "config.json").read_text()) | {name: value}
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


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_bounds_the_free_memory(version: int, tmp_path: Path) -> None:
    kind, limit, used = {
        1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("", "memory.max", "memory.current"),
    }[version]
    top = tmp_path / "sys/fs/cgroup" / kind

    def write(path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def limited(folder: Path, most: object) -> int | None:
        write(folder / limit, most)
        write(folder / used, 3 * GB)
        write(folder / "memory.stat", f"anon 5\ninactive_file {GB}\ntotal_inactive_file {GB}")
        return free_memory(tmp_path)

    assert free_memory(tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemTotal: 99 kB\nMemAvailable: 60000000 kB\nHugePages: 0")
    assert free_memory(tmp_path) == 60_000_000 * 1024
    write(tmp_path / "proc/self/cgroup", f"3:cpu:/\n{2 - version}:{kind}:/a/b")
    assert limited(top / "a" / "b", "max" if version == 2 else 2**63 - 4096) == 60_000_000 * 1024
    assert limited(top / "a", 10 * GB) == 8 * GB  # what is cached of files gives way
    assert limited(top, 4 * GB) == 2 * GB  # of a container, whatever the path of its group
    assert limited(top / "a" / "b", GB) == 0
