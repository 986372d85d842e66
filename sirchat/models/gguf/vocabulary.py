"""Makes a GGUF file's tokenizer, with the ids of the original one, from its vocabulary."""

from __future__ import annotations

import base64
import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from sirchat.errors import ModelError
from sirchat.models.gguf.header import IMAGE_LAYERS
from sirchat.models.gguf.translate import SAMPLING
from sirchat.models.progress import switch_off_bars
from sirchat.text.tokenizer import SPECIAL_TOKEN_NAMES, FastTokenizer

# Kinds of vocabularies: pieces of words with scores, pairs of bytes, and pairs of letters.
_PIECES, _BYTE_PAIRS, _LETTER_PAIRS = "llama", "gpt2", "gemma4"
_LETTER_PAIR_NAMES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")  # as names of splits

_PREFIX = "tokenizer.ggml."
_MERGES_KEY = "sirchat.merges"  # of metadata that `load_tokenizer` prepared
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of tokens
_NO_ID = (None, -1, 2**32 - 1)  # instead of an id
_ID_NAMES = ("bos", "eos", "unknown", "padding")  # in files, of the `SPECIAL_TOKEN_NAMES`
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # in a vocabulary of pieces

# Tokens that end a reply are control, whatever a file says.
_END_TOKENS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "<end_of_utterance>"),
    "<｜end▁of▁sentence｜>",
}
_LOOKS_LIKE_CONTROL = re.compile(r"<\|.+\|>|<｜.+｜>|</?s>")

# Phi 3 drops blanks after all added tokens but these.
_PHI3_NAME = re.compile("phi-?3", re.IGNORECASE)
_PHI3_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


def load_tokenizer(
    metadata: Mapping[str, Any], prepared: dict[str, Any] | None = None
) -> FastTokenizer:
    """Make the tokenizer of a GGUF file with these `metadata`.

    `prepared` is filled with metadata that make an equal tokenizer faster. Raises
    ModelError if a part of the vocabulary is missing or broken, or if its kind is unknown.
    """
    vocabulary = _Vocabulary(metadata)
    special = dict(zip(SPECIAL_TOKEN_NAMES, vocabulary.special, strict=True))
    template: Any = metadata.get("tokenizer.chat_template")
    merges = vocabulary.merges()
    if template is None:  # then `refuse_broken_template` names the others
        start = "tokenizer.chat_template."
        named = {key.removeprefix(start) for key in metadata if key.startswith(start)}
        template = dict.fromkeys(named, "") or None
    tokenizer = FastTokenizer(vocabulary.backend(merges), special, template)
    tokenizer.adds_bos, tokenizer.notices = vocabulary.adds_bos, vocabulary.notices
    if images := [key for key in metadata if key.endswith(f".{IMAGE_LAYERS}")]:
        tokenizer.notices.append("the GGUF file's part for images is not read: send text alone")
    if prepared is not None:
        starts = ("tokenizer.", "general.name", SAMPLING, *images)
        prepared.update({key: x for key, x in metadata.items() if key.startswith(starts)})
        for name in ("scores", "merges"):  # to find the pairs takes longest
            prepared.pop(f"{_PREFIX}{name}", None)
        prepared[f"{_PREFIX}tokens"] = vocabulary.tokens
        ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        numbers = np.array([ids[part] for pair in merges for part in pair], np.int32)
        prepared[_MERGES_KEY] = base64.b64encode(numbers.tobytes()).decode("ascii")
    return tokenizer


