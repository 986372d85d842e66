"""Two studies of attention: of surprising tokens (SirLLM, section 3.2, Figure 3), and of anchors
(Anchor-based LLMs, appendix A.5, Figure 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.config.profile import Profile
from sirchat.errors import ModelError, SettingError
from sirchat.lab.studies.perplexity import round_ids
from sirchat.lab.studies.reading import followed_by_reply
from sirchat.lab.studies.report import Plot, Record, Report, Table, Value
from sirchat.lab.studies.study import NumberedStudy, RunUnit, fields_of
from sirchat.lab.synthetic.dialogue import Dialogue, dialogue, draw_fact
from sirchat.lab.synthetic.facts import KINDS
from sirchat.lab.synthetic.rounds import Message, Style
from sirchat.lab.training.masks import anchor_mask
from sirchat.lab.training.probe import SMALL_TALK
from sirchat.models.model import LoadedModel
from sirchat.models.surprisal import surprisal
from sirchat.text.anchors import anchor_detector
from sirchat.text.template import Template
from sirchat.text.text_file import read_regular

SEGMENTS = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AttentionStudy(NumberedStudy):
    """The study that measures how much attention tokens of low and of high surprisal receive.

    Raises SettingError if `tokens` is too small, and if the file can't be read or has too few
    lines.
    """

    needs_hub: ClassVar[bool] = True

    profile: Profile  # the settings; their seed draws the texts
    limit: int = 256  # number of texts
    tokens: int = 40  # number of tokens to read of each text
    # a UTF-8 file with one text on each line; None for synthetic conversations
    text: str | None = None

    def __post_init__(self) -> None:
        if self.tokens < SEGMENTS + 2:
            raise SettingError(f"tokens is {self.tokens}, must be at least {SEGMENTS + 2}")
        _ = self._lines

    name = "attention"

    def parameters(self) -> Record:
        return {
            "limit": self.limit,
            "tokens": self.tokens,
            "text": self.text,
            "seed": self.profile.seed,
        }

    def worker(self, model: LoadedModel) -> RunUnit:
        """Create a function that reads the text with a given key and returns its record."""
        return lambda key: _read(model, self._ids(model, int(key)))

    def report(self, found: Mapping[str, Record]) -> Report:
        """A table and a plot of the attention that each segment of tokens receives."""
        layers = np.mean([one["weights"] for one in found.values()], axis=0)  # [L, 1 + SEGMENTS]
        first, weights = layers[:, 0], layers[:, 1:]
        ranks = 1 + (-weights).argsort(axis=1).argsort(axis=1)  # 1 receives most
        rows: list[tuple[Value, ...]] = [
            (str(at + 1), _mean(weights[:, at]), _mean(ranks[:, at]), _mean(ranks[:, at] == 1))
            for at in range(SEGMENTS)
        ]
        rows.append(("the first token", _mean(first), None, None))
        columns = ("segment by surprisal", "mean weight", "mean rank", "share of layers: first")
        lines = {
            f"segment {at + 1}": tuple((float(n), float(w[at])) for n, w in enumerate(weights))
            for at in range(SEGMENTS)
        }
        header = (
            f"seed {self.profile.seed}",
            f"{self.limit} texts of {self.tokens} tokens",
            f"text {self.text}" if self.text else "synthetic dialogue",
        )
        table = Table("Attention by surprisal", columns, tuple(rows), digits=5)
        plot = Plot("attention by surprisal", "layer", "mean weight", lines)
        return Report(header, (table,), (plot,), self.parameters())

    def _ids(self, model: LoadedModel, number: int) -> list[int]:
        if self._lines is not None:
            ids: list[int] = model.tokenizer(self._lines[number])["input_ids"][: self.tokens]
        else:
            template, ids = Template(model.tokenizer, model.anchors), []
            for user, reply in self._talk(number):
                turn = template.user(user) if ids else template.opening(user)[1]
                ids += followed_by_reply(template, turn, reply).ids
            ids = ids[: self.tokens]
        if len(ids) < self.tokens:
            raise SettingError(f"text {number + 1} has {len(ids)} tokens, must have {self.tokens}")
        return ids

    def _talk(self, number: int) -> Iterator[tuple[str, str]]:
        rng = Random(f"attention/{self.profile.seed}/{number}")
        texts = [one.text for one in dialogue(rng, self.tokens, SMALL_TALK) if one.role != "system"]
        return zip(texts[::2], texts[1::2], strict=False)

    @cached_property
    def _lines(self) -> list[str] | None:
        if self.text is None:
            return None
        try:
            text = read_regular(Path(self.text)).decode("utf-8")
            lines = [line for line in text.splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"text {self.text!r} can't be read: {error}") from None
        if len(lines) < self.limit:
            raise SettingError(f"text {self.text!r} has {len(lines)} lines, but needs {self.limit}")
        return lines


def mean_by_segment(received: Floats, nats: Floats) -> Floats:
    """The attention [1 + SEGMENTS] that the first token and each segment of tokens receive.

    `received` [n] is the attention that each token receives, `nats` [n] its surprisal in nats.
    """
    inner = np.argsort(nats[1:-1], kind="stable") + 1
    means = [received[part].mean() for part in np.array_split(inner, SEGMENTS)]
    return np.array([received[0], *means])


def attention_received(weights: Tensor) -> Tensor:
    """The attention [n - 1] that each token, except the last, receives from all later tokens.

    `weights` [H, n, n] are the attention weights of the H heads of one layer.
    """
    mean = weights.float().mean(0)  # [n, n]
    later_tokens = torch.arange(len(mean) - 1, 0, -1)
    return mean.tril(-1).sum(0)[:-1] / later_tokens


def _read(model: LoadedModel, ids: list[int]) -> Record:
    with eager_attention(model.module) as module, torch.inference_mode():
        tokens = torch.tensor([ids], device=model.device)
        out = module(input_ids=tokens, use_cache=False, output_attentions=True)
    if not out.attentions or out.attentions[0] is None:
        raise ModelError(f"model {model.name!r} does not return its attention weights")
    nats = np.zeros(len(ids))
    nats[1:] = surprisal(out.logits[0, :-1], tokens[0, 1:]).cpu().numpy()
    weights = [
        mean_by_segment(
            np.append(attention_received(layer[0]).cpu().double().numpy(), 0.0), nats
        ).tolist()
        for layer in out.attentions
    ]
    return {"weights": weights}


@contextmanager
def eager_attention(module: Any) -> Iterator[Any]:
    """Context manager: the model uses eager attention, which returns attention weights.

    At the end the model uses its own attention implementation again.
    """
    original = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        yield module
    finally:
        module.set_attn_implementation(original)


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean())


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
        return lambda key: _read_rounds(model, *self.conversation(int(key)))

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
def _read_rounds(model: LoadedModel, rounds: list[tuple[Message, Message]], target: int) -> Record:
    template = Template(model.tokenizer, model.anchors)
    parts = [
        round_ids(template, user.text, reply.text, first=not number)
        for number, (user, reply) in enumerate(rounds)
    ]
    ids = [one for part in parts for one in part]
    ends = anchor_detector(model.tokenizer, model.anchors)
    is_anchor = torch.tensor([[ends(one) for one in ids]])
    round_of = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    sinks = model.anchors.sinks if model.anchors else 0
    with eager_attention(model.module) as module:
        out = module(
            input_ids=torch.tensor([ids], device=model.device),
            attention_mask=model.mask(anchor_mask(is_anchor, sinks=sinks)[0, 0]),
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
