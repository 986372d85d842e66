"""A save writes what is new, and neither reads nor copies what was saved before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chatting import babbler, session
from sirchat.chat.session import Session
from sirchat.saved.autosave import Autosave
from sirchat.saved.resume import resume_session
from sirchat.saved.store import SavedTurn, SessionStore

pytestmark = pytest.mark.usefixtures("folder")
SAID = "Anna has a red boat near the old lake, and it is green now."


class Counted(np.ndarray[Any, Any]):
    """An array that counts the elements which are copied, or are read by a function of numpy."""

    read = 0

    def __array_finalize__(self, of: object) -> None:
        Counted.read += self.size * (self.base is None)  # else it is a view

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        if "out" in options:
            options["out"] = tuple(map(np.asarray, options["out"]))
        return getattr(ufunc, method)(*map(self._counted, given), **options)

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        return function(*map(self._counted, given), **options)

    @staticmethod
    def _counted(one: Any) -> Any:
        Counted.read += one.size if isinstance(one, Counted) else 0
        return np.asarray(one) if isinstance(one, Counted) else one


def say(chat: Session, rounds: int) -> None:
    for _ in range(rounds):
        list(chat.read_user(SAID))
        list(chat.read_reply("It is."))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that saves: the numbers of rows read, turns copied and SQL statements run."""
    turns = []

    def copy(*index: Any, **turn: Any) -> Any:
        turns.append(turn)
        return SavedTurn(*index, **turn)

    monkeypatch.setattr("sirchat.saved.autosave.SavedTurn", copy)

    def save(chat: Session, saving: Autosave) -> tuple[int, int, int]:
        assert saving._store is not None
        statements: list[str] = []
        plain, Counted.read = chat.ledger._rows, 0
        chat.ledger._rows = plain.view(Counted)
        turns.clear()
        saving._store._connection.set_trace_callback(statements.append)
        saving.save()
        saving._store._connection.set_trace_callback(None)
        chat.ledger._rows = plain
        return Counted.read, len(turns), len(statements)

    return save


def test_after_a_new_turn_no_old_row_or_turn_is_read_or_copied(reads: Any) -> None:
    chat = session(babbler(), budget=96, policy="sink", save_kv="off")
    saving = Autosave(chat)
    say(chat, 6)
    list(chat.pin("turn 0"))
    saving.save()
    say(chat, 1)
    early = reads(chat, saving)
    for _ in range(3):
        say(chat, 6)
        saving.save()
    say(chat, 1)
    assert reads(chat, saving) == early
    assert early[1] == 2
    assert reads(chat, saving)[1] == 0
    saving.close()


def test_a_pin_writes_the_rows_around_it_alone_and_an_undo_what_it_changed(reads: Any) -> None:
    chat = session(babbler(), budget=96, recent=16)
    saving = Autosave(chat)
    for _ in range(12):
        say(chat, 1)
        saving.save()
    list(chat.pin("turn 20"))
    list(chat.pin("turn 4"))
    assert reads(chat, saving)[1] == 0
    list(chat.undo())
    list(chat.pin("turn 20", pinned=False))
    say(chat, 1)
    assert reads(chat, saving)[1] == 2
    saving.close()
    assert saving._store is not None
    with SessionStore.open(saving._store.path) as store:
        again = Session(babbler(), chat.profile)
        resume_session(again, store)
    assert again.turns == chat.turns
    for name in ("token_id", "turn", "surprisal", "birth_decay", "flags", "state"):
        column = chat.ledger.column(name)
        np.testing.assert_array_equal(again.ledger.column(name), column, name)
