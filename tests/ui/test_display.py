"""What reaches the screen: a reply, the memory beneath it, and nothing that steers the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyte
import pytest

from chatting import answer, babbler, save_babbler, session
from command import run
from sirchat.chat.events import Delta, Evicted, Reading, TokenRow
from sirchat.chat.snapshot import EDGES, Histogram, Snapshot, TurnShare
from sirchat.config.profile import Profile
from sirchat.ui.live import LiveTurn
from sirchat.ui.panel import draw_panel
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_tokens
from sirchat.ui.text import displayable
from terminal import Shared, Terminal, everything_on, resize

TOKENS = 900
"""Of the replies here: more than 300 words."""

_GAUGE = r"━+─* +[\d,]+/1,024 held"


@pytest.fixture(scope="module")
def shared(home: Path, endless: str) -> Iterator[Shared]:
    chats = Shared(lambda: Terminal("--model", endless, home=home))
    yield chats
    chats.close()


@pytest.fixture
def chat(shared: Shared) -> Terminal:
    """A chat that says `_reply()` when it is told to go on."""
    chat = shared.anew()
    chat.ask(f"/set max_new_tokens {TOKENS}")
    chat.ask("/set repetition_penalty 1.3")
    return chat


@cache
def _reply(tokens: int = TOKENS) -> str:
    """What the model of the chat says, as it may be shown."""
    settings: dict[str, Any] = {"max_new_tokens": tokens, "repetition_penalty": 1.3}
    return displayable(answer(list(session(babbler(), **settings).ask("Go on."))))


def _said(shown: str) -> list[str]:
    """The words above the quiet line."""
    return shown[: re.search(r"(?m)^\d+ in, ", shown).start()].split()  # type: ignore[union-attr]


# --- the live region


def test_a_reply_is_streamed_with_the_gauge_beneath_it(chat: Terminal) -> None:
    chat.ask("/set max_new_tokens 100000")
    chat.say("Go on.")
    chat.wait(re.escape(_reply().split()[0]))
    chat.wait_screen(rf"[a-z].*\n── entropy · .*\n{_GAUGE}.*\nturns \S\S ")
    assert " out, " not in chat.text
    assert chat.screen.cursor.hidden
    chat.send("\x03")
    chat.wait_prompt()
    assert not re.search(_GAUGE, chat.everything)
    assert not chat.screen.cursor.hidden


@pytest.mark.parametrize("columns", [51, 80, 133])
def test_no_word_of_a_reply_is_lost_or_broken(chat: Terminal, columns: int) -> None:
    chat.resize(rows=30, columns=columns)
    shown = chat.ask("Go on.")
    assert len(_reply().split()) > 300
    assert _said(shown) == _reply().split()
    assert not re.search(_GAUGE, chat.everything)


def test_a_window_that_changes_during_a_reply_is_no_trouble(chat: Terminal) -> None:
    chat.ask("/set max_new_tokens 3000")
    chat.say("Go on.")
    for rows, columns in ((30, 60), (50, 140), (8, 30), (40, 100)):
        before = len(chat.raw)
        chat.until(lambda before=before: len(chat.raw) > before + 2000)  # type: ignore[misc]
        chat.resize(rows, columns)
    chat.wait(r"\d in, 3,000 out")
    chat.wait_prompt()
    assert "3,009 tokens seen" in chat.ask("/stats")
    assert " out, " in chat.ask("/set max_new_tokens 9") + chat.ask("And then?")


@pytest.mark.parametrize("panel", ["off", "turn"])
def test_without_a_live_panel_the_reply_is_streamed_as_it_is(chat: Terminal, panel: str) -> None:
    chat.ask(f"/panel {panel}")
    before = len(chat.raw)
    chat.say("Go on.")
    chat.until(lambda: len(chat.shown) > 500)
    assert b"out, " not in chat.raw[before:]
    assert not re.search(_GAUGE, chat.everything)
    chat.wait_prompt()
    assert "".join(_said(chat.shown)) == "".join(_reply().split())
    beneath = chat.shown[chat.shown.index("tok/s") :]
    assert bool(re.search(_GAUGE, beneath)) is (panel == "turn")


# --- the same without a process, for texts and sizes of our own


class _Fake(io.StringIO):
    """A terminal that a screen writes to, and what it shows."""

    def __init__(self, rows: int = 30, columns: int = 80) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return super().write(text)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window."""
        resize(self.screen, rows, columns)

    def size(self, *descriptor: int) -> os.terminal_size:
        """The window, as the system tells it."""
        return os.terminal_size((self.screen.columns, self.screen.lines))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> _Fake:
    terminal = _Fake()
    monkeypatch.setattr("os.get_terminal_size", terminal.size)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return terminal


