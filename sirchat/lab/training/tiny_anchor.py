"""Trains the bundled model `tiny-anchor`, which compresses each round into an anchor (AnSAN).

The training starts from the weights of the bundled model `tiny`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from sirchat import paths
from sirchat.lab.training.anchor import add_anchor
from sirchat.lab.training.masks import anchor_mask
from sirchat.lab.training.network import register_attention
from sirchat.lab.training.probe import anchor_card, probe
from sirchat.lab.training.rows import Batch, Renderer
from sirchat.lab.training.schedule import ANCHOR_EACH_ROUND, ANCHOR_PHASES, Phase
from sirchat.lab.training.trainer import Trainer
from sirchat.text.anchors import ANCHOR, Anchors

SINKS = 1


class TinyAnchorTrainer(Trainer):
    """Trains the bundled model `tiny` further, so that it compresses each round into an anchor.

    The attention mask is that of the paper Anchor-based LLMs (equation 4).
    """

    phases: ClassVar[tuple[Phase, ...]] = ANCHOR_PHASES

    def begin(self) -> tuple[Tokenizer, LlamaForCausalLM]:
        """Load the bundled model `tiny` and its tokenizer, add the anchor token, and return both.

        The embedding of the anchor token is the mean of all other embeddings.
        """
        tokenizer = AutoTokenizer.from_pretrained(paths.tiny_dir())
        model = AutoModelForCausalLM.from_pretrained(
            paths.tiny_dir(), dtype=torch.float32, attn_implementation=register_attention()
        )
        anchors = Anchors("ac", "round", add_anchor(model, tokenizer), SINKS)
        anchors.write_to_config(model.config)
        return tokenizer, model

    @property
    def anchor(self) -> int:
        """The id of the anchor token in the tokenizer's vocabulary."""
        return int(self.tokenizer.convert_tokens_to_ids(ANCHOR))

    def renderer(self, step: int) -> Renderer:
        """The object that turns the conversations of a training step into ids with anchors.

        The phase of the step says after which messages an anchor is placed.
        """
        return Renderer(self.tokenizer, self.anchor, self.schedule_at(step).phase.gathered)

    def attention_mask(self, step: int, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """The attention mask for the batch of a training step, and None."""
        return self.visible(batch.ids[:, :-1]), None

    def visible(self, ids: Tensor) -> Tensor:
        """The mask of anchor-based attention, bool [rows, 1, n, n], for ids [rows, n].

        Under it, a token attends to its own sequence and to the anchors of earlier sequences.
        """
        document = (ids == self.tokenizer.bos_token_id).long().cumsum(1)
        return anchor_mask(ids == self.anchor, document, sinks=SINKS)

    def card(self) -> str:
        """Measure the recall of the trained model, and return the text of its model card."""
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
