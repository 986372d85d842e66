"""Mutated model files: opened, or refused in one line, without growth of memory."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

from attacking import attack, mutated
from chatting import babbler, random_model, save_babbler
from gguf_file import write_gguf
from plain_model import load_model
from random_encoders import random_encoder
from sirchat.errors import ModelError
from sirchat.models.encoder import Encoder
from sirchat.models.listing import find_model, find_models
from sirchat.models.shape import shape_of_gguf
from sirchat.paths import tiny_model_dir

_ODD_NUMBERS = [0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 13, 24]


@pytest.fixture(autouse=True)
def _no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_models` looks at the damaged one alone."""
    monkeypatch.setattr("sirchat.models.listing.BUNDLED", ())
    monkeypatch.setattr("sirchat.models.listing.PACKAGED", ())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy GGUF file, small so that a damaged copy is soon written."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", babbler())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy model folder."""
    return save_babbler(tmp_path_factory.mktemp("models") / "model")


def odd_header(random: Random, data: bytes) -> bytes:
    """A file whose header is damaged; its tensors rarely are."""
    length = random.choice((24, 2000, 40_000))
    head = mutated(random, data[:length])
    if random.random() < 0.5:
        at, number = random.randrange(0, length), random.choice(_ODD_NUMBERS)
        head = head[:at] + struct.pack("<Q", number) + head[at + 8 :]
    return (head + data[length:])[
        : random.choice((len(data), len(data), length, random.randrange(len(data))))
    ]


def test_every_gguf_file_is_listed_and_loaded_or_refused_in_one_line(
    tmp_path: Path, whole: Path
) -> None:
    data, path = whole.read_bytes(), tmp_path / "odd.gguf"

    def read(random: Random) -> None:
        path.write_bytes(odd_header(random, data))
        find_models([tmp_path])
        with suppress(ModelError):
            shape_of_gguf(path)
        try:
            load_model(str(path), device="cpu")
        except ModelError as error:
            if "pip install" in str(error):  # what is there already
                raise ValueError(str(error)) from error
            raise

    attack(read)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_a_library_quotes_of_a_file_makes_no_long_message(
    tmp_path: Path, folder: Path
) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    change_json(folder / "tokenizer.json", padding="a" * 5000)
    with pytest.raises(ModelError, match="cannot be loaded: invalid type") as caught:
        load_model(str(folder), device="cpu")
    assert len(str(caught.value)) == 1000


# By a size in a config.json: values that make no sense.
NO_LENGTHS: list[object] = [-1, 0.5, 1e12, 10**12, 10**30, float("inf"), float("nan"), "64", True]
NO_COUNTS: list[object] = [0, *NO_LENGTHS]
SIZES = ("max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads")
NONSENSE: dict[str, list[object]] = {
    **dict.fromkeys((*SIZES, "num_key_value_heads", "head_dim", "vocab_size"), NO_COUNTS),
    "sliding_window": NO_LENGTHS,
}


def test_a_size_without_sense_is_named_at_loading_and_where_models_are_listed(
    tmp_path: Path, folder: Path
) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    change_json(folder / "config.json", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    whole = (folder / "config.json").read_text()

    def refuse(key: str, value: object) -> None:
        config = json.loads(whole)
        config[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        (listed,) = find_models([folder])
        refusals = [listed.problem]
        for act in (find_model, load_model):
            with pytest.raises(ModelError) as caught:
                act(str(folder))
            refusals.append(str(caught.value))
        for one in refusals:
            assert key in one, (value, refusals)
            assert "cannot be loaded" not in one, (value, refusals)

    for key, values in NONSENSE.items():
        refuse(key, values[0])

    def draw(random: Random) -> None:
        key = random.choice(list(NONSENSE))
        refuse(key, random.choice(NONSENSE[key]))

    attack(draw, few=20)


# By a key of a GGUF file's header: values that make no sense.
ODD_HEADER: dict[str, list[object]] = {
    "llama.context_length": [0, 2**40],
    "llama.rope.freq_base": [0.0, -1.0, float("nan"), float("inf"), "x"],
    "llama.attention.layer_norm_rms_epsilon": [0.0, 7.0, float("nan"), "x"],
    "llama.attention.head_count": [0, 7, 2**40, "x", [1, 2]],
    "llama.attention.head_count_kv": [0, 3, 2**40, -1],
    "llama.block_count": [0, 2**40, 1.5],
    "tokenizer.chat_template": [7, 0.5, [1]],
    "tokenizer.ggml.tokens": [7, float("nan"), "x", [1]],
    "tokenizer.ggml.merges": [7, "x", [1.0]],
    "tokenizer.ggml.token_type": [7, [1.5]],
    "tokenizer.ggml.pre": [7, [1]],
    "tokenizer.ggml.eos_token_id": ["x", 0.0, [1]],
}


def of_type(value: object) -> bytes:
    """A value of a GGUF header, its type before it."""
    if isinstance(value, list):
        kind, *parts = of_type(value[0])[:4], *(of_type(one)[4:] for one in value)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(parts)) + b"".join(parts)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    return (
        struct.pack("<Iq", 11, value) if isinstance(value, int) else struct.pack("<Id", 12, value)
    )


def test_nonsense_in_the_header_of_a_gguf_file_is_named_at_loading_and_in_the_list(
    tmp_path: Path, whole: Path
) -> None:
    data, path = whole.read_bytes(), tmp_path / "odd.gguf"
    names = [key for key in ODD_HEADER if key.encode() in data]
    assert names == list(ODD_HEADER)

    def refuse(key: str, value: object) -> None:
        name = struct.pack("<Q", len(key)) + key.encode()
        # The usual one gets another name, which nothing reads; tensors stay aligned by a text.
        other = name[:8] + b"general." + b"x" * (len(key) - 8)
        added = name + of_type(value) + struct.pack("<Q", 11) + b"general.pad"
        added += of_type("x" * (-(len(added) + 12) % 32))
        count = struct.pack("<Q", data[16] + 2)
        path.write_bytes(data[:16] + count + added + data[24:].replace(name, other, 1))
        for act in (find_model, load_model):
            with pytest.raises(ModelError) as caught:
                act(str(path))
            assert key in str(caught.value), (value, caught.value)
        assert key in find_models([tmp_path])[0].problem

    for key, values in ODD_HEADER.items():
        refuse(key, values[0])

    def draw(random: Random) -> None:
        key = random.choice(names)
        refuse(key, random.choice(ODD_HEADER[key]))

    attack(draw, few=20)


def test_a_damaged_sentence_encoder_is_refused_or_the_same(tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    random_encoder(babbler(), (1,)).save(path)
    data, good = path.read_bytes(), Encoder.load(path)

    def load(random: Random) -> None:
        path.write_bytes(mutated(random, data))
        found = Encoder.load(path)
        if found.checksum != good.checksum or not torch.equal(found.hidden, good.hidden):
            raise ValueError("other numbers")

    attack(load, few=20)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir(), tmp_path / "model")
    random_model(100).save_pretrained(folder)
    with pytest.raises(ModelError, match="the model has 100 "):
        load_model(str(folder), device="cpu")
