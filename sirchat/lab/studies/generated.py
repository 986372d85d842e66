"""Conversations like those of SirLLM's released files, generated from the project's question bank.

The conversations use only words that the bundled model knows.
"""

from __future__ import annotations

from random import Random

from sirchat.lab.studies.choice import Question
from sirchat.lab.studies.sirllm_files import COMMONSENSE, DIALOGUE, GROCERY
from sirchat.lab.synthetic.rounds import LETTERS, bank_question
from sirchat.lab.synthetic.texts import WORDS

GROCERY_ROUNDS = 20


def dailydialog(seed: int, number: int) -> list[Question]:
    """Conversation `number` of the DailyDialog task, as a list of questions.

    It has 4 to 14 questions with up to four options each.
    """
    rng = Random(f"dailydialog/{seed}/{number}")
    return [question(rng, 4, DIALOGUE) for _ in range(rng.randint(4, 14))]


def grocery(seed: int, number: int) -> list[Question]:
    """Conversation `number` of the Grocery Shopping task, as a list of questions."""
    rng = Random(f"grocery/{seed}/{number}")
    choices = rng.sample(WORDS["groceries"], 4)
    target = rng.randrange(4)
    request = Question(f"I want you to buy the GROCERY: [{choices[target]}].", ("OK",), 0, "told")
    between = [question(rng, 5, COMMONSENSE) for _ in range(GROCERY_ROUNDS)]
    replies = tuple(f"You asked me to buy {one}." for one in choices)
    recall = Question("Which GROCERY did I ask you to buy?", replies, target, GROCERY)
    return [request, *between, recall]


def question(rng: Random, count: int, group: str) -> Question:
    """Draw a multiple-choice question with `count` options from the project's question bank."""
    text, right, wrong = bank_question(rng)
    options = [right, *rng.sample(wrong, min(len(wrong), count - 1))]
    rng.shuffle(options)
    lettered = [f"{word} ({letter})" for word, letter in zip(options, LETTERS, strict=False)]
    return Question(
        f"{text} Choices: {', '.join(lettered)}",
        tuple(f"The answer is {one}." for one in lettered),
        options.index(right),
        group,
        stem=text,
        texts=tuple(f"The answer is {word}." for word in options),
    )
