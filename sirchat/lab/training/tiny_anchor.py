"""Trains `tiny-anchor`: `tiny`, further trained to compress each round into an anchor (AnSAN)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from sirchat import paths
from sirchat.lab.training.anchor import add_anchor
from sirchat.lab.training.card import anchor_card
from sirchat.lab.training.masks import visible
from sirchat.lab.training.network import register_attention
from sirchat.lab.training.probe import probe
from sirchat.lab.training.rows import Batch, Renderer
from sirchat.lab.training.schedule import ANCHOR_EACH_ROUND, ANCHOR_PHASES, Phase
from sirchat.lab.training.trainer import Trainer
from sirchat.text.anchors import ANCHOR, Anchors

SINKS = 1


class TinyAnchorTrainer(Trainer):
    """Trains `tiny` further, under the attention mask of Anchor-based LLMs (equation 4)."""

    phases: ClassVar[tuple[Phase, ...]] = ANCHOR_PHASES

    def begin(self) -> tuple[Tokenizer, LlamaForCausalLM]:
        """Load `tiny`, and add the anchor token, whose embedding is the mean of all others."""
        tokenizer = AutoTokenizer.from_pretrained(paths.tiny_dir())
        model = AutoModelForCausalLM.from_pretrained(
            paths.tiny_dir(), dtype=torch.float32, attn_implementation=register_attention()
        )
        anchors = Anchors("ac", "round", add_anchor(model, tokenizer), SINKS)
        anchors.write(model.config)
        return tokenizer, model

    @property
    def anchor(self) -> int:
        """The id of the anchor token."""
        return int(self.tokenizer.convert_tokens_to_ids(ANCHOR))

    def renderer(self, step: int) -> Renderer:
        """The renderer of a step's conversations: it places anchors as the step's phase says."""
        return Renderer(self.tokenizer, self.anchor, self.schedule_at(step).phase.gathered)

    def attention_mask(self, step: int, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """The mask of anchor-based attention for a batch; and None, since no answers are lost.

        Tokens attend to their own sequence and to the anchors of earlier sequences.
        """
        return self.visible(batch.ids[:, :-1]), None

    def visible(self, ids: Tensor) -> Tensor:
        """The mask of anchor-based attention, bool [rows, 1, n, n], for ids [rows, n]."""
        document = (ids == self.tokenizer.bos_token_id).long().cumsum(1)
        return visible(ids == self.anchor, document, sinks=SINKS)

    def card(self) -> str:
        """The text of the model card, with the recall of the current model.

        Recall is measured with older rounds visible only through their anchors.
        """
        options, size = self.options, self.size
        recalls = probe(
            self.model,
            Renderer(self.tokenizer, self.anchor, ANCHOR_EACH_ROUND.gathered),
            seed=options.seed,
            dialogues=size.probes,
            visible=self.visible,
        )
        gathering = sum(
            self.schedule_at(step).phase is self.phases[0] for step in range(options.steps)
        )
        return anchor_card(
            gathering=gathering,
            command=f"sirchat train tiny-anchor --steps {options.steps} --seed {options.seed}",
            tokens=options.steps * size.tokens_per_step,
            seed=options.seed,
            recalls=list(recalls) if size.probes else [],
        )
