"""Makes the conversations of the study: facts told amid real dialogue, and a question for each.

The dialogue comes from a file: SirLLM's DailyDialog, LoCoMo's conversations, or any
transcript that sirchat reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from sirchat.errors import SettingError
from sirchat.lab.studies.facts_in_dialogue.kinds import Kind
from sirchat.lab.studies.long_talk import long_talks
from sirchat.lab.studies.reading import read_data
from sirchat.lab.studies.sirllm_files import dailydialog
from sirchat.text.transcript import TranscriptTurn, parse_transcript

OPTIONS = 4
TOLD = "told"  # the one type of question for a fact of `KINDS`
_CORRECTED = 1 / 4  # share of facts that are corrected, among the kinds that can be corrected
_ALONE = 0.4  # share of facts that are told in a turn of their own
_LAST_PLACE = 0.75  # facts are told only in this first part of the conversation

_REPLIES = (
    "Oh, I see.",
    "Thanks for telling me.",
    "Good to know!",
    "Alright, got it.",
    "Okay, I'll keep that in mind.",
    "Really? That's nice.",
    "Sure, no problem.",
    "Ah, great.",
)


@dataclass(frozen=True)
class Statement:
    """A sentence that a user turn says, and the value in it."""

    text: str
    value: str


@dataclass(frozen=True)
class AskedFact:
    """What a conversation tells about one fact, in several places, and how it is asked for."""

    kind: str  # name of the kind of fact
    told: tuple[Statement, ...]  # in the order in which they are told
    needed: tuple[int, ...]  # indices in `told` of the statements that the answer needs
    asked: dict[str, str]  # the user turn that asks, for each type of question
    values: tuple[str, ...]  # what the right reply names
    replies: tuple[str, ...]  # the four replies to choose from
    right: int  # index of the right reply


@dataclass(frozen=True)
class Woven:
    """Real dialogue in which some user turns tell facts.

    `places` has the round of each sentence of each fact, `own` the rounds of a reply that is not
    the dialogue's.
    """

    rounds: Dialogue
    places: list[list[int]]
    own: set[int]


def weave(
    rng: Random,
    dialogues: Sequence[Dialogue],
    facts: Sequence[AskedFact],
    length: int,
    size: Callable[[str, str], int],
) -> Woven:
    """Let real dialogue of at most `length` tokens tell the statements of each fact.

    Those of one fact are told in order. Raises SettingError when they leave no room for dialogue.
    """
    sentences = [(one.text, number) for number, fact in enumerate(facts) for one in fact.told]
    replies = [rng.choice(_REPLIES) if rng.random() < _ALONE else "" for _ in sentences]
    room = length - sum(
        size(sentence, reply) for (sentence, _), reply in zip(sentences, replies, strict=True)
    )
    dialogue = _draw_rounds(rng, dialogues, room, size)
    last = int(len(dialogue) * _LAST_PLACE)
    if last < len(sentences):
        raise SettingError(
            f"length is {length}, too short for {len(facts)} facts with talk between them",
            hint="choose a smaller --facts, or a greater length",
        )
    places = _places(rng, last, [len(fact.told) for fact in facts])
    telling = dict(zip(places, zip(sentences, replies, strict=True), strict=True))
    woven = Woven([], [[] for _ in facts], set())
    for number, (user, reply) in enumerate(dialogue):
        if number in telling:
            (sentence, fact), own_reply = telling[number]
            woven.places[fact].append(len(woven.rounds))
            if own_reply:
                woven.own.add(len(woven.rounds))
                woven.rounds.append((sentence, own_reply))
            else:
                user = f"{sentence} {user}" if rng.random() < 0.5 else f"{user} {sentence}"
        woven.rounds.append((user, reply))
    return woven


def _places(rng: Random, last: int, counts: Sequence[int]) -> list[int]:
    """Draw the rounds below `last` that tell each fact, those of one fact ascending."""
    free = rng.sample(range(last), sum(counts))
    places: list[int] = []
    for count in counts:
        places += sorted(free.pop() for _ in range(count))
    return places


def draw_told_fact(rng: Random, kind: Kind) -> AskedFact:
    """Draw a fact of the given kind, which may be told wrong at first, and corrected."""
    values: list[str] = []
    while len(values) < OPTIONS:
        value = kind.values(rng)
        if value not in values:
            values.append(value)
    who = rng.choice(kind.who)
    right, other = values[:2]
    told = [Statement(_filled(rng.choice(kind.told), who, right), right)]
    if kind.corrected and rng.random() < _CORRECTED:
        told = [
            Statement(_filled(rng.choice(kind.told), who, other), other),
            Statement(_filled(kind.corrected, who, right), right),
        ]
    options = rng.sample(values, OPTIONS)
    asked = {TOLD: _filled(rng.choice(kind.asked), who, "")}
    replies = tuple(_filled(kind.answer, who, value) for value in options)
    needed = (len(told) - 1,)
    return AskedFact(kind.name, tuple(told), needed, asked, (right,), replies, options.index(right))


def _filled(sentence: str, who: str, value: str) -> str:
    text = sentence.replace("{who}", who).replace("{v}", value)
    return text[0].upper() + text[1:]


def _draw_rounds(
    rng: Random, dialogues: Sequence[Dialogue], length: int, size: Callable[[str, str], int]
) -> Dialogue:
    """Draw conversations in random order, and return their rounds, one after another."""
    rounds: Dialogue = []
    while True:
        for talk in rng.sample(dialogues, len(dialogues)):
            for user, reply in talk:
                length -= size(user, reply)
                if length < 0:
                    return rounds
                rounds.append((user, reply))


Dialogue = list[tuple[str, str]]  # the rounds of one conversation, each as (user turn, reply)

# Number of rounds in each of the conversations into which a transcript is cut
_ROUNDS_OF_TRANSCRIPT = 12


def load_dialogues(path: Path) -> list[Dialogue]:
    """The conversations in a file; raises SettingError if there are none."""
    data = read_data(path)
    if b'"session_1"' in data and path.suffix == ".json":
        return _of_weeks(path)
    first = data.lstrip().partition(b"\n")[0]
    dialogues = _dailydialog(path) if b'"answerKey"' in first else _transcript(data, path.name)
    if not any(dialogues):
        raise SettingError(
            f"data {str(path)!r} has no rounds of talk",
            hint="give SirLLM's DailyDialog, LoCoMo or a transcript",
        )
    return dialogues


def _dailydialog(path: Path) -> list[Dialogue]:
    """Read a file of DailyDialog: each question becomes a user turn, its right answer the reply."""
    dialogues = [[one.unlisted for one in talk] for talk in dailydialog(path)]
    return [
        [(untokenized(one.text), untokenized(one.answer)) for one in talk] for talk in dialogues
    ]


def _of_weeks(path: Path) -> list[Dialogue]:
    """Read a file of LoCoMo; returns a dialogue for each session."""
    sessions = [one for talk in long_talks(path) for one in talk.sessions]
    dialogues = [
        [
            (one.text, other.text)
            for one, other in pairwise(session.turns)
            if one.speaker == session.turns[0].speaker != other.speaker
        ]
        for session in sessions
    ]
    return [talk for talk in dialogues if talk]


def _transcript(data: bytes, name: str) -> list[Dialogue]:
    """Read a transcript, and cut it into conversations of a fixed number of rounds."""
    turns = [turn for turn in parse_transcript(data, name) if turn.role != "system"]
    rounds = [(a.content, b.content) for a, b in pairwise(turns) if _is_round(a, b)]
    return [
        rounds[at : at + _ROUNDS_OF_TRANSCRIPT]
        for at in range(0, len(rounds), _ROUNDS_OF_TRANSCRIPT)
    ]


def _is_round(turn: TranscriptTurn, following: TranscriptTurn) -> bool:
    return (turn.role, following.role) == ("user", "assistant")


def untokenized(text: str) -> str:
    """`text` without the blanks that DailyDialog has before punctuation and in contractions."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([.,!?;:%)])", r"\1", text)
    return re.sub(r" ?(['’]) ?(s|t|re|ve|ll|d|m)\b", r"\1\2", text)
