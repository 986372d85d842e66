"""A chat that was killed goes on, and what it had evicted can still be recalled."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from terminal import Terminal

SETTINGS = ("--policy", "sink", "--budget", "64", "--recall", "words", "--max-new-tokens", "4")


@pytest.mark.slow
def test_what_a_killed_chat_had_evicted_is_recalled_and_it_says_so_once(tmp_path: Path) -> None:
    with Terminal(*SETTINGS, home=tmp_path) as chat:
        chat.ask("I have a pelican.")
        chat.ask("Tell me a joke. " * 12)
        chat.child.kill(signal.SIGKILL)
    with Terminal("--resume", *SETTINGS, home=tmp_path) as chat:
        chat.wait_prompt()
        shown = chat.ask("Is it a pelican?")
        assert "recalled" in shown
        assert "read again from the text" in " ".join(shown.split())
        assert "read again" not in chat.ask("The pelican?")
        assert chat.leave() == 0
