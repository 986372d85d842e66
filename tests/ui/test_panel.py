"""Panels as golden text and for any text; their numbers equal a count of events; styles.

`SIRCHAT_WRITE_GOLDEN=1 pytest tests/ui/test_panel.py` writes the golden files anew.
"""

from __future__ import annotations

import os
import random
import re
import unicodedata
from dataclasses import replace
from itertools import chain, pairwise
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
from chatting import session
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
from held_rows import Count
from sirchat.chat.events import Evicted, TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.chat.session import Session
from sirchat.ui.cells import (
    StyledRun,
    token_line,
    wrap_runs,
)
from sirchat.ui.panel import draw_compact_panel, draw_full_panel
from sirchat.ui.tables import draw_tokens, format_three_digits
from sirchat.ui.theme import Theme, find_theme

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
    small = lines(draw_compact_panel(view, DARK, width, evicted=[one * 9 for one in gone]), width)
    assert len(small) <= 8
    assert max(map(cell_len, small)) <= width - 1
    table = printed(draw_tokens(snapshot.rows, DARK), 80).split("\n")
    kinds = {unicodedata.category(char) for char in "".join([*full, *small, *table])}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_a_token_table_shows_spaces_every_number_and_flags_where_there_are_any() -> None:
    row = TokenRow(7, 1234, " a\n\tb", 2, "assistant", None, 0.1, 0.123456, 0.5, ("sink", "anchor"))
    titles, cells = (line.split() for line in lines(draw_tokens([row], NONE), 80))
    assert cells == ["7", "2", "model", '"', 'a⏎→b"', "1234", "-", "0.123", "sink", "anchor"]
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


# --- the compact panel


def test_the_strip_has_signs_of_its_own_for_turns_of_which_no_word_or_all_is_held() -> None:
    shares = [(9, 0, 0), (9, 2, 1), (9, 2, 0), (9, 3, 3), (9, 9, 9)]  # tokens, held, no template's
    turns = (HeldShare(0, "user", *share[:2], None, share[2]) for share in shares)
    drawn = lines(draw_compact_panel(replace(TALK, turns=tuple(turns)), NONE, 80), 80)
    assert drawn[2] == "turns ·▂·▃█  2 wholly evicted"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "2 of 10 are evicted next: Rex, green"),
        ({"leaving_words": {}}, "2 of 10 are evicted next: only punctuation and the marks"),
        ({"evicted_next": (), "budget": 50}, "room for 40 tokens"),
    ],
)
def test_what_goes_next_is_said_in_words(change: dict[str, Any], said: str) -> None:
    leaving = {"Rex": "user", "green": "assistant"}
    view = replace(TALK, rows=(), slots=(), resident=10, evicted_next=(3, 4), leaving_words=leaving)
    drawn = draw_compact_panel(replace(view, **change), NONE, 80)
    assert lines(drawn, 80)[3].startswith(said)


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


# --- numbers and text read off the drawn panels equal a count over the events


MORE = ["sink", "random"] if MANY else []
_SAYINGS = (
    "My name is Anna.",
    "I have a cat named Luna and I live in Lisbon.",
    "Tell me a joke.",
    "My favourite colour is green.",
    "What is my name?",
    "I want you to buy the GROCERY: [apples, rice, tea]",
    "Where do I live?",
)
_GAUGE = re.compile(r"([\d,]+)/([\d,]+) held +([\d,]+) seen +([\d,]+) evicted")


def _talk(policy: str, seed: int) -> tuple[Session, Count]:
    draw = random.Random(seed)
    chat = session(
        tokens=True,
        policy=policy,
        budget=draw.choice([64, 80, 128]),
        recent=draw.choice([0, 8]),
        decay=draw.choice([1.0, 0.8]),
        max_new_tokens=40,
        system=draw.choice([None, "You are a helpful assistant."]),
    )
    count = Count()
    for _ in range(6):
        count.add(list(chat.ask(draw.choice(_SAYINGS))))
        if draw.random() < 0.3:
            count.add(list(chat.switch("/budget", budget=draw.choice([64, 80, 128]))))
    return chat, count


def _drawn(drawing: RenderableType) -> list[str]:
    return [line.strip("│╭╮╰╯─ ") for line in lines(drawing, 100)]


