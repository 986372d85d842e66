"""`sirchat eval focus`: whether a model answers better from what recall finds than from all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue
from sirchat.lab.studies.intervals import paired_interval
from sirchat.lab.studies.report import Estimate
from sirchat.lab.studies.run import run_units
from sirchat.models.model import LoadedModel
from sirchat.recall.recall import MAX_FOCUS_TOKENS

_ASKED = 40  # questions of each type by which it is decided whether focus wins
_MOST_COST = 0.02  # nats a token that it may cost ordinary replies


class Focus(FactsInDialogue):
    """The study of the setting `focus`, which is compared, with one retriever."""

    without_effect = (*FactsInDialogue.without_effect, "recall", "focus")


def focus_study(settings: tuple[Profile, ...], data: str, **options: Any) -> Focus:
    """Whether a model answers better from what recall finds (setting `focus`) than from all."""
    both = tuple(
        changed_profile(one, "eval focus", recall="meaning", focus=focus)
        for one in settings
        for focus in ("off", MAX_FOCUS_TOKENS)
    )
    fixed: dict[str, Any] = {"facts": 10, "lengths": (3500,), "reply_tokens": 24}
    return Focus(both, data=data, questions=("shared", "paraphrase"), **fixed, **options)


@dataclass(frozen=True)
class FocusTest:
    """What the setting `focus` changes, paired: positive numbers are more with it."""

    right: Estimate  # share of questions with the right reply
    nats: Estimate  # nats a token of ordinary replies

    @property
    def wins(self) -> bool:
        """Whether replies are better with it, and ordinary ones as good."""
        return self.right.low > 0 and self.nats.value <= _MOST_COST


def measure_focus(model: LoadedModel, data: str) -> FocusTest:
    """Measure what `focus` changes for a model with an encoder, in the talk of a file."""
    profile = Profile(policy="salience", budget=min(4096, model.context_length))
    study = replace(focus_study((profile,), data, limit=_ASKED), reply_tokens=0)
    off, on = study.findings(run_units(study, model))
    right = [
        [[answer["right"] for answer in record["answers"]] for record in one.records]
        for one in (on, off)
    ]
    nats = [[[record["nats"]] for record in one.records] for one in (on, off)]
    return FocusTest(paired_interval(*right), paired_interval(*nats))
