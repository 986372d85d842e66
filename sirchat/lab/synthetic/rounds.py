"""Messages of synthetic dialogues, and those rounds that do not depend on told facts.

These rounds are quizzes, questions on common knowledge, repeated words and games. A round is a user
message and its reply.
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
    """One message of a synthetic dialogue.

    Attributes:
        role: who writes the message.
        text: the text of the message.
        recall: what a reply must recall: the name of a fact's kind for one fact; "two" for two
            facts; "repeat" for words to repeat; "quiz" for the right option; "untold" if the user
            never told the fact. None for any other message.
        fact: kind and subject of the one fact that a user tells or a reply recalls, else None.
        value: the value of the one fact that a user tells, else empty.
    """

    role: Speaker
    text: str
    recall: str | None = None
    fact: Key | None = None
    value: str = ""


Round = tuple[Message, Message]


def capital(text: str) -> str:
    """Put the first letter of a text in upper case; all other letters stay unchanged."""
    return text[:1].upper() + text[1:]


def fill(template: str, subject: str, value: str, number: int = 0) -> str:
    """Fill the template of a message with a subject, a value and a number; returns the text.

    `{s}` stands for the subject, `{v}` for the value, `{v:c}` for the value with a capital letter,
    and `{n}` for the number. The article `a` before a vowel becomes `an`.
    """
    for placeholder, word in (("{s}", subject), ("{v}", value)):
        if word[:1].lower() in ("a", "e", "i", "o", "u"):
            template = template.replace(f" a {placeholder}", f" an {placeholder}")
    template = template.replace("{n}", str(number)).replace("{s}", subject)
    return template.replace("{v:c}", capital(value)).replace("{v}", value)


def lower_start(template: str) -> str:
    """Put the first letter of a message in lower case, so that the message continues a sentence.

    A message that begins with the word `I` or with a placeholder such as `{v}` is unchanged.
    """
    if template.startswith(("I ", "I'", "{")):
        return template
    return template[:1].lower() + template[1:]


def spell(rng: Random, text: str) -> str:
    """Change `favourite` and `colour` to American spelling, in half of all calls at random."""
    if rng.random() < 0.5:
        return text
    return text.replace("favourite", "favorite").replace("colour", "color")


@dataclass(frozen=True, slots=True)
class Style:
    """How a user types a message: carefully, in lower case, without end punctuation, or both."""

    lower: bool = False
    bare: bool = False  # no punctuation at the end; no apostrophes if `lower` is true, too

    @staticmethod
    def draw(rng: Random) -> Style:
        """Draw a random style of typing.

        It is mostly careful, and sometimes in lower case, without end punctuation, or both.
        """
        return rng.choices(
            (Style(), Style(lower=True), Style(bare=True), Style(True, True)), (66, 10, 12, 12)
        )[0]

    def apply(self, text: str) -> str:
        """Change the text of a message to how a user types it in this style."""
        if self.bare:
            text = text.rstrip(".?!")
        if self.lower:
            text = text.lower()
        return text.replace("'", "") if self.lower and self.bare else text


def reply(user: str, assistant: str, recall: str | None = None) -> Round:
    """Make a round, two messages, from the texts of a user message and its reply.

    `recall` says what the reply must recall; `Message` describes its values.
    """
    return Message("user", user), Message("assistant", assistant, recall)


LETTERS = "ABCDE"
BEATS = {"rock": "paper", "paper": "scissors", "scissors": "rock"}  # the value wins against the key


def bank_question(rng: Random) -> tuple[str, str, list[str]]:
    """Draw a random question from the question bank.

    Returns the text of the question, its right answer, and a list of its wrong options.
    """
    topic = rng.choices(TOPICS, [len(topic.known) for topic in TOPICS])[0]
    thing, right = rng.choice(topic.known)
    question = fill(rng.choice(topic.questions).replace("{x}", "{s}"), thing, "")
    return question, right, topic.wrong(thing, right)


def quiz(rng: Random, count: int | None = None) -> Round:
    """Generate a round with a multiple-choice question from the question bank.

    The reply is a text such as `The answer is library (B).` The question has `count` options
    (default: three to five), or fewer if its topic has fewer answers. In question and reply, the
    letter stands after its option: a small model learns to copy the letter that follows a word.
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
    """Generate a round with a question from the question bank, without options."""
    question, right, _ = bank_question(rng)
    return reply(Style.draw(rng).apply(question), f"The answer is {right}.")


def knowledge(rng: Random) -> Round:
    """Generate a round with a question on common knowledge, and a reply that answers in words.

    The question is about an animal's sound or a sum, or comes from the question bank.
    """
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
    """Generate a round in which the user asks to repeat some words, and the reply repeats them."""
    words = [
        made_up(rng) if rng.random() < 0.25 else rng.choice(REPEATABLE)
        for _ in range(rng.choice((1, 2, 3, 4, 5, 6)))
    ]
    text = rng.choice((" ".join(words), item_list(words)))
    ask = rng.choice(("Repeat after me: {x}.", "Please repeat: {x}.", "Say this: {x}."))
    return reply(ask.replace("{x}", text), f"{text}.")


def game_opening() -> str:
    """The text of the user message that starts a match of rock-paper-scissors."""
    return f"Please play a game of Rock-Paper-Scissors. Choose one option from: {', '.join(BEATS)}."


def game_round(theirs: str, result: str) -> str:
    """The text of a user message between two rounds of a match of rock-paper-scissors.

    `theirs` is the user's move in the last round, and `result` the sentence that tells its outcome.
    """
    return f"I chose [{theirs}]. {result} Analyze my preferences and proceed to the next round."


def outcome(ours: str, theirs: str) -> str:
    """The sentence in which the user tells the outcome of a round of rock-paper-scissors.

    It is `You win.`, `You lose.` or `It is a tie.` `You` is the model: `ours` is the model's move,
    and `theirs` the user's move.
    """
    if ours == theirs:
        return "It is a tie."
    return "You win." if BEATS[theirs] == ours else "You lose."


def game(rng: Random) -> Iterator[Round]:
    """Yield the rounds of a match of rock-paper-scissors between the user and the model.

    The user has a favourite move. Each reply chooses the move that wins against the user's most
    frequent move; among equally frequent moves, the user's last move comes first. Now and then the
    user asks which move the user has chosen most often.
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
    """Draw a random length from `low` to `high`; its logarithm is distributed uniformly.

    So short lengths are more frequent than long ones.
    """
    return math.exp(rng.uniform(math.log(low), math.log(max(low, high))))
