"""Replies in a format that the request names: JSON, or JSON by a schema.

The package llguidance says which tokens may come next; the model chooses among these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.server.requests import RequestError

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Blanks as Python writes them, and no others: small models would write them without end."""


class Formats:
    """Makes the formats of replies for one model; its vocabulary is prepared at the first use."""

    def __init__(self) -> None:
        self._vocabulary: Any = None

    def json(self, schema: dict[str, Any], session: Session) -> JsonFormat:
        """The format of one reply in this session; raises RequestError for a bad schema."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise _refusal("needs the package llguidance: pip install 'sirchat[server]'") from None
        model, template = session.model, session.template
        if template.opens_reasoning:
            raise _refusal("can't be had from a model that begins every reply with reasoning")
        if self._vocabulary is None:
            declared = getattr(model.module.generation_config, "eos_token_id", None)
            ends = sorted(template.end_ids(declared))
            try:
                written = model.tokenizer.backend_tokenizer.to_str()
                self._vocabulary = LLTokenizer(written, n_vocab=model.vocab_size, eos_token=ends)
            except Exception as error:  # it knows most kinds of tokenizers, but not all
                raise _refusal(f"can't be had from this model: {error}") from None
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPACT)
            problem = LLMatcher.validate_grammar(grammar, self._vocabulary)
        except ValueError as error:  # such as a number that is too large
            problem = str(error)
        if problem:
            raise _refusal(f"has a schema that can't be used: {problem}")
        return JsonFormat(LLMatcher(self._vocabulary, grammar), model.vocab_size)


class JsonFormat:
    """Called with the ids of a reply so far, returns which ids may follow: a mask [V].

    Args:
        matcher: reads the ids, one after another.
        size: the number of ids, V.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._read = 0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        for one in ids[self._read :]:
            self._matcher.consume_token(one)
        self._read = len(ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._size].astype(bool))


def _refusal(problem: str) -> RequestError:
    return RequestError(f"response_format {problem[:300]}", param="response_format")
