"""A reply as `sirchat ask` prints it: its text, and notes about what is left out."""

from __future__ import annotations

from sirchat.chat.events import Delta, Event, Notice, TurnDone
from sirchat.chat.session import Session
from sirchat.chat.why import supporting_sentence
from sirchat.text.detokenizer import QUESTION_MARKS
from sirchat.text.tool_calls import CALL_CLOSE
from sirchat.text.transcript import THINK_CLOSE, THINK_OPEN


class TaggedText:
    """Joins the parts of a reply to one text, with its reasoning between the tags `<think>`."""

    def __init__(self) -> None:
        self._thinks = False

    def push(self, new: Delta) -> str:
        """The text of `new`, after a tag where reasoning begins or ends."""
        if not new.text or self._thinks == (new.part == "thinking"):
            return new.text
        self._thinks = not self._thinks
        return (THINK_OPEN if self._thinks else THINK_CLOSE) + new.text

    def end(self) -> str:
        """End the text: returns the mark `</think>` if reasoning is open, else an empty text."""
        is_open, self._thinks = self._thinks, False
        return THINK_CLOSE.rstrip() if is_open else ""


class PlainReply:
    """Splits the events of a reply into text and notes, with or without its reasoning.

    The first `source` characters of `message` are a text that a question is about. After a complete
    answer, `quote` is the sentence of that text that fits the answer best, or "". A note warns if
    no sentence of it has any of the answer's words.
    """

    def __init__(self, session: Session, message: str = "", source: int = 0) -> None:
        self._session = session
        self._source, self._question, self.quote = message[:source], message[source:], ""
        self._text, self._leaves_out = TaggedText(), session.profile.thinking != "show"
        self._has_thought = False

    def push(self, event: Event) -> tuple[str, list[str]]:
        """The text and the notes to print for the next event."""
        text, notes = "", list[str]()
        match event:
            case Delta(part="thinking") if self._leaves_out:
                self._has_thought = True
            case Delta():
                text = self._text.push(event)
            case TurnDone(role="user" | "tool"):
                notes = [describe_excess(event, self._session, "--budget")]
            case TurnDone(role="assistant"):
                text = self._text.end()
                if not calls_tools(event, self._session):
                    notes.extend(self._compare(event.text))
                if self._has_thought and self._session.profile.thinking == "fold":
                    notes.append("the reasoning was left out; --thinking show prints it")
                if event.finish == "length":
                    limit = "--max-new-tokens raises the limit"
                    stopped = "the reply was stopped at the length limit, perhaps before its end"
                    notes.append(f"{stopped}; {limit}")
                elif event.finish == "loop":
                    limit = "--no-stop-loops lets it"
                    notes.append(f"the reply was ended because it repeated itself; {limit}")
            case Notice():
                notes = [event.text]
        return text, [note for note in notes if note]

    def _compare(self, answer: str) -> list[str]:
        """Quote the sentence that fits a complete answer, or return a note that none does."""
        sentence, is_said = supporting_sentence(answer, self._question, self._source)
        asks = bool(self._source) and any(mark in self._question for mark in QUESTION_MARKS)
        if is_said or not asks:
            self.quote = f'the text says: "{sentence}"' if sentence else ""
            return []
        self.quote = f'closest in the text: "{sentence}"' if sentence else ""
        return ["the text may not say so: none of the answer's own words is in its statements"]


def calls_tools(turn: TurnDone, session: Session) -> bool:
    """Whether a reply has calls of tools, so that another reply follows it."""
    return bool(session.toolbox.tools) and turn.text.endswith(CALL_CLOSE)


def describe_excess(turn: TurnDone, session: Session, option: str) -> str:
    """A line with the number of held tokens of a message, and the budget that would hold all.

    `option` is how the user sets the budget. "" if all tokens are held, or would fit the budget.
    """
    division = session.engine.choice.divide_budget()
    if turn.role not in ("user", "tool") or turn.tokens_in <= division.evictable:
        return ""
    held = session.ledger.held_of_turn(turn.index)
    if held == turn.tokens_in:
        return ""
    enough = session.engine.choice.smallest_budget_for(turn.tokens_in)
    if enough is None:
        rest = f"the model's context, {session.model.context_length:,} tokens, is too short for all"
    else:
        rest = f"{option} {enough} would hold all"
    return f"read {turn.tokens_in:,} tokens, {held:,} held; {rest}"


def raise_budget_for(session: Session, text: str) -> None:
    """Raise the budget, if necessary, to hold tools, the message and its reply.

    The new budget is at most the model's context, and its KV cache takes at most half of the free
    memory.
    """
    tools_json = session.toolbox.tools_json
    template = session.template_with(tools_json) if tools_json else session.template
    head, turn = template.opening(text, session.profile.system)
    pins = len(head.ids) if head is not None else 0
    needed = pins + len(turn.ids) + session.profile.max_new_tokens
    wanted = max(needed, 2 * pins)  # pins take at most half of a budget
    if wanted <= session.engine.choice.divide_budget().evictable:
        return
    most = session.model.affordable_rows()
    budget = max(
        session.budget, min(session.engine.choice.smallest_budget_for(wanted) or most, most)
    )
    # If all fits, nothing will be evicted, pinned or not.
    pin_system = session.profile.pin_system and not needed <= budget < wanted
    session.switch("ask", budget=budget, pin_system=pin_system)
