"""The sentence that `/why` begins with: whether words are held, and why."""

from __future__ import annotations

from collections.abc import Sequence

from sirchat.chat.standing import Standing
from sirchat.chat.targets import turn_of_target, without_quotes
from sirchat.ui.text import displayable_line, shorten

_LENGTH = 40  # characters of the words that were asked for
_FEW = 4  # one in so many is few

_FADING = ("entropy", "salience")  # policies that rank by surprisal after the decays
_RANKED_BY = {
    **dict.fromkeys(_FADING, ("surprised", "surprised", "the model more")),
    **dict.fromkeys(("sink", "window"), ("is", "are", "newer")),
    **dict.fromkeys(("random", "reservoir"), ("was", "were", "luckier in the draw")),
    **dict.fromkeys(("h2o", "tova", "snapkv"), ("gets", "get", "more attention")),
}
"""What is true of one token that a policy ranks higher, and of several."""


def explain(standings: Sequence[Standing], target: str, policy: str) -> str:
    """One or two sentences about the tokens, at least one, that `target` means."""
    what, held = _named(target, standings), [one for one in standings if one.state == "held"]
    best = min(held or standings, key=lambda one: (one.rank is None, one.rank))
    if not held:
        way_back = _way_back(standings, target)
        return f"{what} is forgotten{_why_forgotten(best, policy)} {way_back}"
    if len(held) == len(standings):
        return f"{what} is held{_why_held(best, policy)}"
    share = f"{len(held):,} {'is' if len(held) == 1 else 'are'} held"
    return (
        f"Of the {len(standings):,} tokens of {what}, {share}. "
        f"The best of these is held{_why_held(best, policy)}"
    )


def _named(target: str, standings: Sequence[Standing]) -> str:
    if turn_of_target(target, ()) is not None:
        return f"turn {standings[0].row.turn}"
    return f"“{shorten(displayable_line(without_quotes(target)), _LENGTH)}”"


def _why_held(best: Standing, policy: str) -> str:
    flags, higher = best.row.flags, _higher(best, policy)
    if "pinned" in flags:
        return " because it is pinned."
    if "sink" in flags:
        return " because it is among the first tokens of all, which stay."
    if "recalled" in flags:
        return " for this turn only: it was recalled."
    if best.rank is None:
        return f"; policy {policy} gives no token a rank."
    if best.leaves:
        return f", but goes next: {higher}."
    if best.threshold is not None and (best.row.score or 0.0) <= best.threshold:
        return f" because it is new, and for that alone: {higher}."
    return f": {higher}."


def _why_forgotten(best: Standing, policy: str) -> str:
    if best.rank is None:
        return f"; policy {policy} gives no token a rank."
    higher = _higher(best, policy)
    is_low = best.threshold is not None and (best.row.score or 0.0) <= best.threshold
    if best.rank <= best.held // 2 and not is_low:
        return f": it went before, or under other settings. Now, {higher}."
    return f": {higher}."


def _higher(one: Standing, policy: str) -> str:
    """How many held tokens rank above this one."""
    default = ("has", "have", f"a higher score under policy {displayable_line(policy)}")
    singular, plural, what = _RANKED_BY.get(policy, default)
    above = (one.rank or 1) - 1
    few = "only " * (0 < above * _FEW <= one.held)
    verb = singular if above == 1 else plural
    fading = " (what is older counts less)" if one.decayed_to < 1 and policy in _FADING else ""
    count = f"{few}{above:,}" if above else "none"
    return f"of the {one.held:,} held tokens, {count} {verb} {what}{fading}"


def _way_back(standings: Sequence[Standing], target: str) -> str:
    if all(one.state == "gone" for one in standings):
        return "It is gone for good."
    if turn_of_target(target, ()) is not None:
        return "It is archived: /pin brings it back."
    words = displayable_line(without_quotes(target))
    return f'It is archived: /recall "{words}" brings it back.'
