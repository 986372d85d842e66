"""GGUF files: headers are read or refused in one line, blocks as ggml defines them.

A file in several parts is one model, by the name of any part; of one with images, the text counts.
The parts are written by ggml's own package. Keys and names for images are those of Ollama's files.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi

pytest.importorskip("gguf")

import gguf

import gguf_models
from chatting import tiny
from gguf_file import write_first_layers, write_gguf
from gguf_models import (
    HALVES,
    add_settings,
    few_bits,
    floats_only,
    random_blocks,
    random_model,
    wait_for_writer,
    write_model,
)
from plain_model import load_model
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models import hub
from sirchat.models.fit import compute_fit
from sirchat.models.gguf import prepared
from sirchat.models.gguf.blocks import split_four_bit, unpack_floats
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, GgufTensor, parse_gguf
from sirchat.models.gguf.translate import refuse_unsupported
from sirchat.models.listing import find_model, find_models
from sirchat.models.names import locate


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, written as GGUF in float32."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_unpacked_as_by_ggmls_own_package(kind: str) -> None:
    tensor = random_blocks(kind, 6, np.random.default_rng(0))
    number = gguf.constants.GGMLQuantizationType(BLOCKS[kind][0])
    wanted = gguf.quants.dequantize(tensor.blocks, number).reshape(6, 512)
    assert np.array_equal(unpack_floats(tensor).numpy(), wanted)


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_four_bit_blocks_are_taken_apart_without_loss(kind: str) -> None:
    tensor = random_blocks(kind, 6, np.random.default_rng(0))
    taken = split_four_bit(tensor)
    q, scale, minimum = taken.q, taken.scale, taken.minimum
    assert (q.dtype, int(q.max())) == (torch.uint8, 15)
    again = q.view(6, 16, 32) * scale[..., None] + minimum[..., None]
    assert torch.equal(again.view(6, 512), unpack_floats(tensor))


def test_metadata_and_tensors_are_those_that_ggmls_own_package_reads(file: Path) -> None:
    ours, theirs = parse_gguf(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        assert ours.tensors[one.name].shape == tuple(map(int, one.shape[::-1]))
        assert np.array_equal(
            ours.tensors[one.name].data, np.asarray(one.data).view(np.uint8).ravel()
        )


@pytest.mark.parametrize(("number", "name"), [(40, "NVFP4"), (42, "Q2_0"), (99, "type 99")])
def test_weights_of_a_later_type_are_refused_by_its_name(
    file: Path, tmp_path: Path, number: int, name: str
) -> None:
    data, tensor = bytearray(file.read_bytes()), b"output_norm.weight"
    at = data.index(tensor) + len(tensor)
    dimensions = int.from_bytes(data[at : at + 4], "little")
    place = at + 4 + 8 * dimensions
    data[place : place + 4] = number.to_bytes(4, "little")
    changed = tmp_path / "later.gguf"
    changed.write_bytes(data)
    with pytest.raises(ModelError, match=name):
        load_model(str(changed), device="cpu")


def test_a_tensor_that_is_not_understood_is_named(file: Path) -> None:
    read = parse_gguf(file)
    refuse_unsupported(read)
    odd = GgufTensor((4,), "type 99", np.zeros(0, np.uint8))
    for name, tensor in (
        ("rope_freqs.weight", read.tensors["output_norm.weight"]),
        ("output.weight", odd),
        ("blk.0.attn_q.input_scale", read.tensors["output_norm.weight"]),
    ):
        with pytest.raises(ModelError, match=name):
            refuse_unsupported(type(read)(read.metadata, dict(read.tensors) | {name: tensor}))


@pytest.mark.real
@pytest.mark.slow
def test_the_real_file_gives_the_model_that_transformers_makes_of_it(
    tmp_path: Path,
) -> None:
    """Two layers are compared; all layers of the file have tensors of the same types."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packaged, file = locate("smollm2")
    whole = Path(packaged) / file
    types = defaultdict[str, set[str]](set)
    for key, tensor in parse_gguf(whole, with_text_lists=False).tensors.items():
        types[re.sub(r"^blk\.\d+", "blk", key)].add(tensor.type)
    assert {len(found) for found in types.values()} == {1}
    path = write_first_layers(tmp_path / "two.gguf", whole, 2)
    write_first_layers(tmp_path / "weights.gguf", whole, 2, has_lists=False)  # they take seconds
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="weights.gguf", dtype=torch.float32
    )
    ours = load_model(str(path), dtype="float32", device="cpu")
    wanted = theirs.state_dict()
    assert len(ours.module.model.layers) == 2
    assert wanted.keys() == ours.module.state_dict().keys()
    assert all(torch.equal(one, wanted[key]) for key, one in ours.module.state_dict().items())
    assert torch.equal(theirs.model.rotary_emb.inv_freq, ours.module.model.rotary_emb.inv_freq)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = "<|im_start|>user\nIt's Anna's 12th, naïve 東京!<|im_end|>\n"
    assert tokenizer.get_vocab() == ours.tokenizer.backend_tokenizer.get_vocab()
    assert tokenizer.encode(text) == ours.tokenizer.encode(text)
    assert tokenizer.chat_template == ours.tokenizer.chat_template
    assert tokenizer.special_tokens_map == ours.tokenizer.special_tokens_map


