"""The status line after a turn."""

from __future__ import annotations

from collections.abc import Sequence

from sirchat.chat.events import TurnDone

_ENDINGS = {
    "length": "cut at the length limit",
    "interrupt": "interrupted",
    "control": "ended at a control token",
    "context": "context full",
}


def describe_turn(turn: TurnDone, budget: int) -> str:
    """Tokens in and out of one turn, speed, evicted tokens, held tokens."""
    parts = [f"turn {turn.index}: {turn.tokens_in:,} read"]
    if turn.tokens_out:
        parts.append(f"{turn.tokens_out:,} said, {_speed(turn)}")
    return ", ".join(parts + _cache(turn, turn.evicted, budget))


def describe_round(
    user: TurnDone | None, reply: TurnDone, budget: int, forgotten: Sequence[str] = ()
) -> str:
    """Tokens in and out of a user turn and its reply, speed, evicted tokens, held tokens.

    `forgotten` are words of the user's that went.
    """
    tokens_in = reply.tokens_in + (user.tokens_in if user else 0)
    evicted = reply.evicted + (user.evicted if user else 0)
    parts = [f"{tokens_in:,} in", f"{reply.tokens_out:,} out"]
    if reply.tokens_out:
        parts.append(_speed(reply))
    return ", ".join(parts + _cache(reply, evicted, budget, forgotten))


def _speed(turn: TurnDone) -> str:
    return f"{turn.tokens_out / max(turn.seconds_decode, 1e-9):,.0f} tok/s"


def _cache(turn: TurnDone, evicted: int, budget: int, forgotten: Sequence[str] = ()) -> list[str]:
    words = f" (of yours: {', '.join(forgotten)})" if forgotten else ""
    parts = [f"forgot {evicted:,}{words}"] if evicted else []
    parts.append(f"holds {turn.resident:,}/{budget:,}")
    return [*parts, _ENDINGS[turn.finish]] if turn.finish in _ENDINGS else parts
