"""Two small vocabularies as GGUF files have them: of byte pairs, and of sentencepiece."""

from __future__ import annotations

from typing import Any

import gguf
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
_MERGES = [*_WORDS, "( hello", "1 2", "12 3", "123 4", "Ġ Ġ"]
_PIECES = ["▁he", "▁hello", "llo", "▁wo", "▁world", "ld", "ll", "he", "wo", "or", "rld", "lo"]
_CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def add_byte_pairs(writer: Any, size: int, pre: str = "llama-bpe") -> None:
    """Add a vocabulary of `size` tokens: bytes and merged bytes, as of GPT-2."""
    merged = [one.replace(" ", "") for one in _MERGES]
    tokens = [*_CONTROL, *bytes_to_unicode().values(), *merged]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges(_MERGES)
    _add(writer, tokens, [gguf.TokenType.NORMAL] * (len(tokens) - len(_CONTROL)), size)


def add_sentence_pieces(writer: Any, size: int, kind: str = "llama") -> None:
    """Add a vocabulary of `size` tokens: bytes, letters and pieces of words with scores.

    `kind` is how the file calls this kind of vocabulary: `llama` or `gemma4`.
    """
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, *letters]
    kinds = [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(_PIECES) + len(letters))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(at) for at in range(size)])
    _add(writer, tokens, kinds, size)


def _add(writer: Any, tokens: list[str], kinds: list[Any], size: int) -> None:
    unused = [f"[PAD{at}]" for at in range(len(tokens), size)]
    control = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * (len(_CONTROL) - 1)
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*control, *kinds, *[gguf.TokenType.UNUSED] * len(unused)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
