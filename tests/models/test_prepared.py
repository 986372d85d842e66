"""Prepared files: a later start maps what the first one made, to the last bit, or makes it again.

`SIRCHAT_ATTACK=300` damages as many files; without it, a few.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open

import gguf_models
from gguf_models import MODELS, add_settings, few_bits, random_model, wait_for_writer, write_model
from native_library import built_library
from plain_model import load_model
from sirchat.chat.model_defaults import with_model_defaults
from sirchat.config.profile import Profile
from sirchat.models import compiling, load
from sirchat.models.gguf import prepared
from sirchat.models.model import LoadedModel
from sirchat.models.packed import BlockLinear
from sirchat.paths import find_changeable_by_others, open_private, prepared_dir
from sirchat.saved.saved_state import model_fingerprint

MANY = int(os.environ.get("SIRCHAT_ATTACK", "0"))
IDS = list(range(3, 23))
CASES = ["llama3", "gpt-oss"]  # our module, and one of transformers with packed experts
PAGE = 4096


@pytest.fixture(autouse=True)
def _small_files_too(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MIN_GGUF_BYTES", 0)


def written(folder: Path, case: str = "llama3", seed: int = 0) -> Path:
    """A GGUF file with four-bit and eight-bit weights."""
    folder.mkdir(exist_ok=True)
    module = random_model(case)
    torch.manual_seed(seed)
    module.get_output_embeddings().weight.data += 0.1 * torch.randn(1)
    return write_model(folder / "model.gguf", module, case, few_bits)


def loaded(path: Path, **how: Any) -> LoadedModel:
    """Load a model, and wait for its prepared file."""
    model = load_model(str(path), device="cpu", quantize="packed", **how)
    wait_for_writer()
    return model


def logits(model: LoadedModel) -> torch.Tensor:
    return model.forward(IDS, model.new_cache(64))


def prepared_files() -> list[Path]:
    return list(prepared_dir().glob("*.safetensors"))


def the_file() -> Path:
    (file,) = prepared_dir().glob("*.safetensors")
    return file


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes each later load that reads the GGUF file fail."""

    def refuse(*_: object) -> None:
        raise AssertionError("the GGUF file was read")

    return lambda: monkeypatch.setattr(load, "parse_gguf", refuse)


@pytest.mark.parametrize("case", list(MODELS) if MANY else CASES)
def test_a_mapped_model_is_the_loaded_one_to_the_last_bit(
    case: str, tmp_path: Path, no_reading: Callable[[], None]
) -> None:
    path = written(tmp_path, case)
    first = loaded(path)
    no_reading()
    second = loaded(path)
    assert torch.equal(logits(first), logits(second))
    ours, wanted = second.module.state_dict(), first.module.state_dict()
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], one) for name, one in wanted.items())
    assert second.module.config.to_dict() == first.module.config.to_dict()
    text = "<|im_start|>user\nhello  world, naïve 東京 12345<|im_end|>\n"
    assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert second.tokenizer.chat_template == first.tokenizer.chat_template
    assert second.tokenizer.notices == first.tokenizer.notices
    with safe_open(the_file(), framework="pt") as file:
        assert set(file.keys()) == {"manifest", "weights"}


@pytest.mark.parametrize("case", CASES)
def test_a_file_says_how_replies_are_drawn_read_or_mapped(
    case: str, tmp_path: Path, no_reading: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_with_sampling(writer: gguf.GGUFWriter, *about: Any) -> None:
        add_settings(writer, *about)
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_penalty_last_n(64)

    monkeypatch.setattr(gguf_models, "add_settings", add_with_sampling)
    path = written(tmp_path, case)
    for read in (loaded, loaded):
        drawn = with_model_defaults(Profile(), read(path))
        assert (drawn.temperature, drawn.top_k, drawn.repetition_window) == (0.6, 20, 64)
        assert drawn.top_p == Profile().top_p
        no_reading()


def test_a_swapped_file_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path, other = written(tmp_path), written(tmp_path / "other", seed=1)
    before, about = logits(loaded(path)), path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size
    found = logits(loaded(path))
    assert not torch.equal(found, before)
    assert torch.equal(found, logits(loaded(other)))
    assert len(prepared_files()) == 2  # what was made of the former file is gone


Damage = Callable[[bytearray, random.Random], bytes]


def _flip(data: bytearray, draw: random.Random) -> bytes:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _cut(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.choice((0, 7, PAGE, len(data) - 1, draw.randrange(len(data))))])


