"""What the prompt offers while the user types, and the toolbar below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from chatting import babbler, session, tiny
from fake_terminal import FakeTerminal
from saved_chats import Chat
from sirchat.ui.completion import SlashCompleter
from sirchat.ui.status import toolbar_text
from typed_chat import TypedChat


def offered(text: str, policy: str = "salience") -> dict[str, str]:
    """The lines that completion offers, with their help."""
    completer = SlashCompleter(lambda: session(babbler(), policy=policy))
    return {
        text[: len(text) + one.start_position] + one.text: one.display_meta_text
        for one in completer.get_completions(Document(text), CompleteEvent())
    }


@pytest.mark.parametrize(
    ("typed", "line", "help"),
    [
        ("/", "/help", "list all commands"),
        ("/", "/budget", "set how many tokens"),
        ("/help al", "/help all", "what each command does"),
        ("/help po", "/help policy", "choose the policy, which decides"),
        ("/policy ", "/policy entropy", "."),
        ("/policy ", "/policy interval", "."),
        ("/policy reservoir ", "/policy reservoir sample=", "number of tokens in the sample"),
        ("/panel ", "/panel live", ""),
        ("/tokens ", "/tokens next", ""),
        ("/pin ", "/pin last", ""),
        ("/set max", "/set max_new_tokens", "Maximum number of tokens in one"),
        ("/set panel ", "/set panel turn", ""),
        ("/set protect ", "/set protect off", ""),
        ("/set policy ran", "/set policy random", "."),
        ("/show dec", "/show decay", "Factor that multiplies"),
        ("/recall ", "/recall on", "the best retriever: meaning"),
        ("/recall ", "/recall off", ""),
        ("/recall wor", "/recall words", "Finds passages"),
    ],
)
def test_commands_and_values_are_completed_with_their_meaning(
    typed: str, line: str, help: str
) -> None:
    assert re.match(help, offered(typed)[line])


def test_options_of_the_current_policy_are_completed_and_messages_are_not() -> None:
    assert "number of tokens in the sample" in offered("/set sa", "reservoir")["/set sample"]
    assert "/set sample" not in offered("/set sa", "entropy")
    assert not offered("//pol")


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


@pytest.mark.parametrize(
    ("typed", "lines"),
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
        ("/export md no", {"/export md notes.txt"}),
        ("/export ", {"/export md", "/export json", "/export --force"}),
        ("/copy ", {"/copy code"}),
        *((text, set()) for text in ("a@no", r"\@no", "@none", "@no x", '@"a b.md" ')),
        ("/export md a", {'/export md "a b.md"'}),
        ("/export md notes.txt no", set()),
        *((text, set()) for text in ("/set @no", "/export txt no", "/save no")),
    ],
)
def test_file_names_are_completed(files: Path, typed: str, lines: set[str]) -> None:
    assert set(offered(typed)) == lines


def test_the_toolbar_follows_what_happens(terminal: FakeTerminal, own_home: Path) -> None:
    chat = Chat(tiny(), budget=1024, decay=1.0, save=False)
    assert toolbar_text(chat.session, 100) == "tiny · salience · ──────── 0/1,024 held · decay 1"
    chat.say("Hello.")
    bar = r"tiny · salience · ─{8} (\d+)/1,024 held · decay 1 · \d+ tok/s"
    assert re.fullmatch(bar, toolbar_text(chat.session, 100))
    for line in ("/policy reservoir", "/budget 64", "/decay 0.5"):
        chat.do(line)
    bar = r"tiny · reservoir · ━{1,8}─{0,7} (\d+)/64 held · decay 0.5 · \d+ tok/s"
    assert re.fullmatch(bar, toolbar_text(chat.session, 100))
    with TypedChat(terminal, save=False) as typed:
        typed.press("/stats\r")
        assert " tiny · salience · ──────── 0/1,024 held · decay 1" in terminal.getvalue()
