"""Converts files of format 6, the one before the present.

In format 6, a reply's reasoning stands in tags before its text. Its head, and not its turns,
records which turns are summaries, are left out, or have torn sentences.
"""

from __future__ import annotations

import json
import re
import sqlite3
from typing import Any

from sirchat.saved.database import FORMAT_VERSION, TABLES, insert_record
from sirchat.text.transcript import THINK_CLOSE, THINK_OPEN

# A reply with reasoning, in which the end of each `think>` is escaped.
_TAGGED = re.compile(f"{THINK_OPEN}(.*?){THINK_CLOSE}(.*)", re.DOTALL)
_ESCAPED_TAG = re.compile(r"think\\(\\*)>")


def convert(connection: sqlite3.Connection) -> None:
    """Convert a file of format 6; a damaged one raises an error of `UNDECODABLE`.

    Text that is no longer in the tables is overwritten.
    """
    connection.execute("PRAGMA secure_delete=ON")
    chat = _convert_head(connection)
    turns = connection.execute("SELECT turn, role, text, finish, time FROM turns").fetchall()
    connection.execute("DROP TABLE turns")
    connection.execute(TABLES["turns"])
    for number, role, written, finish, began in turns:
        thinking, text = split_reasoning(role, written)
        flags = int(number in chat["summaries"]), int(number in chat["left_out"])
        torn = json.dumps([sentence for turn, sentence in chat["torn"] if turn == number])
        values = number, role, text, finish, thinking, began, *flags, torn
        insert_record(connection, "turns", *values)
    connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")


def split_reasoning(role: str, written: str) -> tuple[str, str]:
    """The reasoning and the text of a turn as it was `written`."""
    match = _TAGGED.fullmatch(written) if role == "assistant" else None
    thinking, text = match.groups() if match else ("", written)
    return _ESCAPED_TAG.sub(r"think\1>", thinking), text


def _convert_head(connection: sqlite3.Connection) -> dict[str, list[Any]]:
    """Take the facts that are now in the turns out of the head; returns them."""
    chat: dict[str, list[Any]] = {"summaries": [], "left_out": [], "torn": []}
    for number, *state, written, _ in connection.execute("SELECT * FROM head").fetchall():
        fields = {"passages": 0, "encoder": 0, "pins": [], **json.loads(written)}
        fields["pins"] = [[*pin, False][:4] for pin in fields["pins"]]  # older ones name no rules
        fields["conversation"] = {"asked": [], "unpinned": [], **fields["conversation"]}
        chat |= {name: fields["conversation"].pop(name, []) for name in chat}
        connection.execute("DELETE FROM head")
        insert_record(connection, "head", number, *state, json.dumps(fields))
    return chat
