"""Names that users give to saved sessions."""

from __future__ import annotations

import re
import unicodedata

from sirchat.errors import SessionError, format_value

LENGTH = 40  # characters of a session's name

_LIKE_AN_ID = r"[0-9]{1,8}|[0-9]{8}-[0-9]{0,4}|[0-9]{8}-[0-9]{4}-\w{0,4}"


def checked_name(text: str) -> str:
    """The name with spaces and Unicode composition normalized.

    Raises SessionError for one that could be an id, or `last`, or a flag, or is no visible text.
    """
    name = re.sub(" +", " ", unicodedata.normalize("NFC", text).strip(" "))
    is_reserved = re.fullmatch(_LIKE_AN_ID, name) or _key(name) == "last"
    is_text = name.isprintable() and not name.startswith(("-", '"')) and 0 < len(name) <= LENGTH
    if is_reserved or not is_text:
        raise SessionError(
            f"a session can't be called {format_value(name)}; allowed: up to {LENGTH} visible "
            "characters, but not the word last, nothing that looks like an id, and no dash or "
            "quote at the start",
            hint="for example /save my trip",
        )
    return name


def same_name(name: str, other: str) -> bool:
    """Whether two names are equal but for case, spaces and Unicode composition."""
    return bool(name) and _key(name) == _key(other)


def tells_of(name: str, said: str, *, whole: bool) -> bool:
    """Whether a name tells a text that is to be erased: if it contains `said`, a part of a turn.

    With `whole`, `said` is all of a turn, and a name that is a part of it tells it, too.
    """
    name_key, said_key = _key(name), _key(said)
    repeats = said_key in name_key or (whole and name_key in said_key)
    return bool(name_key and said_key) and repeats


def _key(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())
