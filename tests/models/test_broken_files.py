"""Files of a model that are not what they should be: one line says which, and what is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatting import tiny
from gguf_file import write_gguf
from gguf_models import random_model
from plain_model import load_model
from sirchat.errors import ModelError
from sirchat.models.listing import find_models
from sirchat.paths import tiny_model_dir
from sirchat.text.tokenizer import ControlTokens

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html><html><body>Not found</body></html>"
UP = "model.layers.1.mlp.up_proj.weight"
TEMPLATE = "{{ messages }}"

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy folder of a small random Llama whose head is not tied."""
    path = tmp_path_factory.mktemp("whole") / "model"
    random_model("llama", vocab_size=2048).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model_dir() / name, path)
    load_model(str(path), device="cpu")
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny(), "Q8_0").read_bytes()


def refused(path: Path, why: str) -> str:
    """The message with which a model is refused."""
    with pytest.raises(ModelError, match=why) as caught:
        load_model(str(path), device="cpu")
    assert "\n" not in str(caught.value)
    assert "install" not in caught.value.hint
    return str(caught.value)


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: one for key, one in weights.items() if key != name}


def with_another_layer(weights: Weights) -> Weights:
    last = {key: one.clone() for key, one in weights.items() if ".layers.1." in key}
    return weights | {key.replace(".1.", ".2."): one for key, one in last.items()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda weights: {f"x.{key}": one for key, one in weights.items()},
            r"lack weights .*: lm_head\.weight, .*, and 18 more \(they have x\.lm_head\.weight ",
        ),
        (without("lm_head.weight"), r"lack .*: lm_head\.weight \(.*tie_word_embeddings"),
        (without("model.embed_tokens.weight"), r"lack .*: model\.embed_tokens\.weight"),
        (without(UP), r"lack .*: model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            lambda weights: weights | {UP.replace("weight", "bias"): torch.zeros(96)},
            r"would be left out: model\.layers\.1\.mlp\.up_proj\.bias",
        ),
        (with_another_layer, r"would be left out: model\.layers\.2\..*, and 6 more"),
        (
            lambda weights: weights | {UP: torch.ones(90, 64)},
            r"of other shapes .*: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
    ],
)
def test_weights_that_the_model_lacks_or_would_leave_out_are_named(
    folder: Path, change: Callable[[Weights], Weights], why: str
) -> None:
    change_weights(folder, change)
    refused(folder, why)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.patch.weight"]
)
def test_what_is_computed_or_of_a_part_for_images_may_be_there(folder: Path, name: str) -> None:
    change_weights(folder, lambda weights: weights | {name: torch.ones(8)})
    load_model(str(folder), device="cpu")


def test_a_head_that_is_tied_need_not_be_there(folder: Path) -> None:
    change_weights(folder, without("lm_head.weight"))
    change_json(folder / "config.json", tie_word_embeddings=True)
    load_model(str(folder), device="cpu", for_hub=True)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors", POINTER, r"model\.safetensors is a Git LFS pointer.*git lfs pull"),
        ("model.safetensors", PAGE, "model.safetensors is a web page"),
        ("model.safetensors", b"", r"model\.safetensors can't be read: .*empty"),
        ("model.safetensors", bytes(5000), r"nothing but zeros .*the download is incomplete"),
        ("model.safetensors", b"PK\3\4" + bytes(200), r"is a pickle or a zip archive"),
        ("model.safetensors", b"GGUF" + bytes(200), r"is a GGUF file"),
        ("model.safetensors", b"\x80\x01", r"incomplete|is a pickle"),
        ("model.safetensors", b"\xff" * 7 + b"\0{", r"no safetensors file, or incomplete"),
        *(
            ("model.safetensors", struct.pack("<Q", len(header)) + header, r"safetensors can't be")
            for header in (
                *(b"[]", b"{", b'{"a": 3}', b'{"a": {"shape": "4", "dtype": "F32"}}'),
                *(
                    b'{"a": {"shape": [%b], "dtype": %b}}' % odd
                    for odd in ((b"-1", b'"F32"'), (b"99999999999999", b'"F32"'), (b"4", b"[]"))
                ),
                *(
                    b'{"a": {"shape": [%b], "dtype": "F32", "data_offsets": [0, 4]}}' % odd
                    for odd in (b"1e999", b"-1", b"9999999999")
                ),
            )
        ),
        ("config.json", b"{", r"config\.json can't be read: JSONDecodeError"),
        ("generation_config.json", b'{"temperature": 0', r"generation_config\.json can't be read"),
        ("tokenizer.json", b"{", r"the tokenizer of .* is no valid JSON"),
        ("adapter_config.json", b"{}", r"has a LoRA adapter \(adapter_config\.json\)"),
        (
            "chat_template.jinja",
            b"{{ x }}\n{% for m in y %}{{ m }",
            "is broken: line 2: unexpected",
        ),
        ("chat_template.jinja", b"{% if x %}", "template .* is broken: line 1: .*endif"),
    ],
)
def test_a_file_of_another_kind_or_with_an_error_is_named(
    folder: Path, name: str, content: bytes, why: str
) -> None:
    (folder / name).write_bytes(content)
    refused(folder, why)
    if name in ("model.safetensors", "config.json"):
        problems = {one.path: one.problem for one in find_models([folder.parent])}
        assert problems[folder].startswith("cannot be used: ")


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
NO_IDS: tuple[object, ...] = ("", [[]], 1.5)


