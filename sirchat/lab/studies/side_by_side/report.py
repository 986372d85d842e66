"""Shows a comparison as JSON, as tables for the terminal, and as one self-contained HTML page.

The page is `page.html` with the JSON record in it; it needs no network and no other file. Its
script inserts all text as text nodes, and its content security policy forbids it to load anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.lab.studies.report import Record
from sirchat.lab.studies.side_by_side.compare import Comparison, RoundResult, SettingResult, Token
from sirchat.ui.text import shorten

# A function that removes from a text the control sequences that must not reach a terminal
Safe = Callable[[str], str]

MIB = 2**20
_BEGINNING = 120  # characters of a text, which are some three lines of a table


def record_of(found: Comparison, head: Record) -> Record:
    """A comparison as one JSON object, which begins with the entries of `head`."""
    return {
        **head,
        "file": found.file,
        "goes_on_with": "own answers" if found.own else "transcript",
        "notes": list(found.notes),
        "system": found.transcript.system,
        "turns": [{"user": one.user, "reply": one.reply} for one in found.transcript.rounds],
        "settings": [_setting_record(one) for one in found.settings],
    }


def draw(found: Comparison, safe: Safe, *, is_whole: bool = False) -> Iterator[RenderableType]:
    """Yield the printed parts of a comparison: a table, then user turns with their answers.

    Unless `is_whole`, only the beginning of each text is shown.
    """

    def shown(text: str) -> str:
        return safe(text if is_whole else shorten(text, _BEGINNING))

    yield _summary(found, safe)
    cut = f"texts are cut to {_BEGINNING} characters; --whole shows all of them\n"
    yield Text("" if is_whole else cut, style="dim")
    for number, round in enumerate(found.transcript.rounds):
        yield Text(f"{number + 1}. USER: {shown(round.user)}", style="bold")
        yield _answers(found, number, safe, shown)
        if round.reply is not None and not found.own:
            yield Text(f"ASSISTANT, in the transcript: {shown(round.reply)}", style="dim")
        yield ""


def _answers(found: Comparison, number: int, safe: Safe, shown: Safe) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "held", "kept", "KL", "same"):
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
    table.add_column("answer", overflow="fold")
    for result in found.settings:
        if number < len(result.rounds):
            after = result.rounds[number]
            cells = (f"{after.held:,}", _percent(result.kept(number)), _nats(after.nats))
            row = (safe(result.name), *cells, _same(after), shown(after.answer.text))
            table.add_row(*map(Text, row))
    return table


def _summary(found: Comparison, safe: Safe) -> Table:
    columns = ("held", "of", "KL", "same", "read tok/s", "answer tok/s", "cache MiB")
    table = Table(box=None, pad_edge=False, caption_justify="left", caption_style="dim")
    table.caption = (
        "held: number of held tokens; kept: share of the turn that is held at the end; KL: mean "
        "divergence, in nats, of next-token predictions from those under full; same: number of "
        "first tokens of the answer, or of answers, that are the same as under full"
    )
    table.add_column("setting", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for result in found.settings:
        same, of = result.same_answers
        last = result.rounds[-1] if result.rounds else None
        row = (
            safe(result.name),
            f"{last.held:,}" if last else "",
            f"{last.seen:,}" if last else "",
            _nats(result.nats),
            f"{same}/{of}",
            f"{result.read_speed:,.0f}",
            f"{result.answer_speed:,.0f}",
            f"{last.cache_bytes / MIB:,.2f}" if last else "",
        )
        table.add_row(*map(Text, row))
    return table


def _same(after: RoundResult) -> str:
    if after.same is None:
        return ""
    return "all" if after.same else str(after.differs_at)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _nats(nats: float | None) -> str:
    return "" if nats is None else f"{nats:.3f}"


def _setting_record(result: SettingResult) -> Record:
    same, of = result.same_answers
    return {
        "name": result.name,
        "setting": result.setting.model_dump(mode="json"),
        "kl_nats": result.nats,
        "same_answers": same,
        "compared_answers": of,
        "read_tokens_per_second": result.read_speed,
        "answer_tokens_per_second": result.answer_speed,
        "turns": [_round_record(result, number) for number in range(len(result.rounds))],
        "tokens": _token_columns(result.tokens),
    }


def _round_record(result: SettingResult, number: int) -> Record:
    after = result.rounds[number]
    answer = after.answer
    return {
        "answer": answer.text,
        "answer_ids": answer.ids,
        "answer_tokens": answer.tokens,
        "finish": answer.finish,
        "reply": after.reply,
        "same": after.same,
        "differs_at": after.differs_at,
        "kl_nats": after.nats,
        "held": after.held,
        "seen": after.seen,
        "kept_at_end": result.kept(number),
        "own_turns": after.turns,
        "held_of_turns": [one.held for one in after.shares],
        "tokens_of_turns": [one.tokens for one in after.shares],
        "cache_bytes": after.cache_bytes,
        "tokens_in": answer.tokens_in,
        "seconds_in": answer.seconds_in,
        "seconds_out": answer.seconds_out,
    }


def _token_columns(tokens: tuple[Token, ...]) -> Record:
    """The values of all tokens that a setting read, as a record with one list for each property."""
    return {
        "id": [one.id for one in tokens],
        "text": [one.text for one in tokens],
        "turn": [one.turn for one in tokens],
        "role": [one.role for one in tokens],
        "surprisal_nats": [_rounded(one.surprisal) for one in tokens],
        "kl_nats": [_rounded(one.nats) for one in tokens],
        "held": [[at for span in one.held for at in span] for one in tokens],
    }


def _rounded(value: float | None) -> Any:
    """The value rounded to five significant digits; None stays None."""
    return None if value is None else float(f"{value:.5g}")


_PLACEHOLDER = "{{record}}"


def page_of(record: Record) -> str:
    """The HTML page that shows a record; the record is written into the page as pure ASCII."""
    template = files("sirchat.lab.studies.side_by_side").joinpath("page.html").read_text("utf-8")
    # Only "<" could end the script element, or begin a comment in it.
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition(_PLACEHOLDER)
    return before + data + after