@pytest.fixture
def every_frame() -> Iterator[None]:
    """Draw after every event, however fast they come."""
    with patch("sirchat.ui.live.Pace.is_due", lambda self: True):
        yield


def _talk(panel: str = "live", text: str = "held") -> Any:
    """What a live view needs of a session that holds such a token."""
    row = TokenRow(0, 1, text, 0, "user", 2.0, 1.0, 1.0, 0.5, ())
    view = Snapshot(
        model="model",
        policy="entropy",
        decay=1.0,
        budget=64,
        resident=1,
        seen=1,
        recalled=0,
        speed=1.0,
        threshold=1.0,
        next_to_go=(0,),
        rows=(row,),
        slots=(0,),
        turns=(TurnShare(0, "user", 1, 1, 2.0),),
        histogram=None,
    )
    return SimpleNamespace(
        profile=Profile(panel=panel),  # type: ignore[arg-type]
        budget=64,
        snapshot=lambda strongest=None: view,
        tokens=lambda positions: (row,),
    )


def _show(terminal: _Fake, runs: list[str], panel: str = "live", *sizes: tuple[int, int]) -> None:
    """Show a reply that comes in these pieces, the window changing to these sizes in its course."""
    changes = {(i + 1) * len(runs) // (len(sizes) + 1): size for i, size in enumerate(sizes)}
    with LiveTurn(_talk(panel), Screen(terminal, terminal)) as view:
        for i, piece in enumerate(runs):
            if i in changes:
                terminal.resize(*changes[i])
            view.show(Delta(piece))


_WORDS = " ".join(f"word{i:03}" if i % 7 else f"\n\n{i:03}\tend." for i in range(150))
_TABS = " ".join(f"word{i:03}\t{i:03}" for i in range(104))
_WIDE = " ".join(f"{i:02}海は広い。" if i % 3 else f"{i:02}e\u0301te\u0301" for i in range(90))


@pytest.mark.usefixtures("every_frame")
@pytest.mark.parametrize("text", [_WORDS, _TABS, _WIDE], ids=["lines", "tabs", "wide"])
@pytest.mark.parametrize("size", [1, 3, 50])
def test_every_word_is_there_however_it_comes(terminal: _Fake, text: str, size: int) -> None:
    _show(terminal, [text[i : i + size] for i in range(0, len(text), size)])
    assert everything_on(terminal.screen).split() == unicodedata.normalize("NFC", text).split()


@pytest.mark.usefixtures("every_frame")
@pytest.mark.parametrize("sizes", [[(30, 60)], [(30, 120)], [(16, 51), (40, 140)], [(8, 30)]])
def test_no_word_is_lost_when_the_window_changes(
    terminal: _Fake, sizes: list[tuple[int, int]]
) -> None:
    text = _WORDS.replace("\n", "")
    wanted = "".join(text.split())
    seen: list[str] = []
    with patch.object(terminal, "resize", lambda *size: _look(terminal, seen, size)):
        _show(terminal, [text[i : i + 5] for i in range(0, len(text), 5)], "live", *sizes)
    seen.append(everything_on(terminal.screen))
    shown = "".join("".join(seen).split())
    lost = [word for word in text.split() if word not in shown]
    assert not lost
    assert shown.endswith(wanted[-100:])


def _look(terminal: _Fake, seen: list[str], size: tuple[int, int]) -> None:
    seen.append(everything_on(terminal.screen))
    _Fake.resize(terminal, *size)


# --- nothing that is shown can steer the terminal


_CONTROLS = {
    **{f"C0 {i:02x}": chr(i) for i in range(32) if chr(i) not in "\t\n"},
    "DEL": "\x7f",
    **{f"C1 {i:02x}": chr(i) for i in range(0x80, 0xA0)},
    **{f"bidi {ord(c):04x}": c for c in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e"},
    **{f"bidi {ord(c):04x}": c for c in "\u2066\u2067\u2068\u2069"},
    "colour": "\x1b[31m",
    "clear": "\x1b[2J",
    "cursor": "\x1b[10A",
    "private mode": "\x1b[?1049h",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://example.com\x1b\\link\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;b3duZWQ=\x07",
    "device control": "\x1bP1$r0m\x1b\\",
    "privacy message": "\x1b^owned\x1b\\",
    "application command": "\x1b_owned\x1b\\",
    "start of string": "\x1bXowned\x1b\\",
    "charset": "\x1b(0",
    "reset": "\x1bc",
    "8-bit CSI": "\x9b2J",
    "8-bit OSC": "\x9d0;owned\x9c",
    "8-bit DCS": "\x90owned\x9c",
    "broken off": "\x1b]0;owned\x1b[2J",
}

_OURS = re.compile(r"\x1b\[(?:[\d;]*m|\?25[lh]|\d*A|2K)|\r")
"""What the chat itself writes: styles, the cursor shown, hidden or moved up, rows erased."""

_HARM = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    "|owned|b3duZWQ|example"
)


def _harm(written: str) -> list[str]:
    """What is in there that the chat did not write."""
    return _HARM.findall(_OURS.sub("", written))


@pytest.mark.parametrize("name", _CONTROLS)
def test_a_reply_cannot_steer_the_terminal_wherever_it_is_split(terminal: _Fake, name: str) -> None:
    text = f"before{_CONTROLS[name]}\nafter"
    for panel in ("live", "off"):
        for cut in range(len(text) + 1):
            _show(terminal, [text[:cut], text[cut:]], panel)
        _show(terminal, list(text), panel)
    screen = Screen(terminal, terminal)
    for char in text:
        screen.stream(char)
    assert not _harm(terminal.getvalue())
    assert terminal.getvalue().count("after") >= 2 * len(text) + 5


@pytest.mark.usefixtures("every_frame")
def test_what_is_held_cannot_steer_the_terminal(terminal: _Fake) -> None:
    for control in _CONTROLS.values():
        text = f"before{control}after"
        talk, screen = _talk(text=text), Screen(terminal, terminal)
        with LiveTurn(talk, screen) as view:
            view.show(Reading(1, 2))
            view.show(Evicted(turn=0, positions=(0,), resident=1, seen=1))
        snapshot = replace(talk.snapshot(), model=text, policy=text)
        histogram = Histogram(*([(0,) * (len(EDGES) - 1)] * 2))
        screen.show(draw_panel(replace(snapshot, histogram=histogram), screen.theme, 80))
        screen.show(draw_tokens(snapshot.rows, screen.theme))
    written = re.sub("owned|b3duZWQ|example", "", terminal.getvalue())  # as text they may be shown
    assert not _harm(written)


def test_notices_and_errors_cannot_steer_the_terminal(terminal: _Fake) -> None:
    screen = Screen(terminal, terminal)
    for control in _CONTROLS.values():
        screen.note(f"before{control}")
        screen.error(f"before{control}")
    assert not _harm(terminal.getvalue())


_EVIL = "evil\x1b]0;owned\x07\x1b[2J\u202e\x9b2J"


def test_names_in_errors_and_lists_cannot_steer_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"description: {json.dumps(_EVIL)}\n", encoding="utf-8")
    variables = {"SIRCHAT_HOME": str(tmp_path), "NO_COLOR": "1"}
    for arguments in (
        ["replay", _EVIL],
        ["--model", _EVIL],
        ["--policy", _EVIL],
        ["--budget", _EVIL],
        ["--profile", _EVIL],
        [f"--{_EVIL}"],
        [_EVIL],
        ["profiles", "list"],
        ["profiles", "show", "mine"],
        ["profiles", "path", _EVIL],
        ["policies", "check", _EVIL],
    ):
        done = run(*arguments, **variables)
        assert "evil" in done.stdout + done.stderr, arguments
        written = (done.stdout + done.stderr).replace("owned", "")  # as text it may be shown
        assert not _harm(written), arguments


