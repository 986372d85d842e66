"""What a chat shows of recall: of which turns tokens were restored, and by which words."""

from __future__ import annotations

import pytest

from chatting import babbler, session
from drawing import NONE, lines
from sirchat.chat.events import TurnDone
from sirchat.chat.session import Session
from sirchat.recall import RecalledTurn
from sirchat.ui.panel import draw_panel
from sirchat.ui.status import describe_recalled, describe_round, describe_turn
from sirchat.ui.tables import draw_recalled_turns
from sirchat.ui.why import explain

TOLD = "Our zebra is called Quixbert."


@pytest.fixture(scope="module")
def asked() -> Session:
    """A chat that has just recalled what it was told."""
    one = session(babbler(), policy="sink", budget=96, recall="words", recall_n=40)
    for text in ("Hello there.", TOLD, *["What a rainy day it is.", "Tell me a joke."] * 6):
        list(one.read_user(text))
        list(one.read_reply("Fine, thank you."))
    list(one.read_user("Who is Quixbert?"))
    return one


@pytest.mark.parametrize(
    ("turns", "line"),
    [
        ([(3, 140)], "recalled 140 tokens of turn 3"),
        ([(3, 100), (17, 1_040)], "recalled 1,140 tokens of turns 3, 17"),
        ([(3, 1)], "recalled 1 token of turn 3"),
        (
            [(1, 5), (2, 1), (4, 9), (6, 7), (9, 8), (11, 2)],
            "recalled 32 tokens of turns 1, 4, 6, 9 and 2 more",
        ),
    ],
)
def test_the_turns_that_gave_most_are_named(turns: list[tuple[int, int]], line: str) -> None:
    assert describe_recalled([RecalledTurn(*one) for one in turns]) == line


def test_the_lines_of_a_round_and_of_a_turn_say_it() -> None:
    done = TurnDone(1, "assistant", "Yes.", 2, 3, 90, 200, 0, 40, 0.1, 0.1, "stop")
    recalled = [RecalledTurn(0, 40, ("zebra",))]
    for line in (describe_round(None, done, 96, (), recalled), describe_turn(done, 96, recalled)):
        assert ", recalled 40 tokens of turn 0, " in line
    assert "recalled" not in describe_round(None, done, 96)


def test_panel_and_table_name_the_words(asked: Session) -> None:
    told = next(one for one in asked.recall.turns if asked.turns[one.turn].text == TOLD)
    assert told.words == ("Quixbert",)
    panel = "\n".join(lines(draw_panel(asked.snapshot(), NONE, 120), 120))
    assert f"turn {told.turn} (Quixbert)" in panel
    rows = asked.tokens(list(asked.recall.scores))
    table = lines(draw_recalled_turns(rows, asked.recall.turns, NONE), 120)
    (line,) = [row for row in table if row.split()[:1] == [str(told.turn)]]
    assert "Quixbert" in line
    assert TOLD in line


def test_why_says_by_which_words(asked: Session) -> None:
    ranks = asked.why('"zebra"')
    told = explain(ranks, '"zebra"', "sink", asked.recall.turns)
    assert told.endswith("for this round only: it was recalled by the words “Quixbert”.")
    assert explain(ranks, '"zebra"', "sink").endswith("for this round only: it was recalled.")
