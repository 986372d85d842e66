"""What the chat says of evicted words: the status line, `/evicted`, `/recall` and the gauge."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from saved_chats import Chat
from sirchat.chat.evicted_text import EvictedText
from terminal import Terminal

TOLD = ("My name is Anna.", "I live in Rome.", "My brother Paul is a baker.")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100, 160])
def test_what_was_evicted_is_named_listed_and_brought_back(tmp_path: Path, columns: int) -> None:
    flags = ("--policy", "sink", "--sinks", "2", "--recent", "16", "--budget", "64")
    with Terminal(*flags, home=tmp_path, columns=columns) as chat:
        chat.wait_prompt()
        assert "━" not in _toolbar(chat)
        assert "nothing is evicted" in chat.ask("/evicted")
        for line in TOLD:
            chat.ask(line)
        shown = [" ".join(chat.ask("Tell me a story.").split()) for _ in range(2)]
        named = re.findall(r"\d+ evicted \(your words: ([^)]*)\)", " ".join(shown))
        assert named
        assert all(len(words.split(", ")) <= 3 for words in named)
        assert "Paul" in ", ".join(named)
        assert _toolbar(chat).count("━") >= (6 if columns >= 80 else 0)
        listed = chat.ask("/evicted")
        assert re.search(r"(?m)^ +0 +you +\d+ of \d+ .*Anna", listed)
        assert not re.search(r"(?m)^ +\d+ +(you|model) +\d+ of \d+$", listed)
        assert "Paul" not in chat.ask("/tokens")
        chat.ask('/recall "Paul"')
        back = chat.ask("/tokens")
        assert "Paul" in back
        assert "baker" in back
        assert chat.leave() == 0


def test_a_turn_that_lost_no_word_is_counted_but_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = Chat()
    chat.say("One.")
    turns = [EvictedText(0, "user", 9, 3, ("Rome",)), EvictedText(1, "assistant", 4, 2, ())]
    monkeypatch.setattr("sirchat.ui.commands.evicted_turns", lambda session: iter(turns))
    shown = chat.do("/evicted")
    assert "6 of 9" in shown
    assert "2 of 4" not in shown
    assert "1 more message lost only repeats and punctuation" in shown
    turns.pop(0)
    assert chat.do("/evicted").startswith("1 message lost only")
    turns.clear()
    assert chat.do("/evicted") == "nothing is evicted\n"


def _toolbar(chat: Terminal) -> str:
    return next(line for line in reversed(chat.lines) if " held" in line)
