"""Converts a file of format 4, whose records have no check sums of their own.

Its check sums are of whole tables, and its head lists the tokens that are pinned or excluded, whose
flags are out of date in their ledger rows.
"""

from __future__ import annotations

import json
import sqlite3

import numpy as np

from sirchat.saved.database import FORMAT, SUM, TABLES, record_sum, require

_FLAGS = {"pinned": 1, "excluded": 32}  # flags by the lists in the head


def convert(connection: sqlite3.Connection) -> None:
    """Within a transaction, give the file the newest format; ValueError if it is damaged."""
    about = dict(connection.execute("SELECT name, value FROM about"))
    sums = json.loads(about["sums"])
    for table in TABLES:
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
    for table in TABLES:
        connection.execute(f"ALTER TABLE {table} ADD COLUMN{SUM[1:]}")
        for rowid, *values, _ in connection.execute(f"SELECT rowid, * FROM {table}").fetchall():
            new = (record_sum(values), rowid)
            connection.execute(f"UPDATE {table} SET sum = ? WHERE rowid = ?", new)
    connection.execute(f"PRAGMA user_version={FORMAT}")
