"""A recalled token that is pinned is no longer one that recall evicts."""

from __future__ import annotations

from typing import Any

import numpy as np

from chatting import babbler, session
from sirchat.chat.session import Session

FACT = "Our zebra is called Quixbert."


def recalling(*texts: str, **settings: Any) -> Session:
    """A chat in which recall has restored the fact."""
    usual: dict[str, Any] = {"policy": "sink", "budget": 160, "max_new_tokens": 20}
    chat = session(babbler(), **usual, recall="words", recall_n=40, **settings)
    for text in (*texts, *["other words " * 20] * 3, "Which zebra?"):
        list(chat.ask(text))
    assert chat.recall.scores
    return chat


def assert_held_for_two_turns(chat: Session, positions: np.ndarray) -> None:
    for text in ("Hello there.", "And now?"):
        assert np.isin(positions, chat.ledger.held_positions).all()
        list(chat.ask(text))
    assert np.isin(positions, chat.ledger.held_positions).all()


def test_it_stays_after_an_undo_that_keeps_pins() -> None:
    chat = recalling(FACT)
    recalled = np.asarray(list(chat.recall.scores))
    list(chat.ask("A zebra?"))
    chat.pin(recalled)
    chat.undo(keep_pins=True)
    assert_held_for_two_turns(chat, recalled)


def test_a_system_prompt_that_is_pinned_while_recalled_is_held_whole_from_then_on() -> None:
    chat = recalling(system=FACT, pin_system=False)
    prompt = np.asarray(chat.state.system)
    assert not np.isin(prompt, chat.ledger.held_positions).all()
    chat.switch("/set", pin_system=True)
    assert_held_for_two_turns(chat, prompt)
