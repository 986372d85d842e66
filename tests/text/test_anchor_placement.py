"""Insertion of anchor tokens into a text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatting import tiny
from sirchat.memory.ledger import Role
from sirchat.text.anchors import Anchors, Per, sentences, with_anchors
from sirchat.text.template import Template

ANCHOR = 2048
TEXT = "My name is Anna. I live in Oslo, and I need milk, eggs and honey. " * 20


def ids(text: str) -> list[int]:
    found: list[int] = tiny().tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def placed(per: Per, text: str = TEXT) -> list[int]:
    return with_anchors(text, Anchors("ac", per, ANCHOR), ids)


@given(st.text(alphabet="aB .!?\n\"'」。1", max_size=60))
def test_sentences_joined_are_the_text(text: str) -> None:
    pieces = sentences(text)
    assert "".join(pieces) == text
    assert all(chunk.strip() for chunk in pieces[1:])


def test_sentences_are_split_by_their_meaning() -> None:
    pieces = [
        "Mr. Smith went to Washington.",
        " He paid 3.5 dollars.",
        " Why?",
        " 我是。",
        "你好！\n",
    ]
    assert sentences("".join(pieces)) == pieces


def test_sentence_puts_an_anchor_after_each_sentence() -> None:
    found = placed("sentence", "It rains. It pours.")
    assert found == [*ids("It rains."), ANCHOR, *ids(" It pours."), ANCHOR]


def test_many_sentences_take_no_long_time() -> None:
    begun = time.process_time()
    for text, count in (("It rains. " * 50_000, 50_000), ("a." + " \n" * 50_000, 1)):
        found = sentences(text)
        assert (len(found), "".join(found)) == (count, text)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("per", ["round", "sentence"])
def test_in_a_turn_anchors_have_the_template_role_and_nothing_else_changes(per: Per) -> None:
    plain = Template(tiny().tokenizer)
    turns = Template(tiny().tokenizer, Anchors("ac", per, ANCHOR))
    for one, other in (
        (turns.user_turn(TEXT), plain.user_turn(TEXT)),
        (turns.assistant_turn(TEXT), plain.assistant_turn(TEXT)),
        (turns.opening(TEXT)[1], plain.opening(TEXT)[1]),
    ):
        kept = [(i, r) for i, r in zip(one.ids, one.roles, strict=True) if i != ANCHOR]
        anchors = [r for i, r in zip(one.ids, one.roles, strict=True) if i == ANCHOR]
        assert set(anchors) <= {Role.TEMPLATE}
        assert bool(anchors) == (per != "round")
        if per != "sentence":  # which may tokenize the space between two sentences differently
            assert kept == list(zip(other.ids, other.roles, strict=True))
    rounds = [ANCHOR] * (per == "round")
    assert turns.closing == [*plain.closing, *rounds]
    assert turns.stop_ids(None) == plain.stop_ids(None)
    system, usual = (one.opening("Hi.", "Be kind")[0] for one in (turns, plain))
    assert system is not None
    assert usual is not None
    assert system.ids == [*usual.ids, *rounds]
