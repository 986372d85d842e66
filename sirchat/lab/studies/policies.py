"""Compares policies in four studies: facts, SirLLM's shopping lists and games, and an ablation.

The study `facts` runs with every policy and every budget, and also measures the perplexity of the
text after the facts. The other studies run with one budget only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from sirchat.chat.settings import build_policy
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.errors import SettingError
from sirchat.lab.studies.facts import Facts
from sirchat.lab.studies.multiple_choice import MultipleChoice
from sirchat.lab.studies.report import Record, Report
from sirchat.lab.studies.rock_paper_scissors import PLAYERS, RockPaperScissors
from sirchat.lab.studies.study import Grid, RunUnit, Study, fields_of, refuse_unknown, without
from sirchat.models.model import LoadedModel

PARTS = ("ablation", "grocery", "rock-paper-scissors", "facts")

_ROUNDS = 60  # rounds of each game

_EXTENDS = ("settings", "limit", "repeats", "parts", "facts", "at")


@dataclass(frozen=True)
class Policies(Study):
    """The study that compares policies, in several parts; each part is a study of its own.

    Raises SettingError for an unknown part, for an `at` that is not a budget of the settings, and
    any error that the parts raise.
    """

    settings: tuple[Profile, ...]  # profiles, one for each row of a table
    # number of questions for each table cell, and number of rounds in all games together
    limit: int
    seed: int = 0  # random seed of conversations and moves
    repeats: int = 1  # number of seeds that a setting is run with, if its policy chooses at random
    parts: tuple[str, ...] = PARTS  # which of `PARTS` to run
    facts: tuple[int, ...] = (1, 4, 8)  # numbers of facts told in a conversation
    between: tuple[int, ...] = (20, 60)  # numbers of rounds between the facts and the questions
    at: int = 128  # budget, in tokens, of all parts except the part `facts`
    # a folder with SirLLM's released files, or one file, if only one part needs a file; None for
    # generated shopping lists and random moves
    data: str | None = None

    def __post_init__(self) -> None:
        refuse_unknown("part", self.parts, PARTS)
        budgets = sorted({setting.budget for setting in self.settings})
        if self.at not in budgets and set(self.parts) != {"facts"}:
            raise SettingError(
                f"--at {self.at} is not one of the budgets {', '.join(map(str, budgets))}",
                hint="add it to --budgets, or choose --parts facts, which does not use --at",
            )
        _ = self.studies

    name = "policies"

    @cached_property
    def studies(self) -> dict[str, Grid]:
        """A dict from the name of each part to the study that the part runs.

        Parts without settings, such as an ablation of policies without switches, are left out.
        """
        common = (self.limit, self.seed, self.repeats)
        at_one_budget = tuple(setting for setting in self.settings if setting.budget == self.at)
        ablated = tuple(less for setting in at_one_budget for less in without_each(setting))
        matches = -(-self.limit // (_ROUNDS * len(PLAYERS)))
        studies: dict[str, Callable[[], Grid]] = {
            "facts": lambda: Facts(self.settings, *common, self.facts, self.between),
            "ablation": lambda: Facts(ablated, *common, (4,), self.between),
            "grocery": lambda: MultipleChoice(
                at_one_budget, *common, "grocery", data=self.data, answered=True
            ),
            "rock-paper-scissors": lambda: RockPaperScissors(
                at_one_budget, matches, self.seed, self.repeats, _ROUNDS, data=self.data
            ),
        }
        asked = {part: studies[part]() for part in self.parts}
        return {part: one for part, one in asked.items() if one.settings}

    def parameters(self) -> Record:
        return fields_of(self) | {
            "settings": [one.model_dump(mode="json") for one in self.settings]
        }

    def shared(self) -> Record:
        """The parameters that must be equal in all runs that write to the same results log.

        They are all fields except those that only decide which units (independent runs) are run.
        """
        return without(self.parameters(), _EXTENDS)

    def log_key(self, key: str) -> str:
        """The name that the unit (independent run) with this key has in the results log.

        It is `PART: NAME`, where NAME is the unit's name in the study of its part.
        """
        part, _, own = key.partition(": ")
        return f"{part}: {self.studies[part].log_key(own)}"

    def keys(self) -> list[str]:
        """The keys of all units (independent runs), as `PART: KEY`.

        PART is the name of a part, and KEY is the unit's key in the study of that part.
        """
        keys_of = {part: study.keys() for part, study in self.studies.items()}
        return [f"{part}: {key}" for part, keys in keys_of.items() for key in keys]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that runs a unit (independent run), given its key.

        The function returns the unit's record.
        """
        workers = {part: study.worker(model) for part, study in self.studies.items()}

        def work(key: str) -> Record:
            part, _, own = key.partition(": ")
            return workers[part](own)

        return work

    def report(self, found: Mapping[str, Record]) -> Report:
        """A report with the tables of all parts of the study."""
        tables, header = (
            [],
            [f"seed {self.seed}", f"at least {self.limit} questions for each table cell"],
        )
        for part, study in self.studies.items():
            keys = study.keys()
            report = study.report({key: found[f"{part}: {key}"] for key in keys})
            tables += [replace(table, name=f"{part}: {table.name}") for table in report.tables]
        return Report(tuple(header), tuple(tables), details=self.parameters())


def without_each(setting: Profile) -> Sequence[Profile]:
    """Copies of a setting; in each copy, another switch of the setting's policy is turned off.

    A switch is a boolean option of the policy; there is a copy for each switch that is on.
    """
    policy = build_policy(setting)
    switches = [field.name for field in fields(policy) if getattr(policy, field.name) is True]
    return [
        changed_profile(setting, "ablation", policy_options=setting.policy_options | {name: False})
        for name in switches
    ]
