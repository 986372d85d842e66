"""A window that changes while a reply is generated: nothing of the panel stays, no word is lost."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path
from string import ascii_uppercase

import pytest

from attacking import MANY
from terminal import WARM, Emulator, Reflowing, Terminal

ROWS, COLUMNS = 24, 80  # the window at the beginning of a reply, and at its end
_CHANGES = 50 if MANY else 16
# The number of the word with which the window is left alone, and of the last one.
_CHANGED, _ALL = 3 * _CHANGES, 3 * _CHANGES + 110
# Words whose order is that of the alphabet; the panel has no other word of capital letters.
_WORDS = ["".join(letters) for letters in product(ascii_uppercase, repeat=2)][:_ALL]

_PAIRS = [" ".join(pair) for pair in zip(_WORDS[::2], _WORDS[1::2], strict=True)]
_THIRD = _CHANGED // 8
_LONG = " ".join(_PAIRS[:_THIRD]), " ".join(_PAIRS[2 * _THIRD : _CHANGED // 2])
_SAID = "\n\n".join([_LONG[0], *_PAIRS[_THIRD : 2 * _THIRD], _LONG[1], *_PAIRS[_CHANGED // 2 :]])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("said") / "reply.txt"
    file.write_text(_SAID, encoding="utf-8")
    return file


def _change_window(chat: Terminal, drawn: random.Random, least: tuple[int, int]) -> None:
    for change in range(_CHANGES):
        word = _WORDS[drawn.randrange(change, change + 2) * _CHANGED // _CHANGES]
        chat.until(lambda word=word: _newest(chat) >= word, 10)  # type: ignore[misc]
        chat.resize(drawn.randrange(least[0], 40), drawn.randrange(least[1], 120))
        if drawn.random() < 0.5:
            chat.read(0.01)
    chat.resize(ROWS, COLUMNS)


def _newest(chat: Terminal) -> str:
    """The last word that was written."""
    written = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", " ", chat.raw[-3000:].decode(errors="ignore"))
    return max(re.findall(r"(?<=\s)[A-Z]{2}\b", written), default="")


def _check(shown: str) -> None:
    """All that stays of a reply is its words, in their order; a narrower window may cut some."""
    assert not [row for row in shown.splitlines() if not re.fullmatch("[A-Z ]*", row)]
    words = re.findall(r"\b[A-Z]{2}\b", shown)
    assert words == sorted(words)


_SETTINGS = [(panel, markdown) for panel in ("live", "turn", "off") for markdown in ("on", "off")]
_LEAST, _SMALL = (14, 50), (11, 40)
_STEP = 1 if MANY else 6  # each of the windows below with one of the settings, or with all
_SLOW = [
    pytest.param(*settings, seed, least, screen, marks=pytest.mark.slow)
    for number, (seed, least, screen) in enumerate(
        (
            (2, _LEAST, Reflowing),
            (3, _SMALL, Emulator),  # a small window gets plain text
        )
    )
    for settings in _SETTINGS[number % _STEP :: _STEP]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("panel", "markdown", "seed", "least", "screen"), [("live", "on", 0, _LEAST, Emulator), *_SLOW]
)
def test_after_many_changes_the_screen_is_that_of_a_window_that_never_changed(
    home: Path,
    endless: str,
    said: Path,
    panel: str,
    markdown: str,
    seed: int,
    least: tuple[int, int],
    screen: type[Emulator],
) -> None:
    flags = ("--model", endless, "--panel", panel, "--budget", "128", "--max-new-tokens", "9999")
    command = (WARM, "-m", "tests.support.speaking", str(said), *flags)
    with Terminal(*command, home=home, rows=ROWS, columns=COLUMNS, screen=screen) as chat:
        if markdown == "off":
            chat.ask("/set markdown off")
        chat.say("Go on.")
        _change_window(chat, random.Random(seed), least)
        chat.wait_prompt()
        shown = chat.shown
        assert chat.leave() == 0
    reply = re.split(r"\n+\d+ tokens read, ", shown)[0]
    _check(reply)
    assert reply.splitlines()[-ROWS:] == _SAID.splitlines()[-ROWS:]
