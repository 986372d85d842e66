"""Runs one transcript under several settings, round by round.

Every setting answers every user turn, undoes it, and reads the turn again with the reply that the
conversation continues with: the transcript's or, if it has none, the answer of `full`. So all
settings read the same ids, and their predictions can be compared token by token. With `own`, each
setting continues with its own answers; then the ids differ, and only answers are compared.

`full` is the reference until the model's context is full. After that no agreement is measured, and
the setting with the largest budget gives the missing replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from sirchat.config.layers import changed
from sirchat.config.profile import Profile
from sirchat.lab.studies.report import setting_names
from sirchat.lab.studies.side_by_side.compared import Comparison
from sirchat.lab.studies.side_by_side.compared_session import ComparedSession, ReferenceRound
from sirchat.lab.studies.side_by_side.rounds import Round, Rounds
from sirchat.models.model import LoadedModel


def compare(
    model: LoadedModel,
    settings: Sequence[Profile],
    transcript: Rounds,
    *,
    file: str = "transcript",
    own: bool = False,
    advance: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Run the conversation under every setting, one round after the other.

    Args:
        settings: the first one is `full`, which the others are compared with.
        file: the transcript's name in messages.
        own: whether each setting continues with its own answers.
        advance: called whenever a setting has finished a round.
        stopped: called before each round; the comparison ends when it returns true.

    Raises SettingError for a setting that this model, or the system prompt, does not allow.
    """
    if transcript.system is not None:
        where = f"{file}, system turn"
        settings = [changed(one, where, system=transcript.system) for one in settings]
    named = zip(settings, setting_names(settings), strict=True)
    sessions = [
        ComparedSession(model, one, name, is_reference=not at)
        for at, (one, name) in enumerate(named)
    ]
    done = 0
    while done < len(transcript.rounds) and not stopped():
        _run_round(sessions, transcript.rounds[done], own, advance)
        done += 1
    notes = dict.fromkeys(chain(transcript.notes, *(compared.notes for compared in sessions)))
    if done < len(transcript.rounds):
        notes[f"stopped after {done} of {len(transcript.rounds)} user turns"] = None
    transcript = replace(transcript, rounds=transcript.rounds[:done])
    return Comparison(
        file, transcript, own, tuple(compared.result() for compared in sessions), tuple(notes)
    )


def _run_round(
    sessions: Sequence[ComparedSession], round: Round, own: bool, advance: Callable[[], None]
) -> None:
    """Run one round: `full` first, then the others from the largest budget down."""
    reference, reply = ReferenceRound(), round.reply
    for compared in sorted(sessions, key=lambda compared: compared.rank):
        if compared.is_open and own:
            compared.continue_with_answer(round.user, reference)
        elif compared.is_open:
            reply = compared.continue_with_reply(round.user, reply, reference)
        advance()