def hub_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Make a transformers tokenizer that gives the same ids."""
    from transformers import PreTrainedTokenizerFast

    switch_off_bars()
    made = load_tokenizer(metadata)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer, **made.special_tokens_map
    )
    tokenizer.chat_template = made.chat_template
    tokenizer.adds_bos, tokenizer.notices = made.adds_bos, made.notices
    return tokenizer


class _Vocabulary:
    """The vocabulary of a GGUF file; `special` has the tokens named in `SPECIAL_TOKEN_NAMES`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._kind, pre = self._setting("model"), self._setting("pre")
        if self._kind not in (_PIECES, _BYTE_PAIRS, _LETTER_PAIRS):
            kinds = f"{_PIECES}, {_BYTE_PAIRS} and {_LETTER_PAIRS}"
            raise _error(f"tokenizer is of the kind {self._kind}; sirchat reads {kinds}")
        self.tokens = self._read_list("tokens", 1)
        has_types, count = self._setting("token_type") is not None, len(self.tokens)
        self._types = self._read_list("token_type", count) if has_types else []
        if self._kind == _PIECES and _MERGES_KEY not in metadata:  # runs of blanks in the file
            self.tokens = [t if t.strip(" ") else "▁" * len(t) for t in self.tokens]
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        self.special = [self._special_token(key) for key in _ID_NAMES]
        self.notices, self._split = list[str](), None
        if self._kind == _BYTE_PAIRS and pre not in _LETTER_PAIR_NAMES:
            self._split = find_split(pre, self._ids)
            if self._split is None:
                self._split = find_split("gpt-2", ())
                self.notices.append(
                    "the GGUF file does not say how its tokenizer splits words (tokenizer.ggml.pre "
                    f"is {pre}): they are split as by GPT-2, and replies may be worse"
                )
        default = self._split is None or self._split.adds_bos
        asks_for_bos = self._kind == _LETTER_PAIRS or self._setting("add_bos_token", default)
        self.adds_bos = bool(asks_for_bos) and self.special[0] is not None
        self._adds_eos = bool(self._setting("add_eos_token")) and self.special[1] is not None

    def backend(self, merges: list[tuple[str, str]]) -> Tokenizer:
        """Make the tokenizer with all added tokens."""
        split = self._split
        if split is not None:
            options: dict[str, Any] = {"ignore_merges": split.ignore_merges}
        else:
            options = {"unk_token": self.special[2], "fuse_unk": True}
            options["byte_fallback"] = "<0x00>" in self._ids
        try:
            backend = Tokenizer(models.BPE(self._ids, merges, **options))
        except Exception as error:  # the library raises nothing more special
            raise _error(f"merges do not fit its tokens: {error}") from error
        if split is not None:
            backend.normalizer = normalizers.NFC() if split.composes else None
            backend.pre_tokenizer, backend.decoder = split.pre_tokenizer(), decoders.ByteLevel()
        else:
            self._replace_blanks(backend)
        control, others = self._added_tokens()
        backend.add_special_tokens(control)
        backend.add_tokens(others)
        bos, eos = [self.special[0]] * self.adds_bos, [self.special[1]] * self._adds_eos
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(token, self._ids[token]) for token in {*bos, *eos}],
        )
        return backend

    def _replace_blanks(self, backend: Tokenizer) -> None:
        """Let `▁` stand for a blank, and put one before a text if word pieces are used."""
        normalizer: list[Any] = [normalizers.Replace(" ", "▁")]
        decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._kind == _PIECES and self._setting("add_space_prefix", True):
            normalizer.insert(0, normalizers.Prepend("▁"))
            decoder.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(normalizer)
        backend.decoder = decoders.Sequence(decoder)

    def merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens to merge, in order of priority."""
        if (prepared := self._metadata.get(_MERGES_KEY)) is not None:
            numbers = np.frombuffer(base64.b64decode(prepared), np.int32)
            parts = np.array(self.tokens, object)[numbers].tolist()  # each text is there once
            return list(zip(parts[::2], parts[1::2], strict=True))
        merges = self._setting("merges")
        if self._kind == _PIECES and (not merges or self._setting("scores")):
            return self._merges_by_score(self._read_list("scores", len(self.tokens)))
        if not merges and self._split is not None and "kimi-k2" in self._split.names:
            return self._merges_by_score(itertools.repeat(0))  # so that ids tell the order
        if not merges:
            raise _error("vocabulary has no merges (tokenizer.ggml.merges)")
        flat = " ".join(merges).split(" ")
        if len(flat) == 2 * len(merges):  # at once: a fifth of the time
            return list(zip(flat[::2], flat[1::2], strict=True))
        parts = (merge.partition(" ") for merge in merges)
        return [(left, right) for left, _, right in parts]

    def _merges_by_score(self, scores: Iterable[float]) -> list[tuple[str, str]]:
        """All pairs of tokens that together are a token, the highest score first."""
        types = self._types or itertools.repeat(_NORMAL)
        scored = [
            (score if kind == _NORMAL else math.inf, token)
            for token, score, kind in zip(self.tokens, scores, types, strict=False)
            if kind == _NORMAL or (kind == _USER_DEFINED and not token.strip("▁"))
        ]
        if len({score for score, _ in scored if score < math.inf}) == 1:  # no scores at all
            scored = [(min(score, -self._ids[token]), token) for score, token in scored]
        scored.sort(key=itemgetter(0), reverse=True)
        mergeable, merges = {token for _, token in scored}, list[tuple[str, str]]()
        counts = Counter(score for score, _ in scored)
        # Tokens of one score make a group, and neighbours whose scores are their own another.
        groups = itertools.groupby(scored, lambda pair: pair[0] if counts[pair[0]] > 1 else None)
        for score, group in groups:
            pairs = [
                (left, right)
                for _, token in group
                for cut in range(len(token) - 1, 0, -1)
                if (left := token[:cut]) in mergeable and (right := token[cut:]) in mergeable
            ]
            if score is not None:
                pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
            merges += pairs
        return merges

    def _added_tokens(self) -> tuple[list[AddedToken], list[AddedToken]]:
        """The control tokens, and other tokens that are found in a text before it is split."""
        ends = [*self.special, *map(self._special_token, ("eot", "eom"))]
        control = _END_TOKENS.union(filter(None, ends))
        others = list[str]()
        if self._types:
            kinds = list(zip(self.tokens, self._types, strict=False))
            control |= {token for token, kind in kinds if kind == _CONTROL}
            others = [t for t, kind in kinds if kind == _USER_DEFINED and t not in control]
        else:
            control |= set(filter(_LOOKS_LIKE_CONTROL.fullmatch, self.tokens))
        is_phi3 = bool(_PHI3_NAME.search(str(self._metadata.get("general.name"))))

        def added(tokens: Iterable[str]) -> list[AddedToken]:
            drops_blanks = {t: is_phi3 and t not in _PHI3_KEEPS_BLANKS for t in tokens}
            return [AddedToken(t, normalized=False, rstrip=x) for t, x in drops_blanks.items()]

        return added(sorted(control & self._ids.keys(), key=self._ids.__getitem__)), added(others)

    def _special_token(self, key: str) -> str | None:
        """The token that the file names as `key`, such as `bos`; None if it names none."""
        default = _DEFAULT_IDS.get(key) if self._kind == _PIECES else None
        number, count = self._setting(f"{key}_token_id", default), len(self.tokens)
        if number in range(count):
            return str(self.tokens[number])
        if number not in _NO_ID and key in ("bos", "eos"):
            name = f"tokenizer.ggml.{key}_token_id"
            raise _error(f"{name} is {number:,}, but its vocabulary has {count:,} tokens")
        return None

    def _read_list(self, name: str, min_length: int) -> list[Any]:
        values = self._setting(name)
        if not isinstance(values, list) or len(values) < min_length:
            count = f"{len(values):,}" if isinstance(values, list) else "no"
            raise _error(f"vocabulary has {count} {name} (tokenizer.ggml.{name})")
        return list(values)

    def _setting(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{_PREFIX}{key}", default)


def _error(what: str) -> ModelError:
    return ModelError(f"the GGUF file's {what}", hint="use another file, or the model's folder")


@dataclass(frozen=True)
class Split:
    """The rule of one name in `tokenizer.ggml.pre`; `vocabulary.toml` describes the fields."""

    names: list[str]
    patterns: list[str]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> Any:
        """Make the part of a tokenizer that splits a text, and spells bytes as letters."""
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*parts, spell])


def find_split(name: object, tokens: Collection[str]) -> Split | None:
    """The split called `name`, or else that of the family with these tokens; None if unknown."""
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    splits = {alias: Split(**entry) for entry in listed["splits"] for alias in entry["names"]}
    families = (
        splits[family["name"]]
        for family in listed["families"]
        if family["token"] in tokens
        and family.get("size", len(tokens)) == len(tokens) >= family.get("least", 0)
    )
    return splits[name] if name in splits else next(families, None)
