"""A summary of the whole chat: its most telling sentences, pinned as a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from chatting import babbler, fail_reading, held_text, notices, session, tell, tiny
from sirchat.chat.events import Event
from sirchat.chat.rereading import reread_session, rewind
from sirchat.chat.session import Session
from sirchat.chat.state import last_generated_reply
from sirchat.chat.statements import StatedFact
from sirchat.chat.summary import (
    PREFIX,
    last_user_message,
    make_summary,
    omitted_facts,
    pin_summary,
    summary_cost,
)
from sirchat.chat.tool_loop import Toolbox
from sirchat.chat.turn import never
from sirchat.engine.sampling import Sampler
from sirchat.errors import SettingError, SirchatError, UndoError, UsageError
from sirchat.models.model import LoadedModel
from sirchat.ui.turn_commands import Retry, retry

FACT = "Dr. Halvorsen lives at 42 Mill Lane."


def told(model: LoadedModel | None = None, after: int = 12, **settings: Any) -> Session:
    """A chat in which a fact was told long ago."""
    chosen = {"policy": "sink", "budget": 192, "max_new_tokens": 4, **settings}
    chat = session(model or babbler(), **chosen)
    list(chat.ask(f"Hello there! {FACT} I like it."))
    walks = [f"The weather is fine, and we walk in garden {number % 3}." for number in range(after)]
    tell(chat, *walks, reply="Oh, I see. That is nice to hear.")
    return chat


def state(chat: Session) -> tuple[Any, ...]:
    """All of a session: ledger, keys and values, text, undo points, settings."""
    saved, rows = chat.engine.save(), chat.engine.store.copy_key_values()
    assert rows is not None
    assert saved.logits is not None
    columns = [saved.rows[name] for name in saved.rows.dtype.names or ()]
    arrays = (*columns, saved.held, saved.logits, rows.positions, rows.written_at)
    return (
        [array.tobytes() for array in arrays],
        [tensor.numpy().tobytes() for tensor in rows.tensors],
        deepcopy(chat.state),
        [(point.text, point.turns) for point in chat.history.messages],
        chat.profile,
        last_generated_reply(chat.ledger, chat.turns),
        chat.recall.scores,
        chat.attention_paid(len(chat.turns) - 1),
    )


def pinned(chat: Session, turn: int) -> int:
    rows = chat.snapshot().rows
    return sum(row.turn == turn and "pinned" in row.flags for row in rows)


@pytest.mark.parametrize("archive", ["ram", "off"])
def test_a_fact_that_was_evicted_long_ago_stands_in_the_extract(archive: str) -> None:
    chat = told(archive=archive)
    assert "Halvorsen" not in held_text(chat)
    text = make_summary(chat, chat.facts())
    assert FACT in text


def test_an_extract_is_whole_sentences_once_each_in_the_order_they_were_said() -> None:
    chat = told(budget=320)
    thinking = "<think>The zebra counts 999 quaggas.</think>"
    tell(chat, "My code is tangerine77. Is it?", reply=f"{thinking}It is tangerine77, yes.")
    text = make_summary(chat, chat.facts())
    assert "Hello" not in text
    assert text.index(FACT) < text.index("My code is tangerine77.")
    assert text.count("garden 1") <= 1
    assert "zebra" not in text
    chat.erase("Halvorsen")
    assert "Halvorsen" not in make_summary(chat, chat.facts())


@pytest.mark.parametrize("settings", [{}, {"recall": "words"}, {"archive": "off"}])
def test_making_a_summary_leaves_the_conversation_bit_for_bit_as_it_was(
    settings: dict[str, Any],
) -> None:
    chat = told(**settings)
    list(chat.ask("Where does Dr. Halvorsen live?"))
    before = state(chat)
    assert make_summary(chat, chat.facts())
    assert state(chat) == before


@pytest.mark.parametrize("budget", [128, 192, 1024])
def test_a_summary_takes_at_most_a_quarter_of_the_budget(budget: int) -> None:
    chat = told(budget=budget, after=24)
    turn = len(chat.turns)
    list(pin_summary(chat, make_summary(chat, chat.facts())))
    assert chat.turns[turn].is_summary
    assert 8 < pinned(chat, turn) <= budget // 4


def test_a_kept_summary_is_a_pinned_turn_and_undone_like_any() -> None:
    chat = told()
    before, turn = state(chat), len(chat.turns)
    events = list(pin_summary(chat, "Halvorsen: 42 Mill Lane."))
    notes = notices(events)
    assert notes == [f"the summary is turn {turn}, which is now pinned; /undo removes it"]
    assert [each.role for each in chat.turns[turn:]] == ["user", "assistant"]
    assert chat.turns[turn].text == PREFIX + "Halvorsen: 42 Mill Lane."
    assert pinned(chat, turn)
    chat.undo()
    assert state(chat)[:5] == before[:5]


def test_a_new_summary_takes_the_place_of_the_former_one() -> None:
    chat = told(budget=320)
    turn = len(chat.turns)
    list(pin_summary(chat, make_summary(chat, chat.facts())))
    list(chat.ask("My code is tangerine77."))
    second = len(chat.turns)
    text = make_summary(chat, chat.facts())
    assert FACT in text
    assert "Noted" not in text
    assert PREFIX not in text
    *_, note = list(pin_summary(chat, text))
    assert "the former summary is no longer pinned" in str(note)
    assert (pinned(chat, turn), pinned(chat, second)) == (0, pinned(chat, second))
    assert pinned(chat, second)
    chat.undo()
    assert pinned(chat, turn)
    list(pin_summary(chat, text))
    chat.undo_summaries()  # as /retry and /edit do
    assert len(chat.turns) == second
    assert pinned(chat, turn)


@pytest.mark.parametrize(
    "undo",
    [
        lambda chat: chat.undo(),
        lambda chat: rewind(chat, 2)[1],
        lambda chat: chat.retry(),
        lambda chat: retry(chat, Retry(full=True), never),
    ],
)
def test_undo_says_if_the_summary_before_has_no_room_any_more(
    undo: Callable[[Session], Iterable[Event]],
) -> None:
    chat = told(budget=320)
    first = len(chat.turns)
    list(pin_summary(chat, "many words " * 10))
    list(chat.ask("Go on."))
    list(pin_summary(chat, "Mill Lane."))
    for turn in range(0, 30, 2):
        with suppress(SettingError):
            chat.pin(f"turn {turn}")
    (line,) = (line for line in notices(undo(chat)) if "the summary before" in line)
    assert line.startswith("the summary before is not pinned again: ")
    assert "would be pinned, but budget 320 allows only 160" in line
    assert not pinned(chat, first)


def test_a_retry_that_fails_midway_leaves_reply_and_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = told(tiny(), after=4, budget=128)
    list(chat.ask("Where does he live?"))
    turn = len(chat.turns)
    list(pin_summary(chat, "Halvorsen: 42 Mill Lane."))
    before = [(one.role, one.text, one.is_summary) for one in chat.turns], pinned(chat, turn)
    usual, calls = Sampler.pick, count()

    def fails_once(*arguments: Any) -> int:
        if next(calls) == 2:
            raise SirchatError("the model has failed")
        return usual(*arguments)

    monkeypatch.setattr(Sampler, "pick", fails_once)
    with pytest.raises(SirchatError, match="has failed"):
        list(retry(chat, Retry(full=True), never))
    after = [(one.role, one.text, one.is_summary) for one in chat.turns], pinned(chat, turn)
    assert after == before


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_summary_that_can_not_be_read_changes_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = told()
    before = state(chat)
    fail_reading(monkeypatch, number, RuntimeError())
    with pytest.raises(RuntimeError):
        list(pin_summary(chat, "Mill Lane."))
    assert state(chat) == before


def test_a_message_from_before_a_resume_is_not_called_a_summary() -> None:
    chat = told(after=2)
    chat.history.messages = []  # as after a resume
    list(pin_summary(chat, "Mill Lane."))
    assert last_user_message(chat).startswith("The weather is fine")
    with pytest.raises(UndoError, match="of your messages none can be undone, only a summary"):
        list(chat.retry())


def test_a_message_whose_tokens_are_lost_is_not_asked_again_and_its_summary_stays() -> None:
    chat = session(babbler(), max_new_tokens=8, budget=640, recent=8, archive_limit="100KB")
    for text in ("red " * 30, "green " * 60, "blue " * 400, "x " * 90):
        list(chat.ask(text))
    list(pin_summary(chat, "word"))
    before = state(chat)
    with pytest.raises(UndoError, match="no longer archived"):
        list(chat.retry())
    assert state(chat) == before


@pytest.mark.parametrize("why", ["tools", "archive", "schema", "room"])
def test_a_refused_retry_leaves_the_summary(why: str, tmp_path: Path) -> None:
    chat = told(archive="off" if why == "archive" else "ram", budget=128)
    list(chat.ask("Well?"))
    list(pin_summary(chat, "Halvorsen: 42 Mill Lane."))
    if why == "tools":
        chat.toolbox = Toolbox([lambda: None])
    elif why == "schema":
        chat.note_profile(chat.profile.model_copy(update={"json_schema": str(tmp_path / "gone")}))
    elif why == "room":
        chat.switch("/set", policy="full", budget=4096)
    before = state(chat)
    with pytest.raises(SirchatError):
        list(
            chat.retry(text="word " * 5000)
            if why == "room"
            else retry(chat, Retry(full=why != "schema"), never)
        )
    assert state(chat) == before


def test_only_a_summary_is_taken_for_one_even_after_the_chat_was_read_again() -> None:
    chat = told(after=2)
    list(pin_summary(chat, "Mill Lane."))
    list(chat.read_user(PREFIX + "this is no summary."))
    again = reread_session(chat)
    assert [turn.is_summary for turn in again.turns] == [turn.is_summary for turn in chat.turns]
    for each in (chat, again):
        assert last_user_message(each) == PREFIX + "this is no summary."
        each.undo_summaries()  # there is none after it
        assert each.turns[-1].text == PREFIX + "this is no summary."


def test_a_summary_that_can_not_be_kept_changes_nothing() -> None:
    with pytest.raises(UsageError, match="nothing to summarize"):
        make_summary(session(babbler()), [])
    chat = told(tiny(), after=1, budget=64, recent=16)
    with pytest.raises(SettingError, match="a quarter of the budget; it needs at least"):
        make_summary(chat, chat.facts())
    chat = told(after=2)
    chat.pin("turn 0")
    chat.pin("turn 2")
    before = state(chat)
    with pytest.raises(SettingError, match="would be pinned, but budget 192 allows only 96"):
        list(pin_summary(chat, "many words " * 40))
    assert state(chat) == before


def test_a_summary_quotes_no_question_and_nothing_that_a_later_statement_denies() -> None:
    chat = session(babbler(), budget=1024)
    tell(
        chat,
        "In March I am moving to Valparaiso.",
        "What is my job?",
        "My job is to repair violins.",
        "```notes.txt\nCorrection: I'm moving in June, not in March.\n```\n\nWhen am I moving?",
        reply="So you are moving in March. Can I help?",
    )
    text = make_summary(chat, chat.facts())
    assert text == "My job is to repair violins. Correction: I'm moving in June, not in March."


@pytest.mark.parametrize(("policy", "budget"), [("sink", 192), ("entropy", 192), ("sink", 1024)])
def test_what_a_summary_costs_is_known_before_it_is_kept(policy: str, budget: int) -> None:
    chat = told(policy=policy, budget=budget)
    text = make_summary(chat, chat.facts())
    added, evicted = summary_cost(chat, text)
    seen, held = chat.seen, chat.resident
    list(pin_summary(chat, text))
    assert added == chat.seen - seen
    assert evicted == added - (chat.resident - held)


def test_a_budget_too_small_for_a_kept_summary_names_the_summary() -> None:
    chat = told(budget=320)
    turn = len(chat.turns)
    list(pin_summary(chat, make_summary(chat, chat.facts())))
    count = pinned(chat, turn)
    with pytest.raises(SettingError, match=rf"/unpin turn {turn} lets go of {count}\)"):
        list(chat.switch("/budget", budget=2 * count - 2))


MEETING = ("My meeting is on Monday at ten.", "The meeting moved to Tuesday.")
CAT = ("My cat is called Zebedee.", "Actually, my cat is called Momo.")


@pytest.mark.parametrize(
    ("told", "reply", "is_true"),
    [
        (MEETING, "The train leaves at ten.", True),
        (MEETING, "Shops open on Monday.", True),
        (MEETING, "The meeting is at ten.", False),
        (MEETING, "Monday at ten is fine.", False),
        (CAT, "Hello to Zebedee!", False),
    ],
)
def test_a_reply_with_one_word_of_a_corrected_fact_is_summed_up_if_it_is_about_something_else(
    told: tuple[str, str], reply: str, is_true: bool
) -> None:
    chat = session(tiny(), budget=512)
    tell(chat, " ".join(told), reply=reply)
    facts = [StatedFact(0, told[0], None, 9, 9, 0, told[1]), StatedFact(0, told[1], None, 9, 9)]
    assert (reply in make_summary(chat, facts)) == is_true
    assert f'"{told[0]}" (corrected)' in next(omitted_facts(facts, told[1])).text
