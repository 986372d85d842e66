"""The tiny model's tokenizer: byte-level BPE trained on synthetic dialogues; its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sirchat.lab.synthetic.dialogue import Mix, dialogue

BOS, USER, ASSISTANT, SYSTEM, END, PAD = SPECIAL_TOKENS = (
    "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>",
)  # fmt: skip

# Append-only: the render of a longer conversation starts with the render of a shorter one.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The mix of rounds that the vocabulary is learnt from: every kind, made-up words included.
VOCABULARY_MIX = Mix(tell=0.45, ask=0.2, repeat=0.1)


def sample_texts(seed: int, dialogues: int) -> Iterator[str]:
    """The message texts of `dialogues` conversations."""
    for index in range(dialogues):
        rng = Random(f"{seed}/vocabulary/{index}")
        for message in dialogue(rng, 20, VOCABULARY_MIX):
            yield message.text


def learn_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with single digits; encoding adds no special tokens."""
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
    """Learn a tokenizer from `dialogues` seeded conversations and give it the chat template."""
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
