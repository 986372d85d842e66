"""`sirchat bench gpu`, on a CPU: its rows at tiny sizes, its limits of time, and its output."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from chatting import tiny
from command import run
from native_library import read_in_native_code
from sirchat.lab.bench import gpu, gpu_rows
from sirchat.lab.bench.gpu import RowWorker, measure
from sirchat.lab.bench.gpu_rows import ROWS, Bench, Row
from sirchat.lab.bench.gpu_value import Value
from sirchat.memory.cache import BoundedCache
from sirchat.models.hidden_states import concat_states, record_states
from sirchat.models.model import LoadedModel
from sirchat.models.probe import cache_argument


class Body:
    """What a captured step runs."""

    def __init__(self, module: Any, kernels: str, wanted: Any) -> None:
        if kernels == "triton":
            raise RuntimeError("no [compiler]\nat line 1")
        self.module, self.wanted_layers = module, wanted


class StandIn:
    """A step of the CPU that has what the rows ask of a captured one."""

    capture_seconds = 0.5

    def __init__(self, body: Body, device: torch.device, *, captures: bool, encoder: Any) -> None:
        self.body, self.captures = body, captures

    def fits(self, ids: Sequence[int], cache: BoundedCache) -> bool:
        return len(ids) == 1

    @torch.inference_mode()
    def read(self, token_id: int, position: int, cache: BoundedCache) -> tuple[Tensor, Tensor]:
        module = self.body.module
        how = {"position_ids": torch.tensor([[position]]), **cache_argument(module, cache)}
        cache.begin_pass()
        with record_states(module, self.body.wanted_layers) as states:
            out = module(input_ids=torch.tensor([[token_id]]), use_cache=True, **how)
        logits = out.logits[0].float()
        return (-logits if self.captures else logits), (
            concat_states(states) if states else torch.empty(1, 0)
        )

    def read_together(self, tokens: Sequence[Any]) -> tuple[Tensor, Tensor]:
        logits, states = zip(*(self.read(*token) for token in tokens), strict=True)
        return torch.cat(logits), torch.cat(states)


@pytest.fixture(autouse=True)
def native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models have a decode step, as those of a GPU do."""

    def with_step(make: Callable[..., LoadedModel], *args: Any, **how: Any) -> LoadedModel:
        model = make(*args, **how)
        with suppress(ValueError):  # of weights in the layout of a GPU
            read_in_native_code(model)
        return model

    for name in ("random_model", "load_model"):
        monkeypatch.setattr(gpu_rows, name, partial(with_step, getattr(gpu_rows, name)))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, part in {"captured_step.CapturedStep": StandIn, "llama_step.LlamaStep": Body}.items():
        module = ModuleType(f"sirchat.models.{name.partition('.')[0]}")
        setattr(module, name.partition(".")[2], part)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cpu")


def measured(bench: Bench, row: str) -> dict[str, Value]:
    """The values of a row, by name."""
    return {value.name: value for value in bench.measure(row)}


KINDS = {name.partition(" ")[2] or name: name for name in ROWS}


@pytest.mark.parametrize(
    "row", [KINDS[kind] for kind in KINDS if kind not in ("exactness", "steps")]
)
def test_each_row_measures(bench: Bench, row: str) -> None:
    found = measured(bench, row)
    assert all(value.value is not None for value in found.values()), found
    assert len(found) >= 2


def test_each_way_to_decode_is_measured_and_the_usual_one_stays(
    bench: Bench, stand_in: None
) -> None:
    model = bench.model("8b")
    usual = model.decode_step
    found = measured(bench, "8b steps")
    assert model.decode_step is usual is not None
    assert found["captured: capture"].value == 0.5
    assert all(found[f"{way}: a token"].value for way in ("transformers", "own step", "captured"))
    assert found["captured, Triton"][1:4] == (None, "", "failed: RuntimeError: no [compiler]")


def test_a_step_that_computes_something_else_is_not_exact(
    bench: Bench, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_rows, "load_model", lambda name, **how: tiny())
    found = measured(bench, "exactness")
    assert found["greedy ids as own step"].value == 16
    assert (found["greedy ids as captured"].value or 0) < 16
    assert found["after undo: logits differ by"].value == 0
    assert found["after resume: logits differ by"].value == 0
    assert (found["a batch of 4 against each alone"].value or 0) < 1e-5
    assert found["logits in float32, against the CPU's"].value == 0


class FakeWorker:
    """Rows that take the seconds that they are given."""

    plan = (("a 1", 10.0), ("b 1", 60.0), ("a 2", 30.0))

    def __init__(self) -> None:
        self.now = 0.0

    def ask(self, row: str, seconds: float) -> Iterator[Value]:
        self.now += seconds
        yield Value("took", seconds, "s", row=row)


