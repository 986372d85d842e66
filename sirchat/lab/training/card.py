"""Makes the model cards of the bundled models: each is the README.md in the model's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sirchat.lab.synthetic import bank
from sirchat.lab.training.probe import DISTANCES, ProbedRecall

_MEASURED = """
## Measured recall

Share of answers that are right word for word ({how}), by the rounds of small talk
between the fact and the question; {asked} fresh conversations in each cell. Values are partly
listed words, partly made up.

{table}
"""


def anchor_card(
    *, command: str, gathering: int, tokens: int, seed: int, recalls: Sequence[ProbedRecall]
) -> str:
    """The model card of `tiny-anchor`; `gathering` is the number of steps of the first phase."""
    how = "greedy, with nothing of earlier rounds but their anchors"
    return _template("card_tiny_anchor").format(
        command=command,
        tokens=tokens / 1e6,
        seed=seed,
        gathering=gathering,
        recall=_measured(recalls, how),
    )


def model_card(
    *,
    command: str,
    parameters: int,
    vocab: int,
    tokens: int,
    seed: int,
    recalls: Sequence[ProbedRecall],
) -> str:
    """The model card of `tiny`; without `recalls` it has no table of measured recall."""
    return _template("card_tiny").format(
        million=parameters / 1e6,
        command=command,
        tokens=tokens / 1e6,
        seed=seed,
        vocab=vocab,
        facts=bank.facts(),
        recall=_measured(recalls, "greedy, full cache"),
    )


def _template(name: str) -> str:
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")


def _measured(recalls: Sequence[ProbedRecall], how: str) -> str:
    if not recalls:
        return ""
    table = "\n".join(_recall_table(recalls))
    return _MEASURED.format(how=how, asked=recalls[0].asked, table=table)


def _recall_table(recalls: Sequence[ProbedRecall]) -> Iterator[str]:
    """The lines of a table: a row for each kind of fact, a column for each distance in rounds."""
    cell = {(one.kind, one.between): one.right / one.asked for one in recalls}
    distances = [d for d in DISTANCES if any(one.between == d for one in recalls)]
    kinds = list(dict.fromkeys(one.kind for one in recalls))
    yield "| rounds between | " + " | ".join(str(d) for d in distances) + " |"
    yield "|---|" + "---:|" * len(distances)
    for kind in kinds:
        yield f"| {kind} | " + " | ".join(f"{cell[kind, d]:.2f}" for d in distances) + " |"
    means = [sum(cell[kind, d] for kind in kinds) / len(kinds) for d in distances]
    yield "| **mean** | " + " | ".join(f"**{mean:.2f}**" for mean in means) + " |"
    lengths = [
        sum(one.mean_tokens for one in recalls if one.between == d) / len(kinds) for d in distances
    ]
    yield "| tokens, on average | " + " | ".join(f"{length:.0f}" for length in lengths) + " |"