def test_a_transcript_cannot_steer_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    texts = [f"before{control}after" for control in _CONTROLS.values()]
    turns = [{"role": role, "content": text} for text in texts for role in ("user", "assistant")]
    file.write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")
    done = run("replay", "--feed", str(file))
    assert done.stdout.count("before") == len(turns)
    assert not _harm(done.stdout + done.stderr)


def test_a_file_name_in_an_error_cannot_steer_a_terminal(tmp_path: Path) -> None:
    program = (sys.executable, "-m", "sirchat", "replay", _EVIL)
    with Terminal(*program, home=tmp_path) as terminal:
        assert terminal.ended() == 2
        assert "evil cannot be read" in terminal.text
        assert not _harm(terminal.raw.decode())


def test_a_model_name_and_a_profile_cannot_steer_a_chat(tmp_path: Path) -> None:
    model = save_babbler(tmp_path / _EVIL)
    folder = tmp_path / "config" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"description: {json.dumps(_EVIL)}\n", encoding="utf-8")
    with Terminal("--model", str(model), home=tmp_path) as chat:
        chat.ask("Hello.")
        chat.send("/profile m")
        chat.wait_screen("mine +evil")
        chat.submit("\x03\x03")
        chat.paste(_EVIL)
        chat.wait_screen("> evil·")
        chat.submit()
        assert chat.leave() == 0
    for harm in (b"\x1b]", b"\x07", b"\x1b[2J", "\u202e".encode(), "\x9b".encode()):
        assert harm not in chat.raw


