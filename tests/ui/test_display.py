"""A reply on the screen: its text, the compact panel below it, and plain text without one."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chatting import answer, babbler, session
from fake_terminal import FakeTerminal, show_reply
from sirchat.recall.recall import Recall
from sirchat.ui.live import FramePacer
from sirchat.ui.text import displayable
from terminal import Terminal, everything_on
from typed_chat import TypedChat
from warm_python import warm_python

_GAUGE = r"━+─* {2}[\d,]+/1,024 held"


@cache
def _reply(tokens: int = 120) -> str:
    """The reply that the chat's model generates, filtered for display."""
    chat = session(babbler(), max_new_tokens=tokens, repetition_penalty=1.3)
    return displayable(answer(list(chat.ask("Go on."))))


@pytest.mark.slow
@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_a_plain_terminal_gets_plain_text(
    home: Path, endless: str, environ: dict[str, str]
) -> None:
    flags = ("--model", endless, "--max-new-tokens", "120", "--repetition-penalty", "1.3")
    with Terminal(*flags, home=home, environ=environ) as chat:
        for line, shown in (
            ("Go on.", "120 written"),
            ("/panel", "held"),
            ("/nonsense", "no comm"),
        ):
            chat.wait_prompt() if "NO_COLOR" in environ else chat.wait(r"(?m)^>$")
            before = len(chat.raw)
            chat.send(f"{line}\r")
            chat.wait(shown)
            assert line != "Go on." or b"\x1b[1A" not in chat.raw[before:]
        assert "".join(_reply().split()) in "".join(chat.everything.split())
        chat.wait(r"(?m)^>$")
        chat.send("\x04")
        assert chat.ended() == 0
    if "TERM" in environ:
        assert b"\x1b" not in chat.raw
    styles = b";".join(re.findall(rb"\x1b\[([\d;]*)m", chat.raw))
    assert set(styles.split(b";")) <= {b"", *(b"%d" % weight for weight in range(10))}


@pytest.mark.slow
def test_answers_go_to_standard_output_and_the_rest_to_the_terminal(
    tmp_path: Path, endless: str
) -> None:
    flags = f"--model {endless} --max-new-tokens 120 --repetition-penalty 1.3"
    command = f"{' '.join(warm_python())} -m sirchat {flags} > {tmp_path}/out"
    with Terminal("sh", "-c", command, home=tmp_path) as chat:
        chat.ask("Go on.")
        chat.ask("/nonsense")
        assert chat.leave() == 0
    assert re.fullmatch(
        r"\d+ tokens read, 120 written, .*\n/continue .*\n> /nonsense\n"
        r"sirchat: there is no command /nonsense.*",
        chat.everything[chat.everything.index("9 tokens read") :].split("\n>\n")[0].rstrip("> \n"),
    )
    out = (tmp_path / "out").read_text(encoding="utf-8")
    assert "".join(out.split()) == "".join(_reply().split())
    assert "\x1b" not in out


@pytest.mark.parametrize("panel", ["off", "live"])
def test_a_line_says_that_a_message_is_read_until_the_first_token_comes(
    terminal: FakeTerminal, own_home: Path, monkeypatch: pytest.MonkeyPatch, panel: str
) -> None:
    searched, restore = list[str](), Recall.restore_for_turn

    def restore_for_turn(*given: Any, **named: Any) -> Any:  # from here on the model computes
        searched.append(everything_on(terminal.screen))
        return restore(*given, **named)

    monkeypatch.setattr(Recall, "restore_for_turn", restore_for_turn)
    with TypedChat(terminal, babbler(), panel=panel, save=False) as chat:
        assert "reading" not in chat.ask("Go on.")
    assert re.search(r"reading +0 of \d+ tokens", searched[0])


def test_quiet_leaves_status_out_and_answers_commands(
    terminal: FakeTerminal, own_home: Path
) -> None:
    with TypedChat(terminal, save=False) as chat:
        chat.screen.is_quiet = True
        chat.chat.greet(())
        assert "/help" not in terminal.getvalue()
        assert chat.ask("My name is Anna.") == "Nice to meet you, Anna."
        assert "tokens read" in chat.ask("/stats")
        assert "sirchat: " in chat.ask("/nonsense")


@pytest.mark.usefixtures("every_frame")
@pytest.mark.parametrize(
    ("panel", "size"),
    [("off", (30, 80)), ("turn", (30, 80)), ("live", (10, 80)), ("live", (30, 44))],
)
def test_without_a_live_panel_or_room_for_it_the_reply_is_streamed_as_it_is(
    terminal: FakeTerminal, own_home: Path, panel: str, size: tuple[int, int]
) -> None:
    terminal.resize(*size)
    settings = {"max_new_tokens": 40, "repetition_penalty": 1.3}
    with TypedChat(terminal, babbler(), panel=panel, **settings) as chat:
        shown = chat.ask("Go on.")
    said, beneath = re.split(r"(?m)^\d+ tokens read, ", shown)
    assert "".join(said.split()) == "".join(_reply(40).split())
    written = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert not re.search(f"── salience|{_GAUGE}", written.partition(" tokens read, ")[0])
    assert bool(re.search(_GAUGE, beneath)) is (panel == "turn")


_WORDS = " ".join(f"word{i:03}" if i % 7 else f"\n\n{i:03}\tend." for i in range(80))
_TABS = " ".join(f"word{i:03}\t{i:03}" for i in range(50))
_WIDE = " ".join(f"{i:02}海は広い。" if i % 3 else f"{i:02}e\u0301te\u0301" for i in range(45))


@pytest.mark.slow
@pytest.mark.usefixtures("every_frame")
@pytest.mark.parametrize("text", [_WORDS, _TABS, _WIDE], ids=["lines", "tabs", "wide"])
@pytest.mark.parametrize("size", [3, 50])
def test_every_word_is_there_however_it_comes(terminal: FakeTerminal, text: str, size: int) -> None:
    show_reply(terminal, [text[i : i + size] for i in range(0, len(text), size)])
    assert everything_on(terminal.screen).split() == unicodedata.normalize("NFC", text).split()


# --- the pace of frames


@pytest.mark.parametrize(("seconds", "wait"), [(0.0, 1 / 8), (0.02, 1.0)])
def test_slow_frames_come_less_often(
    seconds: float, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("sirchat.ui.live.time.monotonic", lambda: now[0])
    frames = FramePacer()
    assert frames.is_due()
    frames.record_frame(seconds)
    now[0] += wait - 0.001
    assert not frames.is_due()
    now[0] += 0.002
    assert frames.is_due()
