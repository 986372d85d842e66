"""Sixty recorded conversations come out as they did: events, tokens, panels, tables and messages.

`SIRCHAT_WRITE_GOLDEN=1 pytest tests/test_recorded.py` records them anew.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recorder import SESSIONS, condensed, play

RECORDED = Path(__file__).parents[1] / "golden" / "recorded"
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))


@pytest.mark.parametrize("number", range(SESSIONS))
def test_a_conversation_comes_out_as_recorded(number: int) -> None:
    actions = json.loads(json.dumps(condensed(play(number))))
    path = RECORDED / f"{number:02}.json.gz"
    if os.environ.get("SIRCHAT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(actions).encode(), mtime=0))
    _check_same(json.loads(gzip.decompress(path.read_bytes())), actions, str(number))


def _check_same(recorded: Any, now: Any, where: str) -> None:
    """Equal, but for what another processor may round otherwise in a number."""
    if isinstance(recorded, dict):
        assert recorded.keys() == now.keys(), where
        for key, value in recorded.items():
            _check_same(value, now[key], f"{where} {recorded.get('did', '')} {key}")
    elif isinstance(recorded, list):
        assert len(recorded) == len(now), where
        for at, (one, other) in enumerate(zip(recorded, now, strict=True)):
            _check_same(one, other, f"{where} {at}")
    elif isinstance(recorded, float):
        assert recorded == pytest.approx(now, rel=1e-3, abs=1e-3), where
    elif isinstance(recorded, str):
        assert _NUMBER.sub("#", recorded) == _NUMBER.sub("#", now), where
        for one, other in zip(_numbers(recorded), _numbers(now), strict=True):
            assert one == pytest.approx(other, rel=2e-2, abs=0.011), where
    else:
        assert recorded == now, where


@cache
def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]
