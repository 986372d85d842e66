"""Messages of generated dialogues, and the rounds that do not depend on facts told by the user.

These rounds are quizzes, questions on common knowledge, repeated words and games.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from sirchat.lab.synthetic import smalltalk as talk
from sirchat.lab.synthetic import words as w
from sirchat.lab.synthetic.bank import TOPICS
from sirchat.lab.synthetic.facts import item_list, made_up

Speaker = Literal["system", "user", "assistant"]
Key = tuple[str, str]  # kind and subject of a fact


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue.

    `recall` is what a reply recalls: the name of a kind of fact, `two` (two facts), `repeat` (words
    or a story), `quiz`, or `untold`; None for any other message. `fact` is the key of the single
    fact that the user tells in this message, or that this reply recalls. `value` is the value that
    the user tells.
    """

    role: Speaker
    text: str
    recall: str | None = None
    fact: Key | None = None
    value: str = ""


Round = tuple[Message, Message]


def capital(text: str) -> str:
    """`text` with its first letter in upper case, and the other letters unchanged."""
    return text[:1].upper() + text[1:]


def fill(template: str, subject: str, value: str, number: int = 0) -> str:
    """Fill a template's `{s}`, `{v}`, `{v:c}` (capitalised) and `{n}`; use `an` before vowels."""
    for placeholder, word in (("{s}", subject), ("{v}", value)):
        if word[:1].lower() in ("a", "e", "i", "o", "u"):
            template = template.replace(f" a {placeholder}", f" an {placeholder}")
    template = template.replace("{n}", str(number)).replace("{s}", subject)
    return template.replace("{v:c}", capital(value)).replace("{v}", value)


def lower_start(template: str) -> str:
    """Put a template's first letter in lower case, to continue a sentence; `I` is unchanged."""
    if template.startswith(("I ", "I'", "{")):
        return template
    return template[:1].lower() + template[1:]


def spell(rng: Random, text: str) -> str:
    """`text` in American spelling half of the time, else unchanged."""
    if rng.random() < 0.5:
        return text
    return text.replace("favourite", "favorite").replace("colour", "color")


@dataclass(frozen=True, slots=True)
class Style:
    """How carefully a user types one message: in lower case, without punctuation, or both."""

    lower: bool = False
    bare: bool = False  # no punctuation at the end, no apostrophes

    @staticmethod
    def draw(rng: Random) -> Style:
        """A random style: mostly careful, sometimes in lower case, without punctuation, or both."""
        return rng.choices(
            (Style(), Style(lower=True), Style(bare=True), Style(True, True)), (66, 10, 12, 12)
        )[0]

    def apply(self, text: str) -> str:
        """`text` as a user types it in this style."""
        if self.bare:
            text = text.rstrip(".?!")
        if self.lower:
            text = text.lower()
        return text.replace("'", "") if self.lower and self.bare else text


def reply(user: str, assistant: str, recall: str | None = None) -> Round:
    """A round of a user message and a reply; `recall` is that of the reply, as in `Message`."""
    return Message("user", user), Message("assistant", assistant, recall)


LETTERS = "ABCDE"
BEATS = {"rock": "paper", "paper": "scissors", "scissors": "rock"}  # the value wins against the key


def bank_question(rng: Random) -> tuple[str, str, list[str]]:
    """A random question from the question bank, its right answer, and its wrong options."""
    topic = rng.choices(TOPICS, [len(topic.known) for topic in TOPICS])[0]
    thing, right = rng.choice(topic.known)
    question = fill(rng.choice(topic.questions).replace("{x}", "{s}"), thing, "")
    return question, right, topic.wrong(thing, right)


