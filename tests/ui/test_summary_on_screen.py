"""`/summarize` at the prompt: a summary is shown, and then kept, edited or dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import Terminal, program

QUESTION = "k or Enter keeps it, e edits, d drops:"
DROPPED = "no summary is kept; the conversation is unchanged"
KEPT = "the summary is turn 2, which is now pinned; /undo removes it"
TOLD = "My name is Anna."


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A chat in which something was told."""
    home = tmp_path_factory.mktemp("home")
    with Terminal("--max-new-tokens", "4", home=home, environ={"EDITOR": "", "VISUAL": ""}) as chat:
        assert "the chat has no messages yet" in chat.ask("/summarize")
        chat.ask(TOLD)
        yield chat


def summarize(chat: Terminal, line: str = "/summarize") -> None:
    """Ask for a summary, and wait until it is shown with the question."""
    chat.say(line)
    chat.wait_screen(QUESTION)


def pressed(chat: Terminal, keys: str) -> str:
    """Answer the question; returns what is shown below the command until the next prompt."""
    chat.send(keys)
    chat.wait_prompt()
    assert QUESTION not in chat.text
    return chat.shown


def stats(chat: Terminal) -> str:
    return chat.ask("/stats")


@pytest.mark.parametrize("keys", ["d", "\x1b", "\x03"])
def test_a_summary_is_shown_before_it_is_read_and_can_be_dropped(chat: Terminal, keys: str) -> None:
    before = stats(chat)
    summarize(chat)
    assert TOLD in chat.shown
    assert "pinned" not in chat.shown
    assert DROPPED in pressed(chat, keys)
    assert stats(chat) == before


@pytest.mark.parametrize("keys", ["k", "\r", "xk"])  # an x is no answer
def test_it_is_kept_by_a_key_and_undone_like_any_turn(chat: Terminal, keys: str) -> None:
    before = stats(chat)
    summarize(chat)
    assert KEPT in pressed(chat, keys)
    assert stats(chat) != before
    assert "undone: Summary of our conversation" in chat.ask("/undo")


def test_it_is_edited_at_the_prompt_and_a_cancelled_edit_asks_again(chat: Terminal) -> None:
    summarize(chat)
    chat.send("e")
    chat.wait_screen("edit> .*Anna")
    chat.send("\x03")
    chat.wait_screen(QUESTION)
    chat.send("e")
    chat.wait_screen("edit> .*Anna")
    chat.send(" And a cat.\r")
    chat.wait(KEPT)
    chat.wait_prompt()
    assert "cat" in chat.ask("/tokens turn 2")
    chat.ask("/undo")


def test_it_is_edited_in_the_editor(tmp_path: Path) -> None:
    editor = program(tmp_path / "editor", "echo 'Anna owns a dog.' > $1")
    environ = {"EDITOR": editor, "VISUAL": ""}
    with Terminal("--max-new-tokens", "4", home=tmp_path, environ=environ) as chat:
        chat.wait_prompt()
        chat.ask(TOLD)
        summarize(chat)
        assert KEPT in pressed(chat, "e")
        shown = chat.ask("/tokens turn 2").lower()
        assert "dog" in shown
        assert "name" not in shown


def test_where_no_single_key_is_read_it_is_shown_and_kept(tmp_path: Path) -> None:
    flags = ("--max-new-tokens", "4", "--no-save")
    with Terminal(*flags, home=tmp_path, environ={"TERM": "dumb"}) as chat:
        for line, shown in ((TOLD, "4 written"), ("/summarize", KEPT)):
            chat.wait(r"(?m)^>$")
            chat.send(f"{line}\r")
            chat.wait(shown)
        assert QUESTION not in chat.everything
        assert chat.everything.count(TOLD) >= 2  # as it was typed, and in the summary
