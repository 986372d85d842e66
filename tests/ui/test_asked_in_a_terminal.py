"""A reply of `sirchat ask` in a terminal: broken at blanks; on a pipe it is the text itself."""

from __future__ import annotations

import io
import textwrap
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
CODE = "for voyage in ledger: print(voyage.harbour, voyage.extraordinary, voyage.master, 1)"
CHINESE = "\u6d77\u306f\u5e83\u3044\u3002" * 20


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    window = fake_terminal(monkeypatch)
    window.resize(30, 60)
    return window


def parts(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 3, 50, 2_000])
def test_prose_is_broken_at_blanks_and_code_by_the_terminal(
    terminal: FakeTerminal, size: int
) -> None:
    screen = Screen(terminal, terminal)
    for part in parts(f"{PROSE}\n\n- a\tb\n```python\n{CODE}\n```\nSo ``it`` is.\n{PROSE}", size):
        screen.stream(part, at_blanks=True)
    screen.line()
    rows = [row.rstrip() for row in everything_on(terminal.screen).split("\n")]
    broken = textwrap.wrap(PROSE, 59)
    code = ["```python", CODE[:60], CODE[60:], "```"]
    assert rows == [*broken, "", "- a     b", *code, "So ``it`` is.", *broken]


def test_text_without_blanks_is_not_held_back(terminal: FakeTerminal) -> None:
    screen = Screen(terminal, terminal)
    for count, char in enumerate(CHINESE, 1):
        screen.stream(char, at_blanks=True)
        assert len("".join(everything_on(terminal.screen).split())) == count
    assert max(map(len, everything_on(terminal.screen).split())) == 59 // 2


@pytest.mark.parametrize("columns", [40, 90])
def test_what_comes_after_a_change_of_the_window_is_there(
    terminal: FakeTerminal, columns: int
) -> None:
    screen, text = Screen(terminal, terminal), " ".join(f"voyage{n:03}" for n in range(60))
    for at, part in enumerate(parts(text, 7)):
        if at == 40:
            terminal.resize(30, columns)
        screen.stream(part, at_blanks=True)
    shown = everything_on(terminal.screen).split()
    assert "".join(shown).endswith(text[7 * 40 :].replace(" ", ""))
    assert set(shown[-20:]) <= set(text.split())


@pytest.mark.parametrize("is_served", [True, False])
def test_both_ways_to_ask_do_it_and_a_pipe_gets_the_text_itself(
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
    assert rows == textwrap.wrap(said, 59)
    printed(pipe := io.StringIO())
    assert pipe.getvalue().rstrip("\n") == said
