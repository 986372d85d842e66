"""A transcript as rounds: a user turn and its reply, if the transcript has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sirchat.errors import TranscriptError
from sirchat.text.transcript import TranscriptTurn


@dataclass(frozen=True)
class Round:
    """A user turn and the reply in the transcript; None without one."""

    user: str
    reply: str | None


@dataclass(frozen=True)
class Rounds:
    """A whole transcript.

    Attributes:
        system: the system turn at its beginning, None without one.
        rounds: the rounds; not empty.
        notes: messages about turns that are left out.
    """

    system: str | None
    rounds: tuple[Round, ...]
    notes: tuple[str, ...]


def rounds_of(turns: Sequence[TranscriptTurn], name: str) -> Rounds:
    """Pair the turns of a transcript, which errors call `name`, as `sirchat replay --feed` does.

    A system turn after the first turn is left out. Raises TranscriptError for an assistant turn
    that follows no user turn, and for a transcript without user turns.
    """
    system, rounds, notes, previous = None, list[Round](), list[str](), ""
    for turn in turns:
        if turn.role == "user":
            rounds.append(Round(turn.content, None))
        elif turn.role == "assistant":
            if previous != "user":
                raise TranscriptError(
                    f"{name}, line {turn.line}: an assistant turn must follow a user turn"
                )
            rounds[-1] = Round(rounds[-1].user, turn.content)
        elif rounds:
            notes.append(
                f"{name}, line {turn.line}: a system turn after the first turn is left out"
            )
            continue  # a reply may still follow the user turn before it
        else:
            system = turn.content
        previous = turn.role
    if not rounds:
        raise TranscriptError(f"{name} has no user turn", hint="there is nothing to compare")
    return Rounds(system, tuple(rounds), tuple(notes))
