"""The tables of LoCoMo: answers, paired differences, categories, evidence brought back.

A value belongs to a question of a conversation; of several seeds it is the mean. The intervals are
those of `bootstrap`: conversations are drawn again, then questions of each. Adversarial questions
have no right answer and count only in their own column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from sirchat.config.profile import Profile
from sirchat.lab.studies.bootstrap import hierarchical_mean
from sirchat.lab.studies.long_talk import ADVERSARIAL, CATEGORIES
from sirchat.lab.studies.report import Estimate, Table, Value
from sirchat.lab.studies.results_log import Record
from sirchat.lab.studies.study import Findings

Values = Mapping[tuple[int, int], float]
"""A value for each question: by the conversation's place and the question's number."""

Measured = Callable[[Record], float | None]
"""What counts of a question's record; None if it has no such value."""


def tables_of(
    findings: Sequence[Findings],
    settings: Sequence[Profile],
    measures: Sequence[str],
    counts: Sequence[int],
) -> tuple[Table, ...]:
    """The tables; `findings` and `settings` [n] belong together.

    Without replies there is nothing about F1, with a single row no table of differences.
    """
    measured = {
        "token F1": f1,
        "nats a token": nats_a_token,
        "nats an answer": nats,
        "evidence held": held,
        "says not mentioned": abstains,
    }
    columns = {
        name: of
        for name, of in measured.items()
        if of not in (f1, abstains) or any(per_question(one, of) for one in findings)
    }
    answers: tuple[tuple[Value, ...], ...] = tuple(
        (one.name, *(_mean(per_question(one, of)) for of in columns.values())) for one in findings
    )
    return (
        Table("Answers", ("setting", *columns), answers),
        *(
            _differences(f"{name}, less that of another row", findings, settings, columns[name])
            for name in ("nats a token", "token F1")
            if name in columns and len(findings) > 1
        ),
        *(
            _by_category(f"{name} by category", findings, columns[name])
            for name in ("nats a token", "token F1", "evidence held")
            if name in columns
        ),
        *((_back(findings, measures, counts),) if measures else ()),
    )


def nats(question: Record) -> float | None:
    """Surprisal of the right answer, in nats."""
    value: float | None = question["nats"]
    return value


def nats_a_token(question: Record) -> float | None:
    """The same for one of its tokens, on average."""
    return None if question["nats"] is None else question["nats"] / question["answer_tokens"]


def f1(question: Record) -> float | None:
    """Token F1 of the reply."""
    value: float | None = question["f1"]
    return value


def held(question: Record) -> float | None:
    """Share of the evidence that is held, of a question that has an answer."""
    return None if question["category"] == ADVERSARIAL else question["held"]


def abstains(question: Record) -> float | None:
    """Whether the reply to an adversarial question says that nothing was mentioned."""
    value: float | None = question["abstains"]
    return value


def per_question(one: Findings, measured: Measured) -> Values:
    """The mean over the seeds for each question that has a value."""
    values: dict[tuple[int, int], list[float]] = {}
    for records in one.by_seed:
        for place, record in enumerate(records):
            for question in record["questions"] if record["fits"] else ():
                value = measured(question)
                if value is not None:
                    values.setdefault((place, question["number"]), []).append(value)
    return {key: fmean(each) for key, each in values.items()}


def _clusters(values: Values) -> list[list[float]]:
    """The values of each conversation."""
    found: dict[int, list[float]] = {}
    for (place, _), value in values.items():
        found.setdefault(place, []).append(value)
    return list(found.values())


def _mean(values: Values) -> Estimate:
    return hierarchical_mean(_clusters(values))


def _differences(
    name: str, findings: Sequence[Findings], settings: Sequence[Profile], measured: Measured
) -> Table:
    """Each row less the first one, less `sink` of the same budget, and less `full`."""
    values = [per_question(one, measured) for one in findings]
    columns: dict[str, list[int | None]] = {f"less {findings[0].name}": [0] * len(settings)}
    for policy in ("sink", "full"):
        others = [_row(settings, policy, one.budget) for one in settings]
        if any(others):  # the first row has its column already
            columns[f"less {policy}"] = others
    rows: list[tuple[Value, ...]] = [
        (one.name, *(_less(values, at, others[at]) for others in columns.values()))
        for at, one in enumerate(findings)
    ]
    return Table(name, ("setting", *columns), tuple(rows))


def _row(settings: Sequence[Profile], policy: str, budget: int) -> int | None:
    """The first row of a policy at a budget, which `full` does not have; None if there is none."""
    for at, one in enumerate(settings):
        if one.policy == policy and (one.budget == budget or policy == "full"):
            return at
    return None


def _less(values: Sequence[Values], at: int, other: int | None) -> Estimate | None:
    """The paired difference of two rows; None for a row less itself, or without any pair."""
    if other is None or other == at:
        return None
    mine, theirs = values[at], values[other]
    differences = {key: mine[key] - theirs[key] for key in mine.keys() & theirs.keys()}
    return _mean(dict(sorted(differences.items()))) if differences else None


def _by_category(name: str, findings: Sequence[Findings], measured: Measured) -> Table:
    """A measure by the category of the question."""

    def of(category: int) -> Measured:
        return lambda question: measured(question) if question["category"] == category else None

    kinds = {one: text for one, text in CATEGORIES.items() if one != ADVERSARIAL}
    counts = [len(per_question(findings[0], of(kind))) for kind in kinds]
    columns = [f"{text} ({n})" for text, n in zip(kinds.values(), counts, strict=True)]
    rows: list[tuple[Value, ...]] = [
        (one.name, *(_mean(per_question(one, of(kind))) for kind in kinds)) for one in findings
    ]
    return Table(name, ("setting", *columns), tuple(rows), digits=2)


def _back(findings: Sequence[Findings], measures: Sequence[str], counts: Sequence[int]) -> Table:
    """By setting and measure: what comes back of the evidence that is not held."""

    def of(measure: str, n: int, key: str) -> Measured:
        return lambda question: (
            question["back"][measure][str(n)][key] if measure in question["back"] else None
        )

    kinds = {"share": "tokens", "any": "any turn", "all": "all turns"}
    columns = [f"{text}, n = {n}" for text in kinds.values() for n in counts]
    rows: list[tuple[Value, ...]] = [
        (
            f"{one.name}, {measure}",
            *(_mean(per_question(one, of(measure, n, key))) for key in kinds for n in counts),
        )
        for one in findings
        for measure in measures
    ]
    return Table("Evidence brought back", ("setting, measure", *columns), tuple(rows), digits=2)
