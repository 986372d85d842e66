"""Damaged and hostile saved chats: refused in one line, or taken up as they were."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from attacking import attack, mutated, odd_json
from chatting import babbler
from command import run
from saved_chats import saved
from session_files import sum_again
from sirchat.chat.session import Session
from sirchat.errors import SessionError
from sirchat.memory.ledger import ROW
from sirchat.saved.autosave import Autosave
from sirchat.saved.keys_values import KeysAndValues
from sirchat.saved.resume import resume_session
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.session_list import find_session, list_sessions
from sirchat.saved.store import SessionStore

_ODD: list[Any] = [
    None, 0, 1, -1, 2**31, 2**62, 2**63 - 1, 1.5, 1e308, float("nan"), float("inf"), "", "x", b"",
    b"\xff" * 7, b"\0" * 64, "[" * 5000, "{}", "[]", "1e999", "NaN", "\ud7ff", "user", True,
]  # fmt: skip
_ENDLESS_TURNS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS turn, 'user' AS role, 'x' AS text, 'stop' AS finish FROM n"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with two saved chats, `good` and `odd`."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIRCHAT_HOME", str(home))
        for name in ("good", "odd"):
            saved(home / "data" / "sessions", name, save_kv="on")
    return home


class Damaged:
    """A copy of the chats in which a test damages `odd`."""

    def __init__(self, chats: Path, home: Path) -> None:
        self.folder = home / "data" / "sessions"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(chats, home)
        self.good, self.odd = (find_session(self.folder, name) for name in ("good", "odd"))
        self._before = self.good.read_bytes()

    def sql(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.odd)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    def resume_session(self) -> Session:
        """Go on with `odd`, one turn; the list and the other chat are as before."""
        try:
            listing = list_sessions(self.folder)
            assert self.good in [entry.path for entry in listing.sessions]
            assert len(listing.sessions) + len(listing.errors) == 2
            assert find_session(self.folder, "good") == self.good
            with SessionStore.open(self.odd) as store:
                session = Session(babbler(), saved_profile(store))
                resume_session(session, store)
                list(session.ask("and on"))
                Autosave(session, store).save()
            return session
        finally:
            assert self.good.read_bytes() == self._before


def change_a_value(random: Random, connection: sqlite3.Connection) -> None:
    """Change one value of the database."""
    table, column = random.choice(
        [(table, name) for table, names in {
            "about": ["value", "name"], "turns": ["turn", "role", "text", "finish"],
            "rows": ["start", "data", "data", "data"],
            "head": ["seen", "held", "held", "logits", "logits", *["fields"] * 12],
        }.items() for name in names]
    )  # fmt: skip
    number, value = random.choice(
        connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall() or [(0, 0)]
    )
    new: Any = random.choice(_ODD)
    if column in ("fields", "value") and random.random() < 0.95:
        new = json.dumps(odd_json(random, json.loads(value)))
    elif column == "data" and random.random() < 0.95:
        new = odd_rows(random, value)
    elif isinstance(value, bytes) and random.random() < 0.8:
        new = mutated(random, value)
        if column == "held" and random.random() < 0.3:
            (seen,) = connection.execute("SELECT seen FROM head").fetchone()
            new = np.arange(seen, dtype="<i8").tobytes()
        if column == "logits":
            array = np.frombuffer(value, "<f4").copy()
            array[random.randrange(len(array))] = random.choice((np.nan, np.inf, -np.inf, 1e38))
            new = array.tobytes()
    connection.execute(f"UPDATE OR REPLACE {table} SET {column} = ? WHERE rowid = ?", (new, number))


def kept_tensors(path: Path) -> tuple[dict[str, Any], str]:
    """The keys and values beside a saved chat, and their stamp."""
    with safe_open(path.with_suffix(".safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata()["stamp"]


def change_a_tensor(random: Random, path: Path) -> None:
    """Replace one of the saved keys and values by an odd one, as if it had been saved so."""
    tensors, stamp = kept_tensors(path)
    name = random.choice(list(tensors))
    one = tensors[name]
    match random.randrange(5):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = one[:-1].clone()
        case 2:
            tensors[name] = one[None].clone()
        case 3:
            one.flatten()[0] = random.choice((0, -1, 10**9))
        case _:
            tensors[name] = torch.full_like(one.float(), random.choice((torch.nan, torch.inf, 0)))
    KeysAndValues(path).save(tensors, stamp)


def odd_rows(random: Random, data: bytes) -> bytes:
    """Ledger rows with one odd value, or others in number."""
    packed = np.dtype([(name, ROW[name].newbyteorder("<")) for name in ROW.names or ()])
    if random.random() < 0.2 or len(data) % packed.itemsize:
        return mutated(random, data)
    rows = np.frombuffer(data, packed).copy()
    name = random.choice(ROW.names or ())
    kind = rows.dtype[name]
    odd = [np.nan, np.inf, -np.inf, -1, 0, 1e30, 1e-30] if kind.kind == "f" else [
        np.iinfo(kind).min, np.iinfo(kind).max, 0, 1, 7
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        rows[name][random.randrange(len(rows))] = random.choice(odd)
    return rows.tobytes()


def test_a_chat_with_odd_values_is_refused_or_goes_on(chats: Path, tmp_path: Path) -> None:
    def resume(random: Random) -> None:
        chat = Damaged(chats, tmp_path / "home")
        with closing(sqlite3.connect(chat.odd)) as connection:
            for _ in range(random.choice((1, 1, 3))):
                try:
                    change_a_value(random, connection)
                except (sqlite3.Error, ValueError, OverflowError, TypeError, RecursionError):
                    return  # SQLite or JSON took it for no value
            connection.commit()
        sum_again(chat.odd)
        if random.random() < 0.2:
            change_a_tensor(random, chat.odd)
        chat.resume_session()

    attack(resume)


@pytest.mark.parametrize(
    ("table", "change"), [("turns", "view"), ("rows", "missing"), ("head", "without columns")]
)
def test_a_table_that_is_none_is_refused(
    chats: Path, tmp_path: Path, table: str, change: str
) -> None:
    chat = Damaged(chats, tmp_path / "home")
    chat.sql(f"DROP TABLE {table}")
    if change == "view":
        chat.sql(f"CREATE VIEW turns AS {_ENDLESS_TURNS}")
    elif change == "without columns":
        chat.sql(f"CREATE TABLE {table} (other)")
    assert [str(one).startswith(f"{chat.odd} is damaged") for one in
            list_sessions(chat.folder).errors] == [True]  # fmt: skip
    with pytest.raises(SessionError, match="is damaged"):
        SessionStore.open(chat.odd)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_chat_of_another_user_is_named_and_never_quoted(
    chats: Path, tmp_path: Path, is_link: bool
) -> None:
    chat = Damaged(chats, tmp_path / "home")
    chat.sql("UPDATE turns SET text = 'foreign' || text")
    sum_again(chat.odd)
    if is_link:
        chat.odd.rename(tmp_path / "other")
        chat.odd.symlink_to(tmp_path / "other")
    os.chown(chat.odd, 65534, 65534)
    for words in (("list",), ("search", "words"), ("show", chat.odd.stem), ("export", "odd")):
        done = run("sessions", *words, SIRCHAT_HOME=str(tmp_path / "home"))
        assert "foreign" not in done.stdout + done.stderr, words
        assert ("good" in done.stdout) == (words[0] in ("list", "search"))
        if words[0] in ("list", "show"):
            assert f"{chat.odd} belongs to another user" in done.stderr
    with pytest.raises(SessionError, match="belongs to another user"):
        SessionStore.open(chat.odd)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(chats: Path, tmp_path: Path, odd: float) -> None:
    chat = Damaged(chats, tmp_path / "home")
    with closing(sqlite3.connect(chat.odd)) as connection:
        ((logits,),) = connection.execute("SELECT logits FROM head").fetchall()
        array = np.frombuffer(logits, "<f4").copy()
        array[7] = odd
        connection.execute("UPDATE head SET logits = ?", (array.tobytes(),))
        connection.commit()
    sum_again(chat.odd)
    with pytest.raises(SessionError, match="is damaged"):
        chat.resume_session()


def test_keys_and_values_with_a_flipped_bit_or_of_another_shape_are_read_anew(
    chats: Path, tmp_path: Path
) -> None:
    chat = Damaged(chats, tmp_path / "home")
    kept = chat.odd.with_suffix(".safetensors")
    content = bytearray(kept.read_bytes())
    content[-5] ^= 1
    kept.write_bytes(content)
    with SessionStore.open(chat.odd) as store:
        head = store.state_record()
        assert head is not None
        assert store.kv.load(head.fields["kv"]) is None
    assert chat.resume_session().turns[-1].role == "assistant"
    chat = Damaged(chats, tmp_path / "home")
    tensors, stamp = kept_tensors(chat.odd)
    tensors["1"] = tensors["1"][:, :, :0].clone()
    KeysAndValues(chat.odd).save(tensors, stamp)
    assert chat.resume_session().turns[-1].role == "assistant"
