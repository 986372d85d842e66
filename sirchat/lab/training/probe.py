"""Measures how many told facts a model recalls, by kind of fact and by distance.

The distance is the number of rounds of small talk between the fact and the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

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
def matches(
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
                key, between, sum(matches(model, rendered, visible)), dialogues, mean
            )
