"""What a user may call a saved session, and when two names are the same."""

from __future__ import annotations

import re
import unicodedata

from sirchat.errors import SessionError, format_value

LENGTH = 40
"""Characters of the longest name."""

_LIKE_AN_ID = r"[0-9]{1,8}|[0-9]{8}-[0-9]{0,4}|[0-9]{8}-[0-9]{4}-\w{0,4}"


def checked_name(text: str) -> str:
    """A name as it is kept; raises SessionError for one that would mean something else.

    Ids, also their beginnings, and `last` are other ways to name a session; a dash begins a flag.
    """
    name = re.sub(" +", " ", unicodedata.normalize("NFC", text).strip(" "))
    is_another_way = re.fullmatch(_LIKE_AN_ID, name) or _key(name) == "last"
    is_text = name.isprintable() and not name.startswith(("-", '"')) and 0 < len(name) <= LENGTH
    if is_another_way or not is_text:
        raise SessionError(
            f"a session can't be called {format_value(name)}; allowed: up to {LENGTH} letters, "
            "digits and other signs that show, not last, nor like an id, nor with a dash or quote "
            "in front",
            hint="for example /save my trip",
        )
    return name


def same_name(one: str, other: str) -> bool:
    """Whether two names mean the same session: in any case, however their letters are composed."""
    return bool(one) and _key(one) == _key(other)


def tells_of(name: str, said: str, *, whole: bool) -> bool:
    """Whether a name would keep what is to be forgotten: words, or a turn as a `whole`.

    A name made of a turn's words tells of the turn.
    """
    one, other = _key(name), _key(said)
    return bool(one and other) and (other in one or (whole and one in other))


def _key(name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())
