"""Messages of synthetic dialogues, and those rounds that do not depend on told facts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from sirchat.lab.synthetic.bank import TOPICS
from sirchat.lab.synthetic.facts import item_list, made_up_word
from sirchat.lab.synthetic.texts import WORDS, load

Key = tuple[str, str]  # kind and subject of a fact

TALK: dict[str, Any] = load("smalltalk")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a synthetic dialogue.

    `recall` says what a reply must recall: a kind of fact, "two", "repeat", "quiz" or "untold".
    `fact` is the one fact that a user tells, or a reply recalls; `value` is the value told.
    """

    role: str
    text: str
    recall: str | None = None
    fact: Key | None = None
    value: str = ""


Round = tuple[Message, Message]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def fill(template: str, subject: str, value: str, number: int = 0) -> str:
    """Fill a template: `{s}` subject, `{v}` value, `{v:c}` with a capital, `{n}` number."""
    for placeholder, word in (("{s}", subject), ("{v}", value)):
        if word[:1].lower() in ("a", "e", "i", "o", "u"):
            template = template.replace(f" a {placeholder}", f" an {placeholder}")
    template = template.replace("{n}", str(number)).replace("{s}", subject)
    return template.replace("{v:c}", capital(value)).replace("{v}", value)


def lower_start(template: str) -> str:
    """Put the first letter in lower case, but not of `I` or a placeholder."""
    if template.startswith(("I ", "I'", "{")):
        return template
    return template[:1].lower() + template[1:]


def spell(rng: Random, text: str) -> str:
    """Change `favourite` and `colour` to American spelling, in half of all calls."""
    if rng.random() < 0.5:
        return text
    return text.replace("favourite", "favorite").replace("colour", "color")


@dataclass(frozen=True, slots=True)
class Style:
    """How a user types: carefully, in lower case, without end punctuation, or both."""

    lower: bool = False
    bare: bool = False  # no punctuation at the end; no apostrophes if `lower` is true, too

    @staticmethod
    def draw(rng: Random) -> Style:
        return rng.choices(
            (Style(), Style(lower=True), Style(bare=True), Style(True, True)), (66, 10, 12, 12)
        )[0]

    def apply(self, text: str) -> str:
        if self.bare:
            text = text.rstrip(".?!")
        if self.lower:
            text = text.lower()
        return text.replace("'", "") if self.lower and self.bare else text


def make_round(user: str, assistant: str, recall: str | None = None) -> Round:
    """Make a round from the texts of a user message and its reply."""
    return Message("user", user), Message("assistant", assistant, recall)


LETTERS = "ABCDE"
BEATS = {"rock": "paper", "paper": "scissors", "scissors": "rock"}  # the value wins against the key


def bank_question(rng: Random) -> tuple[str, str, list[str]]:
    """Draw a question of the bank; returns its text, its answer and its wrong options."""
    topic = rng.choices(TOPICS, [len(topic.known) for topic in TOPICS])[0]
    thing, right = rng.choice(topic.known)
    question = fill(rng.choice(topic.questions).replace("{x}", "{s}"), thing, "")
    return question, right, topic.wrong(thing, right)


def quiz(rng: Random, count: int | None = None) -> Round:
    """A multiple-choice question of `count` options (default: three to five).

    The letter stands after its option: a small model learns to copy what follows a word.
    """
    question, right, wrong = bank_question(rng)
    options = rng.sample(wrong, min(len(wrong), (count or rng.choice((3, 4, 5, 5, 5))) - 1))
    options.append(right)
    rng.shuffle(options)
    listed = ", ".join(f"{word} ({letter})" for word, letter in zip(options, LETTERS, strict=False))
    word = rng.choice(("Choices:", "Choices:", "Options:", "Choose one:"))
    letter = LETTERS[options.index(right)]
    return make_round(f"{question} {word} {listed}", f"The answer is {right} ({letter}).", "quiz")


def open_quiz(rng: Random) -> Round:
    """A question of the bank without options."""
    question, right, _ = bank_question(rng)
    return make_round(Style.draw(rng).apply(question), f"The answer is {right}.")


def knowledge(rng: Random) -> Round:
    """A question about an animal's sound, a sum, or from the bank."""
    topic = rng.randrange(4)
    if topic == 0:
        animal, sound = rng.choice(list(TALK["sounds"].items()))
        return make_round(
            Style.draw(rng).apply(f"What does a {animal} say?"), f"A {animal} says {sound}."
        )
    if topic == 1:
        one, two = rng.randint(0, 9), rng.randint(0, 9)
        user, answer = f"What is {one} plus {two}?", f"{one} plus {two} is {one + two}."
        return make_round(Style.draw(rng).apply(user), answer)
    return open_quiz(rng)


REPEATABLE = [
    word
    for pool in ("names", "cities", "groceries", "common", "colours", "jobs", "pet_names")
    for word in WORDS[pool]
]


def repeat_after_me(rng: Random) -> Round:
    words = [
        made_up_word(rng) if rng.random() < 0.25 else rng.choice(REPEATABLE)
        for _ in range(rng.choice((1, 2, 3, 4, 5, 6)))
    ]
    text = rng.choice((" ".join(words), item_list(words)))
    ask = rng.choice(("Repeat after me: {x}.", "Please repeat: {x}.", "Say this: {x}."))
    return make_round(ask.replace("{x}", text), f"{text}.")


def game_opening() -> str:
    return f"Please play a game of Rock-Paper-Scissors. Choose one option from: {', '.join(BEATS)}."


def game_round(theirs: str, result: str) -> str:
    return f"I chose [{theirs}]. {result} Analyze my preferences and proceed to the next round."


def outcome(ours: str, theirs: str) -> str:
    """The user's sentence on a round of rock-paper-scissors; `You` is the model."""
    if ours == theirs:
        return "It is a tie."
    return "You win." if BEATS[theirs] == ours else "You lose."


def game(rng: Random) -> Iterator[Round]:
    """Yield a match of rock-paper-scissors against a user with a favourite move.

    Each reply beats the user's most frequent move; of equally frequent ones, the last.
    """
    options = list(BEATS)
    rng.shuffle(options)
    weights = rng.choice(((5, 3, 2), (5, 2, 3), (6, 2, 2), (8, 1, 1), (4, 3, 3)))
    user = game_opening()
    move, seen = rng.choice(options), dict.fromkeys(BEATS, 0)
    for _ in range(int(draw_length(rng, 3, 32))):
        yield make_round(user, f"I choose {move}.")
        theirs = rng.choices(options, weights)[0]
        seen[theirs] += 1
        most = max(BEATS, key=lambda x: (seen[x], x == theirs))
        user = game_round(theirs, outcome(move, theirs))
        if rng.random() < 0.06:
            habit = user.replace("Analyze", "What do I choose most often? Analyze")
            yield make_round(habit, f"You choose {most} most often.")
            user = "Proceed to the next round."
        move = BEATS[most]


def draw_length(rng: Random, low: float, high: float) -> float:
    """Draw a length from `low` to `high` whose logarithm is uniform."""
    return math.exp(rng.uniform(math.log(low), math.log(max(low, high))))
