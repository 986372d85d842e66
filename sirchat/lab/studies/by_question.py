"""Values of the questions about long conversations: their means, and what two settings differ by.

A unit's record has `fits`, and `questions`, each a record with its `number`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from sirchat.lab.studies.intervals import clustered_mean
from sirchat.lab.studies.report import Estimate, Record, Table, Value
from sirchat.lab.studies.study import Findings

# A value for each question; a key is (index of its conversation, number of the question)
Values = Mapping[tuple[int, int], float]

# A function that takes one value from a question's record. The function returns None if the record
# has no such value
Measured = Callable[[Record], float | None]


def per_question(one: Findings, measured: Measured) -> Values:
    """For each question, the value that `measured` takes from its record, as a mean over the seeds.

    Questions without a value are left out.
    """
    values: dict[tuple[int, int], list[float]] = {}
    for records in one.by_seed:
        for place, record in enumerate(records):
            for question in record["questions"] if record["fits"] else ():
                value = measured(question)
                if value is not None:
                    values.setdefault((place, question["number"]), []).append(value)
    return {key: fmean(each) for key, each in values.items()}


def table_of_means(
    name: str,
    columns: Iterable[str],
    rows: Iterable[tuple[str, Findings, Iterable[Measured]]],
    digits: int = 3,
) -> Table:
    """A table whose rows have a label, and the means of what is measured in some findings."""
    means: list[tuple[Value, ...]] = [
        (label, *(mean_of(per_question(one, of)) for of in measured))
        for label, one, measured in rows
    ]
    return Table(name, tuple(columns), tuple(means), digits)


def mean_of(values: Values) -> Estimate:
    """The mean, with an interval for which conversations are drawn again; of one, its questions."""
    found: dict[int, list[float]] = {}
    for (place, _), value in values.items():
        found.setdefault(place, []).append(value)
    clusters = [*found.values()] if len(found) > 1 else [[value] for value in values.values()]
    return clustered_mean(clusters)


def table_of_differences(
    name: str, findings: Sequence[Findings], measured: Measured, digits: int = 3
) -> Table:
    """A table of how much what is measured differs from that under the first setting, paired."""
    first, *others = (per_question(one, measured) for one in findings)
    rows = tuple(
        (one.name, mean_difference(values, first))
        for one, values in zip(findings[1:], others, strict=True)
    )
    return Table(f"Differences of {name}", ("setting", f"less {findings[0].name}"), rows, digits)


def mean_difference(mine: Values, theirs: Values) -> Estimate | None:
    """The mean, over questions in both, of `mine` minus `theirs`; None if there is none."""
    differences = {key: mine[key] - theirs[key] for key in mine.keys() & theirs.keys()}
    return mean_of(dict(sorted(differences.items()))) if differences else None
