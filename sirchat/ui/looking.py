"""What `/forgotten` and `/thinking` show: words that are gone, and the last reasoning."""

from __future__ import annotations

from rich.text import Text

from sirchat.chat.forgotten import forgotten_turns
from sirchat.chat.session import Session
from sirchat.chat.thinking import thought
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_forgotten
from sirchat.ui.text import displayable


def show_forgotten(session: Session, screen: Screen) -> None:
    """The turns that lost words, and how many others lost none."""
    turns = list(forgotten_turns(session))
    named = [turn for turn in turns if turn.words]
    if named:
        screen.page(draw_forgotten(named, screen.theme, screen.width))
        screen.note('/recall "words" brings words back, with what stood beside them')
    if others := len(turns) - len(named):
        went = "lost only what is held elsewhere, too, and punctuation"
        screen.note(f"{others:,} {'more ' * bool(named)}turn{'s' * (others > 1)} {went}")
    if not turns:
        screen.note("nothing is forgotten")


def show_thought(session: Session, screen: Screen) -> None:
    """The reasoning of the last reply that has some."""
    is_open = session.template.opens_reasoning
    replies = [one.text for one in session.turns if one.role == "assistant"]
    thoughts = (thought(reply, is_open=is_open) for reply in reversed(replies))
    if text := next(filter(None, thoughts), ""):
        screen.page(Text(displayable(text), screen.theme.quiet))
    else:
        screen.note("no reply has any reasoning")
