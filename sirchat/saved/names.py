"""Names of saved sessions: which are allowed, and when two are the same."""

from __future__ import annotations

import re
import unicodedata

from sirchat.errors import SessionError, format_value

LENGTH = 40
"""Most characters of a name."""

_LIKE_AN_ID = r"[0-9]{1,8}|[0-9]{8}-[0-9]{0,4}|[0-9]{8}-[0-9]{4}-\w{0,4}"


def checked_name(text: str) -> str:
    """The normalized name; raises SessionError for one that is not allowed.

    Not allowed are ids, beginnings of ids and `last`, which already refer to a session, and a dash
    in front, which begins a flag.
    """
    name = re.sub(" +", " ", unicodedata.normalize("NFC", text).strip(" "))
    is_reserved = re.fullmatch(_LIKE_AN_ID, name) or _key(name) == "last"
    is_text = name.isprintable() and not name.startswith(("-", '"')) and 0 < len(name) <= LENGTH
    if is_reserved or not is_text:
        raise SessionError(
            f"a session can't be called {format_value(name)}; allowed: up to {LENGTH} letters, "
            "digits and other signs that show, not last, nor like an id, nor with a dash or quote "
            "in front",
            hint="for example /save my trip",
        )
    return name


def same_name(one: str, other: str) -> bool:
    """Whether two names are equal, ignoring case, spaces and Unicode composition."""
    return bool(one) and _key(one) == _key(other)


def tells_of(name: str, said: str, *, whole: bool) -> bool:
    """Whether a name repeats text that is to be forgotten: words, or a `whole` turn.

    A name made of a turn's words also repeats the turn.
    """
    name_key, said_key = _key(name), _key(said)
    repeats = said_key in name_key or (whole and name_key in said_key)
    return bool(name_key and said_key) and repeats


def _key(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())
