"""Replaying a transcript from a file or from standard input."""

import sys
from typing import Any

from sirchat.cli.launch import open_session, profile_of
from sirchat.errors import TranscriptError


def replay_transcript(
    name: str,
    flags: dict[str, Any],
    *,
    feed: bool,
    format: str,
    json: bool,
    json_tokens: bool,
    trust: bool,
    quiet: bool,
) -> None:
    """Replay a file, or standard input where `name` is "-" or "standard input".

    Raises TranscriptError for a file that can't be read, before the model is loaded.
    """
    from sirchat.text.transcript import one_conversation, read_turns

    profile = profile_of(flags)
    from_stdin = name in ("-", "standard input")
    try:
        stream = sys.stdin.buffer if from_stdin else open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise TranscriptError(f"{name} cannot be read: {error.strerror}") from error
    with stream:
        shown = "standard input" if from_stdin else name
        turns = one_conversation(read_turns(stream, shown, format), shown)
        from sirchat.ui.loading import loading_bar
        from sirchat.ui.replay import ReplayOptions, replay
        from sirchat.ui.screen import Screen

        screen = Screen(theme=profile.theme, is_quiet=quiet)
        with loading_bar(screen, profile.model) as report:
            session = open_session(profile, trust, report, rows_in_events=json_tokens)
        options = ReplayOptions(feed=feed, json=json or json_tokens, name=name)
        replay(session, turns, screen, options)
