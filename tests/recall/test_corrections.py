"""Where recall brings back what was corrected, the newest statement comes back with it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from chatting import babbler, session
from sirchat.chat.events import Recalled, TurnDone
from sirchat.chat.session import Session
from sirchat.memory.ledger import Role
from sirchat.ui.status import describe_recalled

THINGS = ["locker", "bicycle", "kitchen", "umbrella", "garden gate"]
VALUES = ["green", "yellow", "purple", "orange", "violet", "crimson", "silver", "golden"]
TALK = ["What a rainy day it is.", "Tell me a joke.", "The bus was late again.", "How are you?"]


def tell(chat: Session, *texts: str) -> None:
    for text in texts:
        list(chat.read_user(text, before="assistant"))
        list(chat.read_reply("Fine, thank you."))


def places(chat: Session, text: str) -> np.ndarray:
    """The stream positions of the tokens of a text that the user said once."""
    turn = next(n for n, turn in enumerate(chat.turns) if text in turn.text)
    at = [int(n) for n in chat.ledger.of_turn(turn) if chat.ledger.column("role")[n] == Role.USER]
    pieces = [row.text for row in chat.tokens(at)]
    ends = np.cumsum([len(piece) for piece in pieces])
    start = "".join(pieces).index(text)
    return np.array(at)[(ends > start) & (ends - [len(p) for p in pieces] < start + len(text))]


def random_chat(random: Random, chat: Session) -> dict[str, list[str]]:
    """Tell of things, each up to three times; returns the statements about each, in order."""
    said: dict[str, list[str]] = {thing: [] for thing in THINGS}
    values = {thing: random.sample(VALUES, 3) for thing in THINGS}
    for thing in random.choices(THINGS, k=10):
        count = len(said[thing])
        if count < 3:
            now = random.choice(["now ", "actually "]) if count else ""
            said[thing].append(f"My {thing} is {now}{values[thing][count]}.")
            also = random.choice(["", "Hello. ", "It rains in the whole country today. "])
            tell(chat, also + said[thing][-1])
        tell(chat, *random.choices(TALK, k=random.randint(0, 3)))
    tell(chat, *random.choices(TALK, k=8))
    return {thing: texts for thing, texts in said.items() if len(texts) > 1}


@pytest.mark.parametrize("seed", range(8))
def test_no_statement_comes_back_without_the_newest_about_the_same(seed: int) -> None:
    random, compared = Random(seed), 0
    chat = session(babbler(), policy="sink", budget=160, recall="words", pin_instructions=False)
    said = random_chat(random, chat)
    for thing, texts in said.items():
        for limits in ({"focus": 96}, {"focus": 24}, {"recall_n": 20}, {"recall_n": 80}):
            chat.switch("test", **{"focus": "off", "recall_n": "auto", **limits})
            for event in chat.read_user(f"What is my {thing}? Is it {texts[0].split()[-1][:-1]}?"):
                if isinstance(event, Recalled):
                    came = event.positions
            held = chat.ledger.held_positions
            for every in said.values():
                *older, newest = (places(chat, text) for text in every)
                if any(np.isin(one, came).any() for one in older):
                    compared += 1
                    assert np.isin(newest, held).all()
            chat.undo()
    assert compared or not said


def corrected(budget: int = 1024) -> Session:
    chat = session(babbler(), policy="sink", budget=budget, recall="words", max_new_tokens=4)
    tell(chat, "My locker is green.", *TALK * 3, "My locker is now a purple one.")
    tell(chat, "I saw the crimson sea. My locker is now crimson.", *TALK * 6)
    return chat


def test_both_are_held_in_the_order_of_time_and_the_newer_is_quoted() -> None:
    chat = corrected()
    chat.switch("test", focus=48)
    for event in chat.ask("Was my locker green, all green?"):
        if isinstance(event, TurnDone) and event.role == "user":
            held = "".join(row.text for row in chat.snapshot().rows if row.role == "user")
            assert held.index("locker is green") < held.index("locker is now crimson")
    assert "now crimson" in describe_recalled(chat.recall, chat.seen)


def test_what_was_erased_corrects_nothing() -> None:
    chat = corrected()
    chat.erase("crimson")
    chat.switch("test", focus=48)
    (came,) = (one for one in chat.read_user("Is my locker green?") if isinstance(one, Recalled))
    assert "green" in "".join(row.text for row in chat.tokens(came.positions))
