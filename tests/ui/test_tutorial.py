"""`sirchat tutorial`: what it says of the memory is so, and it leaves nothing behind."""

from __future__ import annotations

import html
import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import sirchat
from chatting import babbler, tiny
from command import run
from fake_terminal import FakeTerminal
from sirchat.chat.events import Delta, Event
from sirchat.chat.session import Interrupted, Session
from sirchat.config.profile import Profile
from sirchat.ui.commands import Commands
from sirchat.ui.screen import Screen
from sirchat.ui.tutorial import (
    ALLOWED_COMMANDS,
    FURTHER_COMMANDS,
    STEPS,
    TUTORIAL_SETTINGS,
    run_tutorial,
)
from terminal import Terminal, everything_on

LAST = len(STEPS)


def step_of(shown: str, number: int) -> str:
    """What is shown of one step."""
    rest = shown.split(f"── {number} of {LAST} ──\n")[1]
    return re.split(rf"── (?:\d+ of {LAST}|the end) ──\n", rest)[0]


def number_of(line: str, nth: int = 0) -> int:
    """The number of the nth step that sends this line."""
    return [number for number, step in enumerate(STEPS, 1) if step.line == line][nth]


def reply_in(shown: str, number: int) -> str:
    """The row below the line that a step sends."""
    rows = step_of(shown, number).splitlines()
    return rows[rows.index(f"> {STEPS[number - 1].line}") + 1]


