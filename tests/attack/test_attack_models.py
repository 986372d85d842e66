"""Mutated model files: opened, or refused in one line, without growth of memory."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from attacking import attack, mutated, odd_text
from chatting import babbler, random_model, save_babbler
from gguf_file import write_gguf
from sirchat.errors import ModelError
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.listing import find_models
from sirchat.models.load import load_model
from sirchat.models.shape import shape_of_folder, shape_of_gguf
from sirchat.paths import tiny_dir

_OTHER_FILES = ["tokenizer_config.json", "generation_config.json"]
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


def without_bad_advice(path: Path) -> None:
    """Load a model; ValueError if that ends in the advice to install what is installed."""
    try:
        load_model(str(path), device="cpu")
    except ModelError as error:
        if "pip install" in str(error):
            raise ValueError(str(error)) from error
        raise


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


@pytest.mark.slow
def test_every_gguf_header_is_read_or_refused_in_one_line(tmp_path: Path, whole: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "odd.gguf"

    def read(random: Random) -> None:
        path.write_bytes(odd_header(random, data))
        find_models([tmp_path])
        parse_gguf(path)
        shape_of_gguf(path)

    attack(read)


@pytest.mark.slow
def test_every_gguf_file_is_loaded_or_refused_in_one_line(tmp_path: Path, whole: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "odd.gguf"

    def load(random: Random) -> None:
        path.write_bytes(odd_header(random, data))
        without_bad_advice(path)

    attack(load)


@pytest.mark.slow
def test_every_model_folder_is_loaded_or_refused_in_one_line(folder: Path) -> None:
    def load(random: Random) -> None:
        name = random.choice(["config.json", "model.safetensors", "tokenizer.json", *_OTHER_FILES])
        path = folder / name
        whole = data = path.read_bytes()
        if name == "model.safetensors":
            length = 8 + struct.unpack("<Q", data[:8])[0]
            data = mutated(random, data[:length]) + data[length:]
            data = data[: random.choice((len(data), len(data) // 2))]
        elif random.random() < 0.5:
            data = mutated(random, data)
        else:
            data = json.dumps(odd_config(random, json.loads(data))).encode()
        path.write_bytes(data)
        try:
            find_models([folder.parent])
            with suppress(ModelError):
                shape_of_folder(folder)
            without_bad_advice(folder)
        finally:
            path.write_bytes(whole)

    attack(load)


def odd_config(random: Random, config: dict[str, object]) -> dict[str, object]:
    """The same with one value replaced."""
    odd: list[object] = [None, True, 0, -1, 1.5, 7, 1e308, [], {}, "x", odd_text(random, 1), [[]]]
    config[random.choice(list(config))] = random.choice(odd)
    return config


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


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_dir(), tmp_path / "model")
    random_model(100).save_pretrained(folder)
    with pytest.raises(ModelError, match="the model has 100 "):
        load_model(str(folder), device="cpu")
