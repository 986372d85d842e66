"""Calls and results in chats that end anywhere in the loop, are saved, branched, undone, exported.

What a chat is then compared with is the same chat that was never saved. `SIRCHAT_ATTACK=N` tries
so many cases of each.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from chatting import ids_of, session
from saved_chats import saved_and_resumed
from sirchat.chat.events import Delta, Event
from sirchat.chat.rereading import copy_session, reread_session, rewind
from sirchat.chat.session import Session
from sirchat.text.transcript import parse_transcript
from sirchat.ui.exporting import _markdown, export_chat
from sirchat.ui.replay import ReplayOptions, replay
from sirchat.ui.screen import Screen
from template_shapes import call, script, tool_quick

CASES = int(os.environ.get("SIRCHAT_ATTACK", "1"))
ASKED = "How is the weather in Oslo?"


def weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"It snows in {city} for {days} days. " * days


def calling(policy: str = "salience") -> Session:
    some: dict[str, Any] = {"budget": 520, "recall": "words", "max_new_tokens": 200}
    return session(tool_quick(), policy=policy, save_kv="on", **some)


def replies(random: Random) -> list[str]:
    """Some calls, several in one reply now and then, with small and large results; an answer."""
    said = []
    for _ in range(random.randint(1, 3)):
        days = [random.choice([1, 2, 40]) for _ in range(random.choice([1, 1, 2]))]
        said.append("".join(f"\n{call(city=random.choice('ABC'), days=d)}" for d in days))
    return [*said, "Cold."]


def state_of(chat: Session) -> dict[str, Any]:
    """All that a chat goes on from."""
    ledger = chat.ledger
    return {
        "turns": [(t.role, t.text, t.finish) for t in chat.turns],
        "ids": ids_of(chat),
        "roles": ledger.column("role").tolist(),
        "held": ledger.held_positions.tolist(),
        "pinned": ledger.pinned_positions.tolist(),
        "tools": chat.state.tools_json,
        "pending": chat.state.pending_ids,
    }


def turns_of(chat: Session) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in chat.turns if turn.role != "system"]


def stopped_at(events: Iterator[Event], number: int, *, in_replies: bool) -> None:
    """Take so many events, and no more, as if the chat were killed; else within what is read."""
    for event in events:
        number -= in_replies or not isinstance(event, Delta)
        if number <= 0:
            break
    events.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(12, 12 + CASES))  # 12: within a result
def test_a_chat_that_ends_within_the_loop_goes_on_as_if_it_had_not_been_saved(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    random, in_replies = Random(seed), seed % 2 > 0
    said, number = replies(random), random.randrange(1, 160 if in_replies else 30)
    kept, saved = calling(), calling()
    for chat in (kept, saved):
        script(monkeypatch, ["Hello.", *said])
        list(chat.ask("Hello there.", tools=[weather]))
        before = state_of(chat)
        stopped_at(chat.ask(ASKED, tools=[weather]), number, in_replies=in_replies)
    again = saved_and_resumed(saved, calling())
    # What was recalled for the message is no longer held.
    assert {**state_of(again), "held": []} == {**state_of(kept), "held": []}
    for chat in (kept, again):
        script(monkeypatch, [call(city="Rome", days=40), "So it is."])
        list(chat.ask("Go on.", tools=[weather]))
    assert state_of(again) == state_of(kept)
    assert set(kept.ledger.pinned_positions.tolist()) <= set(kept.state.system.positions)
    for _ in range(2):
        kept.undo()
    assert state_of(kept) == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES))
def test_what_is_read_again_has_calls_and_results_and_keeps_no_pin(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `/model`, and as after `/undo` in a chat that has no way back in memory."""
    chat = calling()
    for question in (ASKED, "And in Rome?"):
        script(monkeypatch, replies(Random(seed)))
        list(chat.ask(question, tools=[weather]))
    whole, branch = reread_session(chat), copy_session(chat)
    assert turns_of(whole) == turns_of(chat)
    said = chat.seen - chat.state.system.positions.stop  # by tools, too
    for read in (ids_of, lambda one: one.ledger.column("role").tolist()):
        assert read(whole)[-said:] == read(chat)[-said:]
    assert branch is not None
    assert state_of(branch) == state_of(chat)
    branch.history.messages = []
    branch, _ = rewind(branch, 1)
    chat.undo()
    assert turns_of(branch) == turns_of(chat)
    assert set(branch.ledger.pinned_positions.tolist()) <= set(branch.state.system.positions)
    for one in (chat, branch):
        script(monkeypatch, [call(city="Bern", days=40), "So it is."])
        list(one.ask("Go on.", tools=[weather]))
        assert set(one.ledger.pinned_positions.tolist()) <= set(one.state.system.positions)
    assert turns_of(branch) == turns_of(chat)


@pytest.mark.parametrize("seed", range(CASES))
def test_an_exported_chat_is_read_as_it_was(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def weather(city: str, days: int = 1) -> str:
        return "" if city == "A" else f"Snow in {city}."

    chat = calling("full")
    for question in (ASKED, "And in Rome?"):
        script(monkeypatch, replies(Random(seed)))
        list(chat.ask(question, tools=[weather]))
    out = io.StringIO()
    export_chat(chat, Screen(out, out), f"json {tmp_path / 'a.json'}")
    has_snow = any(text.startswith("Snow") for _, text in turns_of(chat))
    assert ("\n## Tool\n\n    Snow in " in _markdown(chat)) is has_snow
    turns = parse_transcript((tmp_path / "a.json").read_bytes(), "a")
    fed = calling("full")
    replay(fed, turns, Screen(out, out), ReplayOptions(feed=True))
    assert turns_of(fed) == turns_of(chat)
    said = ids_of(chat)[chat.state.system.positions.stop :]
    assert ids_of(fed)[-len(said) :] == said
