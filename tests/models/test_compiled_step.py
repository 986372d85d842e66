"""The compiled decode step: the same logits for any cache, from a program that is made once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch._dynamo.utils import counters

from chatting import hub_tokenizer
from engine_steps import some_ids
from families import build, loaded
from gguf_models import random_model, write_model
from made_once import made_once
from random_encoders import random_encoder
from recall_rounds import memory, say
from sirchat.engine.engine import Engine
from sirchat.engine.generation import Generation
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import CacheSettings, EvictedRows, GeneratedToken, TurnRef
from sirchat.errors import ModelError
from sirchat.memory.policies import policy_class
from sirchat.models import compiled_step, compiling
from sirchat.models.compile_worker import TEMPORARY, is_temporary
from sirchat.models.compiled_step import (
    CompiledStep,
    compile_graph,
    pickle_without_weights,
    program_name,
)
from sirchat.models.decode_step import DecodeStep
from sirchat.models.encoder import Encoder
from sirchat.models.load import load_model
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.readout import Readings
from sirchat.paths import compiled_dir, private_dir
from warm_python import warm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not compiling.has_compiler(), reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIRCHAT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else torch tries each for 8 seconds
        patch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # speed is not compared
        yield


def small(**options: Any) -> LoadedModel:
    model = wrap_model("small", build("llama", {"num_hidden_layers": 2, **options}), None)
    return replace(model, encoder=random_encoder(model, (1, 2)))


def step_of(model: LoadedModel) -> DecodeStep:
    assert isinstance(model.decode_step, DecodeStep)
    return model.decode_step


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = small()
    path = private_dir(compiled_dir()) / program_name(step_of(model).graph)
    made_once(tmp_path_factory, path, lambda path: compiling.use_compiled(small(), "on"))
    compiling.use_compiled(model, "on")
    return model


@pytest.fixture
def program(compiled: LoadedModel) -> Iterator[Path]:
    """The file of the compiled program, which is as before after the test."""
    path = compiled_dir() / program_name(step_of(compiled).graph)
    content = path.read_bytes()
    yield path
    path.with_suffix(".failed").unlink(missing_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.unlink(missing_ok=True)  # it may be loaded
        path.write_bytes(content)
        path.chmod(0o600)


def test_it_finds_the_same_logits_states_and_rows_whatever_the_cache_holds(
    compiled: LoadedModel,
) -> None:
    eager = small()
    for capacity, held in ((3, 2), (40, 5), (300, 299), (1000, 64)):
        caches = [model.new_cache(capacity) for model in (compiled, eager)]
        logits, numbers = [], list[Any]()
        for model, cache in zip((compiled, eager), caches, strict=True):
            readings = Readings(encodes=True)
            model.read(some_ids(held), cache)
            cache.commit(held)
            logits.append(model.forward([7], cache, readings=readings))
            numbers.append(readings.numbers)
            cache.commit(1)
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)
        for view in ("layer_keys", "layer_values"):
            torch.testing.assert_close(*(getattr(cache, view)(0) for cache in caches))


def test_a_program_serves_every_model_of_that_shape_and_no_other(compiled: LoadedModel) -> None:
    other = small()
    with torch.no_grad():
        for weight in other.module.parameters():
            weight.mul_(1.5)
    compiling.use_compiled(other, "auto")
    step = step_of(other)
    assert step.compiled is not None
    cache = other.new_cache(20)
    other.read(some_ids(9), cache)
    cache.commit(9)
    found = other.forward([7], cache)
    step.compiled = None
    torch.testing.assert_close(found, other.forward([7], cache), rtol=1e-5, atol=1e-5)
    deeper = small(num_hidden_layers=3)
    without_states = replace(small(), encoder=Encoder())
    for one in (deeper, without_states):
        assert program_name(step_of(one).graph) != program_name(step.graph)


def test_nothing_is_compiled_in_a_session_of_evictions_switches_recall_and_undo(
    compiled: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = CompiledStep.__call__

    def counted(self: CompiledStep, *inputs: Any) -> Any:
        calls.append(1)
        return run(self, *inputs)

    def conversation(model: LoadedModel) -> list[Any]:
        settings = CacheSettings(policy_class("entropy")(), budget=64, archive=2**20)
        engine, events = Engine(model, settings), list[Any]()
        sampler = Sampler(Sampling(temperature=1.0))
        for turn in range(12):
            if turn == 3:
                engine.evictor.switch(
                    CacheSettings(policy_class("sink")(), budget=48, archive=2**20)
                )
            if turn == 6:
                engine.evictor.switch(memory("salience"))
            point = engine.checkpoint()
            for again in range(2 if turn == 9 else 1):
                if again:
                    engine.undo(point)
                say(engine, model, turn)
                for record in Generation(
                    engine, sampler, TurnRef(turn, turn), stop_ids=frozenset(), max_new_tokens=40
                ):
                    if isinstance(record, GeneratedToken):
                        events.append(record.id)
                    elif isinstance(record, EvictedRows):
                        events.append(record.positions.tolist())
        return events

    wanted = conversation(small())
    monkeypatch.setattr(CompiledStep, "__call__", counted)
    counters.clear()
    assert conversation(compiled) == wanted
    assert sum(isinstance(event, list) for event in wanted) >= 30
    assert len(calls) == 13 * 40
    assert not counters


def test_a_damaged_program_is_deleted_and_made_again(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = program.read_bytes()
    made: list[Path] = []

    monkeypatch.setattr(compiling, "_begin_compiling", lambda missing: made.extend(missing.paths))
    for damaged in (content[: len(content) // 2], content[:4000] + b"x" + content[4001:], b""):
        program.unlink()
        program.write_bytes(damaged)
        program.chmod(0o600)
        model = small()
        compiling.use_compiled(model, "auto")
        assert (step_of(model).compiled, program.exists()) == (None, False)
        thread = compiling.compile_in_background(model)
        assert thread is not None
        thread.join(60)
        assert made.pop() == program
        program.touch()


def test_a_program_that_cant_be_loaded_now_is_kept_for_the_next_start(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as where memory is short, or its folder is mounted without the right to run programs."""

    def no_room(*_: object) -> None:
        raise OSError("failed to map segment from shared object")

    model = small()
    with monkeypatch.context() as patch:
        patch.setattr(torch._C._aoti, "AOTIModelContainerRunnerCpu", no_room)
        compiling.use_compiled(model, "auto")
        assert step_of(model).compiled is None
        assert compiling.compile_in_background(model) is None
        assert "failed to map segment" in compiling.compiled_in_words(model)
        with pytest.raises(ModelError, match=r"--compile on: .*failed to map segment"):
            compiling.use_compiled(model, "on")
    assert program.exists()
    assert not program.with_suffix(".failed").exists()
    compiling.use_compiled(model, "auto")
    assert step_of(model).compiled is not None


