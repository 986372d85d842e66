"""What `/why` reports of a score: its factors, its rank, and the threshold to stay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from chatting import session, tiny
from drawing import NONE
from recorder import drawn
from sirchat.chat.session import Session
from sirchat.ui.tables import draw_token_ranks


def told(**settings: Any) -> Session:
    """A chat under `salience`, with more said than its budget holds."""
    chat = session(policy="salience", budget=64, recent=8, **settings)
    for text in ("My name is Anna.", "I live in Lisbon.", "Tell me a joke.", "What is a tree?"):
        list(chat.ask(text))
    return chat


def test_why_reports_the_factors_of_a_score() -> None:
    chat = told()
    everything = [chat.why(f"turn {number}") for number in range(8)]
    rows = [token for turn in everything for token in turn if token.row.surprisal is not None]
    assert {tuple(token.factors) for token in rows} == {("word", "template", "neighbours")}
    for token in rows:
        nats = max(token.row.surprisal or 0, 1e-9)
        factors = math.prod(token.factors.values()) * nats * token.decayed_to
        assert token.row.score == pytest.approx(factors)
    held = sorted(
        (token for token in rows if token.state == "held"), key=lambda token: token.rank or 0
    )
    assert [token.row.score for token in held] == sorted(
        [token.row.rank_key for token in held], reverse=True
    )
    assert chat.snapshot().unit == "nats"


@pytest.mark.parametrize("settings", [{}, {"recall": "mips", "recall_n": 12}], ids=str)
def test_why_scores_held_and_recalled_tokens_as_the_policy_does(settings: dict[str, Any]) -> None:
    """Evicted tokens of a turn do not change the scores of its held ones."""
    chat = told(**settings)
    if settings:
        list(chat.read_user("Tell me a joke about my tree."))
        assert chat.snapshot().recalled
    scores = {row.position: row.score for row in chat.snapshot().rows}
    everything = [token for number in range(8) for token in chat.why(f"turn {number}")]
    assert {token.state for token in everything} == {"held", "archived"}
    held = {token.row.position: token.row.score for token in everything if token.state == "held"}
    assert held == pytest.approx({position: scores[position] for position in held})


def test_with_every_factor_off_only_the_decayed_surprisal_is_left() -> None:
    off = dict.fromkeys(("whole_words", "template", "neighbours"), False)
    chat = told(decay=0.5, policy_options=off)
    for token in chat.why("turn 4"):
        assert token.factors == {}
        assert token.row.score == pytest.approx(
            max(token.row.surprisal or 0, 1e-9) * token.decayed_to
        )


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_number_is_cut_where_the_terminal_is_narrow(width: int) -> None:
    chat = session(tiny(), policy="salience", budget=64)
    list(chat.ask("My name is Anna."))
    list(chat.ask("Tell me a joke."))
    token_ranks = [
        replace(token, row=replace(token.row, score=5140.0), threshold=5150.0)
        for token in chat.why("Anna")
    ]
    shown = drawn(draw_token_ranks(token_ranks, NONE, width), width)
    for number in ("5,140", "5,150", f"{token_ranks[0].row.surprisal:.2f}"):
        assert number in shown, shown
    assert "surprisal" in shown
    assert "needs" in shown
