"""Makes the text of a chat's status lines: below the prompt, and after each turn."""

from __future__ import annotations

from collections.abc import Sequence

from sirchat.chat.events import RecalledTurn, TurnDone
from sirchat.chat.session import Session
from sirchat.config.values import short
from sirchat.ui.text import displayable_line

_CELLS, _WIDE = 8, 80


def toolbar(session: Session, width: int) -> str:
    """The line below the prompt: model, policy, held tokens and budget, decay, speed.

    Held tokens are those in the cache. The speed is that of the last reply. `width` is the window's
    width in columns; if it is small, the bar that shows how full the cache is is left out.
    """
    profile = session.profile
    *_, name = session.model.name.rstrip("/").rpartition("/")
    gauge = f"{_gauge(session.resident / session.budget)} " if width >= _WIDE else ""
    parts = [
        displayable_line(name),
        displayable_line(profile.policy),
        gauge + f"{session.resident:,}/{session.budget:,} held",
        f"decay {short(profile.decay)}",
    ]
    if session.speed:
        parts.append(f"{session.speed:,.0f} tok/s")
    return " · ".join(parts)


def _gauge(share: float) -> str:
    """A short bar that shows how full the cache is: `share` is the filled part, 1 if it is full."""
    full = round(_CELLS * min(share, 1.0))
    return "━" * full + "─" * (_CELLS - full)


_NAMED = 4
"""Maximum number of turns that a line about recalled tokens names."""

_ENDINGS = {
    "length": "reply cut at the length limit",
    "interrupt": "interrupted",
    "control": "reply ended at a control token",
    "context": "model's context full",
}


def describe_turn(turn: TurnDone, budget: int, recalled: Sequence[RecalledTurn] = ()) -> str:
    """A line about one turn: tokens read and written, speed, evicted tokens, held tokens.

    `recalled` are the turns whose tokens were restored for this turn.
    """
    parts = [f"turn {turn.index}: {turn.tokens_in:,} tokens read"]
    if recalled:
        parts.append(describe_recalled(recalled))
    if turn.tokens_out:
        parts.append(f"{turn.tokens_out:,} written, {_speed(turn)}")
    return ", ".join(parts + _cache(turn, turn.evicted, budget))


def describe_round(
    user: TurnDone | None,
    reply: TurnDone,
    budget: int,
    evicted_words: Sequence[str] = (),
    recalled: Sequence[RecalledTurn] = (),
) -> str:
    """A line about a user turn and its reply: tokens read, written, evicted and held, and speed.

    `evicted_words` are words of the user that were evicted in this round. `recalled` are the turns
    whose tokens were restored for this round.
    """
    tokens_in = reply.tokens_in + (user.tokens_in if user else 0)
    evicted = reply.evicted + (user.evicted if user else 0)
    parts = [f"{tokens_in:,} tokens read", f"{reply.tokens_out:,} written"]
    if reply.tokens_out:
        parts.append(_speed(reply))
    if recalled:
        parts.append(describe_recalled(recalled))
    return ", ".join(parts + _cache(reply, evicted, budget, evicted_words))


def describe_recalled(turns: Sequence[RecalledTurn]) -> str:
    """A text about recalled tokens, for example "recalled 140 tokens of turns 3, 17".

    At most 4 turns are named: those of which most tokens were restored.
    """
    most = sorted(sorted(turns, key=lambda one: -one.tokens)[:_NAMED], key=lambda one: one.turn)
    named = ", ".join(str(one.turn) for one in most)
    others = f" and {len(turns) - _NAMED:,} more" if len(turns) > _NAMED else ""
    tokens = sum(one.tokens for one in turns)
    of = f"{tokens:,} token{'s' * (tokens != 1)} of turn{'s' * (len(turns) > 1)}"
    return f"recalled {of} {named}{others}"


def _speed(turn: TurnDone) -> str:
    return f"{turn.tokens_out / max(turn.seconds_decode, 1e-9):,.0f} tok/s"


def _cache(turn: TurnDone, evicted: int, budget: int, words: Sequence[str] = ()) -> list[str]:
    of_yours = f" (your words: {', '.join(words)})" if words else ""
    parts = [f"{evicted:,} evicted{of_yours}"] if evicted else []
    parts.append(f"cache holds {turn.resident:,}/{budget:,}")
    return [*parts, _ENDINGS[turn.finish]] if turn.finish in _ENDINGS else parts