def test_a_program_that_computes_other_logits_is_not_tried_again(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    monkeypatch.setattr(compiled_step, "_TOLERANCE", 0.0)
    compiling.use_compiled(model, "auto")
    assert not program.exists()
    assert compiling.compile_in_background(model) is None
    assert "differ by" in compiling.compiled_in_words(model)


@pytest.mark.parametrize("ending", [f"exit {TEMPORARY}", "kill -9 $$"])
def test_a_full_disk_or_a_killed_compiler_is_no_reason_not_to_try_again(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    worker = tmp_path / "python"
    worker.write_text(f"#!/bin/sh\necho No space left >&2\n{ending}\n", encoding="utf-8")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    model = small()
    with pytest.raises(ModelError, match="--compile on: compiling fails: No space left"):
        compiling.use_compiled(model, "on")
    assert not list(compiled_dir().iterdir())
    assert compiling.compiled_in_words(model) == "not yet"


def test_a_program_that_crashes_while_it_is_loaded_ends_no_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from sirchat.models import compile_worker, compiled_step\n"
        "compiled_step.compile_graph = lambda pickled, path: path.touch()\n"
        "compiled_step.load_program = lambda path: os.kill(os.getpid(), signal.SIGILL)\n"
        "compile_worker.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))\n"
    )
    worker = tmp_path / "python"
    worker.write_text(f'#!/bin/sh\nshift 3\nexec {shlex.join([sys.executable, "-c", code])} "$@"\n')
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    model = small()
    with pytest.raises(ModelError, match="--compile on: compiling fails: the process crashed"):
        compiling.use_compiled(model, "on")
    assert "the process crashed" in compiling.compiled_in_words(model)
    assert compiling.compile_in_background(model) is None  # it would crash again
    assert [path.suffix for path in compiled_dir().iterdir()] == [".failed"]


def test_a_lack_of_memory_is_temporary_and_a_fault_of_the_program_is_not() -> None:
    killed = "g++: fatal error: Killed signal terminated program cc1plus"
    assert all(map(is_temporary, (MemoryError(), OSError(30, "Read-only"), RuntimeError(killed))))
    assert not is_temporary(RuntimeError("x.cpp:3:1: error: 'tmp9' was not declared"))
    included = "In file included from /usr/include/c++/12/memory:66: error: 'tmp9' was not declared"
    assert not is_temporary(RuntimeError(included))


def test_what_a_killed_process_left_is_deleted_at_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    old, young = compiled_dir() / "making-old", compiled_dir() / "making-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
    (compiled_dir() / "former.pt2").touch()
    os.utime(old, (time.time() - 7200,) * 2)
    compiling.use_compiled(small(), "auto")
    assert list(compiled_dir().iterdir()) == [young]


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_a_program_that_others_could_have_written_is_not_loaded_and_doctor_says_so(
    program: Path, whose: str
) -> None:
    changed, mode = (program, 0o600) if whose == "file" else (program.parent, 0o700)
    changed.chmod(mode | 0o020)
    model = small()
    try:
        compiling.use_compiled(model, "auto")
        assert step_of(model).compiled is None
        assert "could have been changed by others" in compiling.compiled_in_words(model)
    finally:
        changed.chmod(mode)


def test_a_chat_has_it_made_in_the_background(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    model = small()
    compiling.use_compiled(model, "auto")
    assert step_of(model).compiled is None

    monkeypatch.setattr(sys, "executable", copying_worker(tmp_path, program))
    thread = compiling.compile_in_background(model)
    assert thread is not None
    thread.join(60)
    assert step_of(model).compiled is not None
    assert compiling.compiled_in_words(model) == "yes"
    assert list(program.parent.iterdir()) == [program]
    modes = [path.stat().st_mode & 0o777 for path in (program, program.parent)]
    assert modes == [0o600, 0o700]
    assert compiling.compile_in_background(model) is None


def copying_worker(folder: Path, program: Path, before: str = "") -> str:
    """A program that takes the arguments of the compiling process, and copies what was compiled."""
    path, to = folder / "python", '"$(dirname "$path")"'
    copied = f'cp {shlex.quote(str(program))} "$path.new"; mv "$path.new" "$path"'
    path.write_text(
        f"#!/bin/sh\n{before}\nfor path; do :; done; umask 077; mkdir -p {to}; {copied}"
    )
    path.chmod(0o755)
    return str(path)


def test_what_one_question_lacks_is_compiled_by_a_process_that_outlives_it(
    program: Path, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": len(hub_tokenizer())}
    build("llama", sizes).save_pretrained(tmp_path)
    hub_tokenizer().save_pretrained(tmp_path)
    waits = f"while [ ! -e {shlex.quote(str(tmp_path / 'go'))} ]; do sleep 0.05; done"
    worker = copying_worker(tmp_path, program, before=waits)
    code = f"import sys; sys.executable = {worker!r}; from sirchat.cli import main; main()"
    asked = ["ask", "Hello", "--model", str(tmp_path), "--server", "off", "--max-new-tokens", "2"]
    environ = {**os.environ, "SIRCHAT_HOME": str(tmp_path), "SIRCHAT_COMPILE": "auto"}
    done = subprocess.run(
        [*warm_python(), "-c", code, *asked], env=environ, capture_output=True, check=True
    )
    assert done.stdout.strip()
    assert not list(tmp_path.glob("state/compiled/*.so"))
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 120  # it gives way to all others
    while not list(tmp_path.glob("state/compiled/*.so")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_process_at_a_time_compiles_and_each_file_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from sirchat.models import background, compile_later, compiling
def compile(path, pickled, niceness):
    for what in ("begins", "ends"):
        with open("log", "a") as log:
            print(path.name, len(pickled), niceness, what, file=log)
        time.sleep(0.5)
    return ""
compiling._compile = compile
background.lower_priority = lambda niceness: None  # the test would wait for all others
compile_later.main([Path(name) for name in sys.argv[1:]])
"""
    environ = {**os.environ, "SIRCHAT_HOME": str(tmp_path)}
    environ["PYTHONPATH"] = str(Path(compiling.__file__).parents[2])
    processes = list[subprocess.Popen[bytes]]()
    for files in (["a", "b"], ["b"], ["c"], ["c"]):
        process = subprocess.Popen(
            [*warm_python(), "-c", code, *files], env=environ, cwd=tmp_path, stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(b"graph")
        process.stdin.close()
        processes.append(process)
        time.sleep(0.2)
    assert [process.wait(60) for process in processes] == [0] * 4
    told = (tmp_path / "log").read_text().splitlines()
    each = ["a 0 19", "b 5 19", "c 5 19"]
    assert told == [f"{one} {what}" for one in each for what in ("begins", "ends")]


def test_what_makes_it_in_the_background_gives_way_to_a_chat_in_another_session() -> None:
    code = "from sirchat.models.background import lower_priority; lower_priority(19); import os; "
    code += "print(os.nice(0), open('/proc/self/autogroup').read())"
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("the system has no priorities of sessions")
    done = subprocess.run(
        [*warm_python(), "-c", code], start_new_session=True, capture_output=True, text=True
    )
    nice, *group = done.stdout.split()
    assert (nice, group[-2:]) == ("19", ["nice", "19"])


# A worker whose compiler writes files until it is killed, or that crashes.
_BUSY_WORKER = """
import os, signal, subprocess, sys, types
from pathlib import Path
from sirchat.models import compile_worker
def compile_graph(pickled, path):
    if pickled == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    work = "while :; do : > busy-$((n += 1)); [ $n = 1000 ] && echo begun; done"
    subprocess.run(["sh", "-c", work], cwd=path.parent)
module = types.SimpleNamespace(compile_graph=compile_graph, load_program=None)
sys.modules["sirchat.models.compiled_step"] = module
compile_worker.main(Path(sys.argv[1]), 0, os.getppid())
"""


@pytest.mark.parametrize("ending", ["signal", "end of the parent", "crash"])
def test_however_compiling_ends_no_file_is_left_and_no_compiler(
    ending: str, tmp_path: Path
) -> None:
    shell = '"$@" <&3 3<&- & echo $!; exec 3<&-; wait'  # which is the parent
    worker = [sys.executable, "-c", _BUSY_WORKER, str(tmp_path / "program")]
    pickled, graph = os.pipe()
    os.write(graph, ending.encode())
    os.close(graph)
    parent = subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; {shell}", "sh", *worker],
        stdin=pickled,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(pickled)
    assert parent.stdout is not None
    number = int(parent.stdout.readline())
    if ending != "crash":
        assert parent.stdout.readline() == b"begun\n"
        os.kill(number if ending == "signal" else parent.pid, signal.SIGTERM)
    assert parent.stdout.read() == b""  # all processes have ended
    assert not list(tmp_path.iterdir())
    parent.wait()


def test_without_a_compiler_auto_leaves_it_and_on_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = small()
    assert compiling.compile_in_background(model) is None
    with pytest.raises(ModelError, match="C\\+\\+ compiler"):
        compiling.use_compiled(model, "on")


def test_a_model_without_a_short_step_can_not_be_compiled() -> None:
    model = loaded("phi")
    compiling.use_compiled(model, "auto")
    with pytest.raises(ModelError, match="can't compile model"):
        compiling.use_compiled(model, "on")


def test_compiling_takes_no_memory_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch copies the buffers of what it compiles; the packed weights of an 8B model are 5 GB."""
    taken: list[Any] = []

    def compile_nothing(program: Any, *, package_path: str, **_: Any) -> None:
        taken.append(program)
        with ZipFile(package_path, "w") as package:
            package.writestr("program.so", b"")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile_nothing)
    graph = step_of(small()).graph
    compile_graph(pickle_without_weights(graph), tmp_path / "program.so")
    assert list(taken[0].buffers()) == []
    assert {name for name, _ in taken[0].named_parameters()} == {
        f"step.{name}" for name in graph.state_dict()
    }


def test_a_program_of_gemma_sees_the_rows_of_its_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as torch exports it: to compile it takes half a minute."""
    taken: list[Any] = []

    def keep(program: Any, *, package_path: str, **_: Any) -> None:
        taken.append(program.module())
        with ZipFile(package_path, "w") as package:
            package.writestr("program.so", b"")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", keep)
    path = tmp_path / "model.gguf"
    write_model(path, random_model("gemma3-long"), "gemma3-long", lambda *_: "F32")
    model = load_model(str(path), device="cpu", quantize="none")
    graph = step_of(model).graph
    compile_graph(pickle_without_weights(graph), tmp_path / "program.so")
    taken[0].load_state_dict({f"step.{name}": one for name, one in graph.state_dict().items()})

    class Program:
        def run(self, inputs: list[Any]) -> Any:
            layers = len(graph.layers)
            return taken[0](*inputs[:4], inputs[4 : 4 + layers], inputs[4 + layers :])

    compiled = CompiledStep.__new__(CompiledStep)
    compiled._program = Program()
    for held in (2, 7, 8, 9, 40):  # the window has 8
        cache = model.new_cache(50)
        model.read(some_ids(held), cache)
        cache.commit(held)
        step_of(model).compiled = None
        wanted = model.forward([7], cache)
        step_of(model).compiled = compiled
        torch.testing.assert_close(model.forward([7], cache), wanted, rtol=1e-5, atol=1e-5)


def test_a_program_is_found_again_however_busy_the_machine_is() -> None:
    graph, before, names = torch.nn.Linear(4, 4), torch.get_num_threads(), set[str]()
    try:
        for threads in (1, 2, 3):  # of which there are fewer where other jobs run
            torch.set_num_threads(threads)
            names.add(program_name(graph))
    finally:
        torch.set_num_threads(before)
    assert len(names) == 1


def test_ctrl_c_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "SIRCHAT_HOME": str(tmp_path)}
    sizes = {"num_hidden_layers": 1, "vocab_size": len(hub_tokenizer())}
    build("llama", sizes).save_pretrained(tmp_path)
    hub_tokenizer().save_pretrained(tmp_path)
    command = [*warm_python(), "-m", "sirchat", "ask", "Hello", "--compile", "on"]
    command += ["--model", str(tmp_path)]
    asking = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)
    folder = tmp_path / "state" / "compiled"
    end = time.monotonic() + 60
    while not list(folder.glob("making-*/*")) and time.monotonic() < end:
        time.sleep(0.05)
    asking.send_signal(signal.SIGINT)
    assert asking.stderr is not None
    said = asking.stderr.read().decode()
    assert (asking.wait(20), "Traceback" in said) == (130, False)
    assert not list(folder.iterdir())
