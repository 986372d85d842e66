"""Measures which anchors an answer attends to (Anchor-based LLMs, appendix A.5, Figure 5).

An anchor is a token into which the model was trained to compress the sentence or round before it.
The user states several facts, each in its own round, and asks for one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sirchat.config.profile import Profile
from sirchat.errors import ModelError, SettingError
from sirchat.lab.studies.attention import eager_attention
from sirchat.lab.studies.perplexity import round_ids
from sirchat.lab.studies.report import Plot, Record, Report, Table, Value
from sirchat.lab.studies.study import NumberedStudy, RunUnit, fields_of
from sirchat.lab.synthetic.dialogue import Dialogue, draw_fact
from sirchat.lab.synthetic.facts import KINDS
from sirchat.lab.synthetic.rounds import Message, Style
from sirchat.lab.training.masks import visible
from sirchat.lab.training.probe import SMALL_TALK
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import ends_sequence
from sirchat.text.template import Template


@dataclass(frozen=True)
class AnchorAttention(NumberedStudy):
    """The study that measures which anchors an answer attends to.

    An anchor is a token into which the model compresses a sentence or round. Raises SettingError
    for fewer than two facts, and for more facts than there are kinds of fact.
    """

    needs_hub: ClassVar[bool] = True

    profile: Profile  # the settings; their seed draws the conversations
    limit: int = 50  # number of conversations
    facts: int = 5  # number of facts in each conversation

    def __post_init__(self) -> None:
        if not 2 <= self.facts <= len(KINDS):
            raise SettingError(f"facts is {self.facts}, must be 2 to {len(KINDS)}")

    name = "anchor-attention"

    def parameters(self) -> Record:
        return fields_of(self) | {"profile": None, "seed": self.profile.seed}

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that reads the conversation with a given key and returns its record.

        Raises SettingError for a model without anchors.
        """
        if model.anchors is None:
            raise SettingError(
                f"model {model.name!r} was not trained to compress text into anchor tokens",
                hint="choose tiny-anchor, or train a model with `sirchat train anchor`",
            )
        return lambda key: _read(model, *self.conversation(int(key)))

    def conversation(self, number: int) -> tuple[list[tuple[Message, Message]], int]:
        """The rounds of a conversation, and the index of the one whose fact is asked for."""
        rng = Random(f"anchor attention/{self.profile.seed}/{number}")
        talk, style = Dialogue(rng, SMALL_TALK), Style()
        facts = [draw_fact(rng, kind, style) for kind in rng.sample(KINDS, self.facts)]
        rounds = [talk.tell_one(fact, style) for fact in facts]
        target = rng.randrange(self.facts)
        return [*rounds, talk.ask((facts[target].kind.key, facts[target].subject))], target

    def report(self, found: Mapping[str, Record]) -> Report:
        """Two tables and a plot of the attention that question and answer pay to anchors."""
        right = np.array([np.array(one["shares"])[:, one["which"]] for one in found.values()])
        layers = right.mean(0)  # [L]
        rows: list[tuple[Value, ...]] = [
            (f"layer {number}", float(share)) for number, share in enumerate(layers)
        ]
        rows += [("all layers", float(layers.mean())), ("by chance", 1 / self.facts)]
        line = tuple((float(n), float(share)) for n, share in enumerate(layers))
        chance = tuple((float(n), 1 / self.facts) for n in range(len(layers)))
        plot = Plot(
            "anchors attended to",
            "layer",
            "share",
            {"the round that told it": line, "by chance": chance},
            dashed=("by chance",),
        )
        header = (
            f"seed {self.profile.seed}",
            f"{self.limit} conversations, {self.facts} facts each",
        )
        columns = ("of the attention to anchors", "share of the round that told it")
        tables = (
            Table("Anchors attended to", columns, tuple(rows)),
            _first_conversation(found["0"]),
        )
        return Report(header, tables, (plot,), self.parameters())


def _first_conversation(one: Record) -> Table:
    columns = ("token", *one["rounds"])
    rows = tuple(
        (token, *shares) for token, shares in zip(one["tokens"], one["by_token"], strict=True)
    )
    return Table("The first conversation: attention to each round's anchors", columns, rows, 2)


@torch.inference_mode()
def _read(model: LoadedModel, rounds: list[tuple[Message, Message]], target: int) -> Record:
    template = Template(model.tokenizer, model.anchors)
    parts = [
        round_ids(template, user.text, reply.text, first=not number)
        for number, (user, reply) in enumerate(rounds)
    ]
    ids = [one for part in parts for one in part]
    ends = ends_sequence(model.tokenizer, model.anchors)
    is_anchor = torch.tensor([[ends(one) for one in ids]])
    round_of = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    sinks = model.anchors.sinks if model.anchors else 0
    with eager_attention(model.module) as module:
        out = module(
            input_ids=torch.tensor([ids], device=model.device),
            attention_mask=model.mask(visible(is_anchor, sinks=sinks)[0, 0]),
            use_cache=False,
            output_attentions=True,
        )
    if not out.attentions or out.attentions[0] is None:
        raise ModelError(f"model {model.name!r} does not return its attention weights")
    start = len(ids) - len(parts[-1])
    queries = slice(start, len(ids) - 1)
    weights = torch.stack([layer[0].float().mean(0)[queries].cpu() for layer in out.attentions])
    by_round = torch.stack(
        [weights[:, :, is_anchor[0] & (round_of == n)].sum(-1) for n in range(len(rounds) - 1)], -1
    )  # [L, m, rounds]
    return {
        "which": target,
        "shares": _normalised(by_round.sum(1)).tolist(),
        "rounds": [user.text for user, _ in rounds[:-1]],
        "tokens": [repr(model.tokenizer.decode([one])) for one in ids[queries]],
        "by_token": by_round.mean(0).tolist(),
    }


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)
