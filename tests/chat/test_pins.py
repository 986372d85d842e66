"""Pins, where a token stands, and what its score is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from chatting import answer, babbler, held_text, notices, pinned_text, session, tiny
from drawing import NONE
from recorder import drawn
from saved_chats import Chat
from sirchat.chat.events import Notice, Pinned, Restored
from sirchat.chat.rereading import repinned_note, reread_session
from sirchat.chat.session import Session
from sirchat.chat.tool_loop import Toolbox
from sirchat.errors import UsageError
from sirchat.ui.tables import draw_token_ranks
from template_shapes import tool_quick

SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 30}
FACT = "The code is 7351."


def full_of_talk(**settings: Any) -> Session:
    """A chat whose fact is evicted; a turn can be undone."""
    chat = session(babbler(), policy="sink", **SMALL, **settings)
    list(chat.ask(FACT))
    for _ in range(3):
        list(chat.ask("other words " * 20))
    return chat


def text_of(chat: Session, target: str) -> str:
    return "".join(token.row.text for token in chat.why(target))


def test_pin_restores_evicted_tokens_and_unpin_lets_eviction_take_them() -> None:
    chat = full_of_talk()
    assert "7351" not in held_text(chat)
    events = chat.pin(FACT)
    assert FACT in held_text(chat)
    assert any(isinstance(event, Restored) for event in events)
    assert chat.resident <= 96
    (pinned,) = (event for event in events if isinstance(event, Pinned))
    assert pinned.tokens == len(chat.why(FACT))
    list(chat.ask("other words " * 20))
    assert FACT in held_text(chat)
    chat.pin(FACT, pinned=False)
    list(chat.ask("other words " * 20))
    assert FACT not in held_text(chat)


def test_undo_leaves_pins_of_what_remains_as_the_user_has_set_them() -> None:
    chat = full_of_talk()
    chat.pin("code is")
    list(chat.ask("one more " * 4))
    chat.pin("7351")
    chat.pin("code is", pinned=False)
    chat.pin("last")
    for _ in range(3):
        chat.undo()
        assert pinned_text(chat) == "7351"
        assert "7351" in held_text(chat)


def test_undo_restores_the_same_memory_if_the_pins_are_the_same_again() -> None:
    chat = full_of_talk()
    chat.pin("code is")
    before = chat.snapshot(), chat.why(FACT)
    list(chat.ask("one more " * 4))
    chat.pin("7351")
    chat.pin("7351", pinned=False)
    chat.undo()
    assert (chat.snapshot(), chat.why(FACT)) == before


OSLO = "I live in Oslo."


def clock(city: str) -> str:
    """The time in a city."""
    return f"It is noon in {city}."


def test_pins_that_were_undone_do_not_return_by_themselves() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("Hello."))
    list(chat.ask(OSLO))
    chat.pin("Oslo")
    list(chat.retry())
    assert pinned_text(chat) == "Oslo"
    chat.undo()
    list(chat.ask(OSLO))
    assert not pinned_text(chat)


@pytest.mark.parametrize("before", [[], ["Hello."]])
def test_a_retry_pins_the_same_words_after_the_tools_have_changed(before: list[str]) -> None:
    chat = session(tool_quick(), policy="full", max_new_tokens=4, pin_system=False)
    for text in (*before, OSLO):
        list(chat.ask(text))
    chat.pin("Oslo")
    for tools in ([clock], []):
        chat.toolbox = Toolbox(tools)
        list(chat.retry())
        assert pinned_text(chat) == "Oslo"


@pytest.mark.parametrize("before", [[], ["Hello."]])
def test_a_retry_leaves_a_rule_unpinned_after_the_tools_have_changed(before: list[str]) -> None:
    chat = session(tool_quick(), policy="full", max_new_tokens=4, pin_system=False)
    rule = "Answer in one sentence from now on."
    for text in (*before, rule):
        list(chat.ask(text))
    assert pinned_text(chat) == rule
    chat.pin("last", pinned=False)
    for tools in ([clock], [], [clock]):
        chat.toolbox = Toolbox(tools)
        list(chat.retry())
        assert not pinned_text(chat)
    list(chat.ask(rule))
    assert pinned_text(chat) == rule, "said anew"


def test_a_retry_says_which_pins_no_longer_have_room() -> None:
    chat = session(tool_quick(), policy="sink", budget=400, max_new_tokens=4)
    list(chat.ask("word " * 90))
    chat.pin("last")
    chat.toolbox = Toolbox([clock])  # the system prompt with the tools is pinned
    notes = notices(chat.retry())
    assert "word" not in pinned_text(chat)
    assert any("what you had pinned in this message is not pinned again: " in one for one in notes)


def test_pins_that_are_evicted_when_the_text_is_read_again_are_told() -> None:
    chat = session(babbler(), policy="sink", budget=96, recent=16, max_new_tokens=4)
    list(chat.ask(f"{OSLO} " + "word " * 120))
    chat.pin("Oslo")
    size = len(chat.ledger.pinned_positions)
    assert size == 1
    notes = [event.text for event in chat.retry() if isinstance(event, Notice)]
    told = (
        f"evicted, and not pinned again: {size} of the tokens that you had pinned in this message"
    )
    assert told in notes
    assert not pinned_text(chat)
    chat.pin("Oslo")
    assert repinned_note(reread_session(chat)).endswith(" pinned again")
    chat.switch("/set", archive="off")
    assert repinned_note(reread_session(chat)) == (
        "0 tokens that you had pinned are pinned again; 1 is not: pins take at most half of the "
        "budget, and what is no longer archived can't be pinned"
    )


def test_last_and_turn_n_name_turns() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("red green"))
    reply = answer(list(chat.ask("blue black")))
    assert text_of(chat, "last") == text_of(chat, "turn 2") == "blue black"
    assert text_of(chat, "turn 0") == "red green"
    assert reply.strip() in text_of(chat, "turn 3")


def test_a_text_is_found_in_any_case() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("Paris, paris and PARIS"))
    found = chat.why("paris")
    assert "".join(token.row.text for token in found).lower().count("paris") == 3
    turns = [token.row.position for token in found]
    assert turns == sorted(set(turns))


@pytest.mark.parametrize(
    "target", ["", "   ", "nowhere to be found", "turn 99", '"last"', "turn", "<|user|>"]
)
def test_an_unknown_target_and_a_control_token_are_refused(target: str) -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("red"))
    with pytest.raises(UsageError):
        chat.why(target)
    with pytest.raises(UsageError):
        chat.pin(target)


def test_why_ranks_as_a_count_over_all_tokens_does() -> None:
    chat = session(babbler(), policy="entropy", decay=0.8, **SMALL)
    for n in range(4):
        list(chat.ask(f"the number {n} is said " * 4))
    view = chat.snapshot()
    scores = [row.rank_key for row in view.rows]
    held = {row.position for row in view.rows}
    for token in chat.why("number"):
        rounds = 4 - token.row.turn // 2
        assert token.decayed_to == pytest.approx(0.8**rounds)
        assert token.row.score == pytest.approx(
            (token.row.surprisal or 0) * token.decayed_to, rel=1e-5
        )
        assert token.rank == 1 + sum(score > token.row.rank_key * (1 + 1e-12) for score in scores)
        assert token.state == ("held" if token.row.position in held else "archived")
        assert (token.held, token.threshold) == (view.resident, view.threshold)
    states = {token.state for token in chat.why("number")}
    assert states == {"held", "archived"}


def test_without_an_archive_evicted_tokens_cannot_be_pinned() -> None:
    chat = full_of_talk(archive="off")
    assert {token.state for token in chat.why("7351")} == {"not_stored"}
    with pytest.raises(UsageError):
        chat.pin("7351")


def test_of_words_that_both_said_yours_are_pinned_and_the_messages_are_counted() -> None:
    chat = Chat(tiny(), policy="sink", budget=96, recall="off", max_new_tokens=16, save=False)
    chat.say("My name is Anna.", "I live in Rome.", "What is my name?")

    def pinned() -> set[tuple[int, str]]:
        rows = chat.session.snapshot().rows
        return {(row.turn, row.text) for row in rows if "pinned" in row.flags}

    assert "Anna" in chat.session.turns[1].text
    assert "1 token; holds" in chat.do("/pin Anna")
    assert pinned() == {(0, " Anna")}
    assert "2 tokens; holds" in chat.do("/pin name")
    assert pinned() == {(0, " Anna"), (0, " name"), (4, " name")}
    assert "1 token; holds" in chat.do("/pin lovely"), "nobody else said it"
    assert (3, " lovely") in pinned()
    chat.do("/pin turn 1")
    assert (1, " Anna") in pinned()
    assert "2 tokens no longer pinned" in chat.do("/unpin Anna")
    assert "Anna" not in "".join(text for _, text in pinned())


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
