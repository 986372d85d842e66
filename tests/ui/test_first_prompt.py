"""The prompt is there before the model: what can be typed, and how one leaves, meanwhile."""

from __future__ import annotations

import re
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
        chat.child.close(1)


@pytest.fixture
def ready(tmp_path: Path) -> Callable[[], None]:
    """Lets the model load."""
    return (tmp_path / "go").touch


def test_what_is_typed_meanwhile_stays_and_the_first_line_appears_above(
    begin: Begin, ready: Callable[[], None], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").touch()
    chat = begin()
    chat.wait_screen(_LOADING)
    chat.send("/unp")
    chat.wait_screen("(?m)^> /unp$")
    assert "let these words" not in chat.text
    assert re.search("(?m)^ tiny · salience · budget 1,024 · loading$", chat.text)
    ready()
    chat.wait_screen("(?m)^tiny, policy salience(?s:.*)^> /unp$")
    chat.send("i")
    chat.wait_screen("(?m)^ *unpin +allow again that these words")  # commands when it is there
    chat.wait_screen("(?m)^> /unpi$")
    assert chat.lines[0].startswith("tiny, policy salience, budget 1,024")
    assert "loading" not in chat.text
    chat.send("\x15Hello there.")
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


def test_a_line_typed_before_the_prompt_is_sent_and_a_saved_chat_loads_behind_a_bar(
    begin: Begin, ready: Callable[[], None], tmp_path: Path
) -> None:
    ready()
    chat = begin()
    chat.send("My name is Anna." + ENTER)  # at once: the terminal makes a newline of the Enter
    chat.wait("tok/s")
    assert chat.leave() == 0
    (tmp_path / "go").unlink()
    chat = begin("--resume", "last")
    chat.wait_screen("^loading tiny ")
    chat.send("/stats" + ENTER)
    ready()
    chat.wait("you: My name is Anna.")
    chat.wait("messages?; ")
    assert chat.leave() == 0


@pytest.mark.parametrize(
    ("keys", "code"),
    [([CTRL_D], 0), (["not this", CTRL_C, "this\r", CTRL_C], 130)],
)
def test_one_can_leave_meanwhile(begin: Begin, keys: list[str], code: int) -> None:
    chat = begin()
    chat.wait_screen(_LOADING)
    for key, shown in zip(keys, ("> not this$", ">$", "loading tiny "), strict=False):
        chat.send(key)
        if len(keys) > 1:
            chat.wait_screen(f"(?m)^{shown}")
    chat.send("".join(keys[3:]))
    assert chat.ended() == code
    assert chat.text.startswith(">")
    assert len(chat.text.splitlines()) == 1
    assert not chat.screen.cursor.hidden


@pytest.mark.parametrize(("line", "keys"), [("a long question", ""), ("Hello.", ENTER)])
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
    assert chat.text.splitlines() == [f"> {line}", "sirchat: the file is broken"]
    assert not chat.screen.cursor.hidden
    history = (tmp_path / "state" / "history").read_text(encoding="utf-8")
    assert f"+{line}\n" in history
