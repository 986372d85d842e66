"""Trains a scorer, which predicts from hidden states how much the model needs each token.

The scorer predicts the logarithm of KVzip's score of a token. To measure this score, the model
reads a conversation, then a request to repeat it, then the whole conversation again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sirchat.engine.attention_tracker import HighestWeights
from sirchat.errors import ModelError, SettingError
from sirchat.lab.studies.facts_in_dialogue.dialogue import load_dialogues
from sirchat.lab.studies.reading import whole_round
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.memory.attention import AttentionStatsConfig
from sirchat.models.load import load_model
from sirchat.models.model import LoadedModel, no_attention_reason
from sirchat.models.scorer import Scorer
from sirchat.models.state_map import layer_count, recorded_states, side_by_side
from sirchat.paths import state_map_files
from sirchat.text.template import Template, TurnIds

Floats = NDArray[np.float64]

# The factor of the ridge penalty, which keeps the weights of standardised inputs small
PENALTY = 100.0

# The user message that follows a conversation before the model reads the conversation again.
# KVzip's prompt asks for the same
REQUEST = "Repeat everything that was said before, word for word."

LENGTH = 1000  # largest number of tokens of a conversation
_ROOM = 64  # tokens of the context that stay free for the request
_HELD_OUT = 4  # every fourth conversation is held out
_LEAST = 1e-9  # lower bound of attention weights, so that their logarithms are finite
_SINKS = 4  # number of first tokens that are left out: they are never evicted, and unlike others
_MIX = Mix(tell=0.15, ask=0.2, repeat=0.04, story=0.1)

Source = Literal["given", "generated"]


@dataclass(frozen=True)
class ScorerOptions:
    """The options of `sirchat train scorer`."""

    model: str  # name of the model whose tokens the scorer scores
    # files of conversations; if they have fewer than `tokens` tokens, synthetic dialogue is added
    data: tuple[Path, ...] = ()
    # numbers (from 1) of the layers whose hidden states the scorer reads; empty for the layers that
    # `default_layers` returns
    layers: tuple[int, ...] = ()
    tokens: int = 40_000  # number of tokens to read, including those held out for the test
    # file of the scorer; None for the path where chats look for a scorer of the model
    out: Path | None = None
    seed: int = 0  # seed of the random order of the data, and of the synthetic dialogue
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ScorerConversation:
    """A conversation from which a scorer learns: the ids of its rounds, and its source.

    `source` is `given` for a conversation from a file, and `generated` for synthetic dialogue.
    """

    rounds: list[TurnIds]
    source: Source

    @property
    def ids(self) -> list[int]:
        """The ids of all rounds of the conversation, in order."""
        return [one for turn in self.rounds for one in turn.ids]


@dataclass(frozen=True)
class ScorerTest:
    """How well a scorer predicts the log scores of tokens in conversations that were held out."""

    source: Source  # the source of the conversations, `given` (in files) or `generated`
    tokens: int  # number of tokens whose scores were predicted
    r2: float  # share of the variance of the measured log scores that the predictions explain
    spearman: float  # Spearman's rank correlation of predicted and measured scores


class Ridge:
    """Ridge regression that predicts a vector y [k] from a vector x [d], with d = `size`.

    The penalty applies to the weights of the standardised x, and not to the intercept. Observations
    are added in parts, and only their sums are kept in memory.
    """

    def __init__(self, size: int, k: int = 1) -> None:
        self._count = 0
        self._x, self._y = (torch.zeros(n, dtype=torch.float64) for n in (size, k))
        self._xx = torch.zeros(size, size, dtype=torch.float64)
        self._xy = torch.zeros(size, k, dtype=torch.float64)

    @property
    def count(self) -> int:
        """Number of observations that have been added to the regression."""
        return self._count

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add m observations to the regression: vectors `x` [m, d] and their `y` [m, k]."""
        x, y = x.double().cpu(), y.double()
        self._count += len(y)
        self._x += x.sum(0)
        self._y += y.sum(0)
        self._xx += x.T @ x
        self._xy += x.T @ y

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Fit the regression with the given penalty; returns weights [d, k] and bias [k], float64.

        Both apply to vectors x as they were added, not to standardised ones.
        """
        mean, mean_y = self._x / self._count, self._y / self._count
        covariance = self._xx - self._count * mean.outer(mean)
        deviation = (covariance.diag() / self._count).clamp_min(0).sqrt()
        deviation[deviation <= 1e-6 * mean.abs()] = 1  # x is constant, apart from rounding
        scaled = covariance / deviation.outer(deviation)
        wanted = (self._xy - self._count * mean.outer(mean_y)) / deviation[:, None]
        weight = torch.linalg.solve(scaled + penalty * torch.eye(len(mean)), wanted)
        weight /= deviation[:, None]
        return weight, mean_y - mean @ weight

    def main_axes(self, weight: Tensor, bias: Tensor, most: int) -> Tensor:
        """The axes [k, most] on which what `solve` found predicts the most, orthonormal."""
        cross = (weight.T @ self._x).outer(bias)
        products = weight.T @ self._xx @ weight + cross + cross.T
        products += self._count * bias.outer(bias)
        axes: Tensor = torch.linalg.eigh(products).eigenvectors[:, -most:]
        return axes


class ScorerTrainer:
    """Trains a scorer for one model: reads conversations, then fits and tests the scorer.

    Raises ModelError if the model does not expose its attention weights, and SettingError if the
    model lacks one of the layers in `options`, or the data has no conversations.
    """

    def __init__(self, model: LoadedModel, options: ScorerOptions) -> None:
        if not model.exposes_attention:
            raise ModelError(no_attention_reason(model))
        self._model = model
        self._layers = options.layers or default_layers(layer_count(model.module))
        check_layers(self._layers, layer_count(model.module))
        self._path = options.out or state_map_files("scorer", model.name)[0]
        size = model.module.config.get_text_config(decoder=True).hidden_size
        self._ridge = Ridge(len(self._layers) * size)
        self._tests: list[tuple[Source, Tensor, Tensor]] = []
        self._request = Template(model.tokenizer, model.anchors).user(REQUEST).ids
        self.conversations = list(collect_conversations(options, model))

    def read(self, number: int) -> None:
        """Let the model read conversation `number` (from 0), and measure the scores of its tokens.

        Every fourth conversation is for testing the scorer, all other ones are for the fit.
        """
        one = self.conversations[number]
        x, y = training_pairs(self._model, one.ids, self._request, self._layers)
        if number % _HELD_OUT == _HELD_OUT - 1:
            self._tests.append((one.source, x, y))
        else:
            self._ridge.add(x, y[:, None])

    def finish(self) -> tuple[Path, list[ScorerTest]]:
        """Fit the scorer to the conversations that were read, test it, and write its file.

        Returns the path of the file, and one test result for each source of the held-out
        conversations.
        """
        weight, bias = self._ridge.solve(PENALTY)
        scorer = Scorer(self._layers, weight[:, 0].float(), bias[0].float())
        sources = sorted({source for source, _, _ in self._tests})
        tests = [self._tested(scorer, source) for source in sources]
        about = {
            "model": self._model.name,
            "hidden_size": str(len(weight) // len(self._layers)),
            "tokens": str(self._ridge.count),
            **{f"{one.source} R2": f"{one.r2:.3f}" for one in tests},
        }
        replace(scorer, about=about).save(self._path)
        return self._path, tests

    def _tested(self, scorer: Scorer, source: Source) -> ScorerTest:
        parts = [(x, y) for name, x, y in self._tests if name == source]
        found = np.concatenate([scorer.scores(x) for x, _ in parts])
        wanted = torch.cat([y for _, y in parts]).numpy()
        return ScorerTest(
            source, len(wanted), explained_variance(found, wanted), spearman(found, wanted)
        )


def default_layers(count: int) -> tuple[int, ...]:
    """The numbers of the layers whose hidden states a scorer reads by default.

    They are the layers at 1/30, 1/3 and 2/3 of the depth of a model with `count` layers.
    """
    return tuple(sorted({max(1, round(count * share)) for share in (1 / 30, 1 / 3, 2 / 3)}))


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise SettingError unless `layers` ascend and a model with `count` layers has them."""
    for one in layers:
        if not 1 <= one <= count:
            raise SettingError(f"layers can't include {one}; allowed: 1 to {count}")
    if list(layers) != sorted(set(layers)):
        raise SettingError(f"layers can't be {','.join(map(str, layers))}; they must ascend")


