"""What a snapshot says equals a slow count over what the conversation reported."""

from __future__ import annotations

import math
import random

import pytest

from attacking import MANY
from chatting import babbler, session, tiny
from held_rows import Count
from sirchat.chat.events import Evicted
from sirchat.chat.session import Session

_POLICIES = ("window", "entropy", "random", "reservoir", "anchor")


def _talk(policy: str, seed: int) -> tuple[Session, Count]:
    draw = random.Random(seed)
    chat = session(
        babbler(),
        tokens=True,
        policy=policy,
        budget=draw.choice([64, 100, 256]),
        recent=draw.choice([0, 8]),
        decay=draw.choice([1.0, 0.8]),
        max_new_tokens=draw.choice([5, 60]),
        system=draw.choice([None, "Speak of the sea."]),
    )
    count = Count()
    for _ in range(4):
        count.add(list(chat.ask("word " * draw.randrange(1, 60))))
        if draw.random() < 0.4:
            count.add(chat.switch("/budget", budget=draw.choice([64, 100, 256])))
        if draw.random() < 0.3:
            count.add(chat.switch("/system", system="Now of mountains."))
    return chat, count


@pytest.mark.slow
@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("seed", range(MANY or 1))
def test_a_snapshot_equals_a_count_over_the_events(policy: str, seed: int) -> None:
    chat, count = _talk(policy, seed)
    view = chat.snapshot()
    assert [row.position for row in view.rows] == count.held
    assert list(view.slots) == list(range(len(count.held)))
    assert (view.resident, view.seen) == (len(count.held), count.ends[-1])
    start = 0
    for share, role, end in zip(view.turns, count.roles, count.ends, strict=True):
        tokens = range(start, end)
        known = [s for p in tokens if (s := count.tokens[p].surprisal) is not None]
        assert (share.role, share.tokens) == (role, end - start)
        assert share.held == len(set(tokens) - count.gone)
        said = [row for row in view.rows if row.turn == share.index and row.role != "template"]
        assert share.held_said == len(said)
        assert share.surprisal == pytest.approx(sum(known) / len(known))
        start = end


@pytest.mark.parametrize("seed", range(MANY or 2))
def test_the_threshold_is_the_highest_score_of_those_evicted_next(seed: int) -> None:
    chat, count = _talk("entropy", seed)
    view, profile = chat.snapshot(), chat.profile
    newest = view.seen - profile.recent
    pins = [r for r in view.rows if "pinned" in r.flags and "sink" not in r.flags]
    room = profile.budget - profile.sinks - len(pins)
    rows = [r for r in view.rows if not r.flags or r.flags == ("anchor",)]
    ranked = sorted(
        rows, key=lambda r: (math.inf if r.position >= newest else r.rank_key, r.position)
    )
    leaving = ranked[: min(max(8, profile.budget // 16), room // 2)]
    if view.resident + 2 * len(leaving) <= profile.budget:
        leaving = []
    assert view.evicted_next == tuple(sorted(r.position for r in leaving))
    if count.gone and leaving:
        assert view.threshold == pytest.approx(max(r.rank_key for r in leaving))
    else:
        assert view.threshold is None


@pytest.mark.parametrize("policy", ["interval", "full", "sink"])
def test_without_scores_there_is_no_threshold_and_without_surprisal_no_nats(policy: str) -> None:
    chat = session(babbler(), policy=policy, budget=64, recent=8, max_new_tokens=40)
    list(chat.ask("word " * 40))
    view = chat.snapshot()
    scored = policy == "sink"
    assert view.threshold == (max(view.evicted_next) if scored else None)
    for row in view.rows:
        assert row.score == (row.position if scored else None)


def test_the_tokens_evicted_next_are_evicted_next() -> None:
    chat = session(babbler(), budget=64, recent=8, max_new_tokens=60, archive="off")
    list(chat.ask("word " * 60))
    view = chat.snapshot()
    block = len(view.evicted_next)
    gone = chat.switch("/budget", budget=chat.resident - block + 1, protect=False)
    left = {p for e in gone if isinstance(e, Evicted) for p in e.positions}
    assert left
    assert left <= set(view.evicted_next)


def test_a_compact_snapshot_has_the_strongest_rows_and_the_same_counts() -> None:
    chat, _ = _talk("entropy", 1)
    whole, compact = chat.snapshot(), chat.snapshot(strongest=10)
    said = [row for row in whole.rows if row.role != "template"]
    assert set(compact.rows) == set(sorted(said, key=lambda row: row.rank_key)[-10:])
    assert [whole.rows[slot] for slot in compact.slots] == list(compact.rows)
    for name in ("resident", "seen", "budget", "threshold", "evicted_next", "leaving_words"):
        assert getattr(compact, name) == getattr(whole, name)
    for name in ("held", "held_said"):
        assert [getattr(t, name) for t in compact.turns] == [getattr(t, name) for t in whole.turns]


@pytest.mark.parametrize("policy", ["entropy", "sink"])
def test_words_evicted_next_are_whole_and_not_the_templates(policy: str) -> None:
    chat = session(tiny(), policy=policy, budget=96, recent=8, max_new_tokens=30, recall="off")
    named: set[tuple[str, str]] = set()
    said = "My brother Halvorsen lives in Copenhagen, and his dog Bella likes fish."
    for _ in range(4):
        list(chat.ask(said))
        view = chat.snapshot()
        named |= set(view.leaving_words.items())
        leaving = [row for row in view.rows if row.position in view.evicted_next]
        if any(row.role != "template" and row.text.strip(" .,?!'") for row in leaving):
            assert view.leaving_words
    assert named
    for word, role in named:
        spoken = " ".join(turn.text for turn in chat.turns if turn.role == role)
        assert word in {said.strip(",.?!()") for said in spoken.split()}
