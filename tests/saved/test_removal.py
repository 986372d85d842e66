"""`sirchat sessions rm`: nothing goes without a yes, and what stays is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import run
from saved_chats import SAYINGS, Chat, saved
from sirchat.saved.session_list import list_sessions
from sirchat.ui.typed_input import input_history
from terminal import Terminal

pytestmark = pytest.mark.usefixtures("folder")


def _typed(*lines: str) -> list[str]:
    """The lines of the input history, after these were added."""
    history = input_history(print)
    for line in lines:
        history.append_string(line)
    return input_history(print).lines()


def test_without_a_terminal_a_yes_is_needed(folder: Path) -> None:
    ident = saved(folder, "my trip")
    refused = run("sessions", "rm", "my trip")
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"sirchat: {ident} is not deleted: deleting needs a confirmation (add --yes)\n"
    )
    assert list_sessions(folder).sessions
    done = run("sessions", "rm", "my trip", "-y")
    assert (done.returncode, done.stderr) == (0, f"removed chat {ident}\n")
    assert not list_sessions(folder).sessions


def test_what_stays_of_it_is_said_and_its_typed_lines_are_erased_if_asked(folder: Path) -> None:
    chat = Chat()
    chat.say(*SAYINGS[:2])
    chat.do("/save trunk")
    chat.do("/branch twig")
    chat.saved_chat.close()
    _typed(SAYINGS[0], "something else", SAYINGS[1])
    done = run("sessions", "rm", "twig", "--yes")
    assert "2 lines typed in this chat stay in the input history, " in done.stderr
    assert "1 other chat branched from the same first chat stays" in done.stderr
    done = run("sessions", "rm", "trunk", "--yes", "--history")
    assert done.stderr.endswith("\n2 lines erased from the input history\n")
    assert _typed() == ["something else"]


def test_no_history_is_made_for_it(folder: Path, tmp_path: Path) -> None:
    saved(folder)
    assert run("sessions", "rm", "last", "--yes", "--history").returncode == 0
    assert not (tmp_path / "state").exists()


def test_a_damaged_chat_goes_too(folder: Path) -> None:
    saved(folder)
    (path,) = folder.glob("*.sqlite")
    content = bytearray(path.read_bytes())
    content[200:4000] = bytes(3800)
    path.write_bytes(content)
    assert run("sessions", "rm", path.stem, "--yes").returncode == 0
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100, 160])
def test_at_a_terminal_it_says_which_chat_and_asks(folder: Path, columns: int) -> None:
    ident, home = saved(folder, "my trip"), folder.parents[1]
    command = ("python", "-m", "sirchat", "sessions", "rm", "last")
    for answer, code, left in (("\r", 1, 1), ("n\r", 1, 1), ("y\r", 0, 0)):
        with Terminal(*command, home=home, columns=columns) as rm:
            rm.wait(r"delete this chat\? \[y/N\]")
            asked = " ".join(rm.text.split())
            assert f'{ident}, called "my trip": 4 messages, begins "{SAYINGS[0]}"' in asked
            rm.send(answer)
            assert rm.ended() == code
            assert ("nothing is deleted" in rm.text) == bool(left)
        assert len(list_sessions(folder).sessions) == left
