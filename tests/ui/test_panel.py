"""Both panels as golden text, properties that they keep for any text, and the themes' styles.

`SIRCHAT_WRITE_GOLDEN=1 pytest tests/ui/test_panel.py` writes the golden files anew.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import RenderableType
from rich.style import Style

from attacking import MANY
from drawing import (
    DARK,
    LIGHT,
    LONG,
    NONE,
    TALK,
    THEMES,
    compact_view,
    copied,
    lines,
    printed,
    snapshot_folder,
    styles,
)
from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.ui.cells import (
    StyledRun,
    token_line,
    wrap_runs,
)
from sirchat.ui.panel import draw_compact_panel, draw_full_panel
from sirchat.ui.tables import draw_tokens, format_three_digits
from sirchat.ui.theme import Theme, decay_intensity, find_theme, surprisal_bucket

GOLDEN = Path(__file__).parents[1] / "golden"
GONE = ("Tuesday", "Ingrid", "fish\x1b[31m")


def draw(kind: str, theme: Theme, width: int) -> RenderableType:
    if kind == "panel":
        return draw_full_panel(TALK, theme, width)
    if kind == "compact-long":
        return draw_compact_panel(compact_view(LONG), theme, width)
    return draw_compact_panel(compact_view(TALK), theme, width, evicted=GONE)


@pytest.mark.parametrize(
    ("kind", "width", "theme", "colours"),
    [
        ("panel", 60, "none", None),
        ("panel", 120, "dark", ColorSystem.EIGHT_BIT),
        ("compact", 60, "none", None),
        ("compact", 120, "light", ColorSystem.EIGHT_BIT),
        ("compact", 80, "dark", ColorSystem.STANDARD),
        ("compact-long", 120, "none", None),
    ],
)
def test_golden(kind: str, width: int, theme: str, colours: ColorSystem | None) -> None:
    suffix = "-16-colours" if colours is ColorSystem.STANDARD else ""
    path = GOLDEN / f"{kind}-{width}-{theme}{suffix}.txt"
    now = printed(draw(kind, THEMES[theme], width), width, colours)
    if os.environ.get("SIRCHAT_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(now, encoding="utf-8")
    assert now == path.read_text(encoding="utf-8")


# --- any text

ODD = (
    "\u0301\u200d\ufe0f\u20e3👍🏽🏿🇳🇴❤👩👧汉字한ｆ\u1112\u1161\u11ab\u094d\u0915\u093e\u0937\u17d2\u0e33\u202e"
    "\u2066\x1b[]\x07\x9b\x85\n\t\r\u2028\u00ad\u0600\ufdfd\ue000\U000e0067\ufffd ⋯…⟨⟦│◌"
)
TEXTS = st.text(
    st.one_of(st.characters(), st.sampled_from(ODD), st.sampled_from("abc   ")), max_size=12
)


@st.composite
def memories(draw: st.DrawFn) -> Snapshot:
    """A full snapshot with arbitrary texts."""
    tokens: list[tuple[TokenRow, bool]] = []
    roles = draw(st.lists(st.sampled_from(("system", "user", "assistant")), min_size=1, max_size=6))
    nats = st.floats(0, 30)
    for turn, role in enumerate(roles):
        for text in draw(st.lists(TEXTS, max_size=12)):
            surprisal = draw(st.none() | nats)
            row = TokenRow(
                position=len(tokens),
                id=draw(st.integers(0, 300_000)),
                text=text,
                turn=turn,
                role=draw(st.sampled_from((role, role, "template"))),
                surprisal=surprisal,
                decayed_surprisal=(surprisal or 0.0) * draw(st.floats(0, 1)),
                score=draw(st.none() | nats),
                arrival_key=0.5,
                flags=draw(st.sampled_from(((), (), ("sink",), ("pinned",), ("sink", "pinned")))),
            )
            tokens.append((row, draw(st.booleans())))
    snapshot = snapshot_folder(tokens, roles)
    return replace(snapshot, model=draw(TEXTS) * draw(st.integers(1, 20)), policy=draw(TEXTS))


@pytest.mark.slow
@settings(max_examples=MANY or 10)
@given(memories(), st.integers(60, 200), st.integers(1, 40), st.lists(TEXTS, max_size=8))
def test_any_text_keeps_panels_straight_and_controls_no_terminal(
    snapshot: Snapshot, width: int, strongest: int, gone: list[str]
) -> None:
    full = lines(draw_full_panel(snapshot, DARK, width), width)
    assert {cell_len(line) for line in full} == {width}
    view = compact_view(snapshot, strongest)
    small = lines(draw_compact_panel(view, DARK, width, evicted=gone), width)
    assert len(small) <= 8
    assert max(map(cell_len, small)) <= width - 1
    table = printed(draw_tokens(snapshot.rows, DARK), 80).split("\n")
    kinds = {unicodedata.category(char) for char in "".join([*full, *small, *table])}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@given(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=7))
def test_each_turns_line_counts_the_tokens_that_were_evicted_of_it(turns: list[list[bool]]) -> None:
    kinds = [(turn, is_held) for turn, kept in enumerate(turns) for is_held in kept]
    tokens = [
        (replace(TALK.rows[0], position=at, text=" w", turn=turn, role="user", flags=()), is_held)
        for at, (turn, is_held) in enumerate(kinds)
    ]
    drawn = lines(draw_full_panel(snapshot_folder(tokens, ["user"] * len(turns)), NONE, 120), 120)
    counted = {
        found[1]: (sum(map(int, re.findall(r"⋯(\d+)", found[2]))), found[2].count("w"))
        for line in drawn
        if (found := re.match(r"│ +(\d+(?:–\d+)?) +(?:you)? +([⋯w][⋯\d w]*?) *│$", line))
    }
    expected = {
        str(turn): (len(kept) - sum(kept), sum(kept))
        for turn, kept in enumerate(turns)
        if any(kept)
    }
    for first, end in _runs_without_held(turns):
        name = str(first) if end == first + 1 else f"{first}–{end - 1}"
        if count := sum(map(len, turns[first:end])):
            expected[name] = count, 0
    assert counted == expected


def _runs_without_held(turns: list[list[bool]]) -> Iterator[tuple[int, int]]:
    """First turn and end of each row of turns of which nothing is held."""
    numbers = range(len(turns))
    for has_held, run in groupby(numbers, lambda turn: any(turns[turn])):
        run_turns = list(run)
        if not has_held:
            yield run_turns[0], run_turns[-1] + 1


def strip(shares: list[tuple[int, int, int]], width: int) -> str:
    """The row of turns of so many tokens, of which so many are held, and are not the template's."""
    turns = [HeldShare(i, "user", n, held, None, own) for i, (n, held, own) in enumerate(shares)]
    return compact(replace(TALK, turns=tuple(turns)), width + 1)[2]


