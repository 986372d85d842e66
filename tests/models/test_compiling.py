"""The library is compiled while a model loads, kept safely, and used by the next start."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sirchat
from chatting import tiny
from gguf_file import write_gguf
from native_library import built_library, has_library
from plain_model import load_model
from sirchat.config.profile import Profile
from sirchat.errors import ModelError
from sirchat.models import compiling, shape
from sirchat.models.compiling import (
    describe_decode_step,
    ensure_library,
    library_name,
    max_native_rows,
    use_compiled,
)
from sirchat.models.load import load_model_of
from sirchat.models.model import LoadedModel
from sirchat.models.native_step import NativeStep
from sirchat.models.packed import matmul_method_of
from sirchat.paths import compiled_dir

pytestmark = has_library


@pytest.fixture(scope="module")
def library() -> Path:
    return built_library()


def compile_by(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Make a script the C++ compiler, which gets where to write as $out; returns its log."""
    compiler, log = folder / "compiler", folder / "log"
    text = f"#!/bin/sh\necho x >> {log}\nfor out; do :; done\n{script}\n"
    compiler.write_text(text, encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log


@pytest.fixture
def copying(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any, library: Path
) -> Path:
    """A compiler that copies the library; its log has a line for each time."""
    code = tmp_path_factory.mktemp("code") / "code"
    code.write_bytes(library.read_bytes()[:-32])  # less the digest, which is appended
    return compile_by(monkeypatch, own_home, f'cp {code} "$out"')


def lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def small() -> LoadedModel:
    return load_model("tiny", device="cpu")


def test_the_first_start_compiles_it_and_the_first_reply_and_later_starts_have_it(
    copying: Path,
) -> None:
    profile = Profile(model="tiny", device="cpu", compile="off")
    assert (load_model_of(profile).decode_step, lines(copying)) == (None, 0)
    profile = Profile(model="tiny", device="cpu", compile="auto")
    for load in (
        partial(load_model_of, profile),
        partial(sirchat.load_model, "tiny", device="cpu"),
    ):
        model = load()
        assert isinstance(model.decode_step, NativeStep)
        assert describe_decode_step(model) == "yes"
        assert lines(copying) == 1
    (made,) = compiled_dir().iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
    assert compiled_dir().stat().st_mode & 0o777 == 0o700


def test_packed_weights_are_multiplied_by_it(copying: Path) -> None:
    for how in ("off", "auto"):
        model = load_model("tiny", quantize="int4", device="cpu")
        use_compiled(model, how)
        method = matmul_method_of(model.module)
        assert method is not None
        assert method.max_native_rows == (max_native_rows() if how == "auto" else 0)


def test_several_threads_and_processes_compile_it_once(copying: Path) -> None:
    threads = [threading.Thread(target=ensure_library) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert lines(copying) == 1
    assert ensure_library() == ""


def test_auto_does_not_wait_for_ever_for_a_slow_compiler(
    copying: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_AUTO_TIMEOUT", 0.1)
    go = own_home / "go"
    compiler = Path(os.environ["CXX"])
    text = compiler.read_text().replace("\n", f"\nuntil [ -e {go} ]; do sleep 0.05; done\n", 1)
    compiler.write_text(text, encoding="utf-8")
    slow = threading.Thread(target=ensure_library)
    slow.start()
    try:
        while not list(compiled_dir().glob("making-*")):
            time.sleep(0.01)
        model = small()
        use_compiled(model, "auto")
        assert model.decode_step is None
    finally:
        go.touch()
        slow.join()
    use_compiled(model, "auto")
    assert isinstance(model.decode_step, NativeStep)


def test_a_start_that_packs_and_decodes_by_it_checks_it_once(
    copying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = list[None](), compiling._compare_with_torch
    monkeypatch.setattr(compiling, "_compare_with_torch", lambda one: checked.append(check(one)))
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), "Q4_1")
    model = load_model(str(path), device="cpu", compile="auto")
    assert isinstance(model.decode_step, NativeStep)
    assert len(checked) == 1


def test_a_damaged_library_is_made_again(copying: Path) -> None:
    assert ensure_library() == ""
    (path,) = compiled_dir().iterdir()
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:4000] + b"x" + content[4001:], b""):
        path.unlink()
        path.write_bytes(damaged)
        path.chmod(0o600)
        model = small()
        use_compiled(model, "on")
        assert isinstance(model.decode_step, NativeStep)
        assert path.read_bytes() == content
    assert lines(copying) == 4


