"""The compiled decode step: the same logits for any cache, from a program that is made once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from engine_steps import some_ids
from families import build, loaded
from recall_rounds import memory, say
from scorers import random_scorer
from sirchat.engine.engine import Engine
from sirchat.engine.records import CacheSettings, EvictedRows, GeneratedToken, TurnRef
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.errors import ModelError
from sirchat.memory.policies import policy_class
from sirchat.models import compiling
from sirchat.models.compiled_step import CompiledStep, program_name, without_weights
from sirchat.models.compiled_step import build as build_program
from sirchat.models.decode_step import DecodeStep
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.models.scorer import Scorer
from sirchat.paths import compiled_dir
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
    return replace(model, scorer=random_scorer(model, (1, 2)))


def step_of(model: LoadedModel) -> DecodeStep:
    assert model.decode_step is not None
    return model.decode_step


@pytest.fixture(scope="module")
def compiled() -> LoadedModel:
    model = small()
    compiling.use_compiled(model, "on")
    return model


def test_it_finds_the_same_logits_scores_and_rows_whatever_the_cache_holds(
    compiled: LoadedModel,
) -> None:
    eager = small()
    for capacity, held in ((3, 2), (40, 5), (300, 299), (1000, 64)):
        caches = [model.new_cache(capacity) for model in (compiled, eager)]
        logits, scores = [], [list[float](), list[float]()]
        for model, cache, learned in zip((compiled, eager), caches, scores, strict=True):
            model.read(some_ids(held), cache)
            cache.commit(held)
            logits.append(model.forward([7], cache, scores=learned))
            cache.commit(1)
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
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
    unscored = replace(small(), scorer=Scorer())
    for one in (deeper, unscored):
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
        for turn in range(40):
            if turn == 10:
                engine.contents.switch(
                    CacheSettings(policy_class("sink")(), budget=48, archive=2**20)
                )
            if turn == 20:
                engine.contents.switch(memory("salience"))
            point = engine.checkpoint()
            for again in range(2 if turn == 30 else 1):
                if again:
                    engine.undo(point)
                say(engine, model, turn)
                for record in engine.generate(
                    sampler, TurnRef(turn, turn), stop_ids=frozenset(), max_new_tokens=40
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
    assert sum(isinstance(event, list) for event in wanted) >= 100
    assert len(calls) == 41 * 40
    assert not counters


def test_a_damaged_program_is_not_used_and_noted() -> None:
    model, step = small(), step_of(small())
    path = compiled_dir() / program_name(step.graph)
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: len(whole) // 2])
        compiling.use_compiled(model, "auto")
        assert step_of(model).compiled is None
        assert compiling.compile_in_background(model) is None  # not tried at every start
        assert compiling.compiled_in_words(model).startswith("no: ")
    finally:
        path.with_suffix(".failed").unlink()
        path.write_bytes(whole)
        path.chmod(0o600)


def test_a_program_that_others_could_have_written_is_not_loaded(compiled: LoadedModel) -> None:
    path = compiled_dir() / program_name(step_of(compiled).graph)
    path.chmod(0o620)
    model = small()
    try:
        compiling.use_compiled(model, "auto")
        assert step_of(model).compiled is None
    finally:
        path.chmod(0o600)


def test_files_are_private_and_nothing_else_is_left(compiled: LoadedModel) -> None:
    path = compiled_dir() / program_name(step_of(compiled).graph)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_chat_has_it_made_in_the_background(
    compiled: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = compiled_dir() / program_name(step_of(compiled).graph)
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    model = small()
    compiling.use_compiled(model, "auto")
    assert step_of(model).compiled is None

    def make(step: DecodeStep, path: Path, niceness: int) -> str:
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_bytes(made.read_bytes())
        os.chmod(path, 0o600)
        return ""

    monkeypatch.setattr(compiling, "_make", make)
    thread = compiling.compile_in_background(model)
    assert thread is not None
    thread.join(60)
    assert step_of(model).compiled is not None
    assert compiling.compiled_in_words(model) == "yes"
    assert compiling.compile_in_background(model) is None


def test_what_makes_it_in_the_background_gives_way_to_a_chat_in_another_session() -> None:
    code = "from sirchat.models.compile_worker import give_way; give_way(19); import os; "
    code += "print(os.nice(0), open('/proc/self/autogroup').read())"
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("the system has no priorities of sessions")
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True
    )
    nice, *group = done.stdout.split()
    assert (nice, group[-2:]) == ("19", ["nice", "19"])


def test_ctrl_c_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "SIRCHAT_HOME": str(tmp_path)}
    command = [*warm_python(), "-m", "sirchat", "ask", "Hello", "--compile", "on"]
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
    monkeypatch.setattr(
        "torch._inductor.aoti_compile_and_package", lambda one, **_: taken.append(one)
    )
    graph = step_of(small()).graph
    build_program(without_weights(graph), tmp_path / "program.pt2")
    assert list(taken[0].buffers()) == []
    assert {name for name, _ in taken[0].named_parameters()} == {
        f"step.{name}" for name in graph.state_dict()
    }


def test_a_program_is_found_again_however_busy_the_machine_is() -> None:
    graph, before, names = torch.nn.Linear(4, 4), torch.get_num_threads(), set[str]()
    try:
        for threads in (1, 2, 3):  # of which there are fewer where other jobs run
            torch.set_num_threads(threads)
            names.add(program_name(graph))
    finally:
        torch.set_num_threads(before)
    assert len(names) == 1
