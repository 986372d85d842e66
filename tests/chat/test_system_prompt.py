"""A system prompt that another one replaces is evicted; undo restores it."""

from __future__ import annotations

import pytest

from chatting import babbler, session
from sirchat.chat.events import Evicted
from sirchat.chat.session import Session


@pytest.mark.parametrize("policy", ["entropy", "salience", "full", "reservoir"])
@pytest.mark.parametrize("new", [None, "Speak of mountains."])
def test_a_replaced_system_prompt_is_never_restored(policy: str, new: str | None) -> None:
    chat = session(babbler(), system="Speak of the sea.", policy=policy, max_new_tokens=20)
    list(chat.ask("Hello."))
    events = chat.switch("/system", system=new)
    assert any(isinstance(event, Evicted) for event in events)
    chat.switch("/policy", policy="window", policy_options={})
    chat.switch("/policy", policy=policy, policy_options={})
    chat.switch("/recall", recall="cosine")
    for _ in range(3):
        list(chat.ask("Of the sea?"))
        assert _system_text(chat) == (new or "")


def _system_text(chat: Session) -> str:
    """The text of system prompts that is held, without the sinks."""
    rows = chat.snapshot().rows
    return "".join(r.text for r in rows if r.role == "system" and "sink" not in r.flags)


def test_undo_restores_a_system_prompt_for_good() -> None:
    chat = session(babbler(), system="Speak of the sea.", max_new_tokens=20)
    list(chat.ask("Hello."))
    list(chat.ask("Hello again."))
    before = _system_text(chat)
    chat.switch("/system", system="Speak of mountains.")
    list(chat.ask("And again."))
    chat.undo()
    chat.undo()
    list(chat.ask("Hello again."))
    chat.switch("/policy", policy="window", policy_options={})
    chat.switch("/policy", policy="salience", policy_options={})
    assert _system_text(chat) == before
