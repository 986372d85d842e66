"""Styles of tokens, labels and bars; `themes.yaml` has those of each theme.

A token's hue shows its surprisal; its brightness shows how much surprisal is left after decay. High
surprisal is also bold or underlined, so that it shows without colour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from rich.style import Style

from sirchat.chat.events import TokenRow
from sirchat.paths import read_yaml

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
        bucket = bisect_right(BUCKET_LIMITS, surprisal, hi=len(BUCKET_LIMITS) - 1)
        share_left = row.decayed_surprisal / surprisal if surprisal > 0 else 1.0
        intensity = sum(share_left < limit for limit in INTENSITY_LIMITS)
        return self.tokens[bucket][intensity]

    def role_style(self, role: str) -> Style:
        """The style of the label of a turn by this role, such as "user"."""
        roles = {"system": self.system, "user": self.user, "assistant": self.model}
        return roles.get(role, self.secondary)


def find_theme(name: str, environ: Mapping[str, str]) -> Theme:
    """The theme "dark", "light" or "none"; "auto" follows COLORFGBG, or else is dark."""
    if name == "auto":
        background = environ.get("COLORFGBG", "").rpartition(";")[2]
        name = "light" if background in ("7", "15") else "dark"
    return _themes()[name]


@cache
def _themes() -> dict[str, Theme]:
    return {
        name: Theme(
            name,
            tuple(tuple(map(Style.parse, shades)) for shades in styles["tokens"]),
            **{part: Style.parse(text) for part, text in styles.items() if part != "tokens"},
        )
        for name, styles in read_yaml(__file__, "themes").items()
    }
