"""The display filter drops control sequences, however they are split, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirchat.ui.text import DisplayFilter, displayable, displayable_line

_DANGEROUS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SEQUENCES = {
    "colour": "\x1b[31m",
    "clear screen": "\x1b[2J",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://example.com\x1b\\",
    "clipboard": "\x1b]52;c;b3duZWQ=\x07",
    "device control": "\x1bP1$r\x1b\\",
    "8-bit CSI": "\x9b31m",
    "8-bit OSC": "\x9d0;owned\x9c",
    "charset": "\x1b(B",
    "reset": "\x1bc",
    "right-to-left override": "\u202e",
    "isolate": "\u2066",
    "bell": "\x07",
    "backspace": "\x08",
    "carriage return": "\r",
    "delete": "\x7f",
}


@pytest.mark.parametrize("sequence", _SEQUENCES.values(), ids=_SEQUENCES)
def test_a_sequence_is_dropped_wherever_it_is_split(sequence: str) -> None:
    whole = f"before{sequence}after"
    for cut in range(len(whole) + 1):
        stream = DisplayFilter()
        assert stream.push(whole[:cut]) + stream.push(whole[cut:]) == "beforeafter"
    stream = DisplayFilter()
    assert "".join(stream.push(char) for char in whole) == "beforeafter"


@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b[]8;P\\\x07m"))))
def test_no_control_passes_and_chunks_do_not_matter(chunks: list[str]) -> None:
    stream = DisplayFilter()
    shown = "".join(stream.push(chunk) for chunk in chunks)
    assert not _DANGEROUS.search(shown)
    assert shown == displayable("".join(chunks))


@given(st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs"))))
def test_ordinary_text_passes_unchanged(text: str) -> None:
    assert displayable(text + "\n\tx") == text + "\n\tx"


def test_an_open_sequence_ends_with_the_line() -> None:
    assert displayable("a\x1b]0;never ended\nb") == "a\nb"


def test_names_are_shown_on_one_line() -> None:
    assert displayable_line("a\nb\x1b[2Jc.yaml") == "a bc.yaml"