def test_the_strip_has_its_own_glyphs_for_none_and_for_all_and_counts_those_that_are_gone() -> None:
    shares = [(100, 0, 0), (100, 1, 1), (100, 99, 99), (100, 100, 100), (0, 0, 0)]
    assert strip(shares, 60) == "turns ·▁▇█·  1 wholly evicted"
    many = strip([(1, i % 2, i % 2) for i in range(500)], 50)
    counted = "  250 wholly evicted"
    assert many.startswith("turns ⋯481 █·█")
    assert many.endswith(counted)
    assert len(many) == 50
    assert len(many.removeprefix("turns ⋯481 ").removesuffix(counted)) == 500 - 481
    shares = [(9, 0, 0), (9, 2, 1), (9, 2, 0), (9, 3, 3), (9, 9, 9)]
    assert strip(shares, 80) == "turns ·▂·▃█  2 wholly evicted"
    assert strip(shares[3:], 80) == "turns ▃█"


def test_a_compact_panel_shows_the_strongest_words_and_what_lies_between() -> None:
    view = view_of((2, "first"), (3, " next"), (9, " last"))
    # 0 and 1 are evicted; 4 to 8 holds two that are not shown and three evicted
    snapshot = replace(view, slots=(0, 1, 4), seen=12, resident=6)
    assert compact(snapshot)[-1] == "⋯2 you: first next⋯3 last⋯1"
    assert compact(view)[-1] == "you: first next… last"


def test_a_token_table_shows_spaces_every_number_and_flags_where_there_are_any() -> None:
    row = TokenRow(7, 1234, " a\nb", 2, "assistant", None, 0.1, 0.123456, 0.5, ("sink", "anchor"))
    titles, cells = (line.split() for line in lines(draw_tokens([row], NONE), 80))
    assert cells == ["7", "2", "model", '"', 'a⏎b"', "1234", "-", "0.123", "sink", "anchor"]
    names = ["position", "turn", "role", "token", "id", "surprisal", "score", "flags"]
    assert titles == names
    plain = [replace(row, flags=(), text="x" * 9)]
    assert lines(draw_tokens(plain, NONE), 60)[0].split() == titles[:-1]
    long = [replace(row, id=128_255, role="template", flags=("anchor",), text="x" * 9)]
    assert "surprisal" in lines(draw_tokens(long, NONE), 60)[0].split()
    assert "128255" in lines(draw_tokens(long, NONE), 60)[1]


