"""Policy `learned`: keeps the tokens to which the model's trained scorer gives high scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sirchat.memory.ledger import HeldRows
from sirchat.memory.policies.base import RecentScorePolicy
from sirchat.memory.policies.scores import (
    neighbour_factor,
    or_usual,
    product_of,
    template_factor,
    word_factor,
)


@dataclass(frozen=True)
class Learned(RecentScorePolicy):
    """Keeps the sinks, the tokens of the highest predicted score, and the newest.

    KVzap (Jegou and Jeblick 2026, arXiv:2601.07891): the score that KVzip measures by reading a
    text a second time can be predicted from a token's hidden states in the first reading:

        log score = w . h + b

    where h is the hidden states after a few layers, joined to one vector. `sirchat train scorer`
    fits w and b by ridge regression. Known deviations: the paper has a scorer for every layer, and
    evicts tokens whose score is below a threshold; here all layers share one score, which predicts
    the mean over heads and layers, and only as many tokens are evicted as necessary. Three factors
    of the score are ours, the same as in the policy `salience`: `whole_words`, `template` and
    `neighbours`. The option with a factor's name switches the factor on or off. A token that was
    read without a scorer gets the median score.

    `smollm2`'s scorer learned from every second conversation of DailyDialog and synthetic dialogue;
    in conversations that it did not learn from, it explains 0.77 of the variance of the log scores
    (Spearman 0.90). On the other half of DailyDialog (`sirchat eval facts-in-dialogue`, 1,000
    tokens, 60 questions, seed 0; paired, 95 %) `learned` answers as many questions correctly as
    `salience` and `kvzip`, as far as 60 questions can show: a share of 0.60 at a budget of 128,
    which is 0.02 more (-0.10 to 0.13) than `salience` and 0.02 less (-0.08 to 0.10) than `kvzip`;
    0.77 at 256, which is 0.03 more (-0.05 to 0.12) than `salience` and 0.03 less (-0.03 to 0.10)
    than `kvzip`. At 256, `learned` holds 0.85 of the words that the questions ask for: 0.10 more
    (0.01 to 0.18) than `salience`, 0.05 less (-0.02 to 0.14) than `kvzip`; at 128 it holds as many
    as `salience` (0.43), and 0.10 less (0.02 to 0.18) than `kvzip`. With `neighbours` it holds no
    more of these words, so this option is off by default. The scorer adds 1 % to the time of
    reading.
    """

    source: ClassVar[str] = "KVzap, arXiv:2601.07891"
    uses: ClassVar[tuple[str, ...]] = ("budget", "sinks", "decay")
    needs_scorer: ClassVar[bool] = True
    log_scale: ClassVar[bool] = True

    whole_words: bool = field(
        default=True, metadata={"help": "give each token the total score of its word"}
    )
    neighbours: bool = field(
        default=False, metadata={"help": "also keep the tokens beside a high-scoring token"}
    )
    template: bool = field(
        default=True, metadata={"help": "evict the chat template's tokens first"}
    )

    def log_factors(self, rows: HeldRows) -> dict[str, Tensor]:
        own = or_usual(rows.learned_score)
        found = {"learned score": own + rows.log_decay_since}
        if self.whole_words:
            found["word"] = word_factor(own, rows)
        if self.template:
            found["template"] = template_factor(rows)
        if self.neighbours:
            found["neighbours"] = neighbour_factor(found, rows)
        return found

    def score(self, rows: HeldRows) -> Tensor:
        return product_of(self.log_factors(rows))
