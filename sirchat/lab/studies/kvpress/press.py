"""A press of kvpress (https://github.com/NVIDIA/kvpress) that evicts by a policy of sirchat.

A press is a method of kvpress to compress the KV cache. kvpress evicts from a layer's cache while
that layer is computed, when there are no logits yet. So this press reads each context twice. Its
own reading comes first, and gives the surprisals, and the hidden states for the scorer of the
policy `learned`. (sirchat itself evicts after a forward pass, and reads only once.) This module
works without sirchat's model classes, and with the version of transformers that kvpress requires.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from kvpress import ScorerPress
from torch import Tensor, nn
from transformers import DynamicCache

from sirchat.memory.key_value_stats import Block, key_value_stats
from sirchat.memory.ledger import HeldRows, Role
from sirchat.memory.policies.base import ScorePolicy, rows_of_text
from sirchat.models.scorer import LayerStates, Scorer
from sirchat.text.detokenizer import WordContinuation

_ROWS = 256  # number of tokens whose logits are computed at once


@dataclass
class PolicyPress(ScorerPress):  # type: ignore[misc]  # kvpress is untyped
    """Evicts the tokens to which a policy of sirchat gives the lowest scores, from every layer.

    The press can be used wherever kvpress takes a `ScorerPress`, also inside `KeyRerotationPress`.
    It takes one context at a time.

    Attributes:
        compression_ratio: share of the tokens that are evicted.
        policy: the policy, such as `Salience(recent=32)`. Policies that need attention weights are
            refused: kvpress has presses of its own for them.
        tokenizer: the model's tokenizer, which tells where words begin and which tokens belong to
            the chat template; without a tokenizer, every token is a word of its own.
        scorer: the scorer of the policy `learned`, such as `Scorer.load(path)`.
        sinks: number of tokens at the context's start that are never evicted.
    """

    policy: ScorePolicy = field(kw_only=True)
    tokenizer: Any = field(default=None, kw_only=True, repr=False)
    scorer: Scorer = field(default_factory=Scorer, kw_only=True, repr=False)
    sinks: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.policy, ScorePolicy) or self.policy.needs_attention:
            raise ValueError(f"{type(self.policy).__name__} has no score that needs no attention")
        if self.policy.needs_scorer and not self.scorer.layers:
            raise ValueError(f"{type(self.policy).__name__} needs a scorer")
        self._rows: HeldRows | None = None
        self._reads_ahead = False
        self._hooks: list[Any] = []
        tells = WordContinuation(self.tokenizer) if self.tokenizer is not None else None
        self._continues: Callable[[int, int], bool] = tells or (lambda previous, token_id: False)

    def post_init_from_model(self, model: Any) -> None:
        """Install hooks with which the press reads the next context before the model does.

        kvpress calls this method.
        """
        self._reset()
        body = model.model

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if not self._reads_ahead:
                ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                with self._reading_ahead():
                    self._rows = self._read(model, ids)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._reads_ahead:
                self._reset()

        self._hooks = [
            body.register_forward_pre_hook(before, with_kwargs=True),
            body.register_forward_hook(after),
        ]

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The rank [1, H, n] of each of the n tokens under the policy, the same in all H heads.

        The token of rank 0 is evicted first.
        """
        batch, heads, count, _ = keys.shape
        ranks = torch.arange(count, dtype=torch.float32)
        if not self._reads_ahead:
            if self._rows is None or len(self._rows) != count or batch > 1:
                raise RuntimeError("this press takes one context at a time, as a whole")
            block = Block(ranks.long().numpy(), [keys[0], values[0]])
            wanted = self.policy.key_value_stats
            stats = key_value_stats(wanted, count, lambda: iter([block]), lambda: iter([block]))
            columns: dict[str, Any] = {name: torch.from_numpy(one) for name, one in stats.items()}
            order = self.policy.best_first(replace(self._rows, **columns))
            ranks[order] = ranks.flip(0)
        return ranks.to(keys.device).expand(batch, heads, count)

    @contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """Context manager: forward passes within it count as the press's own reading ahead.

        In these passes the hooks of the press do nothing.
        """
        self._reads_ahead = True
        try:
            yield
        finally:
            self._reads_ahead = False

    @torch.no_grad()
    def _read(self, model: Any, ids: Tensor) -> HeldRows:
        """Read the token ids [1, n] with an empty cache; returns a row for each token.

        The rows have surprisal, role and other columns, in the form in which policies get them.
        """
        states = LayerStates(model, self.scorer.layers)
        with ExitStack() as stack:
            if self.scorer.layers:
                stack.enter_context(states.recorded())
            hidden = model.model(input_ids=ids, past_key_values=DynamicCache())[0][0]
        learned = self.scorer.scores(states.joined()) if self.scorer.layers else []
        after, nats = ids[0, 1:].to(hidden.device), [math.nan]
        for some, wanted in zip(
            torch.split(hidden[:-1], _ROWS), torch.split(after, _ROWS), strict=True
        ):
            logits = model.get_output_embeddings()(some).float()
            nats += (-logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]).tolist()
        listed = ids[0].tolist()
        special = set(getattr(self.tokenizer, "all_special_ids", ()))
        return rows_of_text(
            listed,
            nats,
            roles=[Role.TEMPLATE if one in special else Role.USER for one in listed],
            continues_word=[False, *(self._continues(*pair) for pair in pairwise(listed))],
            learned_scores=learned,
            sinks=self.sinks,
        )

    def _reset(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._rows = [], None
