"""Styles of tokens, labels and bars: their colours, and what is bold or underlined.

A token's hue shows its surprisal; its brightness shows how much surprisal is left after decay. High
surprisal is also bold or underlined, so that it shows without colour. The 256-colour numbers are
chosen so that each hue stays recognizable on a terminal with 16 colours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.style import Style

from sirchat.chat.events import TokenRow

LIMITS: Final = (0.5, 2.0, 4.0, 7.0, float("inf"))
"""Upper limits of the buckets, the ranges of surprisal that have one colour each; in nats."""

LEVELS: Final = (0.6, 0.25, 0.0)
"""For each intensity (strong, fading, faint), the least share of surprisal left after decay."""

ROLE_NAMES: Final = {"system": "system", "user": "you", "assistant": "model"}

Shades = tuple[Style, Style, Style]
"""The styles of one bucket of surprisal, one for each intensity: strong, fading, faint."""


@dataclass(frozen=True)
class Theme:
    """The styles for one kind of background, such as a dark one.

    Attributes:
        tokens: the styles of tokens for each bucket of surprisal (see `LIMITS`).
        quiet: labels and secondary text. heading: titles of sections.
        gauge, rest: the full and the empty part of a bar. border: boxes and rules.
        gap: mark for evicted or omitted tokens. flash: a token that was just evicted.
        template: text of the chat template. mark: brackets of sinks and pins.
        system, you, model: who wrote a turn.
    """

    name: str
    tokens: tuple[Shades, ...]
    quiet: Style
    heading: Style
    gauge: Style
    rest: Style
    border: Style
    gap: Style
    flash: Style
    template: Style
    mark: Style
    system: Style
    you: Style
    model: Style

    def token(self, row: TokenRow) -> Style:
        """The style of a held token, by its surprisal and the share of it left after decay."""
        if row.role == "template":
            return self.template
        surprisal = row.surprisal or 0.0
        return self.tokens[bucket(surprisal)][intensity(surprisal, row.decayed_surprisal)]

    def role(self, role: str) -> Style:
        """The style of a turn's label; `role` is the role of the turn's speaker, such as "user"."""
        roles = {"system": self.system, "user": self.you, "assistant": self.model}
        return roles.get(role, self.quiet)


def bucket(surprisal: float) -> int:
    """Index of the bucket (range between two of the `LIMITS`) for a surprisal in nats."""
    return bisect_right(LIMITS, surprisal, hi=len(LIMITS) - 1)


def intensity(surprisal: float, decayed: float) -> int:
    """Index of a token's intensity, by the share of its surprisal that is left after decay.

    Returns 0 (strong), 1 (fading) or 2 (faint).
    """
    left = decayed / surprisal if surprisal > 0 else 1.0
    return 0 if left >= LEVELS[0] else 1 if left >= LEVELS[1] else 2


def theme_named(name: str, environ: Mapping[str, str]) -> Theme:
    """The theme called `name`: "dark", "light" or "none".

    For "auto", the variable COLORFGBG in `environ` decides; if it is not set, the theme is dark.
    Raises ValueError for any other name.
    """
    if name == "auto":
        background = environ.get("COLORFGBG", "").rpartition(";")[2]
        name = "light" if background in ("7", "15") else "dark"
    if name not in _THEMES:
        raise ValueError(f"no theme {name!r}; there are auto, {', '.join(_THEMES)}")
    return _THEMES[name]


def _colour(number: int, *, bold: bool = False, underline: bool = False) -> Style:
    # None rather than False: a style that says "not bold" would cost bytes in every frame.
    return Style(color=f"color({number})", bold=bold or None, underline=underline or None)


def _shades(numbers: tuple[int, int, int], *, bold: bool, underline: bool) -> Shades:
    strong, fading, faint = (_colour(n, bold=bold, underline=underline) for n in numbers)
    return strong, fading, faint


def _ramp(*buckets: tuple[int, int, int]) -> tuple[Shades, ...]:
    """The styles of the buckets of surprisal, from their colour numbers (strong, fading, faint).

    The last two buckets are also bold, and the last one is also underlined.
    """
    last = len(LIMITS) - 1
    return tuple(
        _shades(numbers, bold=index >= last - 1, underline=index == last)
        for index, numbers in enumerate(buckets)
    )


def _weights(style: Style) -> Shades:
    return style, style, style + Style(dim=True)


_DARK = Theme(
    name="dark",
    tokens=_ramp((248, 245, 241), (117, 38, 31), (113, 71, 28), (222, 178, 136), (209, 173, 131)),
    quiet=_colour(245),
    heading=_colour(250),
    gauge=_colour(37),
    rest=_colour(240),
    border=_colour(240),
    gap=Style(dim=True),
    flash=Style(color="color(175)", strike=True),
    template=Style(dim=True, italic=True),
    mark=_colour(141),
    system=_colour(141),
    you=Style(color="cyan"),
    model=Style(),
)

_LIGHT = Theme(
    name="light",
    tokens=_ramp((240, 242, 243), (19, 26, 68), (22, 28, 34), (94, 130, 136), (124, 131, 167)),
    quiet=_colour(242),
    heading=_colour(238),
    gauge=_colour(30),
    rest=_colour(248),
    border=_colour(248),
    gap=Style(dim=True),
    flash=Style(color="color(132)", strike=True),
    template=Style(dim=True, italic=True),
    mark=_colour(91),
    system=_colour(91),
    you=Style(color="blue"),
    model=Style(),
)

_NONE = Theme(
    name="none",
    tokens=(
        _weights(Style(dim=True)),
        _weights(Style()),
        _weights(Style(underline=True)),
        _weights(Style(bold=True)),
        _weights(Style(bold=True, underline=True)),
    ),
    quiet=Style(dim=True),
    heading=Style(),
    gauge=Style(),
    rest=Style(dim=True),
    border=Style(dim=True),
    gap=Style(dim=True),
    flash=Style(dim=True, strike=True),
    template=Style(dim=True, italic=True),
    mark=Style(),
    system=Style(italic=True),
    you=Style(bold=True),
    model=Style(),
)

_THEMES: Final = {theme.name: theme for theme in (_DARK, _LIGHT, _NONE)}
