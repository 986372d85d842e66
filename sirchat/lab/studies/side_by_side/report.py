"""Shows a comparison as JSON, tables for the terminal, files with plots, and one HTML page.

The page is `page.html` with the JSON record in it; it needs no network and no other file. Its
script inserts all text as text nodes, and its content security policy forbids it to load anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.lab.pictures import picture
from sirchat.lab.studies import report
from sirchat.lab.studies.intervals import clustered_mean, share
from sirchat.lab.studies.report import Record, value_text
from sirchat.lab.studies.side_by_side.compare import Comparison, RoundResult, SettingResult, Token
from sirchat.paths import write_private
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
    table, whole = Table(box=None, pad_edge=False, caption_justify="left"), tables_of(found)[0]
    table.caption_style = "dim"
    table.caption = (
        "held: held tokens; kept: share of the turn held at the end; KL: mean divergence, in nats, "
        "of next-token predictions from full; same: first tokens of the answer, or share of "
        "answers, as under full; (..): 95 % interval; /s: tokens a second; MiB: of the cache"
    )
    for number, column in enumerate(whole.columns):
        is_number = number > 0  # a long name wraps, and leaves the numbers whole
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(column, justify=justify, no_wrap=is_number, overflow="fold")
    for name, *values in whole.rows:
        cells = (value_text(value, whole.digits) for value in values)
        narrow = (cell.replace(" (", "\n(").replace(" to ", "-") for cell in cells)
        table.add_row(*map(Text, (safe(str(name)), *narrow)))
    return table


def tables_of(found: Comparison) -> tuple[report.Table, report.Table]:
    """A table of all settings, and one of each round under each."""
    whole, rounds = list[tuple[report.Value, ...]](), list[tuple[report.Value, ...]]()
    for result in found.settings:
        same, of = result.same_answers
        equal = share([True] * same + [False] * (of - same))
        last = result.rounds[-1] if result.rounds else None
        held = (last.held, last.seen, last.cache_bytes / MIB) if last else (None, None, None)
        speeds = (round(result.read_speed), round(result.answer_speed))
        whole.append((result.name, *held[:2], mean_divergence(result), equal, *speeds, held[2]))
        for number, after in enumerate(result.rounds):
            row = (after.held, after.seen, result.kept(number), after.nats)
            rounds.append((result.name, number + 1, *row, _same(after)))
    columns = ("setting", "held", "of", "KL", "same", "read/s", "answer/s", "MiB")
    of_round = ("setting", "user turn", "held", "of", "kept", "KL", "same")
    return (
        report.Table("settings", columns, tuple(whole)),
        report.Table("rounds", of_round, tuple(rounds)),
    )


def mean_divergence(result: SettingResult) -> report.Estimate:
    """The divergence from `full` with its interval, for which whole rounds are drawn."""
    of = {turn: number for number, one in enumerate(result.rounds) for turn in one.turns}
    by_round: list[list[float]] = [[] for _ in result.rounds]
    for token in result.tokens:
        if token.nats is not None:
            by_round[of.get(token.turn, 0)].append(token.nats)  # 0: the system prompt
    return clustered_mean(by_round)


def write_files(found: Comparison, record: Record, folder: Path) -> None:
    """Write tables, the record and plots into a folder; UsageError, at last, without matplotlib."""
    tables = report.Report((found.file,), tables_of(found))
    report.write_report(tables, record, folder, "compare")
    for name, label in (("held", "held tokens"), ("nats", "KL divergence from full, nats")):

        def draw(axes: Any, name: str = name, label: str = label) -> None:
            for result in found.settings:
                values = np.array([getattr(one, name) for one in result.rounds], float)
                turns = range(1, len(values) + 1)
                axes.plot(turns, values, ".-", label=result.name, gid=result.name)
            axes.set(xlabel="user turn", ylabel=label)
            axes.legend(fontsize="small")

        image = picture(draw, "svg", f"{found.file}: {label}")
        write_private(folder / f"compare-{name}.svg", image, replaces=True)


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
