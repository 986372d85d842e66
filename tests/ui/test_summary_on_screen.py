"""`/summarize` at the prompt: a summary is shown, and then kept, edited or dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fake_terminal import FakeTerminal
from terminal import program
from typed_chat import TypedChat

QUESTION = "k or Enter keeps it, e edits, d drops:"
DROPPED = "no summary is kept; the conversation is unchanged"
KEPT = "the summary is turn 2, which is now pinned; /undo removes it"
TOLD = "My name is Anna."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        *(("d", ""), ("\x1b", ""), ("\x03", "")),
        *((key, "Anna") for key in ("k", "\r", "\x1b[Ak")),  # an arrow is no answer
        *((f"/facts\r{key}", "Anna" * (key == "k")) for key in "kd"),  # nor is a line
        *(("/undo\x1b", ""), ("/keep\x03", ""), ("x\r/recall\r\r", "Anna")),
        ("e", "dog"),
    ],
)
def test_a_summary_is_shown_before_it_is_read_and_kept_edited_or_dropped(
    terminal: FakeTerminal, own_home: Path, monkeypatch: pytest.MonkeyPatch, keys: str, kept: str
) -> None:
    editor = program(own_home / "editor", "echo 'Anna owns a dog.' > $1")
    monkeypatch.setenv("VISUAL", editor)
    with TypedChat(terminal, max_new_tokens=4) as chat:
        assert "the chat has no messages yet" in chat.ask("/summarize")
        chat.ask(TOLD)
        seen = chat.session.seen
        shown = chat.press(f"/summarize\r{keys}")
        assert TOLD in shown
        assert QUESTION in terminal.getvalue()
        assert re.search(r"takes \d+ tokens, evicts 0: k or", terminal.getvalue())
        assert QUESTION not in shown
        assert ((DROPPED in shown), (KEPT in shown)) == (not kept, bool(kept))
        assert (chat.session.seen > seen) == bool(kept)
        if kept:
            assert kept in chat.session.turns[2].text
            assert ("name" in chat.session.turns[2].text.lower()) == (kept != "dog")
            assert "undone: Summary of our conversation" in chat.ask("/undo")


def test_where_no_single_key_is_read_it_is_shown_and_kept(
    terminal: FakeTerminal, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with TypedChat(terminal, max_new_tokens=4) as chat:
        chat.press(f"{TOLD}\r")
        shown = chat.press("/summarize\r")
        assert KEPT in shown
        assert TOLD in shown
        assert QUESTION not in terminal.getvalue()