def _full_panel(chat: Session) -> list[str]:
    return _drawn(draw_full_panel(chat.snapshot(), NONE, 100))


def _compact_panel(chat: Session) -> list[str]:
    return _drawn(draw_compact_panel(chat.snapshot(strongest=200), NONE, 100))


def _numbers(shown: list[str]) -> list[int]:
    match = _GAUGE.search("\n".join(shown))
    assert match
    return [int(number.replace(",", "")) for number in match.groups()]


def _held_text(count: Count) -> str:
    """The expected text of the panel, without blanks: labels, held tokens, and gaps.

    A gap ends with its turn; turns of which nothing is held, one after another, have one gap.
    """
    text, bounds, lost = "", [0, *count.ends], 0  # the first turn of those that nothing is held of
    names = [{"user": "you", "assistant": "model"}.get(role, role) for role in count.roles]

    def lost_turns(end: int) -> str:
        label = f"{lost}–{end - 1}" if end - lost > 1 else f"{lost}{names[lost]}"
        return f"{label}⋯{bounds[end] - bounds[lost]}"

    for turn, (start, end) in enumerate(pairwise(bounds)):
        held = [position for position in count.held if start <= position < end]
        if not held:
            continue
        text += (lost_turns(turn) if lost < turn else "") + f"{turn}{names[turn]}"
        lost, before = turn + 1, start - 1
        for position in held:
            gap = position - before - 1
            text += (f"⋯{gap}" if gap else "") + count.tokens[position].text
            before = position
        text += f"⋯{end - before - 1}" if end - before > 1 else ""
    return "".join((text + (lost_turns(len(names)) if lost < len(names) else "")).split())


def _body(shown: list[str]) -> str:
    """Labels and held text as drawn, without brackets and blanks."""
    start = next(i for i, line in enumerate(shown) if "template" in line) + 1
    return re.sub(r"[⟨⟩⟦⟧\s]", "", "".join(shown[start : shown.index("turns")]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["window", "entropy", "reservoir", "anchor", *MORE])
@pytest.mark.parametrize("seed", range(MANY or 1))
def test_gauge_held_text_and_shares_are_true(policy: str, seed: int) -> None:
    chat, count = _talk(policy, seed)
    held, seen = len(count.held), count.ends[-1]
    expected = [held, chat.budget, seen, seen - held]
    shown, compact = _full_panel(chat), _compact_panel(chat)
    assert _numbers(shown) == expected
    assert _numbers(compact) == expected
    if policy == "entropy":  # which keeps no turn that has only what the template adds
        _check_strip(compact, count)
    assert _body(shown) == _held_text(count)
    table = [line.split() for line in shown[shown.index("turns") + 2 :] if line]
    shares = [int(cells[3]) for cells in table]
    assert [int(cells[2]) for cells in table] == [
        end - start for start, end in zip([0, *count.ends], count.ends, strict=False)
    ]
    assert shares == [
        sum(start <= p < end for p in count.held)
        for start, end in zip([0, *count.ends], count.ends, strict=False)
    ]


def _check_strip(panel: list[str], count: Count) -> None:
    """It has one cell a turn."""
    strip = next(line for line in panel if line.startswith("turns")).split()[1]
    for glyph, start, end in zip(strip, [0, *count.ends], count.ends, strict=False):
        kept = [count.tokens[p] for p in count.held if start <= p < end]
        share = len(kept) / (end - start)
        assert (glyph == "·") == all(row.role == "template" for row in kept)
        assert (glyph == "█") == (share == 1)
        if glyph != "·":
            assert abs("▁▂▃▄▅▆▇█".index(glyph) / 7 - share) < 0.2
    assert len(strip) == len(count.ends)


def test_while_a_reply_is_generated_the_gauge_is_true_too() -> None:
    chat = session(tokens=True, budget=64, recent=8, max_new_tokens=40)
    gone: set[int] = set()
    for saying in _SAYINGS:
        for event in chat.ask(saying):
            if isinstance(event, Evicted):
                gone |= set(event.positions)
                held, _, seen, evicted = _numbers(_compact_panel(chat))
                read = seen - event.seen  # a token, in the step that evicted
                assert read in (0, 1)
                assert (held, evicted) == (event.resident + read, len(gone))
    assert gone