# --- where nothing is drawn


def test_a_dumb_terminal_gets_plain_text(home: Path, endless: str) -> None:
    environ = {"TERM": "dumb"}
    flags = ("--model", endless, "--max-new-tokens", "600", "--repetition-penalty", "1.3")
    with Terminal(*flags, home=home, environ=environ) as chat:
        chat.wait(r"(?m)^>$")
        chat.send("Go on.\r")
        chat.wait(r"(?s)[^>]{200}")
        chat.wait("600 out")
        assert "".join(_reply(600).split()) in "".join(chat.everything.split())
        assert b"\x1b" not in chat.raw
        chat.wait(r"(?m)^>$")
        chat.send("\x04")
        assert chat.ended() == 0


def test_no_color_means_no_colours_and_no_drawing(home: Path, endless: str) -> None:
    flags = ("--model", endless, "--max-new-tokens", "600", "--repetition-penalty", "1.3")
    with Terminal(*flags, home=home, environ={"NO_COLOR": "1", "PAGER": "cat"}) as chat:
        chat.wait_prompt()
        before = len(chat.raw)
        shown = chat.ask("Go on.")
        assert "".join(_said(shown)) == "".join(_reply(600).split())
        assert b"\x1b[1A" not in chat.raw[before:]
        chat.ask("/panel")
        chat.ask("/nonsense")
        assert chat.leave() == 0
    styles = b";".join(re.findall(rb"\x1b\[([\d;]*)m", chat.raw))
    assert set(styles.split(b";")) <= {b"", *(b"%d" % weight for weight in range(10))}


def test_a_small_window_gets_plain_text(chat: Terminal) -> None:
    chat.ask("/set max_new_tokens 100")
    chat.resize(rows=10, columns=44)
    before = len(chat.raw)
    shown = chat.ask("Go on.")
    assert "".join(_said(shown)) == "".join(_reply(100).split())
    assert b"\x1b[1A" not in chat.raw[before:]


def test_answers_go_to_standard_output_and_the_rest_to_the_terminal(
    tmp_path: Path, endless: str
) -> None:
    flags = f"--model {endless} --max-new-tokens 600 --repetition-penalty 1.3"
    command = f"{sys.executable} -m sirchat {flags} > {tmp_path}/out"
    with Terminal("sh", "-c", command, home=tmp_path) as chat:
        chat.ask("Go on.")
        chat.ask("/nonsense")
        assert chat.leave() == 0
    assert re.fullmatch(
        r"\d+ in, 600 out, .*\n> /nonsense\nsirchat: there is no command /nonsense.*",
        chat.everything[chat.everything.index("9 in") :].split("\n>\n")[0].rstrip("> \n"),
    )
    out = (tmp_path / "out").read_text(encoding="utf-8")
    assert "".join(out.split()) == "".join(_reply(600).split())
    assert "\x1b" not in out
