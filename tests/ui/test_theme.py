"""The styles of a theme differ without colour, in 16 colours, and on either background."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.color import ColorSystem
from rich.style import Style

from drawing import DARK, LIGHT, TALK, THEMES, copied, styles
from sirchat.ui.tables import draw_tokens
from sirchat.ui.theme import Theme, bucket, intensity, theme_named


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


def test_a_theme_keeps_its_hues_apart_in_16_colours() -> None:
    for theme in (DARK, LIGHT):
        for level in range(3):
            numbers = [
                shades[level].color.downgrade(ColorSystem.STANDARD).number  # type: ignore[union-attr]
                for shades in theme.tokens
            ]
            assert len(set(numbers)) == len(numbers), (theme.name, level, numbers)
            assert not {0, 15} & set(numbers)


def test_colours_have_contrast_on_white_and_on_black() -> None:
    for theme, back in ((DARK, 0.0), (LIGHT, 1.0)):
        for shades in theme.tokens:
            for level, least in enumerate((4.0, 3.0, 2.5)):
                ink = _luminance(shades[level])
                contrast = (max(ink, back) + 0.05) / (min(ink, back) + 0.05)
                assert contrast >= least, (theme.name, shades[level], contrast)


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
    assert theme_named("auto", environ).name == name


def test_buckets_and_intensities() -> None:
    assert [bucket(nats) for nats in (0, 0.49, 0.5, 2, 3.9, 4, 7, 1e9)] == [0, 0, 1, 2, 2, 3, 4, 4]
    assert [intensity(4, score) for score in (4, 2.4, 2.3, 1, 0.9, 0)] == [0, 0, 1, 1, 2, 2]
    assert intensity(0, 0) == 0
