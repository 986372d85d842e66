"""A reply of `sirchat ask` is the text itself, in a terminal and on a pipe."""

from __future__ import annotations

import io
from contextlib import ExitStack
from typing import Any

import pytest

from chatting import session, tiny
from fake_terminal import FakeTerminal, fake_terminal
from sirchat.cli.ask_client import _print_reply
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


def parts(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("is_served", [True, False])
def test_both_ways_to_ask_print_the_text_itself(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, is_served: bool
) -> None:
    said = PROSE.strip()
    monkeypatch.setattr(Sampler, "pick", saying(said))

    def printed(out: Any) -> None:
        screen = Screen(out, io.StringIO())
        if is_served:
            choices = [{"choices": [{"delta": {"content": part}}]} for part in parts(said, 5)]
            _print_reply(iter(choices), screen, ExitStack())
        else:
            chat = session(tiny(), policy="full", max_new_tokens=400)
            print_reply(chat, "Tell me.", screen, as_json=False)

    printed(terminal)
    rows = [row.rstrip() for row in everything_on(terminal.screen).split("\n")]
    assert rows == [row.rstrip() for row in parts(said, 60)]
    printed(pipe := io.StringIO())
    assert pipe.getvalue().rstrip("\n") == said