# Files in several parts, or with a part for images


PARTS = [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The folder with a model in three parts, and with the same one as a whole."""
    module = random_model("qwen3")
    write_model(tmp_path / "model.gguf", module, "qwen3", floats_only, tensors_of_part=10)
    write_model(tmp_path / "whole.gguf", module, "qwen3", floats_only)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*PARTS, "whole.gguf"]
    return tmp_path


def test_the_parts_have_the_logits_of_the_whole(parts: Path) -> None:
    whole = load_model(str(parts / "whole.gguf"), device="cpu")
    wanted = whole.forward([3, 5, 7], whole.new_cache(3))
    for name in PARTS:
        assert locate(str(parts / name)) == (str(parts), PARTS[0])
        model = load_model(str(parts / name), device="cpu")
        assert torch.equal(model.forward([3, 5, 7], model.new_cache(3)), wanted)
        assert parse_gguf(parts / name).metadata == parse_gguf(parts / PARTS[0]).metadata


def test_they_are_one_model_in_lists_and_take_what_the_whole_takes(parts: Path) -> None:
    first, whole = (str(parts / name) for name in (PARTS[0], "whole.gguf"))
    found = {one.name: one for one in find_models([parts]) if one.source == "folder"}
    assert list(found) == [first, whole]
    assert not found[first].problem
    assert found[first].size == sum((parts / name).stat().st_size for name in PARTS)
    assert find_model(str(parts / PARTS[2])).size == found[first].size
    fits = [compute_fit(found[name], Profile(device="cpu"), 10**9) for name in (first, whole)]
    assert fits[0].weights == fits[1].weights
    assert fits[0].choices == fits[1].choices


def test_parts_that_are_missing_are_named(parts: Path) -> None:
    (parts / PARTS[1]).unlink()
    with pytest.raises(ModelError, match=f"one of 3 parts; missing: {PARTS[1]}$"):
        load_model(str(parts / PARTS[2]), device="cpu")
    (parts / PARTS[0]).unlink()
    for name in (PARTS[0], PARTS[2]):
        with pytest.raises(ModelError, match=PARTS[0]):
            load_model(str(parts / name), device="cpu")
    (listed,) = (one for one in find_models([parts]) if "-of-0" in one.name)
    assert listed.problem.endswith(f"is one of 3 parts; missing: {PARTS[0]}, {PARTS[1]}")


def test_parts_of_other_models_or_under_other_names_are_refused(parts: Path) -> None:
    other = parts / "other"
    other.mkdir()
    module = random_model("qwen3", num_hidden_layers=3)
    write_model(other / "model.gguf", module, "qwen3", floats_only, tensors_of_part=13)
    (other / PARTS[2]).replace(parts / PARTS[2])
    with pytest.raises(ModelError, match="one of 3 parts, but not of those files"):
        load_model(str(parts / PARTS[0]), device="cpu")
    (parts / PARTS[0]).rename(parts / "renamed.gguf")
    with pytest.raises(ModelError, match=r"one of 3 parts, .*must be named NAME-00001-of-00003"):
        load_model(str(parts / "renamed.gguf"), device="cpu")


def test_a_whole_file_may_have_the_name_of_a_part(parts: Path) -> None:
    os.replace(parts / "whole.gguf", parts / "a-00001-of-00001.gguf")
    load_model(str(parts / "a-00001-of-00001.gguf"), device="cpu")


def pulled(monkeypatch: pytest.MonkeyPatch, files: list[str], wanted: str | None) -> list[str]:
    """The name of what is pulled from a repository with these files, and the files."""
    fetched = []
    siblings = [SimpleNamespace(rfilename=name, size=1) for name in files]
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(hub, "_fetch", lambda _, path, *__: fetched.append(path))
    return [hub.pull("me/it", wanted, lambda *_: None).name, *fetched]


def test_all_parts_are_pulled_by_the_name_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*(f"a/{name}" for name in PARTS), "b.gguf", *PARTS[:2]]
    wanted = [f"a/{name}" for name in PARTS]
    assert pulled(monkeypatch, files, f"a/{PARTS[1]}") == [f"me/it/a/{PARTS[0]}", *wanted]
    assert pulled(monkeypatch, files, "b.gguf") == ["me/it/b.gguf", "b.gguf"]
    with pytest.raises(ModelError, match=f"lacks parts of '{PARTS[0]}': {PARTS[2]}"):
        pulled(monkeypatch, files, PARTS[0])
    with pytest.raises(ModelError, match=rf"--file: a/{PARTS[0]}, b\.gguf, {PARTS[0]}\)$"):
        pulled(monkeypatch, files, None)


def test_an_adapter_is_not_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="'me/it' is a LoRA adapter"):
        pulled(monkeypatch, ["adapter_config.json", "adapter_model.safetensors"], None)


IMAGES: dict[str, dict[str, Any]] = {
    "qwen35": {
        "vision.block_count": 2,
        "vision.image_mean": [0.5],
        "vision.rope.freq_base": 1e4,
        "image_token_id": 7,
        "vision_start_token_id": 8,
        "ssm.v_head_reordered": True,
        "mrope_sections": [2, 1, 1],
        "rope.mrope_section": [2, 1, 1],
        "rope.mrope_interleaved": True,
    },
    "gemma3": {
        "vision.block_count": 2,
        "vision.image_size": 896,
        "mm.tokens_per_image": 256,
        "rope.local.freq_base": 1e4,
    },
    "gemma4": {"vision.block_count": 2, "audio.block_count": 2},
}
OF_IMAGES = ("v.blk.0.attn_q.weight", "mm.0.weight", "a.blk.0.ffn_up.weight")


def with_images(writer: Any, architecture: str, more: dict[str, Any]) -> None:
    """Add keys of these values, and tensors larger than the text model has."""
    for key, value in more.items():
        kinds = [(bool, writer.add_bool), (int, writer.add_uint32), (float, writer.add_float32)]
        add = next((one for kind, one in kinds if type(value) is kind), writer.add_array)
        add(f"{architecture}.{key}", value)
    for name in OF_IMAGES:
        writer.add_tensor(name, np.ones((512, 2048), np.float16))


@pytest.mark.slow
@pytest.mark.parametrize("case", IMAGES)
def test_of_a_file_with_a_part_for_images_the_text_model_is_read_and_fits(
    case: str, tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "MIN_GGUF_BYTES", 0)
    module = random_model(case)
    text = write_model(tmp_path / "text.gguf", module, case, few_bits)

    def add_more(writer: Any, about: Any, architecture: str) -> None:
        add_settings(writer, about, architecture)
        with_images(writer, architecture, IMAGES[case])

    monkeypatch.setattr(gguf_models, "add_settings", add_more)
    both = write_model(tmp_path / "both.gguf", module, case, few_bits)
    assert both.stat().st_size > text.stat().st_size + 6_000_000
    alone = load_model(str(text), device="cpu", quantize="packed")
    wanted = alone.forward([3, 5, 7], alone.new_cache(3))
    for _ in range(2):  # the second time from what was prepared of it
        model = load_model(str(both), device="cpu", quantize="packed")
        assert torch.equal(model.forward([3, 5, 7], model.new_cache(3)), wanted)
        (notice,) = set(model.tokenizer.notices) - set(alone.tokenizer.notices)
        assert "part for images is not read" in notice
        wait_for_writer()
    fits = [
        compute_fit(find_model(str(path)), Profile(device="cpu"), 10**9) for path in (text, both)
    ]
    assert fits[0].weights == fits[1].weights
    assert fits[0].choices == fits[1].choices
    assert fits[0].found.shape == fits[1].found.shape


@pytest.mark.parametrize("more", [{}, {"vision.block_count": 2, "ssm.v_head_reordered": False}])
def test_what_is_not_said_to_be_for_images_is_refused(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_more(writer: Any, about: Any, architecture: str) -> None:
        add_settings(writer, about, architecture)
        with_images(writer, architecture, more)

    monkeypatch.setattr(gguf_models, "add_settings", add_more)
    path = write_model(tmp_path / "odd.gguf", random_model("qwen35"), "qwen35", floats_only)
    with pytest.raises(ModelError, match="v_head_reordered is false" if more else OF_IMAGES[0]):
        load_model(str(path), device="cpu")
    with pytest.raises(ModelError, match="cannot be used"):
        find_model(str(path))
