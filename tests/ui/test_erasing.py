"""`/erase` at the prompt: nothing goes without a yes, and no more than was shown."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path

import pytest

from chatting import babbler
from fake_terminal import FakeTerminal
from saved_chats import Chat
from sirchat.chat.summary import pin_summary
from sirchat.errors import UsageError
from sirchat.paths import sessions_dir
from sirchat.ui.commands import Commands
from sirchat.ui.typed_input import open_history
from typed_chat import TypedChat


@pytest.fixture
def chat(own_home: Path) -> Chat:
    """A chat after two messages, and lines that were typed in other chats before."""
    chat = Chat(budget=300)
    chat.history.append_string("an old line on Marmalade")
    chat.history.append_string("what is called all that")
    for text in ("Oranges make Marmalade.", "this is what the others said"):
        chat.history.append_string(text)
        chat.say(text)
    return chat


def do(chat: Chat, line: str) -> str:
    chat.history.append_string(line)
    return " ".join(chat.do(line).split())


def test_it_is_shown_first_and_done_after_a_yes(chat: Chat) -> None:
    seen, undoable = chat.texts, len(chat.session.turns)
    shown = do(chat, "/erase Marmalade")
    assert "would erase" in shown
    assert shown == (
        "this would erase for good: 4 tokens in turn 0 and 2 typed lines "
        "after that, /undo must read the chat again; to confirm: /erase --yes"
    )
    assert (chat.texts, len(chat.session.turns)) == (seen, undoable)
    done = do(chat, "/erase --yes")
    assert "tokens erased" in done
    assert "2 typed lines erased" in done
    assert chat.texts[0] == "Oranges make ."
    assert chat.history.get_strings() == [
        "what is called all that",
        "this is what the others said",
        "/erase --yes",
    ]
    with pytest.raises(UsageError):
        do(chat, "/erase --yes")  # nothing is shown any more


def test_parts_of_words_stay(chat: Chat) -> None:
    with pytest.raises(UsageError, match="these words are not in this chat"):
        do(chat, "/erase range")
    do(chat, "/erase --yes is")
    assert chat.texts[1] == "this  what the others said"
    assert "this is what the others said" not in chat.history.get_strings()


@pytest.mark.parametrize(("target", "undoes"), [("last", False), ("turn 2", True), ("said", False)])
def test_a_yes_erases_nothing_once_the_chat_has_changed(
    chat: Chat, target: str, undoes: bool
) -> None:
    do(chat, f"/erase {target}")
    if undoes:
        do(chat, "/undo")
    chat.say("something said later")
    before = chat.texts
    shown = do(chat, "/erase --yes")
    assert "the chat has changed since this was shown, so nothing is erased this would" in shown
    assert chat.texts == before
    assert "tokens erased" in do(chat, "/erase --yes")
    assert chat.texts[-1] != before[-1]


def test_what_was_typed_of_a_turn_goes_with_it_whatever_command_sent_it(
    chat: Chat, terminal: FakeTerminal, own_home: Path
) -> None:
    (own_home / "pin.txt").write_text("It is 4711.", encoding="utf-8")
    with TypedChat(terminal, babbler(), max_new_tokens=3) as typed:
        for line in ("/edit My pin is 4711", f"/edit My 4711 is in @{own_home}/pin.txt"):
            typed.ask("Hello.")
            typed.ask(line)
            assert "4711" in typed.said()
            typed.ask("/erase last")
            assert "1 typed line erased" in typed.ask("/erase --yes")
        for line in ("/system My pin is 4711", "/set  system My pin is 4711"):
            typed.ask("/reset")
            typed.ask(line)
            typed.ask("Hello.")
            typed.ask("/erase turn 0")
            assert "1 typed line erased" in typed.ask("/erase --yes")
    assert "4711" not in (own_home / "state" / "history").read_text(encoding="utf-8")
    list(pin_summary(chat.session, "They met."))
    chat.history.append_string("They met.")  # as it was edited
    assert "1 typed line erased" in do(chat, "/erase --yes turn 4")


def test_an_edit_that_changes_nothing_leaves_both_typed_forms_to_be_erased(
    terminal: FakeTerminal, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "true")
    pin, other = own_home / "pin.txt", own_home / "other.txt"
    other.write_text("Nothing.", encoding="utf-8")
    pin.write_text(f"4711, as @{other} says", encoding="utf-8")
    with TypedChat(terminal, babbler(), max_new_tokens=3) as typed:
        typed.ask(f"Read @{pin} now")
        assert "the message is unchanged" in typed.ask("/edit")
        typed.ask("/erase last")
        assert "2 typed lines erased" in typed.ask("/erase --yes")
    history = (own_home / "state" / "history").read_text(encoding="utf-8")
    assert not re.search("4711|pin", history)


def cached_texts() -> Iterator[str]:
    """Every text in an lru_cache of this process."""
    for cache in (item for item in gc.get_objects() if isinstance(item, _lru_cache_wrapper)):
        level: list[object] = [cache]
        for _ in range(3):  # the cache, its entries, their keys, and what these contain
            level = gc.get_referents(*level)
            yield from (item for item in level if isinstance(item, str))


def test_no_cache_of_the_process_keeps_what_was_drawn_and_erased(chat: Chat) -> None:
    chat.say("Sauce à l’ail, über Nüsse ⟨Käse⟩ 洋は深い。")
    for look in ("/panel", "/tokens", "/evicted", "/why Nüsse --all"):
        do(chat, look)
    do(chat, "/erase --yes turn 4")
    assert chat.texts[2] == ""
    assert not [text for text in cached_texts() if len(text) > 1 and re.search("[üàä洋⟨]", text)]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (
            ["sirchat.ui.typed_input.MemoryHistory.erase"],
            "the typed lines could not be erased from",
        ),
        (
            [f"sirchat.ui.typed_input.MemoryHistory.{name}" for name in ("lines", "erase")],
            "the typed lines could not be erased from",
        ),
        (["sirchat.saved.autosave.Autosave.save"], ".sqlite"),
    ],
    ids=["history", "unreadable history", "saved chat"],
)
def test_what_cant_be_erased_is_named_after_all_else_is_gone(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, broken: list[str], named: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("read-only")

    chat.do("/save")
    for method in broken:
        monkeypatch.setattr(method, fail)
    assert "would erase" in do(chat, "/erase Marmalade")
    shown = do(chat, "/erase --yes")
    assert "tokens erased" in shown
    assert "could not be erased from" in shown
    assert named in shown
    assert "Marmalade" not in chat.texts[0]
    files = [file for file in sessions_dir().iterdir() if file.is_file()]
    if named != ".sqlite":
        assert files
        assert not any(b"Marmalade" in file.read_bytes() for file in files)


def test_a_link_that_was_planted_beside_the_history_is_not_followed(own_home: Path) -> None:
    history, victim = open_history(lambda complaint: None), own_home / "victim"
    history.append_string("one")
    victim.write_text("precious", encoding="utf-8")
    (own_home / "state" / "history.new").symlink_to(victim)
    history.erase(lambda line: line == "one")
    assert victim.read_text(encoding="utf-8") == "precious"
    assert not list(open_history(lambda complaint: None).load_history_strings())


def test_former_names_of_commands_still_work_and_say_the_new_name(chat: Chat) -> None:
    assert chat.do("/forgotten") == "/forgotten is now called /evicted\nnothing is evicted\n"
    shown = chat.do("/forget Marmalade")
    assert shown.startswith("/forget is now called /erase\n")
    assert "would erase" in shown
    assert not {"forget", "forgotten"} & set(Commands.names())


def test_branches_that_still_have_the_words_are_named_before_and_after(chat: Chat) -> None:
    chat.do("/save main")
    chat.do("/branch trip")
    chat.say("Plums make none.")
    chat.do("/branch end")
    stays = "it stays in branches {}: /load NAME, and /erase it there"
    assert stays.format("trip") in do(chat, "/erase plums")
    shown = do(chat, "/erase marmalade")
    assert any(stays.format(names) in shown for names in ("trip, main", "main, trip"))
    shown = do(chat, "/erase --yes")
    assert any(stays.format(names) in shown for names in ("trip, main", "main, trip"))
    chat.do("/load main")
    assert stays.format("trip") in do(chat, "/erase --yes turn 0")
    chat.do("/load trip")
    assert "stays in" not in do(chat, "/erase --yes marmalade")