def times(monkeypatch: pytest.MonkeyPatch, end: float, only: str = "") -> list[tuple[Any, ...]]:
    worker: Any = FakeWorker()
    monkeypatch.setattr(time, "monotonic", lambda: worker.now)
    return [(one.row, one.value, one.note) for one in measure(worker, end, only)]


def test_rows_run_in_order_within_their_shares_and_what_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert times(monkeypatch, 100) == [("a 1", 10, ""), ("b 1", 60, ""), ("a 2", 30, "")]
    assert times(monkeypatch, 39) == [
        ("a 1", 10, ""),
        ("b 1", None, "29 s are left, and it may take 60"),
        ("a 2", 29, ""),
    ]
    assert times(monkeypatch, 50)[1:] == [
        ("b 1", 40, ""),
        ("a 2", None, "0 s are left, and it may take 30"),
    ]
    assert [row for row, *_ in times(monkeypatch, 100, "b,2")] == ["b 1", "a 2"]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process of the rows: it then needs no imports, and has this one's `ROWS`."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(gpu, "get_context", lambda method: context)


def test_a_row_that_hangs_or_ends_its_process_costs_only_itself(
    forks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(bench: Bench) -> Iterator[Value]:
        yield Value("first", 1.0)
        time.sleep(60)

    def end(bench: Bench) -> Iterator[Value]:
        yield Value("first", 1.0)
        os._exit(7)

    def broken(bench: Bench) -> Iterator[Value]:
        monkeypatch.setattr(Bench, "is_well", lambda bench: False)
        threading.Thread(target=time.sleep, args=(5,)).start()  # its process would not end soon
        yield Value("first", 1.0)

    def fine(bench: Bench) -> Iterator[Value]:
        yield Value("process", os.getpid())

    for measuring in (hang, end, broken, fine):
        monkeypatch.setitem(ROWS, measuring.__name__, Row(1, measuring))
    worker = RowWorker("cpu")
    begun = time.monotonic()
    try:
        processes = [one.value for _ in range(2) for one in worker.ask("fine", 30)]
        for name, seconds, why in (("hang", 1, "stopped after 1 s"), ("end", 30, "exit code 7")):
            first, failed = worker.ask(name, seconds)
            assert (first.value, first.row, failed.value, failed.row) == (1.0, name, None, name)
            assert why in failed.note
            processes += [one.value for one in worker.ask("fine", 30)]
        assert len([*worker.ask("broken", 30)]) == 1
        processes += [one.value for one in worker.ask("fine", 30)]
    finally:
        worker.close()
    assert processes[0] == processes[1]
    assert len({*processes} - {None}) == len(processes) - 1 == 4
    assert time.monotonic() - begun < 30


def test_a_process_that_does_not_start_again_costs_one_row(
    forks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setitem(ROWS, "fine", Row(1, lambda _: iter([Value("first", 1.0)])))
    worker = RowWorker("cpu")
    try:
        worker.close()
        with monkeypatch.context() as patch:
            patch.setattr(Bench, "__init__", broken)
            (failed,) = worker.ask("fine", 30)
        assert (failed.row, failed.value) == ("fine", None)
        assert failed.note == "CUDA error: out of memory"
        assert [one.value for one in worker.ask("fine", 30)] == [1.0]
    finally:
        worker.close()


def test_a_device_that_is_not_there_gets_one_line() -> None:
    done = run("bench", "gpu", "--device", "gpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sirchat: --device 'gpu' must be cuda or cpu\n"


def test_the_table_appears_and_the_record_is_written(forks: None, tmp_path: Path) -> None:
    tiny()  # loaded before the fork
    file = tmp_path / "gpu.json"
    given = ("bench", "gpu", "--device", "cpu", "--only", "device,8b server")
    done = run(*given, "--json", str(file))
    assert done.returncode == 0, done.stderr
    head, *lines, last = done.stdout.splitlines()
    assert f"torch {torch.__version__}" in head
    assert "triton " in head
    assert lines[0].startswith("device ")
    assert lines[1].startswith("    ")
    assert last.endswith(" s")
    record = json.loads(file.read_text())
    assert [one["row"] for one in record["results"]] == ["device"] * 5 + ["8b server"] * 2
    assert len(lines) == len(record["results"])
    assert all(one["name"] in line for one, line in zip(record["results"], lines, strict=True))
    assert record["machine"]["torch"] == torch.__version__
    assert record["minutes"] == 9
