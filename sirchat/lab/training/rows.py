"""The tiny model's tokenizer, and training batches: ids with marks of replies and facts.

The tokenizer is byte-level BPE, trained on synthetic dialogues.
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
    """Yield the texts of all messages in `dialogues` generated conversations."""
    for index in range(dialogues):
        rng = Random(f"{seed}/vocabulary/{index}")
        for message in dialogue(rng, 20, VOCABULARY_MIX):
            yield message.text


def learn_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which each digit is a token of its own.

    Its encoding adds no special tokens.
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
    """Train a tokenizer on `dialogues` generated dialogues, and set its chat template."""
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
    """One conversation as ids, as the chat template writes it.

    `answer[i]` is true if token i belongs to a reply (end token included). `span[i]` is 0 unless
    token i belongs to a reply that recalls a fact; then it is the number of that reply, counted
    from 1. `fact[i]` is 0 unless token i states or recalls the value of a fact; then it is the
    number of that fact, counted from 1.
    """

    ids: list[int]
    answer: list[bool]
    span: list[int]
    fact: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of rows of equal length: the fields of `Rendered` as tensors [rows, tokens + 1]."""

    ids: Tensor
    answer: Tensor
    span: Tensor
    fact: Tensor


class Renderer:
    """Turns messages into ids as the chat template does, and marks answers and facts.

    If `anchor`, the id of the anchor token, is given, it is inserted after each message whose role
    is in `gathered`.
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
        """A conversation as ids, with marks.

        Replies that repeat words, answer a quiz or refuse an untold fact do not count as recall.
        """
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
        """A row of `tokens` ids: one generated conversation after another, the last one cut."""
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
        """A batch of `rows` rows of `tokens + 1` ids.

        The last `tokens` of them are the targets of the first `tokens`.
        """
        packed = [self.row(rng, tokens + 1, mix) for _ in range(rows)]
        columns = zip(*(astuple(row) for row in packed), strict=True)
        return Batch(*(torch.tensor(column) for column in columns))


def value_tokens(message: Message, offsets: list[tuple[int, int]]) -> list[bool]:
    """For each token of a message, whether it is part of the value that the message states.

    `offsets` has the start and end of each token in the text, in characters. All tokens of a reply,
    or of a message that does not contain the value, count as part of the value.
    """
    start = message.text.find(message.value) if message.role == "user" else -1
    if start < 0:
        return [True] * len(offsets)
    end = start + len(message.value)
    return [begin < end and start < stop for begin, stop in offsets]


def span_matches(correct: Tensor, span: Tensor) -> Tensor:
    """For each answer that recalls a fact, whether every token of it is right; bool [answers].

    This is true if and only if greedy decoding generates the answer.

    Args:
        correct: bool [rows, tokens], whether the argmax is the target.
        span: int [rows, tokens], number of the answer that a token belongs to, or 0.
    """
    rows = span + torch.arange(len(span))[:, None] * (span.max() + 1)
    keys, index = torch.unique(rows[span > 0], return_inverse=True)
    hits = torch.ones(len(keys))
    return hits.scatter_reduce(0, index, correct[span > 0].float(), "amin").bool()
