"""Check sums of what a session's file holds, so that damage does not change it in silence.

They are written in the transaction that changes the contents, and compared when the file is opened.
What is only appended to is summed on from the last sum, so that a turn costs what it adds.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any
from zlib import crc32

_NAME = "sums"  # of the entry in the table `about`
_QUERIES = {
    "about": "SELECT name, value FROM about WHERE name NOT IN ('sums', 'erasing') ORDER BY name",
    "turns": "SELECT turn, role, text, finish FROM turns WHERE turn >= ? ORDER BY turn",
    "rows": "SELECT start, data FROM rows WHERE start >= ? ORDER BY start",
    "head": "SELECT id, seen, held, logits, fields FROM head",
}


def put_sums(connection: sqlite3.Connection, turns: int = 0, rows: int = 0) -> None:
    """Write the sums; turns before index `turns`, and rows before `rows`, are as at the last."""
    since = {"turns": turns, "rows": rows}
    before = _written(connection)
    if before is None:  # a file of the first format, which had none
        since, before = {}, {}
    sums = {
        table: _sum(connection, table, since.get(table, 0), before.get(table, 0))
        for table in _QUERIES
    }
    values = (_NAME, json.dumps(sums))
    connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", values)


def sums_match(connection: sqlite3.Connection, *, required: bool) -> bool:
    """Whether the contents have the sums that were written; without any, whether none need be."""
    written = _written(connection)
    if written is None:
        return not required
    return written == {table: _sum(connection, table) for table in _QUERIES}


def _written(connection: sqlite3.Connection) -> dict[str, int] | None:
    found = connection.execute("SELECT value FROM about WHERE name = ?", (_NAME,)).fetchone()
    return None if found is None else dict(json.loads(found[0]))


def _sum(connection: sqlite3.Connection, table: str, since: int = 0, before: int = 0) -> int:
    """The sum of a table; with `since`, of what comes from there on, continued from `before`."""
    query = _QUERIES[table]
    total = before if since else 0
    for values in connection.execute(query, (since,) if "?" in query else ()):
        for value in values:
            data = _bytes_of(value)
            total = crc32(data, crc32(b"%d:" % len(data), total))
    return total


def _bytes_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
