"""Recorded conversations come out as they did: events, tokens, panels, tables and messages.

A few, each under another policy, and one under a policy from outside, the README's `Loud`. With
`SIRCHAT_ATTACK` all sixty, which `SIRCHAT_WRITE_GOLDEN=1 pytest tests/chat/test_recorded.py`
records anew.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacking import MANY
from drawing import NONE
from recorder import POLICIES, SESSIONS, check_same, condensed, drawn, exact, play
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.ui.panel import draw_compact_panel, draw_full_panel
from sirchat.ui.tables import draw_token_ranks

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


ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "loud.txt"


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A chat under `Loud`, with more said than its budget holds."""
    text = (ROOT / "sirchat" / "README.md").read_text("utf-8")
    (source,) = re.findall(r"```python\n(# mine\.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    session = Session(exact(), Profile(policy="mine:Loud", budget=64, max_new_tokens=14))
    for said in ("My name is Anna.", "Tell me a joke.", "I live in Oslo.", "What is my name?"):
        list(session.ask(said))
    yield session
    del sys.modules["mine"]


def test_panel_and_why_show_how_an_outside_policy_ranks(chat: Session) -> None:
    shown = [
        draw_full_panel(chat.snapshot(), NONE, 120),
        draw_compact_panel(chat.snapshot(strongest=30), NONE, 100),
        draw_token_ranks(chat.why("Anna"), NONE, 120),
    ]
    lines = [line for panel in shown for line in drawn(panel, 120).splitlines()]
    now = "\n".join(line for line in lines if "tok/s" not in line) + "\n"
    if os.environ.get("SIRCHAT_WRITE_GOLDEN"):
        GOLDEN.write_text(now, encoding="utf-8")
    check_same(GOLDEN.read_text("utf-8"), now)


def test_the_users_words_rank_above_all_others(chat: Session) -> None:
    rows = chat.snapshot().rows
    of_user = [row.score for row in rows if row.role == "user"]
    others = [row.score for row in rows if row.role != "user"]
    assert min(score for score in of_user if score is not None) >= 100
    assert max(score for score in others if score is not None) < 100
    for row in rows:
        assert row.score == pytest.approx((row.role == "user") * 100 + (row.surprisal or 0), abs=8)
