"""The input of an eviction policy: a table with one row of facts for each token it ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from torch import Tensor


class Role(IntEnum):
    """Who wrote a token. `TEMPLATE` is for tokens that the chat template puts around the text."""

    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TEMPLATE = 3
    TOOL = 4  # what a tool returned


# The name of a statistic of a token's key k and value v in one head: the L2 norm |k|; the cosine
# between k, rotated as attention reads it, and the mean of k / |k| over all tokens that the policy
# ranks; the L1 norm |v|.
KeyValueStat = Literal["key_norm", "key_similarity", "value_norm"]


@dataclass(frozen=True)
class HeldRows:
    """The n tokens among which a policy chooses, in stream order: tensors [n] on the CPU.

    These are the held tokens; after a change of settings or pins, archived tokens, too.
    """

    position: Tensor  # in the stream, ascending
    token_id: Tensor
    turn: Tensor
    round: Tensor
    role: Tensor  # one of `Role`
    surprisal: Tensor  # nats; of the stream's first token, the highest of those read with it
    log_decay_since: Tensor  # log of the product of the decays since the token was read
    log_decayed_surprisal: Tensor  # log of the surprisal times these decays
    attention: Tensor  # received so far; 0 if attention is not recorded
    recent_attention: Tensor  # received from the newest queries alone
    # [layers, heads, n]: the same for each query head; [1, 1, n] if the policy does not want it
    head_attention: Tensor
    key_norm: Tensor  # this and the next two: see `KeyValueStat`; 0 if the policy uses none
    key_similarity: Tensor
    value_norm: Tensor
    arrival_key: Tensor  # uniform in [0, 1), drawn when the token was read
    is_pinned: Tensor
    is_anchor: Tensor
    is_sink: Tensor
    continues_word: Tensor  # mask of the tokens of the same word as the token before
    protected: Tensor  # mask of those that must stay: sinks, pins, newest of the round
    seen: int  # tokens ever read
    seed: int  # for the policy's random numbers
    # For a policy with `needs = "keys"`: for each layer, the keys, as attention reads them, and the
    # values [H, n, D], copies in float32; 0 for a token of which they are no longer stored.
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.position)

    def newest(self, count: int) -> Tensor:
        """Mask [n] of the tokens among the last `count` of the conversation."""
        return self.position >= self.seen - count
