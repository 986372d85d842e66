"""Makes the tokenizer of a GGUF file from its vocabulary, with the ids of the model's own one."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from sirchat.errors import ModelError
from sirchat.models.gguf.header import IMAGE_LAYERS
from sirchat.models.gguf.splits import find_split
from sirchat.models.gguf.translate import SAMPLING
from sirchat.models.progress import switch_off_bars
from sirchat.text.tokenizer import SPECIAL_TOKEN_NAMES, FastTokenizer

# Kinds of vocabularies: pieces of words with scores, pairs of bytes, and pairs of letters.
_PIECES, _BYTE_PAIRS, _LETTER_PAIRS = "llama", "gpt2", "gemma4"
_LETTER_PAIR_NAMES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")  # as names of splits

_KEYS, _MERGES = (
    "tokenizer.ggml.",
    "sirchat.merges",
)  # of metadata; `load_tokenizer` adds the latter
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of tokens
_NO_TOKEN = (None, -1, 2**32 - 1)  # instead of an id
_IDS = ("bos", "eos", "unknown", "padding")  # what files call the tokens in `SPECIAL_TOKEN_NAMES`
_USUAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # in a vocabulary of pieces

# Tokens that end a reply are control, whatever a file says.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "<end_of_utterance>"),
    "<｜end▁of▁sentence｜>",
}
_LOOKS_LIKE_CONTROL = re.compile(r"<\|.+\|>|<｜.+｜>|</?s>")

# Phi 3 drops blanks after all added tokens but these.
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_BEFORE_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


def load_tokenizer(
    metadata: Mapping[str, Any], kept: dict[str, Any] | None = None
) -> FastTokenizer:
    """Make the tokenizer of a GGUF file with these `metadata`.

    `kept` is filled with metadata that make the same one sooner. Raises ModelError if a part of the
    vocabulary is missing or broken, or its kind is unknown.
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
    if kept is not None:
        starts = ("tokenizer.", "general.name", SAMPLING, *images)
        kept.update({key: value for key, value in metadata.items() if key.startswith(starts)})
        for name in ("scores", "merges"):  # to find the pairs takes longest
            kept.pop(f"{_KEYS}{name}", None)
        kept[f"{_KEYS}tokens"] = vocabulary.tokens
        kept[_MERGES] = [part for pair in merges for part in pair]
    return tokenizer


