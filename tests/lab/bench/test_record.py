"""Records of `sirchat bench` name the machine, and two of them can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command import run
from sirchat.lab.bench import everything
from sirchat.lab.bench.ratio import Ratio


def record(processor: str, **medians: float) -> dict[str, Any]:
    results = [{"name": name, "median": value} for name, value in medians.items()]
    start = [{"name": "loading", "unit": "s", "ours": 2.0, "ratio": None}]
    measured = {"decode": {"results": results}, "start": {"results": start}}
    about = {"processor": processor, "features": ["avx2"]}
    return {"model": "tiny", "machine": about, "benchmarks": measured}


def test_two_records_are_shown_side_by_side(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(record("Old", decode=0.5, gone=1.0)))
    second.write_text(json.dumps(record("New", decode=0.25)))
    done = run("bench", "compare", str(first), str(second), COLUMNS="100")
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == ["first: Old (avx2)", "second: New (avx2)"]
    assert "decode: decode 0.500 0.250 0.500" in lines
    assert "decode: gone 1.000 nan nan" in lines
    assert "start: loading, s 2.000 2.000 1.000" in lines


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}'])
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    done = run("bench", "compare", str(path), str(path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "record" in done.stderr


def test_everything_is_measured_in_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = Ratio("decode", ours_ms=1, other_ms=2, median=0.5, low=0.4, high=0.6, pairs=2)
    for name in ("bench_start", "bench_decode", "bench_recall"):
        found = [] if name == "bench_start" else [ratio]
        monkeypatch.setattr(everything, name, lambda *_, found=found, **__: found)
    arguments = ("--model", "tiny", "--compile", "off", "--rounds", "2")
    found = json.loads(run("bench", "all", *arguments, "--json").stdout)
    assert set(found["benchmarks"]) == {"decode", "start", "recall"}
    assert found["machine"] == found["benchmarks"]["decode"]["machine"]
    assert found["benchmarks"]["recall"]["cache_dtype"] == "float32"
    shown = run("bench", "all", *arguments, COLUMNS="100").stdout
    assert "decode: decode  0.500" in shown
    assert found["machine"]["processor"] in shown
