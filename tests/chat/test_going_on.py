"""Turns taken back and said again; replies that go on, or are cut as they repeat themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chatting import answer, babbler, pinned_text, quick, session, tiny
from held_rows import state
from sirchat.chat.events import Delta, Notice, TurnDone, Undone
from sirchat.chat.plain_reply import PlainReply
from sirchat.chat.rereading import reread_session
from sirchat.chat.retry import go_on
from sirchat.chat.session import Session
from sirchat.chat.state import UNFINISHED, undo_depth
from sirchat.engine.sampling import Sampler
from sirchat.errors import ContextFullError, UndoError, UsageError

SAID = ("red " * 30, "green and red " * 20, "red and blue " * 10)


def told(most: int, **settings: Any) -> Session:
    small = {"budget": 96, "recent": 16, "decay": 0.9, "max_new_tokens": most, "stop_loops": True}
    chat = session(babbler(), **small | settings)
    for text in SAID:
        list(chat.ask(text))
    return chat


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "salience", "temperature": 1.0},
        {"policy": "sink", "recall": "mips", "recall_n": 24},
        {"policy": "sink", "archive": "off"},  # the reply is generated again
        pytest.param({"policy": "h2o", "stop_loops": False}, marks=pytest.mark.slow),
    ],
)
def test_a_reply_that_goes_on_is_as_if_never_cut(settings: dict[str, Any]) -> None:
    whole, cut = told(12, **settings), told(12, **settings)
    for chat, most in ((whole, 36), (cut, 12)):
        chat.switch("/set", max_new_tokens=most)
        list(chat.ask("black and red " * 4))
    at_cut = cut.turns[-1].text
    events = [*go_on(cut), *go_on(cut)]
    cut.switch("/set", max_new_tokens=36)
    (done, last) = (event for event in events if isinstance(event, TurnDone))
    new = [event.text for event in events[: events.index(done)] if isinstance(event, Delta)]
    assert at_cut + "".join(new) == done.text
    assert last.tokens_out == 36
    assert cut.turns == whole.turns
    assert state(cut) == state(whole)
    assert cut.state.totals.tokens_out == whole.state.totals.tokens_out
    for chat in (whole, cut):
        list(chat.ask("red " * 9))
    assert state(cut) == state(whole)
    if settings.get("archive") != "off":
        for chat in (whole, cut):
            chat.undo()
            chat.undo()
    assert state(cut) == state(whole)
    assert cut.turns == whole.turns


def test_after_another_message_the_last_reply_goes_on() -> None:
    chat = told(8)
    list(chat.ask("blue"))
    chat.undo()
    assert chat.turns[-1].finish in UNFINISHED
    (done,) = (event for event in go_on(chat) if isinstance(event, TurnDone))
    assert done.tokens_out == 16


def test_a_cut_reply_of_a_chat_that_was_read_again_goes_on() -> None:
    chat = session(quick(), budget=96, recent=16, max_new_tokens=8)
    list(chat.ask("blue"))
    again = reread_session(chat)
    assert [turn.finish for turn in again.turns] == ["read", "length"]
    assert again.state.generated == chat.state.generated
    whole = [answer(list(go_on(one))) for one in (chat, again)]
    assert whole[0] == whole[1]


def test_a_message_that_has_no_room_in_place_of_the_last_one_changes_nothing() -> None:
    chat = session(replace(babbler(), context_length=160), policy="full", max_new_tokens=8)
    for text in SAID[:2]:
        list(chat.ask(text))
    chat.pin("green and red")
    before, turns = state(chat), list(chat.turns)
    with pytest.raises(ContextFullError, match="context is full"):
        list(chat.retry(text="red " * 120))
    assert (state(chat), chat.turns) == (before, turns)
    assert answer(list(chat.retry(text="red " * 60)))


def test_half_a_character_in_the_new_text_of_a_message_is_replaced() -> None:
    chat = session(babbler(), max_new_tokens=8)
    list(chat.ask("green"))
    list(chat.retry(text="red \udc80 and blue"))
    assert chat.turns[-2].text == "red \ufffd and blue"


def test_a_message_that_is_refused_while_it_is_asked_again_keeps_its_pins() -> None:
    chat = session(babbler(), policy="full", max_new_tokens=8)
    list(chat.ask("green and red"))
    chat.pin("last")
    chat.undo(to_ask_again=True)
    chat.note_profile(chat.profile.model_copy(update={"system": "word " * 5000}))
    with pytest.raises(ContextFullError):
        list(chat.ask("green and red"))
    chat.note_profile(chat.profile.model_copy(update={"system": None}))
    list(chat.ask("green and red"))
    assert pinned_text(chat) == "green and red"


def test_a_complete_reply_does_not_go_on() -> None:
    chat = session(tiny())
    list(chat.ask("My dog is called Rex."))
    assert chat.turns[-1].finish == "stop"
    with pytest.raises(UsageError, match="the last reply is complete"):
        list(go_on(chat))


def repeating(monkeypatch: pytest.MonkeyPatch, text: str, **settings: Any) -> tuple[Session, Any]:
    """A chat whose model writes `text` again and again, and the events of a turn in it."""
    chat = session(tiny(), **{"stop_loops": True, **settings})
    ids = chat.model.tokenizer.encode(text, add_special_tokens=False)
    start = chat.seen

    def pick(self: Sampler, logits: Any, said: Any, position: int) -> int:
        return int(ids[(position - start) % len(ids)])

    monkeypatch.setattr(Sampler, "pick", pick)
    return chat, list(chat.ask("Hello"))


def test_a_reply_that_repeats_itself_ends_and_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, events = repeating(monkeypatch, " He is a cat.", max_new_tokens=120)
    done = next(event for event in events if isinstance(event, TurnDone) and event.tokens_out)
    assert done.finish == "loop"
    assert done.tokens_out < 60
    (note,) = [note for event in events for note in PlainReply(chat).push(event)[1]]
    assert note == "the reply was ended because it repeated itself; --no-stop-loops lets it"
    (more,) = (event for event in go_on(chat) if isinstance(event, TurnDone))
    assert more.tokens_out > done.tokens_out
    assert not any(isinstance(event, Notice) for event in events)


def test_replies_may_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _ = repeating(monkeypatch, " He is a cat.", max_new_tokens=120, stop_loops=False)
    assert chat.turns[-1].finish == "length"


SMALL: dict[str, Any] = {"budget": 96, "recent": 16, "max_new_tokens": 30}


def undo(chat: Session) -> Undone:
    (event,) = chat.undo()
    assert isinstance(event, Undone)
    return event


@pytest.mark.slow
@pytest.mark.parametrize(("system", "temperature"), [("You are Tiny.", 0.0), (None, 1.0)])
def test_a_turn_undone_and_said_again_is_as_if_said_once(
    system: str | None, temperature: float
) -> None:
    chat = session(babbler(), system=system, temperature=temperature, decay=0.9, **SMALL)
    sayings = ["red " * 20, "green " * 20, "blue " * 20, "black " * 20]
    states, replies = [state(chat)], []
    for text in sayings:
        replies.append(answer(list(chat.ask(text))))
        states.append(state(chat))
    for n in (3, 2, 1, 0):
        assert undo(chat).text == sayings[n]
        assert state(chat) == states[n]
    assert [answer(list(chat.ask(text))) for text in sayings] == replies
    assert state(chat) == states[-1]


def test_undo_names_the_turn_and_keeps_the_settings() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("one " * 30))
    seen = chat.seen
    list(chat.ask("two " * 30))
    chat.switch("/policy", policy="sink", budget=64)
    event = undo(chat)
    assert (event.turn, event.text, event.seen) == (2, "two " * 30, seen)
    assert (chat.profile.policy, chat.profile.budget) == ("sink", 64)
    assert chat.resident <= 64
    list(chat.ask("three"))


def test_undo_and_retry_without_a_message_are_refused() -> None:
    chat = session(babbler(), **SMALL)
    with pytest.raises(UndoError, match="no message"):
        chat.undo()
    with pytest.raises(UndoError):
        list(chat.retry())
    list(chat.ask("one"))
    undo(chat)
    with pytest.raises(UndoError):
        chat.undo()
    list(chat.ask("one"))
    chat.reset()
    with pytest.raises(UndoError):
        chat.undo()


def test_without_an_archive_one_turn_is_undone_and_the_hint_says_how_to_have_more() -> None:
    chat = session(babbler(), archive="off", **SMALL)
    for text in ("one " * 30, "two " * 30, "three " * 30):
        before = state(chat)
        list(chat.ask(text))
    undo(chat)
    assert state(chat) == before
    with pytest.raises(UndoError, match="archive"):
        chat.undo()
    assert state(chat) == before


def test_a_stopped_reply_is_undone_exactly() -> None:
    chat = session(babbler(), **SMALL)
    list(chat.ask("one " * 20))
    before = state(chat)
    stops = iter([*[False] * 7, *[True] * 99])
    list(chat.ask("two " * 20, lambda: next(stops)))
    undo(chat)
    assert state(chat) == before


def test_retry_samples_another_reply_but_a_greedy_one_is_the_same() -> None:
    drawn = session(babbler(), temperature=1.0, **SMALL)
    first = answer(list(drawn.ask("one " * 20)))
    others = [answer(list(drawn.retry())) for _ in range(3)]
    assert len({first, *others}) == 4
    undo(drawn)
    assert answer(list(drawn.ask("one " * 20))) == first
    greedy = session(babbler(), **SMALL)
    first = answer(list(greedy.ask("one " * 20)))
    events = list(greedy.retry())
    assert answer(events) == first
    assert [type(event) for event in events if isinstance(event, Undone | TurnDone)] == [
        Undone,
        TurnDone,
        TurnDone,
    ]


def test_fewer_turns_can_be_undone_where_each_needs_a_large_state() -> None:
    assert [undo_depth(True, size) for size in (0, 1000, 100 << 20, 1 << 40)] == [64, 64, 2, 1]
    assert undo_depth(False, 0) == 1, "without an archive, only the last turn"
