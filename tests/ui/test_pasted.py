"""Which `@` signs were pasted, however the text around them is edited."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sirchat.ui.prompt import PastedSigns


def typed(signs: PastedSigns, text: str, before: str = "") -> None:
    """Type a text key by key."""
    for end in range(1, len(text) + 1):
        signs.changed(before + text[:end])


def test_typed_signs_are_not_pasted_and_pasted_ones_are() -> None:
    signs = PastedSigns()
    typed(signs, "see @a and ")
    signs.changed("see @a and @b, @c", pasted=True)
    assert signs.indices == {11, 15}
    signs.changed("see and @b, @c")
    assert signs.indices == {8, 12}
    signs.changed("see and @b, @c @")
    assert signs.indices == {8, 12}


def test_a_path_pasted_after_a_typed_sign_is_named_by_the_user() -> None:
    signs = PastedSigns()
    typed(signs, "@")
    signs.changed("@/tmp/a.txt", pasted=True)
    assert not signs.indices


def test_a_completion_leaves_the_sign_typed() -> None:
    signs = PastedSigns()
    typed(signs, "@no")
    signs.changed("@notes.txt")
    signs.changed('@"notes.txt"')
    assert not signs.indices


def test_pasted_words_stay_pasted_when_they_come_back_at_once() -> None:
    signs = PastedSigns()
    signs.changed("x @/etc/hosts", pasted=True)
    signs.changed("")
    signs.changed("x @/etc/hosts")  # undo, yank, or the history
    assert signs.indices == {2}
    signs.begin()
    signs.changed("@/etc/hosts is what?")
    assert signs.indices == {0}
    signs.begin()
    signs.changed("@mine is what?")
    assert not signs.indices
    signs.begin()
    typed(signs, "@/etc/hosts")  # by hand, it is meant
    assert not signs.indices


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.booleans())))
def test_no_edit_around_a_pasted_sign_makes_it_typed(edits: list[tuple[int, int, bool]]) -> None:
    signs, text = PastedSigns(), ""
    for number, (at, gone, pasted) in enumerate(edits):
        new = f"@{number} " if pasted else "x"
        text = text[:at] + new + text[at + gone :]
        signs.changed(text, pasted=pasted)
        assert signs.indices == {index for index, char in enumerate(text) if char == "@"}
