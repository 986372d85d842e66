"""SirLLM's tasks: DailyDialog (section 4.2.1), Grocery Shopping (4.2.2, 5.1), games (4.2.3).

Every conversation starts with an empty cache. The questions come from SirLLM's released files, or
from the project's own question bank; each player of rock-paper-scissors prefers one move. The table
also has few-shot rows, as the paper's Table 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice
from typing import get_args

from sirchat.chat.session import Session
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError
from sirchat.lab.studies import generated, sirllm_files
from sirchat.lab.studies.choice import Question, Scoring, choose
from sirchat.lab.studies.intervals import share_over_seeds
from sirchat.lab.studies.paper_tables import published
from sirchat.lab.studies.reading import read
from sirchat.lab.studies.report import Estimate, Record, Report, Table, Value
from sirchat.lab.studies.study import Cell, Findings, Grid, refuse_unknown, without

_SOURCES = {
    "dailydialog": (generated.dailydialog, sirllm_files.dailydialog, sirllm_files.DIALOGUE_FILES),
    "grocery": (generated.grocery, sirllm_files.grocery, sirllm_files.GROCERY_FILES),
}

GAME = "rock-paper-scissors"
_COLUMNS = {
    sirllm_files.DIALOGUE: "right",
    sirllm_files.COMMONSENSE: "ACCc",
    sirllm_files.GROCERY: "ACCg",
}


@dataclass(frozen=True)
class MultipleChoice(Grid):
    """The multiple-choice study; `limit` is the number of conversations for each setting.

    Raises SettingError for an unknown scoring, or when the files can't be read.
    """

    task: str = "grocery"  # `dailydialog`, `grocery` or `rock-paper-scissors`
    scoring: Scoring = "paper"  # how an option is chosen; see `choice.Scoring`
    # numbers of shots (examples before each question); each number adds a few-shot row below the
    # rows of the settings
    shots: tuple[int, ...] = ()
    # a folder with the released files, or a file in their format; None for generated conversations
    data: str | None = None
    rounds: int = 300  # of a match of rock-paper-scissors, of which `limit` are against each player

    extends = ("settings", "limit", "repeats", "shots")

    def __post_init__(self) -> None:
        refuse_unknown("scoring", (self.scoring,), get_args(Scoring))
        if not self.conversations:
            raise SettingError(f"data {self.data!r} has no conversations")

    def parameters(self) -> Record:
        found = super().parameters()
        return found if self.task == GAME else without(found, ("rounds",))

    @property
    def name(self) -> str:
        """The study's name; the names of its result files begin with it."""
        return self.task

    @cached_property
    def conversations(self) -> list[list[Question]]:
        """The first `limit` conversations of the task, each a list of questions."""
        if self.task == GAME:
            return self._matches()
        generate, load, files = _SOURCES[self.task]
        if self.data is not None:
            found = load(sirllm_files.require_file(self.data, files))[: self.limit]
        else:
            found = [generate(self.seed, number) for number in range(self.limit)]
        if self.scoring == "text":
            found = [[question.unlisted for question in one] for one in found]
        return found

    def _matches(self) -> list[list[Question]]:
        if self.data is None:
            drawn = partial(generated.moves, self.seed, rounds=self.rounds)
            return [
                generated.match(player, drawn(player, number))
                for number in range(self.limit)
                for player in sirllm_files.PLAYERS
            ]
        players = sirllm_files.moves_of_players(self.data)
        return [
            generated.match(player, list(islice(cycle(moves), start, start + self.rounds)))
            for start in range(0, self.limit * self.rounds, self.rounds)
            for player, moves in players.items()
        ]

    def cells(self) -> list[Cell]:
        """The rows of the table: one for each setting, then one for each number of shots."""
        full = changed_profile(self.settings[0], self.name, policy="full")
        return super().cells() + [
            Cell(f"{n}-shot", full, (full.seed,), shots=n) for n in self.shots
        ]

    def units(self) -> list[str]:
        """The names of the conversations to run: their numbers as strings, from `0`."""
        return [str(number) for number in range(len(self.conversations))]

    def run_unit(self, session: Session, unit: str, cell: Cell) -> Record:
        """Run conversation `unit`; the record says which of the chosen options were right."""
        questions = self.conversations[int(unit)]
        found: dict[str, list[bool]] = {}
        chosen: int | None = None
        for number, one in enumerate(questions):
            if chosen is not None and (before := questions[number - 1]).then:
                one = replace(one, text=before.then[chosen])
            if cell.shots and len(one.replies) > 1:
                session.reset()
                for shot in questions[max(0, number - cell.shots) : number]:
                    read(session, shot.text, shot.answer)
            elif cell.shots:
                continue
            chosen = choose(session, one, self.scoring)
            if len(one.replies) > 1:
                found.setdefault(one.group, []).append(chosen == one.right)
        return {"right": found, "tokens": session.seen}

    def report(self, found: Mapping[str, Record]) -> Report:
        """A report on the share of right options by setting, with the paper's tables."""
        findings = self.findings(found)
        groups = list(dict.fromkeys(group for one in found.values() for group in one["right"]))
        if self.task == GAME:
            groups.append("all")
        columns = ("setting", *(_COLUMNS.get(group, group) for group in groups))
        rows: list[tuple[Value, ...]] = [
            (one.name, *(_right(one, group) for group in groups)) for one in findings
        ]
        whole = [one for cell, one in zip(self.cells(), findings, strict=True) if not cell.shots]
        tokens = [each["tokens"] for one in whole for each in one.records] or [0]
        header = (
            f"seed {self.seed}",
            f"{len(self.conversations)} conversations of {min(tokens):,} to {max(tokens):,} tokens",
            f"scoring {self.scoring}",
            f"data {self.data}" if self.data else "generated data",
        )
        few_shots = [published("few-shot")] if self.shots else []
        tables = Table(self.name, columns, tuple(rows)), published(self.task), *few_shots
        return Report(header, tables, self.parameters())


def _right(findings: Findings, group: str) -> Estimate:
    answers = [
        [
            [right for of, each in one["right"].items() if group in (of, "all") for right in each]
            for one in records
        ]
        for records in findings.by_seed
    ]
    return share_over_seeds(answers)
