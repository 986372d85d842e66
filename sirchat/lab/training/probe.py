"""Measures a model's recall, by kind of fact and by rounds of small talk before the question."""

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

SMALL_TALK = Mix(tell=0.0, ask=0.0, repeat=0.0, game=0.0)
"""A mix of rounds that has only small talk."""

DISTANCES = (0, 3, 6, 12, 20, 40)
Visible = Callable[[Tensor], Tensor]
"""A function from ids [rows, n] to the attention mask, bool [rows, 1, n, n]."""

PROBED: dict[str, FactKind] = {kind.key: kind for kind in (*KINDS, STORY)}
"""Every kind of fact, by its name."""


@dataclass(frozen=True, slots=True)
class ProbedRecall:
    """How many answers about one kind of fact were exact: `right` of `asked`.

    `between` is the number of rounds of small talk between the fact and the question.
    """

    kind: str
    between: int
    right: int
    asked: int
    mean_tokens: float  # length of the conversation up to the end of the answer


def probe_dialogue(rng: Random, kind: FactKind, between: int) -> Iterator[Message]:
    """Yield messages: a fact, `between` rounds of small talk, the question, the right answer."""
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
    """For each dialogue, whether greedy decoding gives the right answer, its end token included.

    To find out, one forward pass reads all dialogues, under the mask that `visible` returns (None:
    a causal mask). At every answer token the argmax must be right, given the right tokens before.
    """
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
    """Measure recall of each kind of fact at each distance, in `dialogues` dialogues each.

    A distance is a number of rounds of small talk between the fact and the question. `visible`
    returns the attention mask; None for a causal mask.
    """
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
