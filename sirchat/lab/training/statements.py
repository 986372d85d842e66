"""Learns to tell a user's standing instructions and facts from other sentences by their vectors.

A small network on an encoder's sentence vectors learns from `statements.yaml`, which is written by
hand. Sentences of given talk are further examples of what is no instruction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle
from random import Random

import torch
import yaml
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from sirchat.chat.settings import build_cache_settings, build_engine
from sirchat.config.profile import Profile
from sirchat.engine.types import TurnRef
from sirchat.lab.studies.facts_in_dialogue.questions import TYPES, draw_fact, entries
from sirchat.lab.studies.reading import whole_round
from sirchat.memory.ledger import Role
from sirchat.models.encoder import KINDS, kind_scores
from sirchat.models.model import LoadedModel
from sirchat.text.template import Template

# Chosen by sentences of DailyDialog and LoCoMo that are not learned from.
_HIDDEN = 16
_PENALTY = 3e-5  # of the sum of the squares of all weights
_OF_TALK = 0.1  # weight of a sentence of talk; of a written example 1

_QUESTION_PENALTY = 2.0
_LONGEST = 128  # tokens of a message that are read alone
_ROUNDS = 40  # in a conversation, in which the sentences are read as messages
_REPLIES = ("Okay.", "I see.", "All right.", "Sure, I can do that.", "Thank you for telling me.")

Statements = dict[str, list[str]]  # by kind: those in `KINDS`, and `other`
Vectors = Mapping[str, Tensor]  # [D], by text
Network = tuple[Tensor, Tensor]  # `Encoder.hidden` and `Encoder.kinds`


@dataclass(frozen=True)
class StatementTest:
    """How well one kind of sentence is told from the others, in sentences that were kept back."""

    kind: str
    hits: float  # share of the kind's sentences that are found
    false_alarms: float  # share of the others that are taken for it
    in_talk: float  # share of sentences of talk that are taken for it; NaN without talk


def load_statements() -> tuple[Statements, Statements]:
    """The written examples, and those that are kept back for the test."""
    text = files("sirchat.lab.training").joinpath("statements.yaml").read_text("utf-8")
    examples = yaml.safe_load(text)
    return examples, examples.pop("kept_back")


def statement_rounds() -> list[tuple[str, str]]:
    """The written examples as messages, each once, in an order without sense, with replies."""
    taught, _ = load_statements()
    texts = list(dict.fromkeys(text for some in taught.values() for text in some))
    Random(0).shuffle(texts)
    return list(zip(texts, cycle(_REPLIES)))


def learn_kinds(
    model: LoadedModel, talk: Tensor, known: Vectors
) -> tuple[Network, list[StatementTest]]:
    """Fit `Encoder.hidden` and `Encoder.kinds` for the encoder of `model`, and test them.

    `talk` [m, D] are vectors of sentences of talk; every second one is kept back, too. Sentences
    that are `known` are not read again.
    """
    taught, kept = load_statements()
    network = fit_kinds(*read_statements(model, taught, known), talk[::2])
    vectors, is_kind = read_statements(model, kept, {})
    found, of_talk = kind_scores(vectors, *network) > 0, kind_scores(talk[1::2], *network) > 0
    tests = list[StatementTest]()
    for at, kind in enumerate(KINDS):
        shares = (found[is_kind[:, at], at], found[~is_kind[:, at], at], of_talk[:, at])
        tests.append(StatementTest(kind, *(share.double().mean().item() for share in shares)))
    return network, tests


def fit_kinds(vectors: Tensor, is_kind: Tensor, talk: Tensor, penalty: float = _PENALTY) -> Network:
    """Fit the network to vectors [n, D] of sentences, of which `is_kind` [n, 2] says the kinds.

    `talk` [m, D] are vectors of sentences without instructions, but maybe with facts.
    """
    x, y = torch.cat([vectors, talk]), torch.cat([is_kind.float(), torch.zeros(len(talk), 2)])
    share = torch.ones_like(y)
    share[len(vectors) :] = torch.tensor([_OF_TALK, 0.0])
    share /= share.sum(0)
    generator, dims = torch.Generator().manual_seed(0), x.shape[1]
    hidden = torch.randn(_HIDDEN, dims + 1, generator=generator) * 3 / dims**0.5
    kinds = torch.randn(len(KINDS), _HIDDEN + 1, generator=generator) / _HIDDEN**0.5
    weights = [hidden.requires_grad_(), kinds.requires_grad_()]
    optimizer = torch.optim.LBFGS(weights, max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        scores = kind_scores(x, hidden, kinds)
        fit = binary_cross_entropy_with_logits(scores, y, share, reduction="sum")
        total: Tensor = fit + penalty * sum(weight[:, :-1].square().sum() for weight in weights)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return hidden.detach(), kinds.detach()


def learn_question(
    model: LoadedModel, talk: Sequence[str], kept_talk: Sequence[str], known: Vectors
) -> tuple[Tensor, StatementTest]:
    """Fit `Encoder.question` [D + 1] for the encoder of `model` by ridge regression, and test it.

    `talk` are messages of people to each other, of which hardly any asks for what was told;
    `kept_talk` and the questions of `facts-in-dialogue` are kept back for the test. Messages that
    are `known` are not read again.
    """
    examples, kept = load_statements()
    asks, others = examples["question"], [*examples["no_question"], *examples["other"], *talk]
    others += [text for text in examples["fact"] if text in known]
    x = _with_one(model, [*asks, *others], known)
    is_asking = torch.arange(len(x)) < len(asks)
    share = torch.where(is_asking, 1 / len(asks), 1 / len(others)).double() * len(x) / 2
    penalty = _QUESTION_PENALTY * torch.eye(x.shape[1], dtype=torch.float64)
    penalty[-1, -1] = 0
    scaled = (x * share[:, None]).T
    weight = torch.linalg.solve(
        scaled @ x + penalty, scaled @ torch.where(is_asking, 1.0, -1.0).double()
    )
    rng = Random(0)
    facts = [
        draw_fact(rng, told, one)
        for told in dict.fromkeys(TYPES.values())
        for one in entries(told, "all")
    ]
    asked = list(dict.fromkeys(text for fact in facts for text in fact.asked.values()))
    shares = [
        (_with_one(model, texts, {}) @ weight > 0).double().mean().item() if texts else math.nan
        for texts in (asked, kept["other"], kept_talk)
    ]
    return weight.float(), StatementTest("question", *shares)


def _with_one(model: LoadedModel, messages: Sequence[str], known: Vectors) -> Tensor:
    """The vectors of messages, and a one: float64 [n, D + 1]."""
    vectors = [known[text] if text in known else _read_alone(model, text) for text in messages]
    return pad(torch.stack(vectors).double(), (0, 1), value=1.0)


def _read_alone(model: LoadedModel, text: str) -> Tensor:
    """The vector of a message, as recall reads it to search: the first part of a long one."""
    turn = Template(model.tokenizer, model.anchors).opening(text)[1]
    start, end = turn.content
    return model.encode(turn.ids[: min(end, start + _LONGEST)], start)


def read_statements(
    model: LoadedModel, statements: Statements, known: Vectors
) -> tuple[Tensor, Tensor]:
    """The vectors [n, D] of all statements, read as messages of conversations, and `is_kind`.

    Those that are `known` are not read again.
    """
    pairs = [(text, kind) for kind in (*KINDS, "other") for text in statements[kind]]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [pairs[number] for number in order]
    unknown, found = [text for text, _ in pairs if text not in known], dict(known)
    for start in range(0, len(unknown), _ROUNDS):
        texts = unknown[start : start + _ROUNDS]
        found |= zip(texts, _vectors(model, texts), strict=True)
    vectors = [found[text] for text, _ in pairs]
    return torch.stack(vectors), torch.tensor([[kind == one for one in KINDS] for _, kind in pairs])


def _vectors(model: LoadedModel, messages: Sequence[str]) -> list[Tensor]:
    """The vector of each of these messages of one conversation."""
    template, ids, roles = Template(model.tokenizer, model.anchors), list[int](), list[Role]()
    spans = list[tuple[int, int]]()
    for at, message in enumerate(messages):
        turn = whole_round(template, message, _REPLIES[at % len(_REPLIES)], first=at == 0)
        said = [len(ids) + n for n, role in enumerate(turn.roles) if role == Role.USER]
        spans.append((said[0], said[-1] + 1))
        ids, roles = [*ids, *turn.ids], [*roles, *turn.roles]
    engine = build_engine(model, build_cache_settings(Profile(policy="full")))
    engine.ledger.token_vectors.wanted = True
    list(engine.prefill(ids, roles, TurnRef(0, 0)))
    means = [engine.ledger.token_vectors.mean(*span) for span in spans]
    return [model.encoder.unit_vectors(mean) for mean in means if mean is not None]