def collect_conversations(
    options: ScorerOptions, model: LoadedModel
) -> Iterator[ScorerConversation]:
    """Yield conversations for training a scorer, until they have `options.tokens` tokens in all."""
    template, rng = Template(model.tokenizer, model.anchors), Random(f"scorer/{options.seed}")
    length, left = min(LENGTH, (model.context_length - _ROOM) // 2), options.tokens
    given = [one for file in options.data for one in load_dialogues(file)]
    rng.shuffle(given)
    talk: dict[Source, Iterator[tuple[str, str]]] = {
        "given": (pair for one in given for pair in one),
        "generated": _synthetic(rng),
    }
    for source, rounds in talk.items():
        for one in cut_into_conversations(rounds, template, length):
            if left <= 0:
                return
            yield ScorerConversation(one, source)
            left -= sum(len(turn.ids) for turn in one)


def _synthetic(rng: Random) -> Iterator[tuple[str, str]]:
    """Yield the rounds of one synthetic dialogue after another, without end."""
    while True:
        said = [one.text for one in dialogue(rng, 12, _MIX) if one.role != "system"]
        yield from zip(said[::2], said[1::2], strict=False)


def cut_into_conversations(
    rounds: Iterator[tuple[str, str]], template: Template, length: int
) -> Iterator[list[TurnIds]]:
    """Turn a stream of rounds into conversations of at most `length` tokens, and yield each."""
    found: list[TurnIds] = []
    for user, reply in rounds:
        ids = whole_round(template, user, reply, first=not found)
        if found and sum(len(one.ids) for one in [*found, ids]) > length:
            yield found
            found, ids = [], whole_round(template, user, reply, first=True)
        if len(ids.ids) <= length:
            found.append(ids)
    if found:
        yield found


def training_pairs(
    model: LoadedModel, ids: Sequence[int], request: Sequence[int], layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Let the model read a conversation twice, and return the training data for a scorer.

    The data is two tensors: hidden states [m, layers x d], and log scores [m].
    """
    count, cache = len(ids), model.new_cache(2 * len(ids) + len(request))
    with recorded_states(model.module, layers) as states:
        model.read(ids, cache)
    cache.commit(count)
    counted = AttentionStatsConfig(0).counted_layers(len(cache.row_layers), model.sliding_layers)
    highest = HighestWeights(counted, torch.arange(count))
    model.read([*request, *ids], cache, observer=highest)
    received = highest.mean()
    if received is None:
        raise ModelError(no_attention_reason(model))
    scores = torch.from_numpy(received).clamp_min(_LEAST).log()
    return side_by_side(states).cpu()[_SINKS:], scores[_SINKS:]


def explained_variance(found: Floats, wanted: Floats) -> float:
    """R2 of predictions: the share of the variance of `wanted` [n] that `found` [n] explains."""
    return float(1 - np.mean((found - wanted) ** 2) / np.var(wanted))


def spearman(found: Floats, wanted: Floats) -> float:
    """Spearman's rank correlation of predictions `found` [n] and measured values `wanted` [n].

    Equal values get successive ranks.
    """
    ranks = [np.argsort(np.argsort(one)) for one in (found, wanted)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def open_trainer(options: ScorerOptions) -> ScorerTrainer:
    """Load the model that `options` names, and make a trainer with the conversations for it."""
    model = load_model(options.model, trust_remote_code=options.trust_remote_code)
    return ScorerTrainer(model, options)
