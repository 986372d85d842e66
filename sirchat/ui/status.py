"""Status lines below the prompt and after each turn, and progress bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from sirchat.models.progress import Progress
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable_line, pluralize, shorten
from sirchat.ui.theme import Theme

if TYPE_CHECKING:  # a bar is drawn before anything heavy is imported
    from sirchat.chat.events import Finish, TurnDone
    from sirchat.chat.session import Session
    from sirchat.config.profile import Profile
    from sirchat.recall.recall import Recall

_BAR_CELLS = 8  # cells of the toolbar's bar
_MIN_BAR_COLUMNS = 80  # least columns for that bar
_MAX_QUOTED_CHARS = 50  # characters of a passage in a line about recall
_FINISH_NOTES = {
    "length": "reply stopped at the length limit",
    "loop": "reply ended because it repeated itself",
    "interrupt": "interrupted",
    "control": "reply ended at a control token",
    "context": "model's context full",
}
_MAX_FILE_CHARS = 24  # characters of a file's name in a bar


def toolbar_text(session: Session, width: int) -> str:
    """The line below the prompt: model, policy, held tokens and budget, decay, last speed."""
    profile = session.profile
    *_, name = session.model.name.rstrip("/").rpartition("/")
    full = round(_BAR_CELLS * min(session.resident / session.budget, 1.0))
    gauge = "━" * full + "─" * (_BAR_CELLS - full) + " " if width >= _MIN_BAR_COLUMNS else ""
    parts = [
        displayable_line(name),
        displayable_line(profile.policy),
        gauge + f"{session.resident:,}/{session.budget:,} held",
        f"decay {profile.decay:g}",
    ]
    if session.speed:
        parts.append(f"{session.speed:,.0f} tok/s")
    return " · ".join(parts)


def describe_turn(turn: TurnDone, budget: int, recalled: str = "") -> str:
    """A line about one turn: tokens read, recalled and written, speed, evicted and held tokens."""
    return f"turn {turn.index}: {describe_round(None, turn, budget, recalled=recalled)}"


def describe_round(
    user: TurnDone | None,
    reply: TurnDone,
    budget: int,
    evicted_words: Sequence[str] = (),
    recalled: str = "",
) -> str:
    """A line about a user turn and its reply; `evicted_words` are words of the user."""
    tokens_in = reply.tokens_in + (user.tokens_in if user else 0)
    evicted = reply.evicted + (user.evicted if user else 0)
    parts = [f"{tokens_in:,} tokens read"]
    if reply.role == "assistant":
        parts.append(f"{reply.tokens_out:,} written")
    if reply.tokens_out:
        parts.append(f"{reply.tokens_out / max(reply.seconds_decode, 1e-9):,.0f} tok/s")
    if recalled:
        parts.append(recalled)
    if evicted:
        words = f" (your words: {', '.join(evicted_words)})" if evicted_words else ""
        parts.append(f"{evicted:,} evicted{words}")
    parts.append(f"cache holds {reply.resident:,}/{budget:,}")
    if reply.finish in _FINISH_NOTES:
        parts.append(_FINISH_NOTES[reply.finish])
    return ", ".join(parts)


def describe_recalled(recall: Recall, seen: int) -> str:
    """Such as `recalled 14 tokens: "I drive a red Volvo." and 2 more`; "" if nothing was.

    Quotes the best passage. If a question was answered from passages alone, it begins `answered
    from 3 passages, found in 3,900 tokens`.
    """
    turns, found = recall.turns, recall.found
    if not turns:
        return ""
    tokens = f"recalled {pluralize(sum(turn.tokens for turn in turns), 'token')}"
    if found is None:  # single tokens were found
        return f"{tokens} of {pluralize(len(turns), 'message')} (/recall shows them)"
    rest = len(found.passages if found.is_question else turns) - 1  # a turn may have several
    if found.is_question:
        tokens = f"answered from {pluralize(rest + 1, 'passage')}, found in {seen:,} tokens"
    rows, at = recall.passage_search.passages.rows, list(found.passages)
    best_first = rows["turn"][at].tolist()
    best = min(turns, key=lambda turn: [*best_first, turn.turn].index(turn.turn))
    size = int((rows["end"] - rows["start"])[at[:1]].sum())
    is_part = not rest and not found.is_question and best.tokens < size  # others were held
    more = f" and {rest:,} more" if rest else ""
    quoted = shorten(displayable_line(best.text), _MAX_QUOTED_CHARS)
    return f'{tokens}{" of" if is_part else ":"} "{quoted}"{more}'


def continue_hint(finish: Finish, profile: Profile) -> str:
    limit = f"/set max_new_tokens {2 * profile.max_new_tokens} allows longer replies"
    ways = {"length": limit, "loop": "/set stop_loops off lets replies repeat themselves"}
    return f"/continue goes on with the reply; {ways[finish]}" if finish in ways else ""


def draw_progress_bar(name: str, done: int, total: int, theme: Theme, width: int) -> Text:
    """Draw a progress bar for tokens in one row: `reading ████ 512 of 4,096 tokens`."""
    head, tail = f"{name} ", f" {done:,} of {total:,} tokens"
    room = max(4, min(40, width - 1 - len(head) - len(tail)))
    bar = "█" * (room * min(done, total) // max(1, total))
    text = Text(no_wrap=True, overflow="crop")
    return (
        text.append(head, theme.secondary)
        .append(bar.ljust(room), theme.filled)
        .append(tail, theme.secondary)
    )


@contextmanager
def loading_bar(screen: Screen, name: str) -> Iterator[Progress | None]:
    """Context manager: show a progress bar while the model `name` loads.

    Yields the function that moves the bar, or None if the output can show no bar.
    """
    if not screen.notes_console.is_terminal or screen.notes_console.is_dumb_terminal:
        yield None
        return
    columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn(bar_width=30))
    with bars.Progress(*columns, console=screen.notes_console, transient=True) as progress:
        task = progress.add_task(f"loading {displayable_line(name)}", total=None)

        def report(step: str, done: int, total: int | None) -> None:
            progress.update(task, description=displayable_line(step), completed=done, total=total)

        yield report


@contextmanager
def download_bar(console: Console) -> Iterator[Progress]:
    """Context manager: yields a function that shows a download as a bar, at a terminal."""
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=None),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(compact=True),
    )
    disable = not console.is_terminal or console.is_dumb_terminal
    with bars.Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("", total=None)

        def report(file: str, done: int, total: int | None) -> None:
            name = shorten(displayable_line(file), _MAX_FILE_CHARS)
            progress.update(task, description=name, completed=done, total=total)

        yield report