def _longer(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data) + draw.randbytes(draw.choice((1, PAGE)))


DAMAGES: list[Damage] = [_flip, _cut, _longer]


def test_a_damaged_file_is_made_again_with_a_line(tmp_path: Path) -> None:
    path, draw = written(tmp_path), random.Random(5)
    wanted, whole = logits(loaded(path)), the_file().read_bytes()
    for at in range(MANY or len(DAMAGES)):
        the_file().chmod(0o600)
        the_file().write_bytes(DAMAGES[at % len(DAMAGES)](bytearray(whole), draw))
        model = loaded(path)
        assert [one for one in model.tokenizer.notices if "is made again" in one], at
        assert torch.equal(logits(model), wanted), at
        assert the_file().read_bytes() == whole, at


def test_a_foreign_file_is_not_used(tmp_path: Path) -> None:
    path, other = written(tmp_path), written(tmp_path / "other", seed=1)
    wanted = logits(loaded(path))
    own = the_file()
    loaded(other)
    (foreign,) = set(prepared_dir().glob("*.safetensors")) - {own}
    own.chmod(0o600)
    shutil.copyfile(foreign, own)
    assert torch.equal(logits(loaded(path)), wanted)
    own.chmod(0o666)
    model = loaded(path)
    assert any("is made again" in one for one in model.tokenizer.notices)
    assert own.stat().st_mode & 0o777 == 0o400  # also, a writer by mistake is refused


def test_a_folder_that_others_may_write_is_not_used_and_a_line_says_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    wanted, before = logits(loaded(path)), the_file().stat()
    prepared_dir().chmod(0o777)
    model = loaded(path)
    (notice,) = [one for one in model.tokenizer.notices if "is made again" in one]
    assert f"could have been changed by others ({prepared_dir()})" in notice
    assert torch.equal(logits(model), wanted)
    assert the_file().stat() == before  # nor is anything written there


@pytest.mark.parametrize(
    "changed", ["", "file", "folder", "linked file", "folder of the linked file"]
)
def test_what_others_may_change_is_found_behind_links_too(changed: str, tmp_path: Path) -> None:
    places = {
        "folder": tmp_path / "own",
        "folder of the linked file": tmp_path / "elsewhere",
        "file": tmp_path / "own" / "file",
        "linked file": tmp_path / "elsewhere" / "file",
    }
    for name, place in places.items():
        place.mkdir(mode=0o700) if "folder" in name else place.touch(mode=0o600)
    link = tmp_path / "own" / "link"
    link.symlink_to(places["linked file"])
    if changed:
        places[changed].chmod(0o720)
    wanted = {"": (None, None), "file": (places["file"], None), "linked file": (None, link)}
    wanted["folder"] = (places["folder"], places["folder"])
    wanted["folder of the linked file"] = (None, places["folder of the linked file"])
    found = find_changeable_by_others(places["file"]), find_changeable_by_others(link)
    assert found == wanted[changed]
    with pytest.raises(FileNotFoundError):
        find_changeable_by_others(tmp_path / "none")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file on a full disk")