def test_a_damaged_library_that_can_not_be_deleted_is_not_used(
    copying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    assert ensure_library() == ""
    (path,) = compiled_dir().iterdir()
    path.write_bytes(b"")
    model = small()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        use_compiled(model, "auto")
    assert model.decode_step is None


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_what_others_could_have_written_is_not_loaded_and_doctor_says_so(
    copying: Path, whose: str
) -> None:
    assert ensure_library() == ""
    (path,) = compiled_dir().iterdir()
    changed, mode = (path, 0o600) if whose == "file" else (path.parent, 0o700)
    changed.chmod(mode | 0o020)
    model = small()
    try:
        use_compiled(model, "auto")
        assert model.decode_step is None
        assert "could have been changed by others" in describe_decode_step(model)
        with pytest.raises(ModelError, match=r"--compile on: .*changed by others"):
            use_compiled(model, "on")
    finally:
        changed.chmod(mode)


def test_what_can_not_be_compiled_is_tried_once_a_day_and_auto_goes_on_without(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "step.cpp:1: error: no such thing" >&2; exit 1'
    log = compile_by(monkeypatch, own_home, script)
    model = small()
    for _ in range(2):
        use_compiled(model, "auto")
        said = describe_decode_step(model)
        assert "no: compiling fails: step.cpp:1: error: no such thing (delete " in said
    assert lines(log) == 1
    with pytest.raises(ModelError, match="--compile on: compiling fails"):
        use_compiled(model, "on")
    (failed,) = compiled_dir().iterdir()
    assert failed.suffix == ".failed"
    os.utime(failed, (time.time() - 25 * 3600,) * 2)
    assert "no such thing" in ensure_library()
    assert lines(log) == 2


def test_a_compiler_that_was_killed_is_tried_again(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compile_by(monkeypatch, own_home, 'echo half > "$out"; kill -INT $$')  # as by Ctrl-C
    for count in (1, 2):
        assert "the compiler was killed" in ensure_library()
        assert lines(log) == count
    assert not list(compiled_dir().iterdir())


def test_without_a_compiler_auto_goes_on_and_on_says_so(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = small()
    use_compiled(model, "auto")
    assert model.decode_step is None
    assert describe_decode_step(model).startswith("no: there is no C++ compiler")
    with pytest.raises(ModelError, match="--compile on: there is no C"):
        use_compiled(model, "on")


def test_the_first_compiler_that_is_there_is_used(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(own_home))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shape, "find_spec", lambda name: None)
    assert shape.compiler() == []
    monkeypatch.setattr(shape, "find_spec", lambda name: name)
    assert shape.compiler() == [sys.executable, "-m", "ziglang", "c++"]
    for name in ("clang++", "g++", "other"):
        (own_home / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (own_home / name).chmod(0o755)
        if name == "other":
            monkeypatch.setenv("CXX", name)
        assert shape.compiler() == [str(own_home / name)]
    monkeypatch.setenv("CXX", "g++ -m64")
    assert shape.compiler() == [str(own_home / "g++"), "-m64"]


def test_a_library_with_wrong_products_is_not_tried_again(
    copying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_MAX_PRODUCT_ERROR", 0.0)
    model = small()
    use_compiled(model, "auto")
    assert model.decode_step is None
    assert "err by" in describe_decode_step(model)
    assert lines(copying) == 1


def test_what_killed_processes_left_is_deleted_and_old_libraries(copying: Path) -> None:
    old, young = compiled_dir() / "making-old", compiled_dir() / "making-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    for age in range(12):  # libraries of other compilers
        (compiled_dir() / f"step-{age:02}.so").touch()
        os.utime(compiled_dir() / f"step-{age:02}.so", (time.time() - age,) * 2)
    assert ensure_library() == ""
    newest = {f"step-{age:02}.so" for age in range(7)}
    left = {path.name for path in compiled_dir().iterdir()}
    assert left == {"making-young", library_name(), *newest}
