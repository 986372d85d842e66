"""Session files that tests write, and other processes that open them.

The files of an open session are read by other processes: in this one, closing such a file would
drop the session's lock.
"""

from __future__ import annotations

import inspect
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from forked_chat import fork
from sirchat.errors import SessionError
from sirchat.saved.database import TABLES, record_checksum
from sirchat.saved.store import SavedTurn, SessionStore, StateRecord

ROW = np.dtype(
    [("token_id", np.int32), ("surprisal", np.float32), ("decay", np.float64), ("flags", np.uint8)],
    align=True,  # as the ledger's, with gaps
)
ROOT = Path(__file__).parents[2]
PRELUDE = """
from __future__ import annotations
import os, sys
from pathlib import Path
import numpy as np
from sirchat.errors import *
from sirchat.saved.session_list import *
from sirchat.saved.store import *
path, ROW = Path(sys.argv[1]), np.dtype(
    [("token_id", np.int32), ("surprisal", np.float32), ("decay", np.float64), ("flags", np.uint8)],
    align=True,
)
"""


def rows_at(positions: range) -> NDArray[Any]:
    """Rows whose values follow from their positions; the first has no surprisal."""
    at = np.arange(positions.start, positions.stop)
    rows = np.zeros(len(at), ROW)
    rows["token_id"], rows["surprisal"], rows["decay"] = at, at / 7, -at / 3
    rows["surprisal"][at == 0] = np.nan
    rows["flags"] = at % 256
    return rows


def head_at(seen: int, logits: list[float] | None = None, **fields: Any) -> StateRecord:
    """A head that holds every second token."""
    held = np.arange(0, seen, 2, dtype=np.int64)
    return StateRecord(seen, held, None if logits is None else np.array(logits, np.float32), fields)


def said(*texts: str, start: int = 0) -> list[SavedTurn]:
    """Turns of the user and the assistant, one after the other."""
    roles = ("user", "assistant")
    return [SavedTurn(i, roles[i % 2], text, "stop") for i, text in enumerate(texts, start)]


def new(folder: Path, *texts: str, model: str = "tiny") -> Path:
    """A session of three tokens a turn, closed."""
    with SessionStore.create(folder, {"model": model}) as session:
        seen = 3 * len(texts)
        session.append(said(*texts), rows_at(range(seen)), head_at(seen))
        return session.path


def sum_again(path: Path) -> None:
    """Give changed records the check sums that they would have if they had been saved so."""
    with closing(sqlite3.connect(path)) as connection:
        for table in TABLES:
            for rowid, *values, _ in connection.execute(f"SELECT rowid, * FROM {table}").fetchall():
                new = (record_checksum(values), rowid)
                connection.execute(f"UPDATE {table} SET sum = ? WHERE rowid = ?", new)
        connection.commit()


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(SessionError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Elsewhere:
    """Another Python process that runs `code`, after `PRELUDE` and the functions above."""

    def __init__(self, code: str, *arguments: object) -> None:
        shared = [inspect.getsource(function) for function in (rows_at, head_at, said)]
        program = ["-c", "\n".join([PRELUDE, *shared, code]), *map(str, arguments)]
        read, write = os.pipe()
        self._process = fork(program, os.environ, str(ROOT), {1: write, 2: 2})
        os.close(write)
        self.stdout = os.fdopen(read, encoding="utf-8")

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.join()
        self.stdout.close()

    @property
    def returncode(self) -> int | None:
        return cast(int | None, self._process.exitcode)

    def kill(self) -> None:
        self._process.kill()


def printed(code: str, *arguments: object) -> str:
    """Run `code` in another process to its end; returns what it prints."""
    with Elsewhere(code, *arguments) as process:
        shown = process.stdout.read()
    assert process.returncode == 0
    return shown


def columns(rows: NDArray[Any]) -> list[bytes]:
    """The bytes of every field, so that NaNs compare equal and padding is ignored."""
    return [rows[name].tobytes() for name in rows.dtype.names or ()]


APPEND_FOREVER = """
with SessionStore.open(path) as session:
    turn, seen = len(session.turns()), session.state_record().seen
    while True:
        more = turn % 5
        text = f"turn {turn} " * (turn % 4 * 200)
        rows, head = rows_at(range(seen, seen + more)), head_at(seen + more, turn=turn)
        session.append(said(text, start=turn), rows, head)
        print(turn, flush=True)
        turn, seen = turn + 1, seen + more
"""
