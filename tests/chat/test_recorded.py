"""Sixty recorded conversations come out as they did: events, tokens, panels, tables and messages.

`SIRCHAT_WRITE_GOLDEN=1 pytest tests/test_recorded.py` records them anew.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from recorder import SESSIONS, check_same, condensed, play

RECORDED = Path(__file__).parents[1] / "golden" / "recorded"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))


_NUMBERS = [pytest.param(n, marks=[pytest.mark.slow] * (n >= 6)) for n in range(SESSIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("number", _NUMBERS)
def test_a_conversation_comes_out_as_recorded(number: int) -> None:
    actions = json.loads(json.dumps(condensed(play(number))))
    path = RECORDED / f"{number:02}.json.gz"
    if os.environ.get("SIRCHAT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(actions).encode(), mtime=0))
    check_same(json.loads(gzip.decompress(path.read_bytes())), actions, str(number))
