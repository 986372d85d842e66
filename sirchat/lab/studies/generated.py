"""Conversations like those of SirLLM's released files, generated from the project's question bank.

The conversations use only words that the bundled model knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sirchat.lab.studies.choice import Question
from sirchat.lab.studies.sirllm_files import COMMONSENSE, DIALOGUE, GROCERY, PLAYERS
from sirchat.lab.synthetic.rounds import (
    BEATS,
    LETTERS,
    bank_question,
    game_opening,
    game_round,
    outcome,
)
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


def moves(seed: int, player: str, number: int, rounds: int) -> list[str]:
    """The moves of a player of rock-paper-scissors in match `number`."""
    rng = Random(f"held out/{seed}/{player}/{number}")
    return rng.choices(tuple(BEATS), PLAYERS[player], k=rounds)


def match(player: str, moves: Sequence[str]) -> list[Question]:
    """A match of rock-paper-scissors, whose right replies win; no reply at all loses."""
    replies = tuple(f"I choose {move}." for move in BEATS)
    found, text = list[Question](), game_opening()
    for theirs in moves:
        wins = tuple(BEATS).index(BEATS[theirs])
        then = tuple(game_round(theirs, outcome(ours, theirs)) for ours in BEATS)
        found.append(Question(text, replies, wins, player, then=then))
        text = game_round(theirs, "You lose.")
    return found


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
