"""Snapshots made by hand, and the text and styles that a terminal gets when they are drawn."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import HeldShare, Snapshot
from sirchat.chat.token_rows import without_template, words_at
from sirchat.ui.theme import find_theme

DARK, LIGHT, NONE = (find_theme(name, {}) for name in ("dark", "light", "none"))
THEMES = {theme.name: theme for theme in (DARK, LIGHT, NONE)}

SAID: list[tuple[str, str]] = [
    (
        "system",
        "You are a ship's cook. Answer briefly, and never forget that the captain is"
        " allergic to walnuts.",
    ),
    ("user", "Good morning! What is there for breakfast, and who caught the fish?"),
    (
        "assistant",
        "Good morning. There is porridge with dried apricots, and two mackerel that Ingrid"
        " Halvorsen caught at dawn off Cape Farewell.\nThe coffee ran out on Tuesday.",
    ),
    ("user", "ok"),
    ("user", "How do you say “fish soup” in Japanese, Chinese, Arabic and Hebrew?"),
    (
        "assistant",
        "Japanese: 魚の汁物, Chinese: 鱼汤, Arabic: حساء السمك, Hebrew: מרק דגים.\n\tIn Hindi it"
        " is मछली का सूप, in Thai ซุปปลา, in Korean 생선국.",
    ),
    (
        "user",
        "Cafe\u0301 style, please 👨\u200d🍳👍🏽🇳🇴 ❤\ufe0f\x1b[31m\x1b]0;title\x07"
        " \u202ereversed\u202c\ufffd",
    ),
    (
        "assistant",
        "Aye: bouillabaisse with saffron, fennel, orange peel and a pinch of cayenne; serve at"
        " 19:45 in the galley. Key 7Q-1138 opens the pantry.",
    ),
]
_TOKENS = re.compile(
    r"\x1b\[31m|\x1b\]0;title\x07|\n|\t|[\u0300-\u036f]| ?[A-Za-z’]{1,6}| ?.", re.S
)
_TEMPLATE_TOKENS = ("<|im_start|>", "<|im_end|>")


def snapshot_of_talk(said: list[tuple[str, str]], *, least: float = 3.2) -> Snapshot:
    """A full snapshot of this talk; tokens with a score below `least` nats are not held."""
    tokens: list[tuple[TokenRow, bool]] = []
    for turn, (role, text) in enumerate(said):
        start, end = _TEMPLATE_TOKENS
        for token in (start, *_TOKENS.findall(text), end):
            tokens.append(_token(len(tokens), token, turn, role, least, text == "ok"))
    return snapshot_folder(tokens, [role for role, _ in said])


def _token(
    position: int, text: str, turn: int, role: str, least: float, lost: bool
) -> tuple[TokenRow, bool]:
    """A token and whether it is held; surprisal comes from its letters, so golden files stay."""
    template = text in _TEMPLATE_TOKENS
    letters = sum(ord(char) for char in text) + 7 * len(text) + position
    surprisal = None if not position else letters % 97 / 97 * (2.0 if text.isspace() else 9.5)
    special = not template and any(ord(char) > 0x24F or char < " " for char in text)
    if special and letters % 5:
        surprisal = 4.0 + letters % 5
    score = (surprisal or 0.0) * (0.35 + 0.65 * (position % 11) / 10)
    flags = ["sink"] * (position < 4) + ["pinned"] * (role == "system" and not template)
    row = TokenRow(
        position=position,
        id=letters % 50_000,
        text=text,
        turn=turn,
        role="template" if template else role,
        surprisal=surprisal,
        decayed_surprisal=score,
        score=score,
        arrival_key=0.5,
        flags=tuple(flags),
    )
    held = bool(flags) or score >= least
    return row, held and not lost


def snapshot_folder(tokens: list[tuple[TokenRow, bool]], roles: list[str]) -> Snapshot:
    """A snapshot of tokens, each with whether it is held; every count is recomputed."""
    held = tuple(row for row, stays in tokens if stays)
    free = sorted((row for row in held if not row.flags), key=lambda row: row.rank_key)
    leaving = sorted(free[:12], key=lambda row: row.position)
    turns = []
    for index, role in enumerate(roles):
        own = [(row, stays) for row, stays in tokens if row.turn == index]
        known = [row.surprisal for row, _ in own if row.surprisal is not None]
        mean = sum(known) / len(known) if known else None
        kept = [row for row, stays in own if stays]
        turns.append(HeldShare(index, role, len(own), len(kept), mean, len(without_template(kept))))
    return Snapshot(
        model="Qwen3-0.6B",
        policy="entropy",
        decay=0.98,
        budget=max(1, len(held) * 5 // 4),
        resident=len(held),
        seen=len(tokens),
        recalled=0,
        speed=0.0,
        threshold=max((row.rank_key for row in leaving), default=None),
        evicted_next=tuple(row.position for row in leaving),
        rows=held,
        slots=tuple(range(len(held))),
        turns=tuple(turns),
        leaving_words=dict.fromkeys(
            words_at([row.position for row in without_template(leaving)], without_template(held)),
            "user",
        ),
    )


def compact_view(snapshot: Snapshot, strongest: int = 200) -> Snapshot:
    """The same snapshot with the rows of highest score only, as a compact panel gets it."""
    ranked = sorted(range(len(snapshot.rows)), key=lambda i: -snapshot.rows[i].rank_key)[:strongest]
    slots = sorted(ranked)
    rows = tuple(snapshot.rows[slot] for slot in slots)
    return replace(snapshot, rows=rows, slots=tuple(slots), speed=41.3)


TALK = snapshot_of_talk(SAID)
LONG = snapshot_of_talk(SAID + SAID[1:] * 17)


# --- drawing


def segments(drawn: RenderableType, width: int) -> list[Segment]:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False, _environ={}
    )
    return list(console.render(drawn))


def printed(drawn: RenderableType, width: int, colours: ColorSystem | None = None) -> str:
    """The bytes that the terminal gets, as text."""
    parts = [
        copied(segment.style).render(segment.text, color_system=colours)
        for segment in segments(drawn, width)
    ]
    return "".join(parts)


def copied(style: Style | None, *, colour: bool = True) -> Style:
    """A copy: a rich style caches the codes of the first colour system it is rendered in."""
    style = style or Style()
    return Style(
        color=style.color if colour else None,
        bold=style.bold,
        dim=style.dim,
        italic=style.italic,
        underline=style.underline,
        strike=style.strike,
    )


def lines(drawn: RenderableType, width: int) -> list[str]:
    """The lines without styles."""
    return printed(drawn, width).splitlines()


def styles(drawn: RenderableType) -> dict[str, Style]:
    """The style that each run of text is drawn in."""
    return {segment.text: segment.style or Style() for segment in segments(drawn, 120)}