@pytest.mark.parametrize(
    ("name", "key", "value", "why"),
    [
        ("config", "num_attention_heads", 0, "has num_attention_heads 0; its config.json must"),
        ("config", "rms_norm_eps", "x", 'has rms_norm_eps "x"; its config.json must have a number'),
        ("config", "rms_norm_eps", 1.0, "has rms_norm_eps 1.0; .* above 0, from 0 to 0.5"),
        *(
            ("config", "rope_parameters", ROPE | {key: no}, f"has {key} {json.dumps(no)}; ")
            for key, no in (
                ("rope_theta", 0.5),
                ("low_freq_factor", float("nan")),
                ("original_max_position_embeddings", 0),
                ("attention_factor", -1.0),
            )
        ),
        (
            *("config", "rope_parameters", {"rope_type": "new", "rope_theta": 1.0}),
            "'new' is missing or unknown",
        ),
        *(
            # before memory is taken for them
            ("config", key, 10**9, rf"config\.json says {key}: 1,000,000,000; the files have")
            for key in ("num_hidden_layers", "vocab_size", "head_dim")
        ),
        *(
            ("generation_config", "eos_token_id", ends, "eos_token_id: .*; it must be an id")
            for ends in NO_IDS
        ),
    ],
)
def test_a_setting_that_can_not_be_is_named_with_the_reason(
    folder: Path, name: str, key: str, value: object, why: str
) -> None:
    change_json(folder / f"{name}.json", **{key: value})
    refused(folder, why)