def hub_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Make a tokenizer of transformers that gives the same ids."""
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
    """The vocabulary of a GGUF file; `special` are the `tokens` named in `SPECIAL_TOKEN_NAMES`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._kind, pre = self._said("model"), self._said("pre")
        if self._kind not in (_PIECES, _BYTE_PAIRS, _LETTER_PAIRS):
            kinds = f"{_PIECES}, {_BYTE_PAIRS} and {_LETTER_PAIRS}"
            raise _broken(f"tokenizer is of the kind {self._kind}; sirchat reads {kinds}")
        self.tokens = self._list("tokens", 1)
        has_types, count = self._said("token_type") is not None, len(self.tokens)
        self._types = self._list("token_type", count) if has_types else []
        if self._kind == _PIECES and _MERGES not in metadata:  # runs of blanks, as files have them
            self.tokens = [t if t.strip(" ") else "▁" * len(t) for t in self.tokens]
        self._ids = {token: at for at, token in enumerate(self.tokens)}
        self.special = [self._token(key) for key in _IDS]
        self.notices, self._split = list[str](), None
        if self._kind == _BYTE_PAIRS and pre not in _LETTER_PAIR_NAMES:
            self._split = find_split(pre, self._ids)
            if self._split is None:
                self._split = find_split("gpt-2", ())
                self.notices.append(
                    "the GGUF file does not say how its tokenizer splits words (tokenizer.ggml.pre "
                    f"is {pre}): they are split as by GPT-2, and replies may be worse"
                )
        usual = self._split is None or self._split.adds_bos
        wants = self._kind == _LETTER_PAIRS or self._said("add_bos_token", usual)
        self.adds_bos = bool(wants) and self.special[0] is not None
        self._adds_eos = bool(self._said("add_eos_token")) and self.special[1] is not None

    def backend(self, merges: list[tuple[str, str]]) -> Tokenizer:
        """The tokenizer itself, with all added tokens."""
        split, how = self._split, dict[str, Any]()
        if split is not None:
            how = {"ignore_merges": split.ignore_merges}
        else:
            how = {"unk_token": self.special[2], "fuse_unk": True}
            how["byte_fallback"] = "<0x00>" in self._ids
        try:
            backend = Tokenizer(models.BPE(self._ids, merges, **how))
        except Exception as error:  # the library raises nothing more special
            raise _broken(f"merges do not fit its tokens: {error}") from error
        if split is not None:
            backend.normalizer = normalizers.NFC() if split.composes else None
            backend.pre_tokenizer, backend.decoder = split.pre_tokenizer(), decoders.ByteLevel()
        else:
            begins = self._kind == _PIECES and bool(self._said("add_space_prefix", True))
            first, last = [normalizers.Prepend("▁")] * begins, [decoders.Strip(" ", 1, 0)] * begins
            backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
            parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence([*parts, *last])
        control, others = self._added_tokens()
        backend.add_special_tokens(control)
        backend.add_tokens(others)
        bos, eos = [self.special[0]] * self.adds_bos, [self.special[1]] * self._adds_eos
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(token, self._ids[token]) for token in {*bos, *eos}],
        )
        return backend

    def merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens that are merged, the first ones first."""
        if (kept := self._metadata.get(_MERGES)) is not None:
            return list(zip(kept[::2], kept[1::2], strict=True))
        given = self._said("merges")
        if self._kind == _PIECES and (not given or self._said("scores")):
            return self._merges_by_score(self._list("scores", len(self.tokens)))
        if not given and self._split is not None and "kimi-k2" in self._split.names:
            return self._merges_by_score(itertools.repeat(0))  # so that ids tell the order
        if not given:
            raise _broken("vocabulary has no merges (tokenizer.ggml.merges)")
        flat = " ".join(given).split(" ")
        if len(flat) == 2 * len(given):  # at once: a fifth of the time
            return list(zip(flat[::2], flat[1::2], strict=True))
        parts = (merge.partition(" ") for merge in given)
        return [(left, right) for left, _, right in parts]

    def _merges_by_score(self, scores: Iterable[float]) -> list[tuple[str, str]]:
        """All pairs of tokens that make a token; those of the highest score come first."""
        kinds = self._types or itertools.repeat(_NORMAL)
        scored = [
            (score if kind == _NORMAL else math.inf, token)
            for token, score, kind in zip(self.tokens, scores, kinds, strict=False)
            if kind == _NORMAL or (kind == _USER_DEFINED and not token.strip("▁"))
        ]
        if len({score for score, _ in scored if score < math.inf}) == 1:  # no scores at all
            scored = [(min(score, -self._ids[token]), token) for score, token in scored]
        known, merges = {token for _, token in scored}, list[tuple[str, str]]()
        scored.sort(key=itemgetter(0), reverse=True)
        shared = {
            score for score, count in Counter(map(itemgetter(0), scored)).items() if count > 1
        }
        by_score = itertools.groupby(scored, lambda one: one[0] if one[0] in shared else None)
        for score, tokens in by_score:  # all neighbours of different scores at once
            pairs = [
                (left, right)
                for _, token in tokens
                for cut in range(len(token) - 1, 0, -1)
                if (left := token[:cut]) in known and (right := token[cut:]) in known
            ]
            if score is not None:
                pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
            merges += pairs
        return merges

    def _added_tokens(self) -> tuple[list[AddedToken], list[AddedToken]]:
        """The control tokens, and other tokens that are found in a text before it is split."""
        control = _ENDS.union(filter(None, [*self.special, *map(self._token, ("eot", "eom"))]))
        if self._types:
            kinds = list(zip(self.tokens, self._types, strict=False))
            control |= {token for token, kind in kinds if kind == _CONTROL}
            others = [token for token, kind in kinds if kind == _USER_DEFINED]
        else:
            control |= set(filter(_LOOKS_LIKE_CONTROL.fullmatch, self.tokens))
            others = []
        drops = bool(_PHI3.search(str(self._metadata.get("general.name"))))
        known = sorted(control & self._ids.keys(), key=self._ids.__getitem__)
        first, second = (
            [
                AddedToken(t, normalized=False, rstrip=drops and t not in _BEFORE_BLANKS)
                for t in group
            ]
            for group in (known, [token for token in others if token not in control])
        )
        return first, second

    def _token(self, key: str) -> str | None:
        """The token that the file calls `key`; None if it calls none so."""
        usual = _USUAL_IDS.get(key) if self._kind == _PIECES else None
        number, count = self._said(f"{key}_token_id", usual), len(self.tokens)
        if number in range(count):
            return str(self.tokens[number])
        if number not in _NO_TOKEN and key in ("bos", "eos"):
            name = f"tokenizer.ggml.{key}_token_id"
            raise _broken(f"{name} is {number:,}, but its vocabulary has {count:,} tokens")
        return None

    def _list(self, name: str, least: int) -> list[Any]:
        values = self._said(name)
        if not isinstance(values, list) or len(values) < least:
            count = f"{len(values):,}" if isinstance(values, list) else "no"
            raise _broken(f"vocabulary has {count} {name} (tokenizer.ggml.{name})")
        return list(values)

    def _said(self, key: str, usual: Any = None) -> Any:
        return self._metadata.get(f"{_KEYS}{key}", usual)


def _broken(what: str) -> ModelError:
    return ModelError(f"the GGUF file's {what}", hint="use another file, or the model's folder")
