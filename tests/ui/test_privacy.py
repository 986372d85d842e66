"""With every private option, nothing of a chat reaches the disk: all files are searched for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from command import run
from fake_terminal import FakeTerminal
from sirchat.paths import memory_dir
from sirchat.ui.typed_input import open_history
from terminal import Terminal, program
from typed_chat import TypedChat

WORD = "Xylothek"  # stands in every line that is typed, in the edited text, and in what is pasted
BEFORE = "a line of an earlier chat"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "more"),
    [(["--no-save"], {}), (["--profile", "private.yaml"], {"SIRCHAT_SAVE": ""})],
    ids=["flag", "profile and killed"],
)
def test_nothing_of_a_private_chat_reaches_the_disk(
    places: dict[str, str],
    own_home: Path,
    flags: list[str],
    more: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(own_home)
    flags = ["--max-new-tokens=4", "--budget=64", *flags]
    with Terminal(*flags, home=own_home, rows=20, environ=places | more) as chat:
        chat.ask(f"I keep a {WORD} of oak.")
        chat.send(f"a {WORD} that is not sent\x03")
        chat.paste(f"/pasted {WORD}\nin two lines")
        chat.submit()
        chat.wait_prompt()
        chat.send(f"{WORD} \x18\x05")  # Ctrl-X Ctrl-E
        chat.wait_screen(f"> {WORD}\\s+and {WORD} edited")
        written = Path((own_home / "edited").read_text(encoding="utf-8").strip())
        assert memory_dir() is None or own_home not in written.parents
        chat.submit()
        chat.wait_prompt()
        chat.ask("/edit")
        assert "replaced by what follows" in chat.shown
        chat.say("/tokens")
        chat.wait_screen("q leaves")
        chat.send(f"/{WORD}\rq")
        chat.ask(f'/recall "{WORD}"')
        chat.wait_prompt()
        chat.send("\x1b[A" * 20)  # earlier chats' lines are still offered by Up
        chat.wait_screen(f"(?m)^> {BEFORE}")
        chat.send("\x03")
        if more:
            chat.child.kill(signal.SIGKILL)
            chat.ended()
        else:
            assert chat.leave() == 0
    assert files_with(WORD, own_home) == []
    assert files_with(BEFORE, own_home) == ["state/history"]
    assert not written.exists()


def test_after_save_the_chat_and_what_is_typed_from_then_on_are_kept(
    terminal: FakeTerminal, own_home: Path
) -> None:
    with TypedChat(terminal, save=False, max_new_tokens=4) as chat:
        chat.ask("This stays in the chat alone.")
        chat.ask("/save oak")
        chat.ask(f"I keep a {WORD}.")
    assert "state/history" in files_with(WORD, own_home)
    assert "state/history" not in files_with("stays in the chat alone", own_home)


def files_with(word: str, folder: Path) -> list[str]:
    """The files at any depth of a folder whose contents or names have a word, in any encoding."""
    forms = [word.encode(code) for code in ("utf-8", "utf-16-le", "utf-32-le")]
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if word in path.name or (path.is_file() and any(f in path.read_bytes() for f in forms))
    ]


@pytest.fixture
def places(own_home: Path) -> dict[str, str]:
    """The environment of a user whose folders are all in the test's: home, temporary, caches."""
    own = {"HOME": "user", "TMPDIR": "tmp", "XDG_CACHE_HOME": "user/.cache"}
    for name in own.values():
        (own_home / name).mkdir(parents=True, exist_ok=True)
    (own_home / "private.yaml").write_text("save: false\n", encoding="utf-8")
    open_history(print).append_string(BEFORE)
    editor = f'echo "$1" > {own_home}/edited\nprintf " and {WORD} edited" >> "$1"'
    return {name: str(own_home / place) for name, place in own.items()} | {
        "EDITOR": program(own_home / "editor", editor.replace(WORD, "$(printf Xylo)thek")),
        "PAGER": "less",
    }


def test_a_question_and_a_replay_leave_nothing(
    places: dict[str, str], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_home)
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")
    assert run("ask", f"I keep a {WORD}.", text=f"A {WORD} is a library.").stdout
    assert run("--no-save", text=f"I keep a {WORD}.").stdout
    assert files_with(WORD, own_home) == []
