"""Finds what the user states in messages: standing instructions, to be pinned, and facts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.state import Turn
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Flag, Ledger, Role, State
from sirchat.models.encoder import Encoder
from sirchat.recall.word_index import words_of
from sirchat.text.detokenizer import Texts, sentence_bounds

_MOST_SENTENCES = 12  # a message with more is a text, and its rules are not for the model
_MOST_PINNED = 2  # sentences of one message


@dataclass(frozen=True)
class StatedFact:
    """A sentence in which the user stated something."""

    turn: int  # index of its message
    text: str
    time: int | None  # UNIX seconds when the message began, if known
    tokens: int
    held: int  # of these tokens, those in the KV cache


def instructions_in(
    ledger: Ledger, texts: Texts, encoder: Encoder, turn: int
) -> Iterator[tuple[str, Positions]]:
    """Yield the text and the stream positions of each standing instruction of a user's turn.

    The turn is the last one; the ledger still has its tokens' vectors.
    """
    count = 0
    for text, positions in _sentences(ledger, texts, turn):
        mean = ledger.token_vectors.mean(int(positions[0]), int(positions[-1]) + 1)
        if mean is None or count == _MOST_PINNED:
            continue
        if encoder.is_kind("instruction", encoder.pooled(mean)[None])[0]:
            count += 1
            yield text, positions


def facts_in(
    ledger: Ledger,
    texts: Texts,
    encoder: Encoder,
    turns: Sequence[Turn],
    vector_of: Callable[[str], Tensor],
    words: str = "",
) -> list[StatedFact]:
    """The facts that the user stated in `turns`, in order; if given, those that have all `words`.

    `vector_of` makes the vector [D] of a sentence.
    """
    wanted = set(words_of(words))
    said = [
        (index, text, positions)
        for index, turn in enumerate(turns)
        if turn.role == "user" and not turn.is_summary
        for text, positions in _sentences(ledger, texts, index)
        if wanted <= set(words_of(text))
    ]
    if not said:
        return []
    is_fact = encoder.is_kind("fact", torch.stack([vector_of(text) for _, text, _ in said]))
    states, found = ledger.column("state"), list[StatedFact]()
    for (index, text, at), is_stated in zip(said, is_fact.tolist(), strict=True):
        if is_stated:
            held = int((states[at] == State.HELD).sum())
            found.append(StatedFact(index, text, turns[index].time, len(at), held))
    return found


def _sentences(ledger: Ledger, texts: Texts, turn: int) -> Iterator[tuple[str, Positions]]:
    """The sentences of a user's turn and the stream positions of their tokens; none of a text."""
    column = ledger.column("turn")  # bisect, because numpy's search copies it
    first, end = bisect_left(column, turn), bisect_left(column, turn + 1)
    is_erased = ledger.column("flags")[first:end] & np.uint8(Flag.ERASED) != 0
    said = np.flatnonzero((ledger.column("role")[first:end] == Role.USER) & ~is_erased) + first
    pieces = texts(ledger.column("token_id")[said].tolist(), said.tolist())
    bounds = sentence_bounds(pieces)
    if len(bounds) <= _MOST_SENTENCES + 1:
        for start, stop in pairwise(bounds):
            if text := "".join(pieces[start:stop]).strip():
                yield text, said[start:stop]
