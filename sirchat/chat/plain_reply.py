"""A reply as `sirchat ask` prints it: text on its own, and notes about what is left out."""

from __future__ import annotations

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.reasoning import FinalAnswer
from sirchat.chat.session import Session
from sirchat.models.shape import free_memory


class PlainReply:
    """Splits a reply's events into text and notes; reasoning is as the setting `thinking` says."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answer: FinalAnswer | None = None  # None: all of the reply is text
        if session.profile.thinking != "show":
            self._answer = FinalAnswer(is_open=session.template.opens_reasoning)

    def push(self, event: Event) -> tuple[str, list[str]]:
        """The text and the notes to print for the next event."""
        text, notes, answer = "", list[str](), self._answer
        match event:
            case Delta():
                text = answer.push(event.text) if answer else event.text
            case TurnDone(role="user"):
                notes = [describe_excess(event, self._session, "--budget")]
            case TurnDone(role="assistant"):
                text = answer.end() if answer else ""
                if answer and answer.has_thought and self._session.profile.thinking == "fold":
                    notes.append("the reasoning was left out; --thinking show prints it")
                if event.finish == "length":
                    limit = "--max-new-tokens raises the limit"
                    notes.append(f"the reply was cut at the length limit; {limit}")
            case Notice():
                notes = [event.text]
        return text, [note for note in notes if note]


def describe_excess(turn: TurnDone, session: Session, option: str) -> str:
    """A line that says how many tokens of a user turn are held, and which budget would hold all.

    `option` is how the user sets the budget. "" if all is held, or if the budget has room for it.
    """
    division = session.divide_budget()
    if turn.role != "user" or turn.tokens_in <= division.evictable:
        return ""
    held = session.ledger.held_of_turn(turn.index)
    if held == turn.tokens_in:
        return ""
    enough = session.budget_for(turn.tokens_in)
    if enough is None:
        rest = f"the model's context, {session.model.context_length:,} tokens, is too short for all"
    else:
        rest = f"{option} {enough} would hold all"
    kept = f" (recall keeps {division.reserve:,} of the budget free)" if division.reserve else ""
    return f"read {turn.tokens_in:,} tokens, {held:,} held{kept}; {rest}"


def raise_budget_for(session: Session, text: str) -> None:
    """Raise the budget, if need be, so that the cache can hold the message `text` and its reply.

    It is at most the model's context, and the KV cache takes at most half of the free memory.
    """
    _, turn = session.template.opening(text, session.profile.system)
    needed = len(turn.ids) + session.profile.max_new_tokens
    if needed <= session.divide_budget().evictable:
        return
    budget = session.budget_for(needed) or session.model.context_length
    if (free := free_memory()) is not None:
        budget = min(budget, free // 2 // session.model.row_bytes)
    if budget > session.budget:
        session.switch("ask", budget=budget)
