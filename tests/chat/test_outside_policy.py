"""A policy from outside, the README's `Loud`, is drawn by its own score in panel and `/why`.

`SIRCHAT_WRITE_GOLDEN=1 pytest tests/chat/test_outside_policy.py` draws the expected text anew.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawing import NONE
from recorder import check_same, drawn, exact
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.ui.panel import draw_compact_panel, draw_panel
from sirchat.ui.tables import draw_token_ranks

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
        draw_panel(chat.snapshot(), NONE, 120),
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
