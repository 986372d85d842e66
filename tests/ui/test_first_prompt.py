"""The prompt is there before the model: what can be typed, and how one leaves, meanwhile."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from terminal import WARM, Terminal

pytestmark = pytest.mark.slow

CTRL_C, CTRL_D, ENTER, TAB = "\x03", "\x04", "\r", "\t"
_LOADING = r"(?m)^>(?s:.*) · loading"

Begin = Callable[..., Terminal]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a chat whose model loads for as long as a file is missing, or fails."""
    opened = []

    def start(*flags: str, fails: str = "", home: Path = tmp_path) -> Terminal:
        program = tmp_path / "program.py"
        program.write_text(
            "import time\nfrom pathlib import Path\n"
            "import sirchat.cli.chat as chat\nfrom sirchat.cli import main\n"
            "from sirchat.errors import ModelError\n"
            "opened = chat.open_session\n"
            "def slow(*args):\n"
            f"    while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
            f"    if {fails!r}: raise ModelError({fails!r})\n"
            "    return opened(*args)\n"
            "chat.open_session = slow\nmain()\n",
            encoding="utf-8",
        )
        flags = ("--device", "cpu", "--max-new-tokens", "3", *flags)
        opened.append(Terminal(WARM, str(program), *flags, home=home))
        return opened[-1]

    yield start
    for chat in opened:
        chat.child.close(force=True)


@pytest.fixture
def ready(tmp_path: Path) -> Callable[[], None]:
    """Lets the model load."""
    return (tmp_path / "go").touch


def test_what_is_typed_meanwhile_stays_and_the_first_line_appears_above(
    begin: Begin, ready: Callable[[], None]
) -> None:
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.send("Hello t")
    chat.wait_screen("(?m)^> Hello t$")
    assert re.search("(?m)^ tiny · salience · budget 1,024 · loading$", chat.text)
    ready()
    chat.wait_screen(" held")
    assert chat.lines[0].startswith("tiny, policy salience, budget 1,024")
    assert chat.lines[1] == "> Hello t"
    assert "loading" not in chat.text
    chat.send("here.")
    chat.wait_screen("(?m)^> Hello there.$")
    chat.submit()
    chat.wait(r"(?m)^> Hello there\.(?s:.*)tok/s")
    assert chat.leave() == 0


def test_a_line_that_is_entered_meanwhile_is_sent_when_the_model_is_ready(
    begin: Begin, ready: Callable[[], None]
) -> None:
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.submit("Hello." + ENTER)
    chat.wait_screen("(?m)^loading tiny ")
    chat.send("and then this")  # not echoed; kept for the next prompt
    ready()
    chat.wait("tok/s")
    chat.wait_screen("(?m)^> and then this$")
    assert "loading" not in chat.text
    assert chat.lines[0] == "> Hello."
    chat.send(CTRL_C)
    assert chat.leave() == 0


def test_a_line_typed_before_the_prompt_is_sent_by_its_enter(
    begin: Begin, ready: Callable[[], None]
) -> None:
    ready()
    chat = begin()
    chat.send("/stats" + ENTER)  # at once: the terminal makes a newline of the Enter
    chat.wait("messages?; ")
    chat.wait_prompt()
    assert chat.leave() == 0


def test_a_saved_chat_loads_behind_a_bar_and_takes_the_line_typed_meanwhile(
    begin: Begin, ready: Callable[[], None], tmp_path: Path
) -> None:
    with Terminal("--max-new-tokens", "3", home=tmp_path) as chat:
        chat.ask("My name is Anna.")
        assert chat.leave() == 0
    chat = begin("--resume", "last")
    chat.wait_screen("^loading tiny ")
    chat.send("/stats" + ENTER)
    ready()
    chat.wait("you: My name is Anna.")
    chat.wait("messages?; ")
    chat.wait_prompt()
    assert chat.leave() == 0


@pytest.mark.parametrize(
    ("keys", "code"),
    [(CTRL_C, 130), (CTRL_D, 0), *((f"/{c}\r", 0) for c in ("exit", "quit", "bye"))],
)
def test_one_can_leave_meanwhile(begin: Begin, keys: str, code: int) -> None:
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.send(keys)
    assert chat.ended() == code
    assert chat.text.startswith(">")
    assert len(chat.text.splitlines()) == 1
    assert not chat.screen.cursor.hidden


def test_ctrl_c_empties_the_line_first_and_leaves_while_a_line_waits(begin: Begin) -> None:
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.send("not this")
    chat.wait_screen("(?m)^> not this$")
    chat.send(CTRL_C)
    chat.wait_screen("(?m)^>$")
    chat.submit("this" + ENTER)
    chat.wait_screen("(?m)^loading tiny ")
    chat.send(CTRL_C)
    assert chat.ended() == 130
    assert not chat.screen.cursor.hidden


def test_sigterm_ends_the_loading(begin: Begin) -> None:
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.child.kill(signal.SIGTERM)
    assert chat.ended() == 128 + signal.SIGTERM


@pytest.mark.parametrize(("line", "keys"), [("a long question", ""), ("Hello.", ENTER), ("", "")])
def test_an_error_in_loading_ends_the_chat_and_the_line_goes_to_the_history(
    begin: Begin, ready: Callable[[], None], tmp_path: Path, line: str, keys: str
) -> None:
    chat = begin(fails="the file is broken")
    chat.wait_screen(_LOADING)
    chat.send(line)
    chat.wait_screen(f"(?m)^> ?{line}$")
    if keys:
        chat.submit(keys)
    ready()
    assert chat.ended() == 1
    assert chat.text.splitlines() == [f"> {line}"] * bool(line) + ["sirchat: the file is broken"]
    history = (tmp_path / "state" / "history").read_text(encoding="utf-8")
    assert (f"+{line}\n" in history) == bool(line)


def test_names_of_files_are_completed_at_once_and_commands_when_the_model_is_there(
    begin: Begin, ready: Callable[[], None], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").touch()
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.send(f"@{tmp_path}/no{TAB}")
    chat.wait_screen(r"notes\.txt")
    chat.send(CTRL_C)
    chat.wait_screen("(?m)^>$")
    chat.send("/unp")
    chat.wait_screen("(?m)^> /unp$")
    assert "let these words" not in chat.text
    ready()
    chat.wait_screen("(?m)^ *unpin +allow again that these words")
    chat.wait_screen("(?m)^> /unp$")
