"""The same kinds of conversations as the released files have, from the project's own bank.

They are worded as in the world of the bundled model, so that everything runs offline. An option's
letter stands behind it, in question and reply: a small model finds what follows a word.
"""

from __future__ import annotations

from random import Random

from sirchat.tasks.choice import Question
from sirchat.tasks.sirllm_files import COMMONSENSE, DIALOGUE, GROCERY
from sirchat.world import words
from sirchat.world.dialogue import LETTERS, bank_question

GROCERY_ROUNDS = 20


def dailydialog(seed: int, number: int) -> list[Question]:
    """Four to fourteen questions of four options each."""
    rng = Random(f"dailydialog/{seed}/{number}")
    return [question(rng, 4, DIALOGUE) for _ in range(rng.randint(4, 14))]


def grocery(seed: int, number: int) -> list[Question]:
    """What to buy; 20 questions of five options; which of four it was."""
    rng = Random(f"grocery/{seed}/{number}")
    choices = rng.sample(words.GROCERIES, 4)
    wanted = rng.randrange(4)
    told = Question(f"I want you to buy the GROCERY: [{choices[wanted]}].", ("OK",), 0, "told")
    between = [question(rng, 5, COMMONSENSE) for _ in range(GROCERY_ROUNDS)]
    replies = tuple(f"You asked me to buy {one}." for one in choices)
    asked = Question("Which GROCERY did I ask you to buy?", replies, wanted, GROCERY)
    return [told, *between, asked]


def question(rng: Random, count: int, group: str) -> Question:
    """A question of the bank with `count` options, or as many as its topic has."""
    text, right, wrong = bank_question(rng)
    options = [right, *rng.sample(wrong, min(len(wrong), count - 1))]
    rng.shuffle(options)
    lettered = [f"{word} ({letter})" for word, letter in zip(options, LETTERS, strict=False)]
    return Question(
        f"{text} Choices: {', '.join(lettered)}",
        tuple(f"The answer is {one}." for one in lettered),
        options.index(right),
        group,
    )
