"""What the prompt shows while the user types: completions, and the toolbar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from chatting import babbler, session
from sirchat.ui.completion import SlashCompleter
from terminal import Terminal


def _menu(chat: Terminal, typed: str, *patterns: str) -> None:
    """Type, and wait until the menu shows each of these; then empty the line again."""
    chat.wait_prompt()
    chat.send(typed)
    for pattern in patterns:
        chat.wait_screen(pattern, 20)
    chat.send("\x15")
    chat.wait_prompt()


def test_commands_are_completed_with_their_help(chat: Terminal) -> None:
    _menu(chat, "/", r" help +list all commands", r" budget +set how many tokens")
    _menu(chat, "/pro", r" profile +apply all settings of a profile")
    _menu(chat, "/help po", r" policy +choose the policy, which decides")


def test_values_are_completed_with_their_meaning(chat: Terminal) -> None:
    _menu(chat, "/policy ", r" entropy +\S+", r" interval +\S+")
    _menu(chat, "/policy reservoir ", r" sample= +number of tokens in the sample")
    _menu(chat, "/profile sirllm-", r" sirllm-grocery +\S+", r" sirllm-rps +\S+")
    _menu(
        chat,
        "/panel ",
        r" live +show some held tokens while the model writes",
        r" off ",
        r" turn ",
        r" full ",
    )
    _menu(chat, "/tokens ", r" turn +the held tokens of one message", r" top ", r" next ")
    _menu(chat, "/set max", r" max_new_tokens +Maximum number of tokens in one")
    _menu(chat, "/set panel ", r" off", r" turn", r" live")
    _menu(chat, "/set protect ", r" on", r" off")
    _menu(chat, "/set policy ran", r" random +\S+")
    _menu(chat, "/show dec", r" decay +Factor that multiplies")
    _menu(chat, "/recall ", r" off", r" on +the best retriever: meaning")
    _menu(chat, "/recall wor", r" words +Finds passages")
    _menu(chat, "/decay a", r" auto")


def test_options_of_the_current_policy_are_completed(chat: Terminal) -> None:
    chat.ask("/policy reservoir")
    _menu(chat, "/set sa", r" sample +number of tokens in the sample")
    chat.ask("/policy entropy")
    chat.send("/set sa")
    chat.settle(0.3)
    assert "number of tokens in the sample" not in chat.text
    chat.send("\x15")


def test_tab_completes(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send("/budg")
    chat.wait_screen(r" budget +set how many")
    chat.send("\t")
    chat.wait_screen(r"(?m)^> /budget$")
    chat.submit(" 64\r")
    chat.wait("budget: 1024 -> 64")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files, the home folder too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("notes.txt", ".hidden", "a b.md", 'q".md', "x\x1b.md"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.md").write_text("x", encoding="utf-8")
    return tmp_path


def _completed(text: str) -> set[str]:
    """The lines that completion offers."""
    completer = SlashCompleter(lambda: session(babbler()))
    completions = completer.get_completions(Document(text), CompleteEvent())
    return {
        text[: len(text) + completion.start_position] + completion.text
        for completion in completions
    }


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("@", {"@notes.txt", '@"a b.md"', "@docs/"}),
        ("see @no", {"see @notes.txt"}),
        ("@docs/", {"@docs/one.md"}),
        ("@~/no", {"@~/notes.txt"}),
        ("@a", {'@"a b.md"'}),
        ('@"a b', {'@"a b.md"'}),
        ("@.h", {"@.hidden"}),
        ('@"no', {'@"notes.txt"'}),
        ("one\n@no", {"one\n@notes.txt"}),
        ("//x @no", {"//x @notes.txt"}),
        ("/read no", {"/read notes.txt"}),
        ("/read a", {'/read "a b.md"'}),
        ("/read docs/o", {"/read docs/one.md"}),
        ("/export md no", {"/export md notes.txt"}),
        ("/export ", {"/export md", "/export html", "/export json"}),
        ("/copy ", {"/copy code", "/copy --osc52"}),
        *((text, set()) for text in ("a@no", r"\@no", "@none", "@no x", '@"a b.md" ')),
        ("/read notes.txt no", set()),
        *((text, set()) for text in ("/set @no", "/export txt no", "/save no")),
    ],
)
def test_file_names_are_completed(files: Path, typed: str, offered: set[str]) -> None:
    assert _completed(typed) == offered


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 160])
def test_files_are_offered_while_a_message_is_typed(home: Path, files: Path, columns: int) -> None:
    with Terminal(home=home, rows=24, columns=columns) as chat:
        chat.wait_prompt()
        chat.send("sum up @no")
        chat.wait_screen(r"(?m)^ +notes\.txt")
        chat.send("\t")
        chat.wait_screen(r"(?m)^> sum up @notes\.txt$")
        chat.submit("\r")
        chat.wait(r"notes\.txt: \d+ tokens; the budget is 1,024 tokens")


def test_a_message_is_not_completed(chat: Terminal) -> None:
    chat.wait_prompt()
    chat.send("//pol")
    chat.wait_screen("> //pol")
    chat.settle(0.3)
    assert "choose the policy" not in chat.text
    chat.send("\x15")


def test_the_toolbar_follows_what_happens(chat: Terminal) -> None:
    chat.wait_prompt()
    assert chat.text.endswith(" tiny · salience · ──────── 0/1,024 held · decay 1")
    chat.ask("Hello.")
    assert re.search(r" tiny · salience · ─{8} (\d+)/1,024 held · decay 1 · \d+ tok/s$", chat.text)
    chat.ask("/policy reservoir")
    chat.ask("/budget 64")
    chat.ask("/decay 0.5")
    assert re.search(
        r" tiny · reservoir · ━{1,8}─{0,7} (\d+)/64 held · decay 0.5 · \d+ tok/s$", chat.text
    )
