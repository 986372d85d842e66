"""Real chatter: rounds of people's talk from a file, in which the facts are told.

Files: SirLLM's DailyDialog, LoCoMo's and Realtalk's conversations, or any transcript that sirchat
reads.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from sirchat.errors import SettingError
from sirchat.lab.studies.long_talk import long_talks
from sirchat.lab.studies.sirllm_files import dailydialog
from sirchat.text.transcript import TranscriptTurn, read_transcript

Talk = list[tuple[str, str]]
"""The rounds of one conversation: user turn and reply."""

_ROUNDS_OF_TRANSCRIPT = 12
"""A transcript is cut into conversations of so many rounds."""


def read_talks(path: Path) -> list[Talk]:
    """The conversations of a file; raises SettingError for a file that has none."""
    if path.is_dir():
        return _of_weeks(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingError(f"data {str(path)!r} can't be read: {error.strerror}") from None
    if b'"session_1"' in data and path.suffix == ".json":
        return _of_weeks(path)
    first = data.lstrip().partition(b"\n")[0]
    talks = _dailydialog(path) if b'"answerKey"' in first else _transcript(data, path.name)
    if not any(talks):
        raise SettingError(
            f"data {str(path)!r} has no rounds of talk",
            hint="give SirLLM's DailyDialog, LoCoMo, Realtalk or a transcript",
        )
    return talks


def _dailydialog(path: Path) -> list[Talk]:
    """Each question is a turn, and its right answer the reply."""
    talks = [[one.unlisted for one in talk] for talk in dailydialog(path)]
    return [[(untokenized(one.text), untokenized(one.answer)) for one in talk] for talk in talks]


def _of_weeks(path: Path) -> list[Talk]:
    """LoCoMo or Realtalk: each session is a conversation; messages without a reply are left out."""
    sessions = [one for talk in long_talks(path) for one in talk.sessions]
    talks = [
        [
            (one.text, other.text)
            for one, other in pairwise(session.turns)
            if one.speaker == session.turns[0].speaker != other.speaker
        ]
        for session in sessions
    ]
    return [talk for talk in talks if talk]


def _transcript(data: bytes, name: str) -> list[Talk]:
    """Pairs of a user turn and the reply that follows it."""
    turns = [turn for turn in read_transcript(data, name) if turn.role != "system"]
    rounds = [(a.content, b.content) for a, b in pairwise(turns) if _is_round(a, b)]
    return [
        rounds[at : at + _ROUNDS_OF_TRANSCRIPT]
        for at in range(0, len(rounds), _ROUNDS_OF_TRANSCRIPT)
    ]


def _is_round(turn: TranscriptTurn, following: TranscriptTurn) -> bool:
    return (turn.role, following.role) == ("user", "assistant")


def untokenized(text: str) -> str:
    """Text without the blanks that DailyDialog has before punctuation marks and in contractions."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([.,!?;:%)])", r"\1", text)
    return re.sub(r" ?(['’]) ?(s|t|re|ve|ll|d|m)\b", r"\1\2", text)
