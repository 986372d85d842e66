"""Recorded conversations come out as they did: events, tokens, panels, tables and messages.

A few, each under another policy. With `SIRCHAT_ATTACK` all sixty, which
`SIRCHAT_WRITE_GOLDEN=1 pytest tests/chat/test_recorded.py` records anew.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from attacking import MANY
from recorder import POLICIES, SESSIONS, check_same, condensed, play

RECORDED = Path(__file__).parents[1] / "golden" / "recorded"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))


_WRITES = bool(os.environ.get("SIRCHAT_WRITE_GOLDEN"))
_FEW = range(0, len(POLICIES), 4)
_ONLY_ALL = pytest.mark.skipif(not MANY and not _WRITES, reason="takes SIRCHAT_ATTACK")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[_ONLY_ALL] * (n not in _FEW)) for n in range(SESSIONS)]
)
def test_a_conversation_comes_out_as_recorded(number: int) -> None:
    actions = json.loads(json.dumps(condensed(play(number))))
    path = RECORDED / f"{number:02}.json.gz"
    if _WRITES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(actions).encode(), mtime=0))
    check_same(json.loads(gzip.decompress(path.read_bytes())), actions, str(number))
