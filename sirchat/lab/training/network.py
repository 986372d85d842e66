"""Builds the model `tiny`, a small Llama, with its attention function, its loss and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from sirchat.lab.training.rows import Batch
from sirchat.lab.training.schedule import Size

CONTEXT = 2048
ANSWER_WEIGHT = 4.0  # other tokens have weight 1, not 0: policies need their surprisal
MUON_LR, MUON_DECAY = 0.02, 0.02
ADAM_LR = 2e-3


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the arguments of an attention function of transformers.

    `query` is [rows, heads, n, d], `key` and `value` are [rows, kv_heads, n, d]. Returns the output
    [rows, n, heads, d], and None in place of the attention weights.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        query, key, value, attention_mask, is_causal=attention_mask is None, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> str:
    """Register the function `causal_attention` with transformers as an attention implementation.

    Returns the name under which transformers knows it.
    """
    AttentionInterface.register("sirchat_causal", causal_attention)
    return "sirchat_causal"


def build_model(
    size: Size, vocab: int, seed: int, bos: int, eos: int, pad: int
) -> LlamaForCausalLM:
    """Build a Llama model of the shape `size`, with random weights that `seed` determines.

    `vocab` is the size of the vocabulary; `bos`, `eos` and `pad` are ids of special tokens.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        attn_implementation=register_attention(),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def token_losses(
    model: LlamaForCausalLM, ids: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Read `ids` [rows, tokens + 1], and compare the prediction of each next token with the token.

    Returns two tensors [rows, tokens]: the cross-entropy of the next token in nats, and whether the
    argmax is the next token.
    """
    targets = ids[:, 1:]
    out = model.model(input_ids=ids[:, :-1], attention_mask=visible, use_cache=False)
    hidden = out.last_hidden_state
    logits = model.lm_head(hidden)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    best = logits.detach().amax(-1)
    correct = logits.detach().gather(-1, targets[..., None])[..., 0] >= best
    return losses.view_as(targets), correct


def weighted_loss(losses: Tensor, batch: Batch, lost: Tensor | None = None) -> Tensor:
    """The weighted mean of the token losses [rows, tokens], as a scalar tensor.

    `lost`, bool [rows, tokens + 1], marks tokens with weight 0, which can't be known under the
    attention mask; None for no such tokens.
    """
    weight = torch.where(batch.answer[:, 1:], ANSWER_WEIGHT, 1.0)
    if lost is not None:
        weight = weight.masked_fill(lost[:, 1:], 0.0)
    weight = weight.to(losses.device)
    return (losses * weight).sum() / weight.sum()


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Make a model's two optimizers: Muon for the layers' matrices, AdamW for all other weights.

    The other weights are the embeddings and the norms.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.dim() == 2 and "embed" not in name else others).append(weight)
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=MUON_DECAY),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
