"""Converts files of formats 4 and 5, and ledger rows with a column that is gone.

In format 4, check sums are of whole tables, and the head lists the tokens that are pinned or
excluded, whose flags are out of date in their ledger rows. Until format 5, the file does not say
which tokens were held after earlier turns.
"""

from __future__ import annotations

import json
import sqlite3

import numpy as np

from sirchat.saved.database import FORMAT, SUM, TABLES, format_of, put, record_sum, require

_FLAGS = {"pinned": 1, "excluded": 32}  # flags by the lists in the head
_GONE = "learned_score"  # the column


def convert(connection: sqlite3.Connection) -> None:
    """Within a transaction, give an older file the newest format; ValueError if it is damaged."""
    if format_of(connection) == 4:
        _convert_sums_and_flags(connection)
    connection.execute(TABLES["held"])
    connection.execute(f"PRAGMA user_version={FORMAT}")


def _convert_sums_and_flags(connection: sqlite3.Connection) -> None:
    """From format 4 to format 5."""
    tables = [table for table in TABLES if table != "held"]
    about = dict(connection.execute("SELECT name, value FROM about"))
    sums = json.loads(about["sums"])
    for table in tables:
        where = "WHERE name NOT IN ('sums', 'erasing')" if table == "about" else ""
        total = 0
        for values in connection.execute(f"SELECT * FROM {table} {where} ORDER BY 1"):
            total = record_sum(values, total)
        require(sums[table] == total)
    connection.execute("DELETE FROM about WHERE name = 'sums'")
    for seen, written in connection.execute("SELECT seen, fields FROM head").fetchall():
        fields = json.loads(written)
        flags = np.zeros(seen, np.uint8)
        for name, flag in _FLAGS.items():
            flags[fields.pop(name, [])] |= flag
        connection.execute("UPDATE head SET fields = ?", (json.dumps(fields),))
        row = np.dtype([(name, kind) for name, kind in json.loads(about.get("row", "[]"))])
        for start, data in connection.execute("SELECT start, data FROM rows").fetchall():
            rows = np.frombuffer(data, row).copy()
            rows["flags"] &= 255 - sum(_FLAGS.values())
            rows["flags"] |= flags[start : start + len(rows)]
            connection.execute("UPDATE rows SET data = ? WHERE start = ?", (rows.tobytes(), start))
    for table in tables:
        connection.execute(f"ALTER TABLE {table} ADD COLUMN{SUM[1:]}")
        for rowid, *values, _ in connection.execute(f"SELECT rowid, * FROM {table}").fetchall():
            new = (record_sum(values), rowid)
            connection.execute(f"UPDATE {table} SET sum = ? WHERE rowid = ?", new)


def drop_gone_column(connection: sqlite3.Connection) -> None:
    """Within a transaction, drop the column `_GONE` of the ledger rows, if they have it."""
    about = connection.execute("SELECT value FROM about WHERE name = 'row'").fetchone()
    fields = [tuple(field) for field in json.loads(about[0])] if about else []
    left = [field for field in fields if field[0] != _GONE]
    if left == fields:
        return
    connection.execute("PRAGMA secure_delete=ON")
    saved, row = np.dtype(fields), np.dtype(left)
    for start, data in connection.execute("SELECT start, data FROM rows").fetchall():
        rows = np.frombuffer(data, saved)[list(row.names or ())].astype(row)
        connection.execute("DELETE FROM rows WHERE start = ?", (start,))
        put(connection, "rows", start, rows.tobytes())
    connection.execute("DELETE FROM about WHERE name = 'row'")
    put(connection, "about", "row", json.dumps(left))