@pytest.mark.parametrize("where", ["open_private", "make_private_dir"])
def test_a_full_or_read_only_disk_costs_only_time(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        if where == "open_private":
            return open("/dev/full", "wb")
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(prepared, where, fail)
    path = written(tmp_path)
    wanted = logits(loaded(path))
    assert torch.equal(logits(loaded(path)), wanted)
    assert not prepared_dir().exists() or not list(prepared_dir().iterdir())


def test_a_process_that_ends_stops_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that still writes while Python ends could abort the process."""
    writes, ends = threading.Event(), list[Callable[[], None]]()
    written_first, usual = threading.Event(), open_private

    class Slow:
        def __init__(self, path: Path, mode: str) -> None:
            self.file = usual(path, mode)

        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: Any) -> None:
            self.file.write(data)
            written_first.set()
            writes.wait(10)

    monkeypatch.setattr(prepared, "open_private", Slow)
    monkeypatch.setattr(prepared, "_END_SECONDS", 0.0)
    monkeypatch.setattr(atexit, "register", ends.append)
    path = written(tmp_path)
    load_model(str(path), device="cpu", quantize="packed")
    (writer,) = (one for one in threading.enumerate() if one.name == prepared.WRITER_THREAD)
    written_first.wait(10)
    assert len(list(prepared_dir().iterdir())) == 1
    threading.Timer(0.1, writes.set).start()
    (end,) = (one for one in ends if one.__module__ == prepared.__name__)
    end()
    assert not writer.is_alive()
    assert not list(prepared_dir().iterdir())


def test_the_longest_unused_go_first_and_what_a_killed_writer_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [written(tmp_path / name, seed=at) for at, name in enumerate("abc")]
    loaded(paths[0])
    size = the_file().stat().st_size
    monkeypatch.setattr(prepared, "_MAX_FOLDER_BYTES", 5 * size // 2)
    left = prepared_dir() / f"1234{prepared._UNFINISHED_SUFFIX}"
    left.write_bytes(b"half")
    loaded(paths[1])
    assert left.exists()  # another process may be writing it
    os.utime(left, (time.time() - 100,) * 2)
    for file in prepared_files():
        os.utime(file, (1 + (prepared.read_header(file).model == str(paths[1])),) * 2)
    loaded(paths[0])  # used again
    loaded(paths[2])
    assert {prepared.read_header(one).model for one in prepared_files()} == {
        str(paths[0]),
        str(paths[2]),
    }
    assert not left.exists()
    monkeypatch.setattr(prepared, "_MAX_FOLDER_BYTES", size // 2)
    loaded(paths[1])
    assert {prepared.read_header(one).model for one in prepared_files()} == {
        str(paths[0]),
        str(paths[2]),
    }


def test_a_file_is_known_again_in_whatever_layout_its_weights_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else chats from before the library was compiled could not go on with it."""
    path = written(tmp_path / "first")
    before = loaded(path)
    library = compiling.load_library(built_library())
    monkeypatch.setattr(load, "compile_in_background", lambda: None)
    monkeypatch.setattr(load, "wait_for_library", lambda: library)
    after = loaded(path, compile="auto")
    assert any(isinstance(layer, BlockLinear) for layer in after.module.modules())
    assert model_fingerprint(after) == model_fingerprint(before)
    other = loaded(written(tmp_path / "second", seed=1))
    assert model_fingerprint(other) != model_fingerprint(after)


HUB_PARTS = [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


def snapshot(folder: Path, seed: int) -> Path:
    """The first part of a file in three parts, each a link to a blob, as in the hub's cache."""
    made, links = folder / f"made-{seed}", folder / f"snapshot-{seed}"
    module = random_model("llama3")
    torch.manual_seed(seed)
    last = module.model.layers[-1].mlp.down_proj.weight.data  # in the last part
    last += 0.1 * torch.randn(1)
    made.mkdir()
    write_model(made / "model.gguf", module, "llama3", few_bits, tensors_of_part=9)
    links.mkdir()
    (folder / "blobs").mkdir(exist_ok=True)
    assert sorted(part.name for part in made.iterdir()) == HUB_PARTS
    for part in made.iterdir():
        blob = folder / "blobs" / hashlib.sha256(part.read_bytes()).hexdigest()
        part.rename(blob)
        (links / part.name).symlink_to(blob)
    return links / HUB_PARTS[0]


def test_all_parts_of_a_file_in_the_cache_of_the_hub_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_reading: Callable[[], None]
) -> None:
    first, second = (snapshot(tmp_path, seed) for seed in (0, 1))
    assert first.resolve() == second.resolve()  # the revisions differ in a later part
    monkeypatch.setattr(prepared, "MIN_GGUF_BYTES", first.stat().st_size + 1)
    models = [loaded(path) for path in (first, second)]
    assert not torch.equal(logits(models[0]), logits(models[1]))
    assert model_fingerprint(models[0]) != model_fingerprint(models[1])
    no_reading()
    assert torch.equal(logits(loaded(second)), logits(models[1]))


@pytest.mark.parametrize("becomes", ["nothing", "another file"])
def test_a_file_that_is_gone_since_it_was_loaded_is_known_again(
    becomes: str, tmp_path: Path
) -> None:
    path, other = written(tmp_path / "first"), written(tmp_path / "second", seed=1)
    model, wanted = loaded(path), model_fingerprint(loaded(path))
    path.unlink()
    if becomes == "another file":
        other.rename(path)
    assert model_fingerprint(model) == wanted