def quiz(rng: Random, count: int | None = None) -> Round:
    """A multiple-choice question from the bank, with a reply like `The answer is library (B).`

    The quiz has `count` options (default: three to five), or fewer if its topic has fewer. Each
    letter stands after its option, in the question and in the reply: a small model finds what to
    copy by the word before it.
    """
    question, right, wrong = bank_question(rng)
    options = rng.sample(wrong, min(len(wrong), (count or rng.choice((3, 4, 5, 5, 5))) - 1))
    options.append(right)
    rng.shuffle(options)
    listed = ", ".join(f"{word} ({letter})" for word, letter in zip(options, LETTERS, strict=False))
    word = rng.choice(("Choices:", "Choices:", "Options:", "Choose one:"))
    letter = LETTERS[options.index(right)]
    return reply(f"{question} {word} {listed}", f"The answer is {right} ({letter}).", "quiz")


def open_quiz(rng: Random) -> Round:
    """A round with a question from the question bank, without options."""
    question, right, _ = bank_question(rng)
    return reply(Style.draw(rng).apply(question), f"The answer is {right}.")


def knowledge(rng: Random) -> Round:
    """A round with a question on common knowledge, which is answered in words."""
    topic = rng.randrange(4)
    if topic == 0:
        animal, sound = rng.choice(talk.SOUNDS)
        return reply(
            Style.draw(rng).apply(f"What does a {animal} say?"), f"A {animal} says {sound}."
        )
    if topic == 1:
        one, two = rng.randint(0, 9), rng.randint(0, 9)
        user, answer = f"What is {one} plus {two}?", f"{one} plus {two} is {one + two}."
        return reply(Style.draw(rng).apply(user), answer)
    return open_quiz(rng)


REPEATABLE: tuple[str, ...] = (
    w.NAMES + w.CITIES + w.GROCERIES + w.COMMON + w.COLOURS + w.JOBS + w.PET_NAMES
)


def repeat_after_me(rng: Random) -> Round:
    """A round in which the user asks to repeat some words, and the reply repeats them."""
    words = [
        made_up(rng) if rng.random() < 0.25 else rng.choice(REPEATABLE)
        for _ in range(rng.choice((1, 2, 3, 4, 5, 6)))
    ]
    text = rng.choice((" ".join(words), item_list(words)))
    ask = rng.choice(("Repeat after me: {x}.", "Please repeat: {x}.", "Say this: {x}."))
    return reply(ask.replace("{x}", text), f"{text}.")


def game_opening() -> str:
    """The user message that starts a match."""
    return f"Please play a game of Rock-Paper-Scissors. Choose one option from: {', '.join(BEATS)}."


def game_round(theirs: str, result: str) -> str:
    """The user message between two rounds of a match."""
    return f"I chose [{theirs}]. {result} Analyze my preferences and proceed to the next round."


def outcome(ours: str, theirs: str) -> str:
    """The sentence in which the user tells the outcome of a round, such as `You win.`

    `ours` is the model's move, and `theirs` the user's move.
    """
    if ours == theirs:
        return "It is a tie."
    return "You win." if BEATS[theirs] == ours else "You lose."


def game(rng: Random) -> Iterator[Round]:
    """Yield the rounds of a match of rock-paper-scissors.

    Now and then the user asks about the user's own habits. The reply chooses the move that wins
    against the user's most frequent move. If several moves are equally frequent, the user's last
    move is taken, if it is one of them.
    """
    options = list(BEATS)
    rng.shuffle(options)
    weights = rng.choice(((5, 3, 2), (5, 2, 3), (6, 2, 2), (8, 1, 1), (4, 3, 3)))
    user = game_opening()
    move, seen = rng.choice(options), dict.fromkeys(BEATS, 0)
    for _ in range(int(draw_length(rng, 3, 32))):
        yield reply(user, f"I choose {move}.")
        theirs = rng.choices(options, weights)[0]
        seen[theirs] += 1
        most = max(BEATS, key=lambda x: (seen[x], x == theirs))
        user = game_round(theirs, outcome(move, theirs))
        if rng.random() < 0.06:
            habit = user.replace("Analyze", "What do I choose most often? Analyze")
            yield reply(habit, f"You choose {most} most often.")
            user = "Proceed to the next round."
        move = BEATS[most]


def draw_length(rng: Random, low: float, high: float) -> float:
    """A random length from `low` to `high`, whose logarithm is distributed uniformly."""
    return math.exp(rng.uniform(math.log(low), math.log(max(low, high))))
