"""What a chat says of its memory: of evicted and recalled words, and on the compact panel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from chatting import babbler, session, tiny
from drawing import NONE, lines
from fake_terminal import FakeTerminal
from saved_chats import Chat
from sirchat.chat.events import TurnDone
from sirchat.chat.evicted_text import EvictedTurn
from sirchat.chat.session import Session
from sirchat.chat.summary import pin_summary
from sirchat.chat.tool_loop import read_result
from sirchat.recall import RecalledTurn
from sirchat.text.tool_calls import ToolCall
from sirchat.ui.panel import draw_full_panel, draw_prompt_panel
from sirchat.ui.status import describe_recalled, describe_round, describe_turn
from sirchat.ui.tables import draw_recalled_turns
from sirchat.ui.why import explain_state
from terminal import lines_of
from typed_chat import TypedChat

ZEBRA = "Our zebra is called Quixbert."
TOLD = ("My name is Anna.", "I live in Rome.", "My brother Paul is a baker.")


# --- the compact panel


@pytest.mark.usefixtures("every_frame")
def test_while_a_reply_comes_the_words_just_evicted_stay_on_the_screen(
    terminal: FakeTerminal, own_home: Path
) -> None:
    frames = list[bool]()
    write = terminal.write

    def look(text: str) -> int:
        count = write(text)
        frames.append(any(line.startswith("evicted: ") for line in lines_of(terminal.screen)))
        return count

    with TypedChat(terminal, babbler(), budget=64, max_new_tokens=80, panel="live") as chat:
        terminal.write = look  # type: ignore[method-assign]
        assert "evicted: " not in chat.ask("Go on.")
    assert sum(frames) > 20


def test_a_turn_that_lost_no_word_is_counted_but_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = Chat()
    chat.say("One.")
    turns = [
        EvictedTurn(0, "user", 9, 3, ("Rome",)),
        EvictedTurn(1, "assistant", 4, 2, ()),
        EvictedTurn(2, "user", 5, 0, ()),
    ]
    monkeypatch.setattr("sirchat.ui.commands.evicted_turns", lambda session: iter(turns))
    shown = chat.do("/evicted")
    assert "6 of 9" in shown
    assert "all 5" in shown
    assert "2 of 4" not in shown
    assert "1 more message lost only punctuation and words that are held elsewhere" in shown
    del turns[0], turns[-1]
    assert chat.do("/evicted").startswith("1 message lost only")
    turns.clear()
    assert chat.do("/evicted") == "nothing is evicted\n"


# --- recall


@pytest.fixture(scope="module")
def asked() -> Session:
    """A chat that has just recalled what it was told."""
    chat = session(babbler(), policy="sink", budget=96, recall="words", recall_n=40)
    for text in ("Hello there.", ZEBRA, *["What a rainy day it is.", "Tell me a joke."] * 6):
        list(chat.read_user(text))
        list(chat.read_reply("Fine, thank you."))
    list(chat.read_user("Who is Quixbert?"))
    return chat


class _Recall(NamedTuple):
    """What `Recall` says of its last search."""

    turns: list[RecalledTurn]
    found: Any
    passage_search: Any = SimpleNamespace(
        passages=SimpleNamespace(
            rows={
                "turn": np.array([4] * 7 + [0, 4, 0]),
                "start": np.zeros(10, int),
                "end": np.full(10, 14),
            }
        )
    )


def test_what_passages_say_is_quoted_and_messages_of_single_tokens_are_counted() -> None:
    for counts, line in (
        ([100, 1_040], "1,140 tokens of 2 messages"),
        ([1], "1 token of 1 message"),
    ):
        single = [RecalledTurn(at, count) for at, count in enumerate(counts)]
        shown = describe_recalled(_Recall(single, None), 200)  # type: ignore[arg-type]
        assert shown == f"recalled {line} (/recall shows them)"
    told = [RecalledTurn(0, 14, ("drive",), "I drive a red Volvo.")]
    more = [*told, RecalledTurn(4, 9, (), "My aunt has a boat.")]
    for is_question, turns, line in (
        (False, told, 'recalled 14 tokens: "I drive a red Volvo."'),
        (False, [replace(told[0], tokens=1)], 'recalled 1 token of "I drive a red Volvo."'),
        (False, more, 'recalled 23 tokens: "I drive a red Volvo." and 1 more'),
        (
            True,
            more,
            'answered from 3 passages, found in 3,900 tokens: "I drive a red Volvo." and 2 more',
        ),
    ):
        found = SimpleNamespace(passages=(7, 1, 9), is_question=is_question)
        assert describe_recalled(_Recall(turns, found), 3_900) == line  # type: ignore[arg-type]


def test_the_passage_that_fits_best_is_quoted_not_the_longest() -> None:
    chat = session(babbler(), policy="sink", budget=160, recall="words", recall_n=60)
    told = "The train leaves from platform nine."
    long = "A train of thought that I had on the way home was about all of my old school friends."
    for text in (long, told, *["What a rainy day it is.", "Tell me a joke."] * 6):
        list(chat.read_user(text))
        list(chat.read_reply("Fine, thank you."))
    list(chat.read_user("From which platform does my train leave?"))
    turns = {chat.turns[turn.turn].text: turn.tokens for turn in chat.recall.turns}
    assert turns[long] > turns[told]
    assert f'"{told}"' in describe_recalled(chat.recall, chat.seen)
    assert list(turns).index(long) < list(turns).index(told), "the list is in order of turns"


def test_the_lines_of_a_round_and_of_a_turn_say_it() -> None:
    done = TurnDone(1, "assistant", "Yes.", 2, 3, 90, 200, 0, 40, 0.1, 0.1, "stop")
    for line in (describe_round(None, done, 96, (), "as said"), describe_turn(done, 96, "as said")):
        assert ", as said, " in line
    assert "recalled" not in describe_round(None, done, 96)


def test_panel_and_table_name_the_words(asked: Session) -> None:
    told = next(t for t in asked.recall.turns if asked.turns[t.turn].text == ZEBRA)
    assert told.words == ("Quixbert",)
    panel = "\n".join(lines(draw_full_panel(asked.snapshot(), NONE, 120), 120))
    assert f'"{ZEBRA}"' in panel
    rows = asked.tokens(list(asked.recall.scores))
    table = lines(draw_recalled_turns(rows, asked.recall.turns, asked.state.roles, NONE), 120)
    ago = len(asked.turns) - told.turn
    (line,) = [row for row in table if row.startswith(f"you, {ago} messages ago ")]
    assert "Quixbert" in line
    assert ZEBRA in line


def test_why_says_by_which_words(asked: Session) -> None:
    ranks = asked.why('"zebra"')
    told = explain_state(ranks, '"zebra"', "sink", asked.recall.turns)
    assert told.endswith("for this round only: it was recalled by the words “Quixbert”.")
    assert explain_state(ranks, '"zebra"', "sink").endswith("for this round only: it was recalled.")


@pytest.mark.usefixtures("own_home")
def test_once_recall_is_off_no_former_recall_is_reported_any_more() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, recall="words", max_new_tokens=24)
    chat.say(*TOLD, *["Tell me a joke."] * 3, "Who is Paul?")
    assert "Paul" in chat.do("/recall")
    chat.do("/recall off")
    for step in ("", "/branch other", "/policy entropy"):
        if step:
            chat.do(step)
            chat.say("Where do I live?")
        assert describe_recalled(chat.session.recall, chat.session.seen) == "", step
        panel = draw_prompt_panel(chat.session.snapshot(strongest=0), [], NONE, 100)
        assert "recalled" not in "\n".join(lines(panel, 100)), step
        assert chat.do("/recall") == "recall is off\n", step


def test_recall_says_why_nothing_was_restored() -> None:
    chat = Chat(tiny(), policy="sink", budget=64, recent=0, recall="words", max_new_tokens=24)
    said = "nothing was restored for your last message: "
    assert chat.do("/recall") == "recall is words\n"
    chat.say("My name is Anna.")
    assert chat.do("/recall") == f"{said}all was held\nrecall is words\n"
    chat.say(*["Tell me a joke."] * 3, "Which zebra?")
    assert chat.do("/recall") == f"{said}nothing evicted fits it\nrecall is words\n"
    chat.say("Tell me a joke " + "and a story " * 20)
    assert chat.do("/recall") == f"{said}there was no room beside it\nrecall is words\n"
    chat.do("/undo")
    assert said not in chat.do("/recall")


def test_what_a_tool_returned_and_a_summary_are_no_message_of_yours() -> None:
    chat = Chat(tiny(), policy="sink", budget=96, recent=0, recall="words", max_new_tokens=8)
    chat.say("My name is Anna.")
    said, call = chat.do("/recall"), ToolCall("1", "zoo", "{}")
    assert "nothing was restored for your last message: all was held" in said
    for _ in range(3):
        list(read_result(chat.session, call, "red " * 20, "Which zebra?"))
    assert chat.session.resident < chat.session.seen
    assert chat.do("/recall") == said
    chat.say("Which zebra?")
    list(pin_summary(chat.session, "They."))
    assert "your last message" not in chat.do("/recall")


def test_a_pin_says_why_other_tokens_came_back_with_it() -> None:
    chat = Chat(policy="sink", max_new_tokens=2)
    chat.say(ZEBRA, *["red " * 20] * 3)
    before = chat.session.ledger.held_positions.tolist()
    shown = chat.do("/pin Our")
    pins, now = chat.session.ledger.pinned_positions, chat.session.ledger.held_positions
    came = np.setdiff1d(np.setdiff1d(now, before), pins)
    assert len(came)
    assert f"{len(came)} others restored, as policy sink fills the budget anew" in shown
