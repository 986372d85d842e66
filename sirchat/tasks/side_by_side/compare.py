"""One transcript under several settings, side by side, round by round.

Every setting answers every user turn, takes turn and answer back, and reads the turn again with
the reply that the conversation goes on with: the transcript's, or where it has none, the answer of
`full`. So all settings read the same ids, and what they foretell can be compared token by token.
With `own`, each goes on with its own answers; then ids differ, and only answers are compared.

`full` is the measure of all, as long as the model's context lasts. After that there is no
agreement to tell, and the largest budget gives the replies that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from sirchat.config.profile import Profile, changed
from sirchat.models.model import LoadedModel
from sirchat.tasks.report import setting_names
from sirchat.tasks.side_by_side.compared import Comparison
from sirchat.tasks.side_by_side.compared_session import ComparedSession, ReferenceRound
from sirchat.tasks.side_by_side.rounds import Round, Rounds


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
    """Hold the conversation under every setting, all of them in step.

    Args:
        settings: the first one is `full`, which the others are compared with.
        file: what messages call the transcript.
        own: go on with each setting's own answers.
        advance: called whenever a setting is through with a round.
        stopped: asked before each round; once it says so, the transcript ends there.

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
    held = 0
    while held < len(transcript.rounds) and not stopped():
        _hold(sessions, transcript.rounds[held], own, advance)
        held += 1
    notes = dict.fromkeys(chain(transcript.notes, *(compared.notes for compared in sessions)))
    if held < len(transcript.rounds):
        notes[f"stopped after {held} of {len(transcript.rounds)} user turns"] = None
    transcript = replace(transcript, rounds=transcript.rounds[:held])
    return Comparison(
        file, transcript, own, tuple(compared.result() for compared in sessions), tuple(notes)
    )


def _hold(
    sessions: Sequence[ComparedSession], round: Round, own: bool, advance: Callable[[], None]
) -> None:
    """One round: `full` first, then the others from the largest budget down."""
    full, reply = ReferenceRound(), round.reply
    for compared in sorted(sessions, key=lambda compared: compared.rank):
        if compared.is_open and own:
            compared.answer_and_continue(round.user, full)
        elif compared.is_open:
            reply = compared.follow(round.user, reply, full)
        advance()
