"""What `/why` says first: a sentence that is true of the numbers below it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chatting import session, tiny
from sirchat.chat.session import Session
from sirchat.memory.policies import policy_names
from sirchat.ui.explaining import explain
from terminal import Terminal

SAID = ("My name is Anna.", "I live in Lisbon.", "Tell me a joke.", "What is a tree?")


def _told(policy: str, **settings: Any) -> Session:
    chat = session(tiny(), policy=policy, budget=64, recent=8, **settings)
    for text in SAID:
        list(chat.ask(text))
    return chat


def _said(chat: Session, target: str) -> str:
    return explain(chat.why(target), target, chat.profile.policy)


def test_a_word_that_is_held_is_said_to_be_with_how_many_rank_above() -> None:
    chat = _told("entropy")
    (best,) = {one.rank for one in chat.why("tree")}
    assert best == 1
    assert _said(chat, "tree") == (
        "“tree” is held: of the 59 held tokens, none surprised the model more."
    )
    found = re.fullmatch(
        r"“Anna” is held: of the 59 held tokens, only (\d) surprised the model more\.",
        _said(chat, "Anna"),
    )
    assert found
    assert int(found[1]) == min(one.rank or 99 for one in chat.why("Anna")) - 1


@pytest.mark.slow
def test_a_word_that_is_evicted_is_said_to_be_with_the_way_back() -> None:
    chat = _told("sink")
    assert _said(chat, "Anna") == (
        "“Anna” is evicted: of the 59 held tokens, 55 are newer. The tokens are archived: "
        '/recall "Anna" restores them.'
    )
    assert "The tokens are no longer archived, so they can't be restored." in _said(
        _told("sink", archive="off"), "Anna"
    )
    assert _said(_told("window"), "turn 0").endswith("The tokens are archived: /pin restores them.")


def test_of_words_that_are_held_in_part_it_says_how_many() -> None:
    chat = _told("sink")
    states = [one.state for one in chat.why("Lisbon")]
    held = f"Of the {len(states)} tokens of “Lisbon”, {states.count('held')} are held. "
    assert _said(chat, "Lisbon").startswith(held)
    assert "will be evicted next" in _said(chat, "Lisbon")


def test_pins_sinks_and_fading_are_named() -> None:
    chat = _told("entropy", decay=0.5)
    assert "(older surprise counts less)" in _said(chat, "Lisbon")
    chat.pin("Lisbon")
    assert _said(chat, '"Lisbon"') == "“Lisbon” is held because it is pinned."
    assert "the first tokens of the chat" in _said(_told("interval"), "turn 0")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "kvzip"])
def test_under_every_policy_the_sentence_agrees_with_the_state(policy: str) -> None:
    chat = session(tiny(), policy=policy, budget=64 if policy != "full" else 512)
    for text in SAID:
        list(chat.ask(text))
    for target in ("Anna", "Lisbon", "turn 0", "last"):
        states = {one.state for one in chat.why(target)}
        said = _said(chat, target)
        assert ("is evicted" in said) == ("held" not in states)
        assert said.startswith("Of the ") == (len(states) > 1 and "held" in states)
        assert "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100, 160])
def test_why_at_the_prompt(tmp_path: Path, columns: int) -> None:
    flags = ("--policy", "entropy", "--budget", "64", "--recent", "8")
    with Terminal(*flags, home=tmp_path, columns=columns) as chat:
        for text in SAID:
            chat.ask(text)
        shown = chat.ask("/why Anna")
        sentence, numbers = shown.split("position", 1)
        assert re.fullmatch(
            r"“Anna” is held: of the \d+ held tokens, only \d surprised the model more\. ",
            re.sub(r"\s+", " ", sentence),
        )
        assert "surprisal" in numbers
        assert chat.leave() == 0
