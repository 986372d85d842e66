"""Recomputes, from the JSON records alone, which tokens each policy had to keep.

Slow, plain Python, and independent of the package: it knows the records and the policies'
definitions, nothing else.
"""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]


def check_stream(events: list[Row]) -> int:
    """Assert that every eviction follows the policy's definition; returns how many there were."""
    profile = events[0]["profile"]
    rounds = _round_of_turn(events)
    rows = {row["position"]: row for event in events for row in event.get("tokens", [])}
    held: list[int] = []
    read = evictions = 0
    for event in events:
        if "resident" in event:
            assert event["resident"] <= profile["budget"]
        if event["event"] not in ("evict", "turn"):
            continue
        held += range(read, event["seen"])
        read = event["seen"]
        if event["event"] == "evict":
            gone = set(event["positions"])
            assert gone <= set(held)
            after = [p for p in held if p not in gone]
            assert len(after) == event["resident"]
            _check_choice([rows[p] for p in held], after, event, profile, rounds)
            held = after
            evictions += 1
        else:
            assert [row["position"] for row in event["tokens"]] == held
            _check_scores(event, profile["decay"], rounds)
    return evictions


def _check_choice(
    before: list[Row], after: list[int], event: Row, profile: Row, rounds: dict[int, int]
) -> None:
    now = rounds[event["turn"]]
    reduced = _reduced(before, profile)
    if reduced is not None:
        assert set(after) == reduced
        return
    protected = _protected(before, event["seen"], now, profile, rounds)
    assert protected <= set(after)
    if profile["policy"] != "random":
        choose = _RULES[profile["policy"]]
        rest = [row for row in before if row["position"] not in protected]
        fixed = sum(
            row["position"] < profile["sinks"] or "pinned" in row["flags"] for row in before
        )
        context = {"seen": event["seen"], "now": now, "profile": profile, "rounds": rounds}
        context |= {"num_keep": len(after), "fixed": fixed}
        room = len(after) - len(protected)
        assert set(after) == protected | set(choose(rest, room, {**context, "before": before}))


def _reduced(before: list[Row], profile: Row) -> set[int] | None:
    """Rows that an anchor leaves although there is room; None if it leaves all."""
    compacts_at_anchors = profile["policy"] == "anchor" and not profile["policy_options"].get(
        "lazy"
    )
    if not compacts_at_anchors or "anchor" not in before[-1]["flags"]:
        return None
    stays = {
        row["position"]
        for row in before
        if row["position"] < profile["sinks"] or {"anchor", "pinned"} & set(row["flags"])
    }
    return None if len(stays) == len(before) else stays


def _protected(
    before: list[Row], seen: int, now: int, profile: Row, rounds: dict[int, int]
) -> set[int]:
    sinks = 0 if profile["policy"] == "window" else profile["sinks"]
    pins = {
        row["position"]
        for row in before
        if "pinned" in row["flags"] and profile["policy"] != "window"
    }
    room = profile["budget"] - sinks - len({p for p in pins if p >= sinks})
    found = {row["position"] for row in before if row["position"] < sinks} | pins
    newest = room // 2
    if sample := profile["policy_options"].get("sample"):
        newest = max(8, room - sample) // 2
    if profile["protect"]:
        found |= {
            row["position"]
            for row in before
            if rounds[row["turn"]] == now and row["position"] >= seen - newest
        }
    return found


def _newest(rest: list[Row], room: int, context: Row) -> list[int]:
    return sorted((row["position"] for row in rest), reverse=True)[:room]


def _entropy(rest: list[Row], room: int, context: Row) -> list[int]:
    def rank(row: Row) -> tuple[float, int]:
        if row["position"] >= context["seen"] - context["profile"]["recent"]:
            return (math.inf, row["position"])
        return (_log_score(row, context), row["position"])

    return [row["position"] for row in sorted(rest, key=rank, reverse=True)[:room]]


def _log_score(row: Row, context: Row) -> float:
    closed = context["now"] - max(1, context["rounds"][row["turn"]])
    surprisal = row["surprisal"]
    log = math.log(surprisal) if surprisal > 0 else -math.inf
    return float(log + closed * math.log(context["profile"]["decay"]))


def _interval(rest: list[Row], room: int, context: Row) -> list[int]:
    stride = max(1, len(rest) // room) if room else 1
    return [row["position"] for row in rest[::stride][:room]]


def _reservoir(rest: list[Row], room: int, context: Row) -> list[int]:
    profile = context["profile"]
    sample = profile["policy_options"].get("sample")
    window = profile["recent"]
    if sample is not None:  # new tokens come out of the window, and not of the sample
        window = min(window, max(0, context["num_keep"] - context["fixed"] - sample))
    left = context["seen"] - window
    pool = [
        row
        for row in context["before"]
        if profile["sinks"] <= row["position"] < left and "pinned" not in row["flags"]
    ]
    by_key = sorted(pool, key=lambda row: -row["arrival_key"])
    members = [row["position"] for row in by_key[:sample]]
    recent = sorted((r["position"] for r in rest if r["position"] >= left), reverse=True)
    others = sorted((r["position"] for r in rest), reverse=True)
    order = [*recent, *members, *others]
    may = {row["position"] for row in rest}
    return [p for p in dict.fromkeys(order) if p in may][:room]


def _anchor(rest: list[Row], room: int, context: Row) -> list[int]:
    ends = [row["position"] for row in context["before"] if "anchor" in row["flags"]]
    last = max(ends, default=-1)

    def rank(row: Row) -> tuple[int, int]:
        tier = 2 if row["position"] > last else int("anchor" in row["flags"])
        return (tier, row["position"])

    return [row["position"] for row in sorted(rest, key=rank, reverse=True)[:room]]


_RULES: dict[str, Any] = {
    "window": _newest,
    "sink": _newest,
    "entropy": _entropy,
    "interval": _interval,
    "reservoir": _reservoir,
    "anchor": _anchor,
}


def _check_scores(event: Row, decay: float, rounds: dict[int, int]) -> None:
    """A token's decayed surprisal is its surprisal times the decays of the rounds closed since."""
    closed_now = rounds[event["index"]] + (1 if event["role"] == "assistant" else 0)
    for row in event["tokens"]:
        if row["surprisal"] is not None:
            closed = max(0, closed_now - max(1, rounds[row["turn"]]))
            expected = row["surprisal"] * decay**closed
            assert math.isclose(row["decayed_surprisal"], expected, rel_tol=1e-9, abs_tol=1e-300)


def _round_of_turn(events: list[Row]) -> dict[int, int]:
    rounds: dict[int, int] = {}
    number = 0
    for event in events:
        if event["event"] == "turn":
            number += event["role"] == "user"
            rounds[event["index"]] = number
    return rounds
