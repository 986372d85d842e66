"""Needle tasks: conversations that state something (the needle) and ask for it at the end.

The tasks `stories` and `lines` follow Retrieval-Augmented StreamingLLM (section 3); the tasks
`facts` and `items` take facts from the generator of synthetic dialogue.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from sirchat.errors import SettingError
from sirchat.lab.synthetic.dialogue import Dialogue, draw_fact
from sirchat.lab.synthetic.facts import STORY
from sirchat.lab.synthetic.rounds import Style
from sirchat.lab.training.probe import PROBED, SMALL_TALK
from sirchat.text.text_file import read_regular

# The size of each needle task, by the task's name. For stories it is the number of stories; for
# facts, the number of rounds of small talk after the fact; for items, the number of facts in a row;
# for lines, the number of lines
TASKS = {
    "stories-3": 3,
    "stories-10": 10,
    "facts-12": 12,
    "facts-40": 40,
    "items-10": 10,
    "lines-10": 10,
}

_FACTS = tuple(kind for kind in PROBED if kind != STORY.key)
_NUMBERED = "In story"


@dataclass(frozen=True)
class NeedleDialogue:
    """A conversation that states something, and the question that asks for it at the end."""

    rounds: tuple[tuple[str, str], ...]  # user message and reply of each round, in order
    question: str  # the last user message
    answer: str  # the right reply
    substring: bool = False  # whether a reply is right if it contains the answer; see `is_right`

    def is_right(self, reply: str) -> bool:
        """Whether a reply to the conversation's question is right."""
        if self.substring:
            return _normalised(self.answer) in _normalised(reply)
        return scored_part(reply) == scored_part(self.answer)

    def may_become_right(self, prefix: str) -> bool:
        """Whether a reply that begins with `prefix` can still be right."""
        return self.substring or scored_part(self.answer).startswith(scored_part(prefix))


def needle_dialogue(task: str, seed: int, number: int) -> NeedleDialogue:
    """Conversation `number` of a needle task; the same seed gives the same conversation."""
    rng = Random(f"retrieval/{seed}/{task}/{number}")
    talk, count = Dialogue(rng, SMALL_TALK), TASKS[task]
    if task.startswith("stories"):
        return _stories(talk, count)
    if task.startswith("lines"):
        return _lines(rng, count)
    if task.startswith("items"):
        return _items(talk, count)
    style, kind = Style.draw(rng), _FACTS[number % len(_FACTS)]
    fact = draw_fact(rng, PROBED[kind], style)
    rounds = [talk.tell_one(fact, style), *(talk.small_talk() for _ in range(count))]
    question, answer = talk.ask((kind, fact.subject))
    return NeedleDialogue(tuple((u.text, r.text) for u, r in rounds), question.text, answer.text)


def dialogues_of_file(path: Path) -> list[NeedleDialogue]:
    """The conversations in a file; a conversation whose answer is in no turn is left out.

    Raises SettingError when the file can't be read, or no conversation is left.
    """
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        parsed = [_dialogue(row["turns"], row.get("reference")) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(
            f"data {str(path)!r} can't be read: {error}",
            hint="each line must be a JSON object with turns",
        ) from None
    found = [one for one in parsed if one is not None]
    if not found:
        raise SettingError(f"no conversation in {str(path)!r} asks for a fact that it told")
    return found


def scored_part(text: str) -> str:
    """The part of an answer, or of the beginning of an answer, that is scored."""
    text = text.strip()
    if not (text.startswith(_NUMBERED) or _NUMBERED.startswith(text)):
        return text
    numbered = re.match(_NUMBERED + r" \d+, an? ", text)
    return text[numbered.end() :] if numbered else ""


def _stories(talk: Dialogue, count: int) -> NeedleDialogue:
    """Numbered stories; of three the second is asked for, as in the paper."""
    stories: dict[str, tuple[str, str]] = {}
    while len(stories) < count:
        fact = draw_fact(talk.rng, STORY, Style())
        if fact.subject not in stories:
            user, reply = talk.tell_one(replace(fact, number=len(stories) + 1), Style())
            stories[fact.subject] = user.text, reply.text
    target = list(stories)[1 if count == 3 else talk.rng.randrange(count - 2)]
    question, answer = talk.ask((STORY.key, target))
    return NeedleDialogue(tuple(stories.values()), question.text, answer.text)


def _items(talk: Dialogue, count: int) -> NeedleDialogue:
    """A conversation of facts of different kinds; the user asks for one of them."""
    style = Style.draw(talk.rng)
    facts = [draw_fact(talk.rng, PROBED[kind], style) for kind in talk.rng.sample(_FACTS, count)]
    rounds = [talk.tell_one(fact, style) for fact in facts]
    target = facts[talk.rng.randrange(count - 2)]
    question, answer = talk.ask((target.kind.key, target.subject))
    return NeedleDialogue(tuple((u.text, r.text) for u, r in rounds), question.text, answer.text)


def _lines(rng: Random, count: int) -> NeedleDialogue:
    """A conversation of lines such as `Line 3: 270328`; the user asks for the number in a line."""
    numbers = [str(rng.randrange(2_000, 1_000_000)) for _ in range(count)]
    target = rng.randrange(count - 2)
    return NeedleDialogue(
        tuple((f"Line {line}: {number}", "OK.") for line, number in enumerate(numbers)),
        f"What is the number in Line {target}?",
        numbers[target],
        substring=True,
    )


def _dialogue(turns: list[str], reference: list[str] | None) -> NeedleDialogue | None:
    """The conversation in a line of a file; None if no turn before the question has the answer."""
    *lines, question = turns
    answer = str(reference[0]) if reference else _answer(question, lines)
    if not answer or not any(answer in line for line in lines):
        return None
    return NeedleDialogue(tuple((line, "OK.") for line in lines), question, answer, substring=True)


def _answer(question: str, lines: list[str]) -> str:
    """The text of the newest line that mentions the name or number in the question."""
    sentence = re.split(r"[.?] ", question)[0].partition(" ")[2]
    names = re.findall(r"\b[A-Z]\w+(?: \d+)?", sentence)
    if not names or len(lines) < 2:
        return ""
    about = [line for line in lines if re.search(rf"\b{names[-1]}\b", line, re.IGNORECASE)]
    return about[-1].rpartition(": ")[2] if about else ""


def _normalised(text: str) -> str:
    """`text` for a comparison: in lower case, with single blanks, with no full stop at its end."""
    return " ".join(text.lower().split()).rstrip(".")
