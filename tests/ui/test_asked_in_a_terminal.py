"""A reply of `sirchat ask` is the text itself, in a terminal and on a pipe."""

from __future__ import annotations

import io
from typing import Any

import pytest

from chatting import session, tiny
from fake_terminal import FakeTerminal, fake_terminal
from sirchat.engine.sampling import Sampler
from sirchat.ui.replay import print_reply
from sirchat.ui.screen import Screen
from speaking import saying
from terminal import everything_on

PROSE = "The harbour master keeps a ledger of extraordinarily long voyages. " * 6


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    window = fake_terminal(monkeypatch)
    window.resize(30, 60)
    return window


def test_the_text_itself_is_printed(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = PROSE.strip()

    def printed(out: Any) -> None:
        monkeypatch.setattr(Sampler, "pick", saying(said))
        chat = session(tiny(), policy="full", max_new_tokens=400)
        print_reply(chat, "Tell me.", Screen(out, io.StringIO()), as_json=False)

    printed(terminal)
    rows = [row.rstrip() for row in everything_on(terminal.screen).split("\n")]
    assert rows == [PROSE.strip()[at : at + 60].rstrip() for at in range(0, len(said), 60)]
    printed(pipe := io.StringIO())
    assert pipe.getvalue().rstrip("\n") == said
