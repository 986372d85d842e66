"""Which anchors an answer attends to (Anchor-based LLMs, appendix A.5, Figure 5).

Facts are told, each in a round of its own, and one is asked for. All is read in one pass under the
masks of equation (4). Of the attention that the question and its answer give to anchors, how much
goes to the anchors of the round that told the fact?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from sirchat.config.profile import Profile
from sirchat.errors import ModelError, SettingError
from sirchat.models.model import LoadedModel
from sirchat.tasks.attention import eager_attention
from sirchat.tasks.perplexity import round_ids
from sirchat.tasks.report import Plot, Report, Table, Value
from sirchat.tasks.results_log import Record
from sirchat.tasks.study import RunUnit, fields_of
from sirchat.text.anchors import ends_sequence
from sirchat.text.template import Template
from sirchat.training.ansan import visible
from sirchat.training.probe import SMALL_TALK
from sirchat.world.dialogue import Dialogue, Message, Style, draw_fact
from sirchat.world.facts import KINDS


@dataclass(frozen=True)
class AnchorAttention:
    """The study.

    Attributes:
        profile: its seed draws the conversations.
        limit: conversations.
        facts: told in each.

    Raises SettingError for fewer than two facts, and for more than there are kinds.
    """

    profile: Profile
    limit: int = 50
    facts: int = 5

    def __post_init__(self) -> None:
        if not 2 <= self.facts <= len(KINDS):
            raise SettingError(f"facts is {self.facts}, must be 2 to {len(KINDS)}")

    @property
    def name(self) -> str:
        """What it is called."""
        return "anchor-attention"

    def parameters(self) -> Record:
        """All that the findings depend on."""
        return fields_of(self) | {"profile": None, "seed": self.profile.seed}

    def keys(self) -> list[str]:
        """Conversations, by number."""
        return [str(number) for number in range(self.limit)]

    def worker(self, model: LoadedModel) -> RunUnit:
        """Reads a conversation: by layer and round, the attention that its anchors get."""
        if model.anchors is None:
            raise SettingError(
                f"model {model.name!r} was not trained to gather text in anchors",
                hint="tiny-anchor was; `sirchat train anchor` trains another",
            )
        return lambda key: _read(model, *self.conversation(int(key)))

    def conversation(self, number: int) -> tuple[list[tuple[Message, Message]], int]:
        """Rounds that tell facts, a question with its answer, and which round told that one."""
        rng = Random(f"anchor attention/{self.profile.seed}/{number}")
        talk, style = Dialogue(rng, SMALL_TALK), Style()
        facts = [draw_fact(rng, kind, style) for kind in rng.sample(KINDS, self.facts)]
        rounds = [talk.tell_one(fact, style) for fact in facts]
        which = rng.randrange(self.facts)
        return [*rounds, talk.ask((facts[which].kind.key, facts[which].subject))], which

    def report(self, found: Mapping[str, Record]) -> Report:
        """The share of the right round's anchors, by layer; and a picture of the first one."""
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
        facts = (
            f"seed {self.profile.seed}",
            f"{self.limit} conversations, {self.facts} facts each",
        )
        columns = ("of the attention to anchors", "share of the round that told it")
        tables = (Table("Anchors attended to", columns, tuple(rows)), _picture(found["0"]))
        return Report(facts, tables, (plot,), self.parameters())


def _picture(one: Record) -> Table:
    """The first conversation: what each token of its end gives to each round's anchors."""
    columns = ("token", *one["rounds"])
    rows = tuple(
        (token, *shares) for token, shares in zip(one["tokens"], one["by_token"], strict=True)
    )
    return Table("The first conversation: attention to each round's anchors", columns, rows, 2)


@torch.inference_mode()
def _read(model: LoadedModel, rounds: list[tuple[Message, Message]], which: int) -> Record:
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
        raise ModelError(f"model {model.name!r} does not tell its attention weights")
    start = len(ids) - len(parts[-1])
    asks = slice(start, len(ids) - 1)
    given = torch.stack([layer[0].float().mean(0)[asks].cpu() for layer in out.attentions])
    by_round = torch.stack(
        [given[:, :, is_anchor[0] & (round_of == n)].sum(-1) for n in range(len(rounds) - 1)], -1
    )  # [L, m, rounds]
    return {
        "which": which,
        "shares": _normed(by_round.sum(1)).tolist(),
        "rounds": [user.text for user, _ in rounds[:-1]],
        "tokens": [repr(model.tokenizer.decode([one])) for one in ids[asks]],
        "by_token": by_round.mean(0).tolist(),
    }


def _normed(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)
