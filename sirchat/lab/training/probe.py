"""Measures how many told facts a model recalls, by kind and distance, and writes model cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from sirchat.lab.synthetic import bank
from sirchat.lab.synthetic.dialogue import Dialogue, Mix, draw_fact
from sirchat.lab.synthetic.facts import KINDS, STORY, FactKind
from sirchat.lab.synthetic.rounds import Message, Style
from sirchat.lab.training.network import token_losses
from sirchat.lab.training.rows import Rendered, Renderer, span_matches

# A mix of rounds that has only small talk
SMALL_TALK = Mix(tell=0.0, ask=0.0, repeat=0.0, game=0.0)

DISTANCES = (0, 3, 6, 12, 20, 40)
# A function that takes ids [rows, n] and returns their attention mask, bool [rows, 1, n, n]
Visible = Callable[[Tensor], Tensor]

# Every kind of fact whose recall is measured, by the kind's name
PROBED: dict[str, FactKind] = {kind.key: kind for kind in (*KINDS, STORY)}


@dataclass(frozen=True, slots=True)
class ProbedRecall:
    """The recall of one kind of fact at one distance: of `asked` answers, `right` were exact.

    `between`, the distance, is the number of rounds of small talk between the fact and the
    question.
    """

    kind: str
    between: int
    right: int
    asked: int
    mean_tokens: float  # length of the conversation up to the end of the answer


def probe_dialogue(rng: Random, kind: FactKind, between: int) -> Iterator[Message]:
    """Yield the messages of a dialogue in which the user tells a fact and later asks for it."""
    talk = Dialogue(rng, SMALL_TALK)
    style = Style.draw(rng)
    fact = draw_fact(rng, kind, style)
    yield from talk.tell_one(fact, style)
    for _ in range(between):
        yield from talk.small_talk()
    yield from talk.ask((kind.key, fact.subject))


@torch.no_grad()
def are_answers_exact(
    model: LlamaForCausalLM, dialogues: list[Rendered], visible: Visible | None = None
) -> list[bool]:
    """Test whether a model would answer the question of each dialogue exactly."""
    longest = max(len(one.ids) for one in dialogues)
    device = next(model.parameters()).device
    ids = torch.tensor([one.ids + [0] * (longest - len(one.ids)) for one in dialogues])
    span = torch.tensor([one.span + [0] * (longest - len(one.span)) for one in dialogues])
    seen = None if visible is None else visible(ids[:, :-1]).to(device)
    _, correct = token_losses(model, ids.to(device), seen)
    return [bool(hit) for hit in span_matches(correct.cpu(), span[:, 1:])]


def probe(
    model: LlamaForCausalLM,
    renderer: Renderer,
    *,
    seed: int,
    dialogues: int,
    distances: tuple[int, ...] = DISTANCES,
    kinds: tuple[str, ...] = tuple(PROBED),
    visible: Visible | None = None,
) -> Iterator[ProbedRecall]:
    """Measure how often the model recalls a fact, for each distance and each kind of fact."""
    for between in distances:
        for key in kinds:
            rng = Random(f"{seed}/probe/{key}/{between}")
            rendered = [
                renderer.render(probe_dialogue(rng, PROBED[key], between)) for _ in range(dialogues)
            ]
            mean = sum(len(one.ids) for one in rendered) / dialogues
            yield ProbedRecall(
                key, between, sum(are_answers_exact(model, rendered, visible)), dialogues, mean
            )


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