def test_weights_in_a_format_that_is_not_read_are_refused(folder: Path) -> None:
    packed = UP.replace(".weight", ".qweight")
    whole = (folder / "config.json").read_text()
    change_weights(folder, lambda weights: without(UP)(weights) | {packed: torch.ones(96, 8)})
    for method in ("gptq", "bitsandbytes", "exl2", None):
        quantization = {"quant_method": method, "bits": 4, "load_in_4bit": True}
        change_json(folder / "config.json", quantization_config=quantization)
        with pytest.raises(ModelError, match=r"cannot be loaded|lack weights that"):
            load_model(str(folder), device="cpu")
    (folder / "config.json").write_text(whole)
    change_weights(folder, lambda weights: without(packed)(weights) | {UP: torch.ones(96, 8)})
    change_json(folder / "config.json", quantization={"group_size": 64, "bits": 4})  # as MLX does
    refused(folder, r"of other shapes .*: model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_token_that_the_model_lacks_is_an_error_of_this_text(folder: Path) -> None:
    model = load_model(str(folder), device="cpu")
    with pytest.raises(ModelError, match="has no token 999999, which its tokenizer gives"):
        model.read([1, 999_999], model.new_cache(2))


def test_a_tokenizer_that_never_ends_is_an_error_of_this_text(folder: Path) -> None:
    endless = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    change_json(folder / "tokenizer.json", pre_tokenizer=endless | {"invert": False})
    control = ControlTokens(load_model(str(folder), device="cpu").tokenizer)
    assert control.text_ids("hello")
    with pytest.raises(ModelError, match="can't read this text: Onig"):
        control.text_ids("a" * 40 + "b")


@pytest.mark.parametrize(("kept", "why"), [(-1000, "bytes, by its header"), (60, "incomplete")])
def test_weights_that_are_cut_off_are_refused(folder: Path, kept: int, why: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "download is incomplete" in refused(folder, why) or kept > 0


@pytest.mark.parametrize("part", [0.9, 0.5, 0.02])
def test_weights_whose_end_is_zeros_are_refused_and_listed_so(folder: Path, part: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = int(part * len(data))
    path.write_bytes(data[:-end] + bytes(end))
    refused(folder, "has only zeros at its end .the download is incomplete")
    (problem,) = (one.problem for one in find_models([folder]) if one.source == "folder")
    assert problem == "cannot be used: model.safetensors has only zeros at its end"


def test_rows_of_padding_and_norms_may_be_zeros(folder: Path) -> None:
    def change(weights: Weights) -> Weights:
        last = max(weights, key=lambda name: name if weights[name].ndim > 1 else "")
        weights[last][-1] = 0
        return weights | {"model.norm.weight": torch.zeros(64)}

    change_weights(folder, change)
    load_model(str(folder), device="cpu")


def test_parts_that_the_index_or_their_names_tell_of_are_missed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    refused(folder, r"only some of its weights; missing: model-00002-of-00002\.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    refused(folder, r"only some of its weights; missing: other\.safetensors")


def test_pickles_and_nothing_at_all_are_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"has no weights but pytorch_model\.bin, which could run code")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, r"has no weights \(weights must be \.safetensors files\)")


def test_an_adapter_alone_is_none(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    refused(folder, "LoRA adapter .*give a folder with the merged model")


def test_several_templates_need_a_default_one(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    refused(folder, r"chat templates \(rag, tool_use\), but none named default")
    named[0]["name"] = "default"
    change_json(folder / "tokenizer_config.json", chat_template=named)
    load_model(str(folder), device="cpu")


def with_pair(data: bytes, key: bytes, value: bytes) -> bytes:
    """A file with one more pair in its header; the value has its type before it."""
    pair = struct.pack("<Q", len(key)) + key + value
    count = struct.unpack_from("<Q", data, 16)[0]
    return data[:16] + struct.pack("<Q", count + 1) + pair + data[24:]


def zeros_from(part: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(part * len(data))].ljust(len(data), b"\0")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: POINTER, "is a Git LFS pointer, not the file itself"),
        (lambda data: PAGE, "is a web page"),
        (lambda data: bytes(4096), "nothing but zeros at its beginning"),
        (lambda data: struct.pack("<Q", 90) + b'{"a": 1}', "is a safetensors file"),
        (lambda data: b"tjgg" + data[4:], "of the time before GGUF"),
        (lambda data: data[:4] + data[7:3:-1] + data[8:], "for big-endian machines"),
        (lambda data: b"", "can't be read"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "its version is 9"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "ends before"),
        (lambda data: data[:200], "ends before|unpack"),
        (lambda data: data[: len(data) // 2], "fewer than its tensors need"),
        (zeros_from(0.5), "has only zeros at its end"),
        (zeros_from(0.97), "has only zeros at its end"),
        (
            # another alignment than the one with which the tensors were written
            lambda data: with_pair(data, b"general.alignment", struct.pack("<II", 4, 1024)),
            "does not follow the one before it|fewer than its",
        ),
        (
            lambda data: with_pair(data, b"general.type", struct.pack("<IQ", 8, 7) + b"adapter"),
            "is a LoRA adapter, not a model",
        ),
        (
            lambda data: data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
            "two tensors of the same name",
        ),
        (lambda data: data.replace(b"llama.vocab_size", b"llama.block_count"[:16]), "llama"),
        (
            lambda data: data.replace(b"general.architecture", b"tokenizer.ggml.model"),
            "it has tokenizer.ggml.model twice",
        ),
        (lambda data: data.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gpt-j"), "'?gpt-j"),
    ],
)
def test_a_gguf_file_that_is_none_or_not_whole_is_refused(
    gguf_file: bytes, tmp_path: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    (tmp_path / "model.gguf").write_bytes(change(gguf_file))
    refused(tmp_path / "model.gguf", why)