@pytest.mark.parametrize(("theme", "back"), [(DARK, 0.0), (LIGHT, 1.0)], ids=["dark", "light"])
def test_colours_have_contrast_and_keep_their_hues_in_16_colours(theme: Theme, back: float) -> None:
    parts = [value for value in vars(theme).values() if isinstance(value, Style)]
    for style in (*parts, *chain(*theme.tokens)):
        if style.color is not None:
            ink = _luminance(style)
            contrast = (max(ink, back) + 0.05) / (min(ink, back) + 0.05)
            assert contrast >= 4.5, (style, contrast)
    for level in range(3):
        numbers = [
            shades[level].color.downgrade(ColorSystem.STANDARD).number  # type: ignore[union-attr]
            for shades in theme.tokens
        ]
        assert len(set(numbers)) == len(numbers), (level, numbers)
        assert not {0, 15} & set(numbers)


@given(st.lists(TEXTS), st.integers(2, 80))
def test_layout_loses_nothing_and_cuts_no_character(texts: list[str], width: int) -> None:
    styles_in_turn = [Style(), Style(bold=True)]
    runs = [StyledRun(token_line(text), styles_in_turn[i % 2]) for i, text in enumerate(texts)]
    laid = wrap_runs(runs, width)
    shown, given = ("".join(one) for one in ((x.plain for x in laid), (x.text for x in runs)))
    assert shown.replace(" ", "") == given.replace(" ", "")
    for line in laid:
        assert cell_len(line.plain) <= width


@pytest.mark.parametrize(
    ("text", "as_shown"),
    [
        ("👨\u200d🍳\U000e0067", "👨🍳"),
        ("a\n\tb", "a⏎→b"),
        ("\x1b[31mred\x1b]0;t\x07", "red"),
        ("\u202eabc", "abc"),
        ("שלום", "שלום"),
        ("का", "का"),
    ],
)
def test_shown(text: str, as_shown: str) -> None:
    assert token_line(text) == as_shown


def test_lines_break_after_spaces_and_within_long_words() -> None:
    runs = [StyledRun("one two th", Style()), StyledRun("ree", Style(bold=True))]
    assert [line.plain for line in wrap_runs(runs, 12)] == ["one two ", "three"]
    assert [line.plain for line in wrap_runs([StyledRun("a字字", Style())], 4)] == ["a字", "字"]
    accented = "aa字\u0301bb"
    laid = [line.plain for line in wrap_runs([StyledRun(accented, Style())], 4)]
    assert laid == [accented[:4], "bb"]


# --- the compact panel


def view_of(*said: tuple[int, str], role: str = "user") -> Snapshot:
    """A summary of these positions and texts, all of one turn, without gaps."""
    rows = tuple(
        replace(TALK.rows[0], position=at, text=text, role=role, flags=(), surprisal=5.0, score=5)
        for at, text in said
    )
    seen = max((at for at, _ in said), default=-1) + 1
    return replace(
        TALK, rows=rows, slots=tuple(row.position for row in rows), seen=seen, resident=seen,
        threshold=None, evicted_next=(), leaving_words={},
    )  # fmt: skip


def compact(snapshot: Snapshot, width: int = 80) -> list[str]:
    return lines(draw_compact_panel(snapshot, NONE, width), width)


def test_a_compact_panel_says_who_speaks_and_hides_the_template() -> None:
    first, second, third = (
        view_of((at, text), role=role).rows[0]
        for at, text, role in ((1, "Rex", "user"), (2, "<|end|>", "template"), (4, "How", "user"))
    )
    rows = (first, second, replace(third, turn=1, role="assistant"))
    snapshot = replace(view_of((9, "x")), rows=rows, slots=(1, 2, 4), seen=5, resident=5)
    assert compact(snapshot)[-1] == "you: Rex model: How"
    evicted = replace(snapshot, slots=(0, 1, 2), seen=5, resident=3)
    assert compact(evicted)[-1] == "⋯1 you: Rex⋯1 model: How"
    drawn = styles(draw_compact_panel(snapshot, DARK, 120))
    assert drawn["you: "].dim
    assert drawn["you: "].color == DARK.user.color
    for theme in (TALK, LONG):
        for width in (60, 120, 200):
            assert "<|im" not in "".join(compact(compact_view(theme), width))


