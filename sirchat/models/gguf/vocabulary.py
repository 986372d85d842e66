"""Makes the tokenizer of a GGUF file: of byte pairs without transformers, any other with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors
from tokenizers import pre_tokenizers as splits

from sirchat.models.gguf.header import GgufFile
from sirchat.models.progress import switch_off_bars
from sirchat.text.tokenizer import SPECIAL, FastTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # numbers of kinds of tokens

# A token that transformers adds to every byte-pair vocabulary; sirchat adds it, too.
_UNNAMED = "<|endoftext|>"

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_THREE_DIGITS = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_ONE_DIGIT = rf"{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_FIRST = ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone")

# For each value of `tokenizer.ggml.pre`: the regular expression for the parts of a text.
_PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _THREE_DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _ONE_DIGIT),
    "tekken": _TEKKEN,
}

# Values of `tokenizer.ggml.pre` that stand for GPT-2's way to split text into parts.
#
# `None` stands for a file that does not have this key.
_PLAIN = ("gpt-2", "default", "None")


def load_tokenizer(folder: str, name: str, file: GgufFile) -> Any:
    """Make the tokenizer of a GGUF file, with transformers only if it must be."""
    tokenizer = byte_pair_tokenizer(file.metadata)
    return hub_tokenizer(folder, name, file) if tokenizer is None else tokenizer


def hub_tokenizer(folder: str, name: str, file: GgufFile) -> Any:
    """Make a tokenizer of transformers."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    switch_off_bars()
    if file.architecture.startswith("qwen"):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, tokenizer_type="qwen2")
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name)
    split = _split_of(str(file.metadata.get("tokenizer.ggml.pre")))
    if split is not None:  # transformers may not know this split
        tokenizer.backend_tokenizer.pre_tokenizer = split
    return tokenizer


def byte_pair_tokenizer(metadata: Mapping[str, Any]) -> FastTokenizer | None:
    """Make the tokenizer of a byte-pair vocabulary; None for others, and for unknown splits."""

    def said(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}")

    pre, tokens, merges = str(said("pre")), said("tokens"), said("merges")
    split = _split_of(pre) or (splits.ByteLevel(False) if pre in _PLAIN else None)
    is_known = said("model") == "gpt2" and split is not None
    if not is_known or not isinstance(tokens, list) or not isinstance(merges, list):
        return None
    alphabet = set(splits.ByteLevel.alphabet())
    if not alphabet.issuperset("".join(tokens)):
        spelled = [_spelled(token, alphabet) for token in tokens]
    else:
        spelled = tokens
    ids = {token: i for i, token in enumerate(spelled)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Tokenizer(
        models.BPE(ids, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    special = dict[str, str | None]()
    for name, key in zip(SPECIAL, ("bos", "eos", "unknown", "padding"), strict=True):
        number = said(f"{key}_token_id")
        special[name] = None if number is None else tokens[number]
    kinds = list(zip(tokens, said("token_type") or (), strict=False))
    control = [token for token, kind in kinds if kind == _CONTROL and set(token) <= alphabet]
    backend.add_special_tokens(_added((_UNNAMED, *control)))
    backend.add_tokens(_added([t for t, kind in kinds if kind == _USER_DEFINED and t in ids]))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [token for token in special.values() if token is not None and token not in known]
    backend.add_special_tokens(_added(named))
    ends = [
        special[f"{name}_token"] if said(f"add_{name}_token") else None for name in ("bos", "eos")
    ]
    backend.post_processor = _add_bos_and_eos(ends[0], ends[1], backend)
    return FastTokenizer(backend, special, metadata.get("tokenizer.chat_template"))


def _added(tokens: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(token, normalized=False) for token in tokens]


def _add_bos_and_eos(bos: str | None, eos: str | None, backend: Tokenizer) -> Any:
    """Make a post-processor that puts `bos` before a text and `eos` after it; None for neither."""
    before, after = f"{bos}:0 " if bos else "", f" {eos}:0" if eos else ""
    second = f"{bos}:1 " if bos else "", f" {eos}:1" if eos else ""
    return processors.TemplateProcessing(
        single=f"{before}$A:0{after}",
        pair=f"{before}$A:0{after} {second[0]}$B:1{second[1]}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (bos, eos) if token],
    )


def _spelled(token: str, alphabet: set[str]) -> str:
    """Spell a token in the letters of `alphabet`, each of which stands for a byte."""
    if alphabet.issuperset(token):
        return token
    split = splits.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in split.pre_tokenize_str(token))


def _split_of(name: str) -> Any:
    """The pre-tokenizer called `name`; None if it is unknown."""
    if name in _DIGITS_FIRST:  # "  12" becomes "  ", "1", "2"
        return splits.Sequence([splits.Digits(individual_digits=True), splits.ByteLevel(False)])
    if name == "falcon":  # marks apart from letters; "1234" becomes "123", "4"
        marks = splits.Split(Regex(r"[\p{P}$+<=>^~|`]+"), "isolated")
        digits = splits.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        return splits.Sequence([marks, splits.ByteLevel(False), digits])
    if name in _PATTERNS:
        parts = splits.Split(Regex(_PATTERNS[name]), "isolated")
        return splits.Sequence([parts, splits.ByteLevel(False, use_regex=False)])
    return None
