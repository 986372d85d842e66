"""Trains the tokenizer of the model `tiny`, and makes its training batches.

The tokenizer is a byte-level BPE, trained on synthetic dialogues. A batch has the ids of
conversations; further tensors mark which ids belong to replies and to facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.synthetic.rounds import Key, Message, Speaker, draw_length

BOS, USER, ASSISTANT, SYSTEM, END, PAD = SPECIAL_TOKENS = (
    "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>",
)  # fmt: skip

# Append-only: the text of a conversation begins with the text of its first messages alone.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The mix of rounds that the tokenizer learns its vocabulary from: every kind of round.
VOCABULARY_MIX = Mix(tell=0.45, ask=0.2, repeat=0.1)


def sample_texts(seed: int, dialogues: int) -> Iterator[str]:
    """Yield the texts of all messages in `dialogues` generated conversations, one by one.

    The tokenizer is trained on these texts.
    """
    for index in range(dialogues):
        rng = Random(f"{seed}/vocabulary/{index}")
        for message in dialogue(rng, 20, VOCABULARY_MIX):
            yield message.text


def learn_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `vocab_size` tokens on `texts`.

    Each digit is a token of its own. The tokenizer adds no special tokens when it encodes a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_tokenizer(seed: int, vocab_size: int, dialogues: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `dialogues` generated dialogues, and give it a chat template.

    `vocab_size` is the number of its tokens. The same seed gives the same tokenizer.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learn_bpe(sample_texts(seed, dialogues), vocab_size),
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


TOKENS_PER_ROUND, TOKENS_PER_QUIZ = 23, 54  # averages, to choose how many rounds to generate


@dataclass(frozen=True, slots=True)
class Rendered:
    """The ids of one conversation, as the chat template writes it, with marks for each id."""

    ids: list[int]  # the ids of all tokens
    # for each token, whether it belongs to a reply; a reply's end token belongs to it
    answer: list[bool]
    # for each token of a reply that recalls a fact, the number of this reply, from 1; for all other
    # tokens 0
    span: list[int]
    # for each token that states or recalls the value of a fact, the number of the fact, from 1; for
    # all other tokens 0
    fact: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of training rows of equal length: ids and their marks.

    Each field is a tensor [rows, tokens + 1] with the values of the same field of `Rendered`.
    """

    ids: Tensor
    answer: Tensor
    span: Tensor
    fact: Tensor


class Renderer:
    """Turns messages into ids as the chat template does, and marks the ids of replies and facts.

    If `anchor`, the id of the anchor token, is given, an anchor token is inserted after each
    message whose role is in `gathered`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        anchor: int | None = None,
        gathered: tuple[Speaker, ...] = (),
    ) -> None:
        self.tokenizer, self.anchor, self.gathered = tokenizer, anchor, gathered
        self.encode = tokenizer.backend_tokenizer.encode
        ids = tokenizer.convert_tokens_to_ids([BOS, SYSTEM, USER, ASSISTANT, END])
        self.bos, system, user, assistant, self.end = ids
        self.roles = {"system": system, "user": user, "assistant": assistant}

    def render(self, messages: Iterable[Message]) -> Rendered:
        """Turn the messages of one conversation into ids, and mark the ids of replies and facts."""
        one = Rendered([self.bos], [False], [0], [0])
        spans, facts = 0, dict[Key, int]()
        for message in messages:
            text = self.encode(message.text, add_special_tokens=False)
            counts = message.recall not in (None, "repeat", "untold", "quiz")
            spans += counts
            is_reply = message.role == "assistant"
            one.ids.extend([self.roles[message.role], *text.ids, self.end])
            one.answer.extend([False] + [is_reply] * (len(text) + 1))
            one.span.extend([0] + [spans * counts] * (len(text) + 1))
            number = facts.setdefault(message.fact, len(facts) + 1) if message.fact else 0
            in_value = value_tokens(message, text.offsets)
            one.fact.extend([0, *(number * inside for inside in in_value), number * is_reply])
            if self.anchor is not None and message.role in self.gathered:
                one.ids.append(self.anchor)
                one.answer.append(False)
                one.span.append(0)
                one.fact.append(0)
        return one

    def row(self, rng: Random, tokens: int, mix: Mix) -> Rendered:
        """Make a training row of `tokens` ids from generated conversations, one after another."""
        row = Rendered([], [], [], [])
        while len(row.ids) < tokens:
            left = tokens - len(row.ids)
            length = left if rng.random() < 0.4 else draw_length(rng, 60, left)
            per_round = TOKENS_PER_ROUND + mix.quiz * (TOKENS_PER_QUIZ - TOKENS_PER_ROUND)
            rounds = max(2, int(length / per_round))
            one = self.render(dialogue(rng, rounds, mix))
            row.ids.extend(one.ids)
            row.answer.extend(one.answer)
            for numbers, more in ((row.span, one.span), (row.fact, one.fact)):
                offset = max(numbers, default=0)
                numbers.extend(n + offset if n else 0 for n in more)
        return Rendered(*(column[:tokens] for column in astuple(row)))

    def batch(self, rng: Random, rows: int, tokens: int, mix: Mix) -> Batch:
        """Make a training batch of `rows` rows, each with `tokens + 1` ids of conversations."""
        packed = [self.row(rng, tokens + 1, mix) for _ in range(rows)]
        columns = zip(*(astuple(row) for row in packed), strict=True)
        return Batch(*(torch.tensor(column) for column in columns))


def value_tokens(message: Message, offsets: list[tuple[int, int]]) -> list[bool]:
    """Whether each token of a message states the value of its fact; in a reply, all do."""
    start = message.text.find(message.value) if message.role == "user" else -1
    if start < 0:
        return [True] * len(offsets)
    end = start + len(message.value)
    return [begin < end and start < stop for begin, stop in offsets]


def span_matches(correct: Tensor, span: Tensor) -> Tensor:
    """Test whether the model predicts every token of each answer that recalls a fact.

    Returns bool [answers], row by row. `correct` is bool [rows, tokens], whether the argmax is the
    target token.
    """
    rows = span + torch.arange(len(span))[:, None] * (span.max() + 1)
    keys, index = torch.unique(rows[span > 0], return_inverse=True)
    hits = torch.ones(len(keys))
    return hits.scatter_reduce(0, index, correct[span > 0].float(), "amin").bool()
