"""Where words of tokens begin and end, and which of them certain tokens belong to."""

from __future__ import annotations

import pytest

from sirchat.chat.events import TokenRow
from sirchat.chat.words import near_positions, split_words, word_text, words_at


def rows(*texts: str, turn: int = 0, start: int = 0) -> list[TokenRow]:
    """Neighbours with these texts; the later the more surprising."""
    return [
        TokenRow(start + i, 0, text, turn, "user", float(i), 0.0, None, 0.5, ())
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ((" Hal", "vor", "sen", ",", " ok"), ["Halvorsen", "ok"]),
        ((" is", " ", "Re", "x", "."), ["is", "Rex"]),
        (("one", "\n", "two"), ["one", "two"]),
        (("魚", "の", "汁"), ["魚", "の", "汁"]),
        (("“", "yes", "”", " !"), ["yes", ""]),
        ((" (", "len", "(", "row", "[", "0", "]),", " sum", "(x", "))"), ["len(row[0])", "sum(x)"]),
        ((" (", "see", " p.", "2", ")."), ["see", "p.2"]),
    ],
)
def test_words_begin_after_blanks(texts: tuple[str, ...], words: list[str]) -> None:
    assert [word_text(word) for word in split_words(rows(*texts))] == words


def test_a_comma_closes_no_blank() -> None:
    assert word_text(rows("a b", ",")) == "a b"


def test_a_gap_and_another_turn_end_a_word() -> None:
    apart = [*rows("Hal"), *rows("sen", start=2), *rows("x", start=3, turn=1)]
    assert [word_text(word) for word in split_words(apart)] == ["Hal", "sen", "x"]


def test_a_text_without_blanks_is_cut() -> None:
    assert max(len(word) for word in split_words(rows(*"a" * 100))) <= 16


def test_words_of_some_tokens_are_whole_and_the_most_surprising_is_first() -> None:
    text = rows(" Hal", "vor", " and", ".", " Rex", " rex")
    assert words_at([0, 4], text) == ("Rex", "Halvor")
    assert words_at([3], text) == (), "its punctuation alone is not a word"
    assert words_at([0, 4], text, known={"rex"}) == ("Halvor",)


def test_neighbours_stay_within_the_stream() -> None:
    assert near_positions([0, 19], seen=20) == [*range(6), *range(14, 20)]
    assert near_positions([], seen=10) == []
