"""Rows of a reply: no text is lost, none is wider than the window; frames keep their pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sirchat.ui.cells import take_rows
from sirchat.ui.live import Pace

_TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Mn", "Me", "Cf")) | st.just(" "))


@given(st.lists(_TEXT | st.just("\n")), st.integers(10, 40))
def test_rows_and_rest_are_the_text_however_it_is_split(runs: list[str], width: int) -> None:
    rows: list[str] = []
    line = ""
    for piece in runs:
        full, line = take_rows(line + piece, width)
        rows += full
    assert "".join([*rows, line]) == "".join(runs)
    assert all(cell_len(row.rstrip(" \n")) <= width for row in [*rows, line])


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=9), min_size=1), st.integers(10, 30))
def test_no_word_is_broken_that_fits(words: list[str], width: int) -> None:
    rows, rest = take_rows(" ".join(words), width)
    assert " ".join([*rows, rest]).split() == words


def test_a_wide_character_never_straddles_the_edge() -> None:
    rows, rest = take_rows("あ" * 11, 5)
    assert rows == ["ああ"] * 5
    assert rest == "あ"


def test_a_row_ends_after_the_last_space_that_fits() -> None:
    assert take_rows("one two three", 7) == (["one two "], "three")
    assert take_rows("one two three", 6) == (["one ", "two "], "three")
    assert take_rows("one\ntwo", 10) == (["one\n"], "two")


@pytest.mark.parametrize(
    ("seconds", "size", "wait"), [(0.0, 0, 1 / 8), (0.0, 6_000, 0.5), (0.02, 100, 1.0)]
)
def test_long_or_slow_frames_come_less_often(
    seconds: float, size: int, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("sirchat.ui.live.time.monotonic", lambda: now[0])
    frames = Pace()
    assert frames.is_due()
    frames.drew(seconds, size)
    now[0] += wait - 0.001
    assert not frames.is_due()
    now[0] += 0.002
    assert frames.is_due()
