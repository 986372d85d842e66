"""From dialogues to training batches: ids, loss weights and the spans that count as recall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sirchat.training.dialogue import Message, Mix, dialogue, draw_length
from sirchat.training.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER

TOKENS_PER_ROUND, TOKENS_PER_QUIZ = 23, 54  # on average; they only steer how long dialogues get


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation as ids, as the chat template writes it.

    `answer[i]` is true where token i belongs to a reply (its end token included); `span[i]` numbers
    the recall answer that token i belongs to, from 1, or is 0.
    """

    ids: list[int]
    answer: list[bool]
    span: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of packed rows: all tensors are [rows, tokens + 1]."""

    ids: Tensor
    answer: Tensor
    span: Tensor


class Renderer:
    """Turns messages into ids, the way the chat template does, keeping track of answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.encode = tokenizer.backend_tokenizer.encode
        ids = tokenizer.convert_tokens_to_ids([BOS, SYSTEM, USER, ASSISTANT, END])
        self.bos, system, user, assistant, self.end = ids
        self.roles = {"system": system, "user": user, "assistant": assistant}

    def render(self, messages: Iterable[Message]) -> Rendered:
        """The conversation as ids; requests to repeat do not count as recall."""
        ids, answer, span = [self.bos], [False], [0]
        spans = 0
        for message in messages:
            text = self.encode(message.text, add_special_tokens=False).ids
            counts = message.recall not in (None, "repeat", "untold", "quiz")
            spans += counts
            said = message.role == "assistant"
            ids += [self.roles[message.role], *text, self.end]
            answer += [False] + [said] * (len(text) + 1)
            span += [0] + [spans * counts] * (len(text) + 1)
        return Rendered(ids, answer, span)

    def row(self, rng: Random, tokens: int, mix: Mix) -> Rendered:
        """Conversations end to end until the row is full; the last one is cut."""
        row = Rendered([], [], [])
        while len(row.ids) < tokens:
            room = tokens - len(row.ids)
            length = room if rng.random() < 0.4 else draw_length(rng, 60, room)
            per_round = TOKENS_PER_ROUND + mix.quiz * (TOKENS_PER_QUIZ - TOKENS_PER_ROUND)
            rounds = max(2, int(length / per_round))
            one = self.render(dialogue(rng, rounds, mix))
            offset = max(row.span, default=0)
            row.ids.extend(one.ids)
            row.answer.extend(one.answer)
            row.span.extend(n + offset if n else 0 for n in one.span)
        return Rendered(row.ids[:tokens], row.answer[:tokens], row.span[:tokens])

    def batch(self, rng: Random, rows: int, tokens: int, mix: Mix) -> Batch:
        """A batch of `rows` rows of `tokens + 1` ids: inputs and targets overlap."""
        made = [self.row(rng, tokens + 1, mix) for _ in range(rows)]
        return Batch(
            torch.tensor([row.ids for row in made]),
            torch.tensor([row.answer for row in made]),
            torch.tensor([row.span for row in made]),
        )


def span_matches(correct: Tensor, span: Tensor) -> Tensor:
    """Which recall answers are right in every token.

    correct: bool [rows, tokens], the argmax hits its target; span: int [rows, tokens], 0 for none.
    Returns bool [answers]. With the right tokens before each argmax, this equals greedy decoding.
    """
    rows = span + torch.arange(len(span))[:, None] * (span.max() + 1)
    keys, index = torch.unique(rows[span > 0], return_inverse=True)
    hits = torch.ones(len(keys))
    return hits.scatter_reduce(0, index, correct[span > 0].float(), "amin").bool()
