"""Styles of tokens, labels and bars.

A token's hue shows its surprisal; its brightness shows how much surprisal is left after decay. High
surprisal is also bold or underlined, so that it shows without colour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.style import Style

from sirchat.chat.events import TokenRow

# Upper limits, in nats, of the buckets: ranges of surprisal that have one colour each.
BUCKET_LIMITS: Final = (0.5, 2.0, 4.0, 7.0, float("inf"))

# The least share of surprisal left after decay that is drawn strong, and that is fading.
INTENSITY_LIMITS: Final = (0.6, 0.25)

ROLE_NAMES: Final = {
    "system": "system",
    "summary": "summary",
    "tool": "tool",
    "user": "you",
    "assistant": "model",
}

_PLAIN, _DIM, _DIM_ITALIC = Style(), Style(dim=True), Style(dim=True, italic=True)

# The styles of one bucket of surprisal, one for each intensity: strong, fading, faint.
Shades = tuple[Style, ...]


@dataclass(frozen=True)
class Theme:
    name: str
    tokens: tuple[Shades, ...]  # for each bucket of surprisal
    secondary: Style  # labels and secondary text
    heading: Style  # titles of sections
    filled: Style  # the full part of a bar
    empty: Style  # the empty part of a bar, boxes and rules
    evicted: Style  # a token that was just evicted
    bracket: Style  # brackets of sinks and pins
    system: Style
    user: Style
    model: Style = _PLAIN
    gap: Style = _DIM  # mark for evicted or omitted tokens
    template: Style = _DIM_ITALIC  # text of the chat template

    def token_style(self, row: TokenRow) -> Style:
        """The style of a held token, by its surprisal and the share of it left after decay."""
        if row.role == "template":
            return self.template
        surprisal = row.surprisal or 0.0
        intensity = decay_intensity(surprisal, row.decayed_surprisal)
        return self.tokens[surprisal_bucket(surprisal)][intensity]

    def role_style(self, role: str) -> Style:
        """The style of the label of a turn by this role, such as "user"."""
        roles = {"system": self.system, "user": self.user, "assistant": self.model}
        return roles.get(role, self.secondary)


def surprisal_bucket(surprisal: float) -> int:
    """Index of the bucket for a surprisal in nats."""
    return bisect_right(BUCKET_LIMITS, surprisal, hi=len(BUCKET_LIMITS) - 1)


def decay_intensity(surprisal: float, decayed: float) -> int:
    """0 (strong), 1 (fading) or 2 (faint), by the share of surprisal left after decay."""
    share_left = decayed / surprisal if surprisal > 0 else 1.0
    return sum(share_left < limit for limit in INTENSITY_LIMITS)


def find_theme(name: str, environ: Mapping[str, str], *, is_light: bool = False) -> Theme:
    """The theme "dark", "light" or "none"; "auto" follows COLORFGBG, or else `is_light`.

    Raises ValueError for any other name.
    """
    if name == "auto":
        background = environ.get("COLORFGBG", "")
        is_light = background.rpartition(";")[2] in ("7", "15") or (is_light and not background)
        name = "light" if is_light else "dark"
    if name not in _THEMES:
        raise ValueError(f"no theme {name!r}; there are auto, {', '.join(_THEMES)}")
    return _THEMES[name]


def _colour(number: int, weights: str = "") -> Style:
    return Style.parse(f"color({number}) {weights}")


def _bucket_shades(*buckets: tuple[int, int, int]) -> tuple[Shades, ...]:
    weights = ("", "", "", "bold", "bold underline")
    return tuple(
        tuple(_colour(number, weight) for number in numbers)
        for numbers, weight in zip(buckets, weights, strict=True)
    )


def _colourless_shades(style: Style) -> Shades:
    return style, style, style + Style(dim=True)


def _colour_theme(name: str, *buckets: tuple[int, int, int], **colours: int) -> Theme:
    styles = {part: _colour(colour) for part, colour in colours.items()}
    styles["evicted"] += Style(strike=True)
    return Theme(name, _bucket_shades(*buckets), **styles, system=styles["bracket"])


# Of 256 colours, those whose hues stay apart on a terminal with 16, and whose contrast with black,
# or white, is at least 4.5. Grey 243 has it with both, for where nobody knows the background.
_DARK = _colour_theme(
    "dark",
    *((248, 245, 243), (117, 38, 31), (113, 71, 34), (222, 178, 136), (209, 173, 131)),
    secondary=243,
    heading=250,
    filled=37,
    empty=243,
    evicted=175,
    bracket=141,
    user=44,
)
_LIGHT = _colour_theme(
    "light",
    *((240, 242, 243), (19, 26, 63), (22, 28, 29), (58, 94, 130), (88, 124, 131)),
    secondary=243,
    heading=238,
    filled=23,
    empty=243,
    evicted=126,
    bracket=91,
    user=20,
)
_NONE = Theme(
    name="none",
    tokens=(
        _colourless_shades(Style(dim=True)),
        _colourless_shades(Style()),
        _colourless_shades(Style(underline=True)),
        _colourless_shades(Style(bold=True)),
        _colourless_shades(Style(bold=True, underline=True)),
    ),
    secondary=Style(dim=True),
    heading=Style(),
    filled=Style(),
    empty=Style(dim=True),
    evicted=Style(dim=True, strike=True),
    bracket=Style(),
    system=Style(italic=True),
    user=Style(bold=True),
)

_THEMES: Final = {theme.name: theme for theme in (_DARK, _LIGHT, _NONE)}
