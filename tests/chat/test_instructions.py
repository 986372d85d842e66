"""A message that sets a rule for later replies is pinned, and says how to let go."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import sirchat.lab.training
from chatting import babbler, held_text, notices, pinned_text, session, smollm2
from saved_chats import Chat
from sirchat.chat.events import Evicted, Notice, Restored, TurnDone
from sirchat.chat.rereading import reread_session, rewind
from sirchat.chat.retry import retry_with_settings, temporary_settings
from sirchat.chat.session import Session
from sirchat.chat.statements import is_rule, preference_in
from sirchat.errors import SettingError
from sirchat.saved.resume import resume_session
from sirchat.saved.session_list import find_session
from sirchat.saved.store import SessionStore
from statement_telling import OTHERS, RULE, telling

STATEMENTS = Path(sirchat.lab.training.__file__).with_name("statements.yaml")
LINE = f'pinned your instruction "{RULE}": /unpin "{RULE}" lets go'


def chat_of(**settings: Any) -> Session:
    given: dict[str, Any] = {"policy": "sink", "budget": 128, "max_new_tokens": 8} | settings
    return session(telling(), **given)


def ask(chat: Session, text: str) -> list[str]:
    return notices(list(chat.ask(text)))


def test_the_rule_alone_is_pinned_and_stays_while_the_chat_goes_on() -> None:
    chat = chat_of()
    assert ask(chat, f"Hello.\n{RULE}\nTell me a joke.") == [LINE]
    for text in OTHERS:
        assert not ask(chat, text)
    assert pinned_text(chat) == RULE
    assert RULE in held_text(chat)


def test_without_the_setting_it_is_evicted() -> None:
    chat = chat_of(pin_instructions=False)
    assert not ask(chat, RULE)
    for text in OTHERS * 2:
        ask(chat, text)
    assert not pinned_text(chat)
    assert RULE not in held_text(chat)


def test_undo_and_unpin_let_go() -> None:
    chat = chat_of()
    ask(chat, "Hello.")
    before = [row.position for row in chat.snapshot().rows]
    ask(chat, RULE)
    chat.undo()
    assert not pinned_text(chat)
    assert [row.position for row in chat.snapshot().rows] == before
    ask(chat, RULE)
    chat.pin(f'"{RULE}"', pinned=False)
    assert not pinned_text(chat)


def test_a_message_that_is_answered_again_stays_unpinned_unless_it_is_pinned_again() -> None:
    chat = chat_of()
    ask(chat, "Hello.")
    ask(chat, RULE)
    for _ in range(2):
        chat.pin("turn 2", pinned=False)
        list(chat.retry())
        list(retry_with_settings(chat, {"temperature": 0.5}, lambda _: "warmer"))
        assert not pinned_text(chat)
        chat.pin("turn 2")
        list(chat.retry())
        assert RULE in pinned_text(chat)
    chat.pin("turn 2", pinned=False)
    assert LINE in ask(chat, RULE)
    chat.pin(f'"{RULE}"', pinned=False)
    chat.undo()
    assert LINE in ask(chat, RULE)  # it was unpinned in what was undone


def test_undo_and_retry_tell_the_users_pins_from_rules() -> None:
    chat = chat_of(budget=160)
    for text in ("Hello.", RULE, "I see."):
        ask(chat, text)
    (rule,) = chat.ledger.rules()
    chat.pin(f'"{RULE}"', pinned=False)
    chat.undo()
    assert not pinned_text(chat)
    ask(chat, "I see.")
    chat.pin(f'"{RULE}"')  # now it is the user's choice
    chat.undo()
    assert not chat.ledger.rules()
    assert set(rule) <= set(chat.ledger.pins_except_rules(0))
    chat.pin("last")
    before = chat.ledger.pins_except_rules(0).tolist()
    list(chat.retry())
    list(retry_with_settings(chat, {"temperature": 0.5}, lambda _: "warmer"))
    assert chat.ledger.pins_except_rules(0).tolist() == before
    assert not chat.ledger.rules()
    list(chat.retry(text="Hello."))  # another message has none of these pins
    assert not chat.ledger.pinned_positions.size


def test_of_a_rule_that_is_erased_nothing_stays() -> None:
    chat = chat_of()
    ask(chat, f"Hello.\n{RULE}")
    ask(chat, "Call me Priya from now on.")
    chat.pin("turn 0", pinned=False)
    chat.pin("turn 2", pinned=False)
    chat.erase("sentence")
    assert chat.state.unpinned_sentences == {(0, "Hello."), (2, "Call me Priya from now on.")}


def test_what_is_left_of_a_rule_with_an_erased_word_is_listed_as_no_rule() -> None:
    chat = chat_of()
    ask(chat, "Call me Priya from now on.")
    assert [one.text for one in chat.facts() if one.is_rule] == ["Call me Priya from now on."]
    chat.erase("Priya")
    assert not chat.facts()


def test_a_policy_without_pins_pins_nothing() -> None:
    window = chat_of(policy="window")
    assert not ask(window, RULE)
    assert not pinned_text(window)


@pytest.mark.slow
@pytest.mark.parametrize("rebuild", [False, True])
def test_a_resumed_chat_keeps_what_is_pinned_and_pins_nothing_again(
    folder: Path, rebuild: bool
) -> None:
    """Nor does it when the message with the rule that was unpinned is answered again."""
    kept = "Call me Priya from now on."
    chat = Chat(telling(), policy="sink", budget=128)
    chat.say(kept, *OTHERS, RULE)
    chat.do(f'/unpin "{RULE}"')
    chat.saved_chat.close()
    again = session(telling(), policy="sink", budget=128)
    with SessionStore.open(find_session(folder, "last")) as store:
        resume_session(again, store, rebuild=rebuild)
        assert pinned_text(again) == pinned_text(chat.session) == kept
        assert [one.text for one in again.facts() if one.is_rule] == [kept]
        again = again if again.history.messages else reread_session(again)
    assert not notices(list(again.retry()))
    assert pinned_text(again) == kept


def test_a_long_text_has_no_rules_for_the_model() -> None:
    chat = chat_of(budget=600)
    assert not ask(chat, " ".join([RULE, *OTHERS * 3]))


def plain_chat(**settings: Any) -> Session:
    """A chat with a model that has no encoder: rules are told by their form."""
    given: dict[str, Any] = {"policy": "sink", "budget": 160, "max_new_tokens": 8} | settings
    return session(babbler(), **given)


def test_any_model_pins_what_has_the_form_of_a_rule_or_a_preference() -> None:
    chat = plain_chat(budget=400)
    assert ask(chat, f"Hello.\n{RULE}\nTell me a joke.") == [LINE]
    said = "I'm new to this, so I prefer short, plain answers, how do I cook rice?"
    (line,) = ask(chat, said)
    liked = "I prefer short, plain answers"
    assert line == f'pinned your instruction "{liked}": /unpin "{liked}" lets go'
    assert pinned_text(chat).split() == f"{RULE} {liked}".split()
    for text in OTHERS * 2:
        assert not ask(chat, text)
    assert pinned_text(chat).split() == f"{RULE} {liked}".split()
    rules = chat.facts()
    assert [(one.text, one.turn) for one in rules] == [
        (RULE, 0),
        (liked, 2),
    ]
    assert all(one.is_rule and one.held == one.tokens for one in rules)
    assert [one.turn for one in chat.facts("plain")] == [2]


def test_rules_have_a_quarter_of_the_budget_and_the_oldest_is_let_go() -> None:
    chat, rules = plain_chat(budget=240), [f"Always use the word {word}." for word in "abcdefghi"]
    ask(chat, "Hello there.")
    chat.pin("Hello")
    kept, dropped = list[str](), list[str]()
    for rule in rules:
        lines = ask(chat, rule)
        assert lines[-1].startswith(f'pinned your instruction "{rule}"')
        kept.append(rule)
        for line in lines[:-1]:
            dropped.append(kept.pop(0))
            assert line.startswith(f'"{dropped[-1]}" is no longer pinned')
        assert [one.text for one in chat.facts()] == kept
        assert sum(one.tokens for one in chat.facts()) <= 60
        assert pinned_text(chat).split() == ("Hello" + "".join(kept)).split()
    assert dropped


def test_what_the_user_pins_is_no_longer_let_go_by_itself() -> None:
    chat = plain_chat()
    ask(chat, RULE)
    chat.pin(f'"{RULE}"')
    for number in range(12):
        ask(chat, f"Always use the word x{number}.")
    assert pinned_text(chat).startswith(RULE)


@pytest.mark.parametrize("target", ["short", "last", "I prefer short, plain answers"])
def test_a_rule_of_which_the_user_pins_a_word_or_all_stays_listed(target: str) -> None:
    chat = plain_chat(budget=400)
    ask(chat, RULE)
    ask(chat, "I'm new to this, so I prefer short, plain answers, how do I cook rice?")
    before = [(one.text, one.is_rule) for one in chat.facts()]
    chat.pin(target)
    assert [(one.text, one.is_rule) for one in chat.facts()] == before
    chat.pin("plain", pinned=False)  # one word of it is enough
    assert "prefer" not in pinned_text(chat)
    assert [one.text for one in chat.facts() if one.is_rule] == [RULE]


@pytest.mark.parametrize("back", [Session.undo, lambda chat: list(chat.retry(text="Hello."))])
def test_undo_and_another_message_bring_back_a_rule_that_was_let_go(back: Any) -> None:
    chat, number = plain_chat(), 0
    ask(chat, RULE)
    while chat.facts()[0].text == RULE and number < 20:
        ask(chat, f"Always use the word x{number}.")
        number += 1
    back(chat)
    assert chat.facts()[0].text == RULE
    assert pinned_text(chat).startswith(RULE)


def test_letting_go_moves_no_token_and_leaves_what_was_recalled() -> None:
    chat = plain_chat(budget=128, recall="words")
    ask(chat, "Hello.")
    ask(chat, "Our zebra is called Quixbert, and it eats old brown hay.")
    number = 0
    while chat.ledger.held_of_turn(2) and number < 20:
        ask(chat, f"Always use the word x{number}.")
        number += 1
    said = f"Always use the word y. Who is our zebra Quixbert{number}?"
    moved, lines, restored = list[str](), list[str](), 0
    for event in chat.read_question(said):
        if isinstance(event, TurnDone):
            restored = len(chat.engine.store.placement.recalled)
        elif isinstance(event, Notice):
            lines.append(event.text)
        elif restored and isinstance(event, Evicted | Restored):
            moved.append(repr(event))
    assert any("is no longer pinned" in line for line in lines)
    assert restored
    assert len(chat.engine.store.placement.recalled) == restored
    assert not moved


def test_a_sentence_larger_than_the_share_is_not_pinned_and_nothing_let_go() -> None:
    chat = plain_chat(budget=200)
    ask(chat, RULE)
    long = "Always use " + " and ".join(f"the word number {n}" for n in range(12))
    (line,) = ask(chat, long + ".")
    assert "rules have at most 50" in line
    assert pinned_text(chat) == RULE


def test_where_the_user_pinned_much_a_new_rule_lets_no_older_one_go() -> None:
    chat = plain_chat(budget=96)
    ask(chat, RULE)
    ask(chat, "A long tale of a fox who ran over the hill and far away to the sea.")
    chat.pin("last")
    size = 0
    while size < len(chat.ledger.pinned_positions) < 60:
        size = len(chat.ledger.pinned_positions)
        ask(chat, "So it ran on.")
        with suppress(SettingError):
            chat.pin("last")
    lines = ask(chat, "Always use the word hill, and the word sea, and the word fox, too.")
    assert all("not pinned" in line for line in lines)
    assert RULE in pinned_text(chat)


@pytest.mark.parametrize("again", [reread_session, "rewind"])
def test_rules_stay_rules_when_the_chat_is_read_again(again: Any) -> None:
    chat = plain_chat(budget=240)
    ask(chat, f"Hello. {RULE}")
    ask(chat, "The train leaves at noon.")
    chat.pin("noon")
    ask(chat, "I see.")
    if again == "rewind":
        chat.history.messages = []
        chat, _ = rewind(chat, 1)
    else:
        chat = again(chat)
    assert [(one.text, one.turn) for one in chat.facts()] == [(RULE, 0)]
    assert "noon" in pinned_text(chat)
    chat.pin("noon", pinned=False)
    assert pinned_text(chat) == RULE


def test_a_smaller_budget_lets_the_oldest_rules_go_instead_of_being_refused() -> None:
    chat = plain_chat(budget=800)
    for number in range(20):
        ask(chat, f"Always use the word x{number}.")
    before = [one.text for one in chat.facts()]
    lines = notices(chat.switch("test", budget=160))
    now = [one.text for one in chat.facts()]
    assert now == before[-len(now) :]
    assert 0 < sum(one.tokens for one in chat.facts()) <= 40
    assert [line for line in lines if "is no longer pinned" in line]
    with pytest.raises(SettingError):
        chat.switch("test", policy="nosuch")
    assert [one.text for one in chat.facts()] == now


def test_a_rule_that_took_the_place_of_another_under_settings_of_one_question_keeps_it() -> None:
    chat = plain_chat(budget=256)
    first, second = (f"Always use {'the word fox and ' * 8}the word {word}." for word in "ab")
    ask(chat, first)
    with temporary_settings(chat, "ask", {"max_new_tokens": 4}):
        lines = ask(chat, second)
    assert any("is no longer pinned" in line for line in lines)
    assert [one.text for one in chat.facts()] == [second]


@pytest.mark.parametrize("own", [0, 50])
def test_undo_under_a_smaller_budget_pins_as_many_rules_as_have_room(own: int) -> None:
    chat = plain_chat(budget=800)
    ask(chat, "fox " * own + "Hello.")
    for number in range(20):
        ask(chat, f"Always use the word x{number}.")
    listed = [one.text for one in chat.facts()]
    chat.switch("test", budget=160)
    if own:
        for rule in chat.facts()[:-1]:
            chat.pin(f"turn {rule.turn}", pinned=False)
            listed.remove(rule.text)
        chat.pin("turn 0")
    lines = notices(chat.undo())
    now = [one.text for one in chat.facts()]
    assert now == listed[:-1][-len(now) :]
    assert 0 < sum(one.tokens for one in chat.facts()) <= 40
    division = chat.engine.choice.divide_budget()
    assert division.max_pins is not None
    assert 0 < division.pins <= division.max_pins
    if not own:  # as many as before the undone one, for which another had been let go
        (line,) = lines
        assert line.startswith(f"{len(listed) - len(now)} instructions are not pinned again, as ")
    assert not ask(chat, "I see.")


def test_an_interrupted_message_sets_no_rule() -> None:
    chat = plain_chat(budget=120)
    said = f"{RULE} " + "A fox ran over the hill and the river and the old wood. " * 9
    list(chat.read_question(said, lambda: True))
    assert chat.turns[-1].finish == "interrupt"
    assert not pinned_text(chat)
    assert ask(plain_chat(budget=600), said) == [LINE]


def test_forms_tell_rules_from_all_else() -> None:
    """Of the kept-back sentences: 23 of 40 rules, and none of the others."""
    told = yaml.safe_load(STATEMENTS.read_text("utf-8"))
    assert sum(map(is_rule, told["kept_back"]["instruction"])) >= 23
    others = [text for kind in ("fact", "other") for text in told["kept_back"][kind]]
    others += [text for kind in ("fact", "other", "question", "no_question") for text in told[kind]]
    assert not [text for text in others if is_rule(text)]


NO_RULES = [
    *("I will never answer again.", "Always here to help.", "Should I always use it?"),
    *("Never give up!", "I'm late from now on.", "I\u2019m eating healthier from now on."),
    *("Summarize what we said in this conversation.", "Give your answer as JSON."),
    *("The app crashes every time I type a letter.", "I get an error each time I write it."),
    *("Each message should have an id.", "All responses must include a CORS header."),
    *("In response, the server returns 404.", "There is a bug in the chat window."),
    *("As of now the team has three members.", "In the future, cars will fly."),
    *("The shop is closed from now on.", "The server must be online at all times."),
    *("My boss said he will call me Monday.", "Call me back.", "Why does she call me Karen?"),
    *("三天以后我去北京。", "Künftig wird das Haus vermietet.", "Désormais le musée est fermé."),
    "Always use it. " + "so " * 400,
]
RULES = [
    *("Call me Ben.", "Always tailor it when I ask of jobs.", "Ab jetzt antworte nur Deutsch."),
    *("Don\u2019t ever use emojis.", "In this chat, always write dates in full."),
    *("Until I say otherwise, answer with yes or no.", "从现在开始，请用中文回答。"),
    "Please keep all your answers under fifty words.",
]


def test_rules_are_told_from_other_sentences_by_their_form() -> None:
    assert [text for text in RULES if not is_rule(text)] == []
    assert [text for text in NO_RULES if is_rule(text)] == []


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("So I prefer simple, minimal dependencies, how do I?", "simple, minimal dependencies"),
        ("I'd prefer the 2.5 version.", "the 2.5 version"),
        ("I prefer writing between 7-9 AM, as I'm fresh then.", "writing between 7-9 AM"),
        ("Since I\u2019d prefer tea, what else is there?", "tea"),
        ("What do I prefer for breakfast?", None),
        ("Should I prefer SQL over NoSQL?", None),
        ("Which do you prefer?", None),
        ("I prefer not to say.", None),
    ],
)
def test_of_a_preference_what_is_preferred_is_found(said: str, wanted: str | None) -> None:
    span = preference_in(said)
    assert (span and said[slice(*span)].split(" prefer ")[1]) == wanted


@pytest.mark.slow
@pytest.mark.real
def test_a_real_model_keeps_the_rule() -> None:
    chat = session(smollm2(), policy="salience", budget=128, max_new_tokens=24)
    assert ask(chat, RULE) == [LINE]
    for text in ("What is a fox?", "Tell me about the sea.", "Write a long story about a fox."):
        assert not ask(chat, text)
    assert RULE in held_text(chat)