def test_words_are_whole_and_come_before_punctuation() -> None:
    texts = ((0, "Hal"), (1, "vor"), (2, "sen"), (3, ","), (4, " ?"), (5, " ok"), (6, " ..."))
    view = view_of(*texts)
    scores = (1.0, 9.0, 1.0, 1.0, 8.0, 2.0, 8.0)
    rows = tuple(replace(row, score=s) for row, s in zip(view.rows, scores, strict=True))
    far = [replace(rows[-1], position=i, text=" !" + "!" * 70, score=99) for i in range(7, 12)]
    view = replace(view, rows=(*rows, *far), slots=tuple(range(12)), seen=12, resident=12)
    assert "".join(compact(view)[4:]).startswith("you: Halvorsen, ? ok ...")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "2 of 10 are evicted next: Rex, green"),
        ({"leaving_words": {}}, "2 of 10 are evicted next: only punctuation and the marks"),
        ({"evicted_next": (), "budget": 50}, "room for 40 tokens"),
    ],
)
def test_what_goes_next_is_said_in_words(change: dict[str, Any], said: str) -> None:
    view = replace(view_of((9, "x")), seen=30, resident=10, evicted_next=(3, 4))
    view = replace(view, leaving_words={"Rex": "user", "green": "assistant"})
    view = replace(view, **change)
    assert compact(view)[3].startswith(said)


def test_a_compact_panel_cuts_what_is_too_long_for_its_rows() -> None:
    vast = replace(TALK.rows[5], text="word " * 200, score=99.0)
    snapshot = replace(TALK, rows=(vast,), slots=(5,))
    assert len(compact(snapshot)) == 7
    assert compact(replace(TALK, rows=(), slots=()))[4:] == ["⋯110"]
    gone = lines(draw_compact_panel(TALK, NONE, 80, evicted=["long" * 30, "x"]), 80)[4]
    assert gone == "evicted: " + "long" * 17 + "l…"


# --- tables


@pytest.mark.parametrize(
    ("score", "shown_as"),
    [(8.72e3, "8,720"), (999.9, "1,000"), (0.12345, "0.123"), (243, "243"), (2.5e12, "2.50e+12")],
)
def test_three_digits_of_a_score_are_read_without_an_exponent(score: float, shown_as: str) -> None:
    assert format_three_digits(score) == shown_as


# --- styles


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_high_surprisal_shows_without_colour(theme: Theme) -> None:
    row = replace(TALK.rows[0], role="user", flags=(), text="word")
    weights = []
    for surprisal in (0.1, 1.0, 3.0, 5.0, 9.0):
        drawn = draw_tokens([replace(row, surprisal=surprisal, decayed_surprisal=surprisal)], theme)
        cell = next(style for text, style in styles(drawn).items() if '"word"' in text)
        style = copied(cell, colour=False)
        weights.append(style.render("x", color_system=ColorSystem.STANDARD))
    assert weights[3:] == ["\x1b[1mx\x1b[0m", "\x1b[1;4mx\x1b[0m"]
    assert not set(weights[:3]) & set(weights[3:])


def _luminance(style: Style) -> float:
    assert style.color
    parts = [value / 255 for value in style.color.get_truecolor()]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("environ", "name"),
    [({}, "dark"), ({"COLORFGBG": "0;15"}, "light"), ({"COLORFGBG": "0;default;7"}, "light")]
    + [({"COLORFGBG": value}, "dark") for value in ("15;0", "", "x", "0;17", ";")],
)
def test_auto_reads_colorfgbg(environ: dict[str, str], name: str) -> None:
    assert find_theme("auto", environ).name == name


def test_buckets_and_intensities() -> None:
    buckets = [surprisal_bucket(nats) for nats in (0, 0.49, 0.5, 2, 3.9, 4, 7, 1e9)]
    assert buckets == [0, 0, 1, 2, 2, 3, 4, 4]
    assert [decay_intensity(4, score) for score in (4, 2.4, 2.3, 1, 0.9, 0)] == [0, 0, 1, 1, 2, 2]
    assert decay_intensity(0, 0) == 0
