"""One rule for all that a command prints: what is taller than the window goes to the pager."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
from rich.text import Text

from sirchat.ui.screen import Screen
from terminal import Terminal, pager_into, program

ROWS, COLUMNS = 20, 80


class _Window(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what the pager got, in a window of 20 rows, at which somebody types."""
    environ = {"PAGER": pager_into(tmp_path / "paged"), "TERM": "xterm"}
    for name, value in {**environ, "LINES": str(ROWS), "COLUMNS": str(COLUMNS)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", _Window())
    return tmp_path / "paged"


def _printed(rows: int, out: io.StringIO | None = None) -> str:
    """What is printed, and not shown by the pager, of so many rows."""
    out = out or _Window()
    Screen(out, _Window()).page(Text("\n".join(["a row"] * rows)))
    return out.getvalue()


def test_what_leaves_a_row_for_the_prompt_is_printed_and_what_does_not_is_paged(
    paged: Path,
) -> None:
    assert _printed(ROWS - 1) == "a row\n" * (ROWS - 1)
    assert not paged.exists()
    assert _printed(ROWS) == ""
    assert paged.read_text() == "a row\n" * ROWS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PAGER", pager) for pager in ("/no/such/program", "", "cat", "less '")),
        ("TERM", "dumb"),
        ("stdin", ""),
    ],
)
def test_without_a_pager_or_somebody_to_turn_pages_all_is_printed(
    paged: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    if name == "stdin":
        monkeypatch.setattr(sys, "stdin", io.StringIO())
    else:
        monkeypatch.setenv(name, value)
    assert _printed(100) == "a row\n" * 100
    assert _printed(100, io.StringIO()) == "a row\n" * 100, "a pipe"
    assert not paged.exists()


def test_a_pager_cannot_start_a_shell_or_an_editor(
    paged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'cat >/dev/null\necho "$LESSSECURE" >{tmp_path}/secure'
    monkeypatch.setenv("PAGER", program(tmp_path / "pager", script))
    monkeypatch.setenv("LESSSECURE", "0")
    _printed(100)
    assert (tmp_path / "secure").read_text() == "1\n"


@pytest.mark.skipif(shutil.which("less") is None, reason="less is not installed")
def test_less_turns_pages_and_leaves_the_text_on_the_screen(tmp_path: Path) -> None:
    environ = {"PAGER": "less"}
    with Terminal(home=tmp_path, environ=environ, rows=ROWS, columns=60) as chat:
        for command in ("/help all", "/show"):
            chat.say(command)
            chat.wait_screen("q leaves$")
            assert len(chat.lines) == ROWS
            chat.send("q")
            chat.wait_prompt()
            assert chat.shown
        assert "q leaves" not in chat.ask("/stats")
        assert chat.leave() == 0