def folded(text: str) -> str:
    """Explanations as one line, without the bar on their left."""
    return " ".join(text.replace("│ ", " ").split())


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that is shown where nobody presses Enter; nothing of it is left in a file."""
    home = tmp_path_factory.mktemp("home")
    own = dict.fromkeys(("SIRCHAT_HOME", "HOME", "TMPDIR", "XDG_CACHE_HOME"), str(home))
    done = run("tutorial", COLUMNS="100", SIRCHAT_BUDGET="64", **own)
    assert done.returncode == 0, done.stderr
    assert "your words: Anna" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert not [*home.iterdir()]
    return done.stdout


# --- what it shows


def test_every_effect_shows_and_is_explained(piped: str) -> None:
    name, cat = "What is my name?", "What is my cat called?"
    assert "Anna" not in reply_in(piped, number_of(name)), "under sink"
    assert "Anna" in reply_in(piped, number_of(name, 1)), "under entropy"
    assert "Luna" not in reply_in(piped, number_of(cat))
    assert number_of('/recall "Luna"') < number_of(cat, 1)
    assert "Luna" in reply_in(piped, number_of(cat, 1))
    said = folded(piped)
    for step in STEPS:
        assert words_of(step.before) in said
        assert words_of(step.after) in said
    assert "Evicted, held, and restored." in said
    assert "sirchat models recommend names a real model" in said
    assert "did not go as" not in said


def test_the_panel_has_what_is_explained_of_it(piped: str) -> None:
    first = step_of(piped, number_of("What is my name?"))
    above = first.split("It can't know")[0]
    for part in ("━", "turns ", "█", "·", " evicted next: ", "⋯", "you:", "model:"):
        assert part in above, part
    assert 'after "evicted" those that just were' in folded(first)
    above, said = step_of(piped, LAST).split("│ It knows the cat's name again.")
    drawn = above.split("evicted next")[1]
    assert "Luna" in drawn
    assert "Anna" in drawn
    assert "the text in the panel still has Anna" in folded(said)


@pytest.mark.slow
def test_enter_at_every_step_leads_to_the_end(home: Path) -> None:
    columns = 60
    with started(home, columns) as terminal:
        for number in range(1, LAST + 1):
            wait_step(terminal, number)
            terminal.wait_screen("Enter sends this line, or type your own; q leaves$")
            terminal.submit()
        assert terminal.ended() == 0
        shown = terminal.everything
        assert reply_in(shown, number_of("What is my name?")) == "You have not told me."
        assert reply_in(shown, number_of("What is my name?", 1)) == "Your name is Anna."
        assert reply_in(shown, number_of("What is my cat called?", 1)) == "Your cat is called Luna."
        assert "Evicted, held, and restored." in folded(shown)
        assert "Enter sends this line" not in terminal.text
        rows = shown.splitlines()
        explained = [row for row in rows if row.startswith("│ ")]
        assert columns - 13 < max(map(len, explained)) <= columns - 1
        panel = re.compile(r"turns |[^│]*evicted next.*: ")
        assert sum(bool(panel.match(row)) for row in rows) == 10  # below five replies


@pytest.mark.slow
def test_own_lines_are_sent_and_an_effect_that_they_prevent_is_not_claimed(home: Path) -> None:
    with started(home) as terminal:
        for number, line, answer in (
            (1, "Hello!", "holds "),
            (1, "/ /save mine", "/save does not work in the tutorial"),
            (1, "/stats", "2 messages; "),
            (1, "/polcy", "there is no command /polcy"),
            (1, "/reset", "the conversation is empty now"),
            (1, "/budget 400", ""),
            (1, "", ""),
            (2, "", ""),
            (3, "", ""),
        ):
            wait_step(terminal, number)
            terminal.submit(f"{line}\r")
            terminal.wait(answer)
        wait_step(terminal, 4)
        said = folded(terminal.everything)
        assert "should: Anna is in the memory. Your own lines may be why." in said
        assert STEPS[2].after not in said
        terminal.send("q\r")
        assert terminal.ended() == 0


@pytest.mark.slow
def test_leaving_half_way(home: Path) -> None:
    with started(home) as terminal:
        wait_step(terminal, 1)
        terminal.submit()
        wait_step(terminal, 2)
        terminal.send("\x03")
        assert terminal.ended() == 130
        assert terminal.lines.count(f"> {STEPS[1].line}") == 0  # it was not sent
        told = "sirchat tutorial starts the tutorial again; sirchat alone opens a chat"
        assert told in terminal.text
        assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_without_colours_it_has_the_panel_as_text(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    opened = Session(tiny(), Profile(save=False, **TUTORIAL_SETTINGS))
    assert run_tutorial(lambda _: opened, Screen(terminal, terminal), waits=False)
    shown = everything_on(terminal.screen)
    assert " evicted next: " in step_of(shown, number_of("What is my name?"))
    assert not re.search(r"\x1b\[[\d;]*3[0-9]", terminal.getvalue())


def test_commands_it_names_exist() -> None:
    names = set(Commands.names())
    assert names >= ALLOWED_COMMANDS
    assert names >= {name[1:].split()[0] for name in FURTHER_COMMANDS if name.startswith("/")}
    used = {step.line[1:].split()[0] for step in STEPS if step.line.startswith("/")}
    assert used <= ALLOWED_COMMANDS


def test_another_model_shows_no_effect_and_it_says_so() -> None:
    """The babbler knows no name, and never ends a reply."""
    settings = {**TUTORIAL_SETTINGS, "max_new_tokens": 8}
    out, err = io.StringIO(), io.StringIO()

    def opened(report: object) -> Session:
        return Session(babbler(), Profile(save=False, **settings))

    assert not run_tutorial(opened, Screen(out, err), waits=False)
    said = folded(out.getvalue())
    assert "This did not go as it should: Anna is not in the reply. Please report it." in said
    assert "It knows, in the same 48 places" not in said
    assert "of the steps did not go as they should." in said
    assert "Evicted, held, and restored." not in said


def test_the_picture_of_it_shows_what_it_says() -> None:
    picture = (Path(sirchat.__file__).parent / "ui" / "capture.svg").read_text(encoding="utf-8")
    shown = html.unescape(picture).replace("\xa0", " ")
    for text in ("My name is Anna.", "You have not told me.", "/policy entropy", "is Anna."):
        assert text in shown, text
    for step in (STEPS[number_of("What is my name?") - 1], STEPS[number_of("/policy entropy") - 1]):
        assert step.before.split(".")[0][:50] in shown


def test_ctrl_c_ends_the_reply_and_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(babbler(), Profile(save=False, **TUTORIAL_SETTINGS))
    ask, err = session.ask, io.StringIO()

    def pressed(text: str, stops: Interrupted) -> Iterator[Event]:
        for event in ask(text, stops):
            yield event
            if isinstance(event, Delta):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session, "ask", pressed)
    with pytest.raises(KeyboardInterrupt):
        run_tutorial(lambda _: session, Screen(io.StringIO(), err), waits=False)
    assert "interrupted" in err.getvalue()
    assert "sirchat tutorial starts the tutorial again" in err.getvalue()
    assert len(session.turns) == 2


# --- in a terminal


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not [*tmp_path.iterdir()]


def started(home: Path, columns: int = 100, **environ: str) -> Terminal:
    """The tutorial; a flag stands in front, so that it is taken for sirchat's own arguments."""
    return Terminal("--debug", "tutorial", home=home, columns=columns, environ=environ)


def wait_step(terminal: Terminal, number: int) -> None:
    """Read until a step waits for Enter."""
    terminal.wait(f"── {number} of {LAST} ──")
    terminal.wait_suggested(STEPS[number - 1].line)
