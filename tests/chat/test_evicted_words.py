"""What was evicted, in whole words, and what restores it by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chatting import held_text, session, tiny
from sirchat.chat.events import Evicted, TokenRow
from sirchat.chat.evicted_text import evicted_turns, evicted_words, surprising_words
from sirchat.chat.session import Session
from sirchat.chat.token_rows import near_positions, split_words, word_text, words_at

SINK: dict[str, Any] = {"policy": "sink", "sinks": 2, "budget": 64, "recent": 16}
TOLD = ("My name is Anna.", "I live in Rome.", "My brother Paul is a baker.", "Tell me a story.")


def _told(**settings: Any) -> tuple[Session, set[int]]:
    """A chat that has evicted what was told, and the positions evicted."""
    chat = session(tiny(), **{**SINK, "max_new_tokens": 24, **settings})
    gone: set[int] = set()
    for line in (*TOLD, "Tell me a story.", "And one more, please."):
        for event in chat.ask(line):
            if isinstance(event, Evicted):
                gone.update(event.positions)
    return chat, gone


def _words_held(chat: Session) -> set[str]:
    said = (row for row in chat.snapshot().rows if row.role != "template")
    return set(re.findall(r"\w+", "".join(row.text for row in said)))


def test_tokens_of_the_chat_template_have_no_surprising_words() -> None:
    chat, _ = _told()
    marks = [row.position for row in chat.tokens(range(chat.seen)) if row.role == "template"]
    assert marks
    assert surprising_words(chat, marks, ()) == surprising_words(chat, [], ()) == ()
    assert surprising_words(chat, range(chat.seen), ())


def test_evicted_words_are_whole_words_of_the_user_that_nothing_holds() -> None:
    chat, gone = _told()
    words = evicted_words(chat, gone)
    said = {word for line in TOLD for word in re.findall(r"\w+", line)}
    assert {"Anna", "Rome", "Paul"} <= set(words) <= said
    assert not set(words) & _words_held(chat)


def test_every_turn_that_lost_something_is_listed_with_what_it_lost() -> None:
    roomy = session(tiny(), budget=512, max_new_tokens=4)
    list(roomy.ask("My name is Anna."))
    assert not list(evicted_turns(roomy))
    assert evicted_words(roomy, set()) == ()
    chat, _ = _told()
    held = {row.position for row in chat.snapshot().rows}
    listed = {turn.index: turn for turn in evicted_turns(chat)}
    everything = chat.tokens(list(range(chat.seen)))
    for index in range(len(chat.turns)):
        said = [row for row in everything if row.turn == index and row.role != "template"]
        stays = sum(row.position in held for row in said)
        if stays == len(said):
            assert index not in listed
        else:
            assert (listed[index].tokens, listed[index].held) == (len(said), stays)


def test_of_a_wholly_evicted_message_all_words_are_listed_also_those_held_elsewhere() -> None:
    chat = session(tiny(), **SINK)
    list(chat.read_question("I live at 12 Heron Street.", next_role="assistant"))
    for told in ("Yes.", "Good.", "Well.", "So you live in 12 Heron Street."):
        list(chat.read_reply(told))
        list(chat.read_question("And my name is Anna, as you know.", next_role="assistant"))
    whole = next(evicted_turns(chat))
    assert "12 Heron Street" in held_text(chat)
    assert (whole.held, set(whole.words)) == (0, {"I", "live", "at", "12", "Heron", "Street"})


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


def test_a_gap_and_another_turn_end_a_word_a_comma_none_and_a_text_without_blanks_is_cut() -> None:
    apart = [*rows("Hal"), *rows("sen", start=2), *rows("x", start=3, turn=1)]
    assert [word_text(word) for word in split_words(apart)] == ["Hal", "sen", "x"]
    assert word_text(rows("a b", ",")) == "a b"
    assert max(len(word) for word in split_words(rows(*"a" * 100))) <= 16


def test_words_of_some_tokens_are_whole_and_the_most_surprising_is_first() -> None:
    text = rows(" Hal", "vor", " and", ".", " Rex", " rex")
    assert words_at([0, 4], text) == ("Rex", "Halvor")
    assert words_at([3], text) == (), "its punctuation alone is not a word"
    assert words_at([0, 4], text, known={"rex"}) == ("Halvor",)


def test_neighbours_stay_within_the_stream() -> None:
    assert near_positions([0, 19], seen=20) == [*range(6), *range(14, 20)]
    assert near_positions([], seen=10) == []
