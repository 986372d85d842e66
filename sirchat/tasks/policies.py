"""Policies side by side, in one study: facts, SirLLM's shopping lists and games, and what follows.

Each part is a study of its own. Facts are told under every setting, and tell the perplexity of what
follows, too; lists and games, and what a policy is without one of its switches, under one budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from sirchat.chat.settings import build_policy
from sirchat.config.profile import Profile, changed
from sirchat.errors import SettingError
from sirchat.models.model import LoadedModel
from sirchat.tasks.facts import Facts
from sirchat.tasks.multiple_choice import MultipleChoice
from sirchat.tasks.report import Report
from sirchat.tasks.results_log import Record
from sirchat.tasks.rock_paper_scissors import PLAYERS, RockPaperScissors
from sirchat.tasks.study import Grid, RunUnit, fields_of, refuse_unknown

PARTS = ("ablation", "grocery", "rock-paper-scissors", "facts")

_ROUNDS = 60  # of a game


@dataclass(frozen=True)
class Policies:
    """The study; `limit` is questions for each cell.

    Attributes:
        settings: profiles, one for each row.
        limit: questions for each cell, or rounds of all games together.
        seed, repeats: as in every grid.
        parts: which of `PARTS`.
        facts, between: as in `facts`.
        at: budget of lists, games and ablation.
        data: a folder with SirLLM's released files; none for made lists and drawn moves.

    Raises SettingError for an unknown part, and as the parts do.
    """

    settings: tuple[Profile, ...]
    limit: int
    seed: int = 0
    repeats: int = 1
    parts: tuple[str, ...] = PARTS
    facts: tuple[int, ...] = (1, 4, 8)
    between: tuple[int, ...] = (20, 60)
    at: int = 128
    data: str | None = None

    def __post_init__(self) -> None:
        refuse_unknown("part", self.parts, PARTS)
        budgets = sorted({setting.budget for setting in self.settings})
        if self.at not in budgets and set(self.parts) != {"facts"}:
            raise SettingError(
                f"--at {self.at} is none of the budgets {', '.join(map(str, budgets))}",
                hint="it is the budget of ablation, lists and games; or ask for --parts facts",
            )
        _ = self.studies

    @property
    def name(self) -> str:
        """What it is called."""
        return "policies"

    @cached_property
    def studies(self) -> dict[str, Grid]:
        """The parts, by name."""
        asked = (self.limit, self.seed, self.repeats)
        one = tuple(setting for setting in self.settings if setting.budget == self.at)
        lessened = tuple(less for setting in one for less in without_each(setting))
        matches = -(-self.limit // (_ROUNDS * len(PLAYERS)))
        made: dict[str, Grid] = {
            "facts": Facts(self.settings, *asked, self.facts, self.between),
            "ablation": Facts(lessened, *asked, (4,), self.between),
            "grocery": MultipleChoice(one, *asked, "grocery", data=self.data, answered=True),
            "rock-paper-scissors": RockPaperScissors(
                one, matches, self.seed, self.repeats, _ROUNDS, data=self.data
            ),
        }
        return {part: made[part] for part in self.parts if made[part].settings}

    def parameters(self) -> Record:
        """All that the findings depend on: every field."""
        return fields_of(self) | {
            "settings": [one.model_dump(mode="json") for one in self.settings]
        }

    def keys(self) -> list[str]:
        """The units of all parts."""
        every = {part: study.keys() for part, study in self.studies.items()}
        return [f"{part}: {key}" for part, keys in every.items() for key in keys]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Does a unit of a part."""
        workers = {part: study.worker(model) for part, study in self.studies.items()}

        def work(key: str) -> Record:
            part, _, own = key.partition(": ")
            return workers[part](own)

        return work

    def report(self, found: Mapping[str, Record]) -> Report:
        """The tables of all parts."""
        tables, facts = [], [f"seed {self.seed}", f"{self.limit} questions a cell or more"]
        for part, study in self.studies.items():
            keys = study.keys()
            made = study.report({key: found[f"{part}: {key}"] for key in keys})
            tables += [replace(table, name=f"{part}: {table.name}") for table in made.tables]
        return Report(tuple(facts), tuple(tables), details=self.parameters())


def without_each(setting: Profile) -> Sequence[Profile]:
    """The setting without each of the switches that its policy has on; none if it has none."""
    policy = build_policy(setting)
    switches = [field.name for field in fields(policy) if getattr(policy, field.name) is True]
    return [
        changed(setting, "ablation", policy_options=setting.policy_options | {name: False})
        for name in switches
    ]
