"""A system prompt that another one replaces is evicted; undo restores it."""

from __future__ import annotations

import pytest

from chatting import babbler, session
from sirchat.chat.events import Evicted
from sirchat.chat.session import Session


@pytest.mark.parametrize("policy", ["entropy", "salience", "full", "reservoir"])
@pytest.mark.parametrize("new", [None, "Speak of mountains."])
def test_a_system_prompt_that_was_replaced_is_out_of_memory_for_good(
    policy: str, new: str | None
) -> None:
    chat = session(babbler(), system="Speak of the sea.", policy=policy, max_new_tokens=20)
    list(chat.ask("Hello."))
    events = list(chat.switch("/system", system=new))
    assert any(isinstance(event, Evicted) for event in events)
    list(chat.switch("/policy", policy="window", policy_options={}))
    list(chat.switch("/policy", policy=policy, policy_options={}))
    list(chat.switch("/recall", recall="cosine"))
    for _ in range(3):
        list(chat.ask("Of the sea?"))
        assert _system_text(chat) == (new or "")


def _system_text(chat: Session) -> str:
    """The text of system prompts that is held, without the sinks."""
    rows = chat.snapshot().rows
    return "".join(r.text for r in rows if r.role == "system" and "sink" not in r.flags)


def test_undo_brings_the_system_prompt_of_then_back_for_good() -> None:
    chat = session(babbler(), system="Speak of the sea.", max_new_tokens=20)
    list(chat.ask("Hello."))
    list(chat.ask("Hello again."))
    before = _system_text(chat)
    list(chat.switch("/system", system="Speak of mountains."))
    list(chat.ask("And again."))
    list(chat.undo())
    list(chat.undo())
    list(chat.ask("Hello again."))
    list(chat.switch("/policy", policy="window", policy_options={}))
    list(chat.switch("/policy", policy="salience", policy_options={}))
    assert _system_text(chat) == before
