"""Numbers and text read off the drawn panels equal a count over the events."""

from __future__ import annotations

import io
import random
import re
from itertools import pairwise

import pytest
from rich.console import Console, RenderableType

from attacking import MANY
from chatting import session
from held_rows import Count
from sirchat.chat.events import Evicted
from sirchat.chat.session import Session
from sirchat.ui.panel import draw_compact_panel, draw_full_panel
from sirchat.ui.theme import find_theme

MORE = ["sink", "random"] if MANY else []
_WIDTH = 100
_THEME = find_theme("none", {})
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
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(drawing)
    return [line.strip("│╭╮╰╯─ ") for line in out.getvalue().splitlines()]


def _panel(chat: Session) -> list[str]:
    return _drawn(draw_full_panel(chat.snapshot(), _THEME, _WIDTH))


def _compact_panel(chat: Session) -> list[str]:
    return _drawn(draw_compact_panel(chat.snapshot(strongest=200), _THEME, _WIDTH))


def _numbers(lines: list[str]) -> list[int]:
    match = _GAUGE.search("\n".join(lines))
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


def _body(lines: list[str]) -> str:
    """Labels and held text as drawn, without brackets and blanks."""
    start = next(i for i, line in enumerate(lines) if "template" in line) + 1
    return re.sub(r"[⟨⟩⟦⟧\s]", "", "".join(lines[start : lines.index("turns")]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["window", "entropy", "reservoir", "anchor", *MORE])
@pytest.mark.parametrize("seed", range(MANY or 1))
def test_gauge_held_text_and_shares_are_true(policy: str, seed: int) -> None:
    chat, count = _talk(policy, seed)
    held, seen = len(count.held), count.ends[-1]
    expected = [held, chat.budget, seen, seen - held]
    lines, compact = _panel(chat), _compact_panel(chat)
    assert _numbers(lines) == expected
    assert _numbers(compact) == expected
    if policy == "entropy":  # which keeps no turn that has only what the template adds
        _check_strip(compact, count)
    assert _body(lines) == _held_text(count)
    table = [line.split() for line in lines[lines.index("turns") + 2 :] if line]
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
