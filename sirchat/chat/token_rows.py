"""Describes tokens by plain values: records, the policy's scores, and words made of tokens."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sirchat.chat.events import TokenRow
from sirchat.engine.engine import Engine
from sirchat.memory.key_values import EXACT, Positions
from sirchat.memory.ledger import Flag, HeldRows, Role
from sirchat.memory.policies.base import ScorePolicy
from sirchat.recall.word_index import FIRST_CJK
from sirchat.text.detokenizer import Texts

Floats = NDArray[np.float64]

_LARGEST = float(np.finfo(np.float64).max)

PUNCTUATION = string.punctuation + string.whitespace + "…“”‘’«»–—。、，！？：；「」（）¿¡"

_OPENING = {")": "(", "]": "[", "}": "{"}  # by the closing one
_SPELLED = re.compile(rf"[^\s{FIRST_CJK}-\U0010ffff]+|[{FIRST_CJK}-\U0010ffff]+")
_MAX_WORD_TOKENS = 16  # then it is cut, as some scripts have no blanks between words
_NEIGHBOURS = 5  # tokens that are read on each side of a token, to find its whole word


def policy_scores(engine: Engine, positions: Positions) -> Floats | None:
    """The policy's scores [n] of the tokens at `positions` [n], ascending, as if all were held.

    Tokens with the lowest scores are evicted first. None if the policy has no scores.
    """
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return None
    scores = _as_if_held(engine, positions, lambda rows: {"score": policy.score(rows)})
    return scores.get("score", np.zeros(0))


def shown_scores(engine: Engine, scores: Floats) -> Floats:
    """The policy's scores [n] as users see them: finite, and not as logarithms."""
    policy = engine.settings.policy
    if isinstance(policy, ScorePolicy) and policy.log_scale:
        return _finite_exp(scores)
    return np.nan_to_num(scores, nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)


def score_factors(engine: Engine, positions: Positions) -> dict[str, Floats]:
    """The factors [n], by name, whose product is each token's score; empty if there are none."""
    policy = engine.settings.policy
    if not isinstance(policy, ScorePolicy):
        return {}
    factors = _as_if_held(engine, positions, policy.log_factors)
    return {name: _finite_exp(logarithms) for name, logarithms in factors.items()}


def is_measured(engine: Engine, positions: Positions) -> NDArray[np.bool_]:
    """Mask [n] of the tokens whose attention is recorded; all True if the policy uses none."""
    ledger, config = engine.ledger, engine.settings.policy.attention_stats
    if config is None:
        return np.ones(len(positions), bool)
    if config.window:
        return np.full(len(positions), ledger.attention.recent(ledger.held_positions).any())
    return ledger.attention.totals(positions, ledger.log_decay) > 0


def token_rows(
    engine: Engine,
    positions: Positions,
    texts: Texts,
    scores: Floats | None,
    roles: Sequence[str] = (),
) -> tuple[TokenRow, ...]:
    """A record of each token at these positions [n], ascending; `scores` [n] are the policy's.

    `roles` are those of the turns; the tokens of a `summary` get that role, too.
    """
    ledger, listed = engine.ledger, positions.tolist()

    def column(name: str) -> list[Any]:
        values: list[Any] = ledger.column(name)[positions].tolist()
        return values

    ids, flags = column("token_id"), column("flags")
    decayed = np.exp(ledger.log_decayed_surprisal_of(positions)).tolist()
    attention = ledger.attention.totals(positions, ledger.log_decay).tolist()
    shown = [None] * len(listed) if scores is None else shown_scores(engine, scores).tolist()
    text = texts(ids, listed)
    turn, role, surprisal = column("turn"), column("role"), column("surprisal")
    summaries = {index for index, of in enumerate(roles) if of == "summary"}
    is_summary = [t in summaries and r != Role.TEMPLATE for t, r in zip(turn, role, strict=True)]
    erased = int(Flag.ERASED)  # comparing with a Flag takes ten times as long
    arrival_key, counted = column("arrival_key"), ledger.attention.has_records
    bits = engine.store.archive.bits(positions).tolist()
    return tuple(
        TokenRow(
            position=listed[i],
            id=ids[i],
            text="" if flags[i] & erased else text[i],
            turn=turn[i],
            role="summary" if is_summary[i] else Role(role[i]).name.lower(),
            surprisal=None if math.isnan(surprisal[i]) else surprisal[i],
            decayed_surprisal=decayed[i],
            score=shown[i],
            arrival_key=arrival_key[i],
            flags=_flag_names(flags[i], listed[i] < engine.settings.sinks, bits[i]),
            attention=attention[i] if counted else None,
        )
        for i in range(len(listed))
    )


def _as_if_held(
    engine: Engine, positions: Positions, compute: Callable[[HeldRows], dict[str, Tensor]]
) -> dict[str, Floats]:
    """The values, by name, that `compute` gives the rows at `positions` [n] as if held."""
    # A score may depend on the other held rows. A held row is scored among all held rows but those
    # that recall restored; a row that recall restored, among all held rows; an evicted row, among
    # the held rows and all rows at `positions`.
    placement = engine.store.placement
    held, without_recalled = placement.held, placement.held_without_recalled
    results: dict[str, Floats] = {}
    unknown = np.ones(len(positions), bool)
    for among in (without_recalled, held, np.union1d(held, positions)):
        here = unknown & np.isin(positions, among)
        if here.any():
            indices = np.searchsorted(among, positions[here])
            for name, values in compute(engine.choice.view(among)).items():
                result = results.setdefault(name, np.zeros(len(positions)))
                result[here] = values.double().numpy()[indices]
            unknown &= ~here
    return results


def _finite_exp(logarithms: Floats) -> Floats:
    """The exponentials of `logarithms`, limited to the largest float64; 0 for NaN."""
    known = np.nan_to_num(logarithms, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    numbers: Floats = np.exp(known.clip(max=np.log(_LARGEST)))
    return numbers


@lru_cache(maxsize=256)
def _flag_names(flags: int, is_sink: bool, bits: int) -> tuple[str, ...]:
    names = ["sink"] * is_sink + [f"{bits} bits"] * (bits != EXACT)
    shown = flags & ~Flag.CONTINUES  # the text itself shows this
    names += [flag.name.lower() for flag in Flag if shown & flag and flag.name]
    return tuple(names)


def is_punctuation(text: str) -> bool:
    """Whether a text has nothing but punctuation and blanks."""
    return not text.strip(PUNCTUATION)


def without_template(rows: Sequence[TokenRow]) -> list[TokenRow]:
    return [row for row in rows if row.role != "template"]


def word_text(word: Sequence[TokenRow]) -> str:
    """The text of a word's tokens, without the punctuation and blanks around it.

    A bracket that closes one within the word stays, as in `len(values)`.
    """
    return _without_punctuation("".join(row.text for row in word))


def _without_punctuation(whole: str) -> str:
    text, after = whole.strip(PUNCTUATION), whole.rstrip()[len(whole.rstrip(PUNCTUATION)) :]
    while (opening := _OPENING.get(after[:1])) and text.count(opening) > text.count(after[0]):
        text, after = text + after[0], after[1:]
    return text


def split_words(rows: Sequence[TokenRow]) -> Iterator[list[TokenRow]]:
    """Split tokens, in stream order, into words; yields the tokens of each word.

    A word begins at a blank, after a missing stream position, and with a turn. A wide (East Asian)
    character is a word. The blank before a word and the punctuation around it belong to the word.
    """
    word: list[TokenRow] = []
    for row in rows:
        if word and (len(word) == _MAX_WORD_TOKENS or _is_apart(word[-1], row)):
            yield word
            word = []
        word.append(row)
    if word:
        yield word


def words_in(rows: Sequence[TokenRow]) -> set[str]:
    """The words of these tokens, in lower case, without those of the chat template."""
    return {word_text(word).casefold() for word in split_words(without_template(rows))}


def words_at(
    positions: Collection[int], rows: Sequence[TokenRow], known: Collection[str] = ()
) -> tuple[str, ...]:
    """The words of `rows` with a token at one of these positions, most surprising first.

    Tokens of punctuation alone do not count. Words in `known`, in lower case, are left out.
    """
    asked = set(positions)
    surprisal: dict[str, float] = {}  # of each word's most surprising token, in nats
    for word in split_words(rows):
        text = word_text(word)
        is_asked = any(row.position in asked and not is_punctuation(row.text) for row in word)
        if is_asked and text.casefold() not in known:
            nats = max(-math.inf if row.surprisal is None else row.surprisal for row in word)
            surprisal[text] = max(surprisal.get(text, -math.inf), nats)
    return tuple(sorted(surprisal, key=lambda text: -surprisal[text]))


def words_missing(pieces: Sequence[str], is_there: NDArray[np.bool_]) -> tuple[str, ...]:
    """The words of a text with a token that is not there, in order; punctuation is never missed.

    `is_there` is a mask of its tokens `pieces`. Of a run of CJK characters, those that are missing.
    """
    ends = np.cumsum([0, *map(len, pieces)])
    text, is_missing = "".join(pieces), np.zeros(ends[-1] + 1, bool)
    for index in np.flatnonzero(~is_there):  # a token without text is a part of the next character
        is_missing[ends[index] : max(ends[index] + 1, ends[index + 1])] = True
    is_missing[[index for index, char in enumerate(text) if char in PUNCTUATION]] = False
    found = list[str]()
    for match in _SPELLED.finditer(text):
        start, end = match.span()
        if text[start] >= FIRST_CJK:
            marked = "".join(text[i] if is_missing[i] else " " for i in range(start, end))
            found += marked.split()
        elif is_missing[start:end].any():
            found.append(_without_punctuation(match[0]))
    return tuple(found)


def near_positions(positions: Collection[int], seen: int) -> list[int]:
    """These positions and up to 5 on each side, ascending, in a stream of `seen` tokens."""
    steps = range(-_NEIGHBOURS, _NEIGHBOURS + 1)
    near = {position + step for position in positions for step in steps}
    return sorted(position for position in near if 0 <= position < seen)


def _is_apart(before: TokenRow, row: TokenRow) -> bool:
    """Whether a new word begins at the token `row`, which follows the token `before`."""
    if row.position != before.position + 1 or row.turn != before.turn:
        return True
    left, right = before.text, row.text
    if left.isspace():  # a blank belongs to the word after it
        return False
    if right[:1].isspace() or left[-1:].isspace():
        return True
    return _is_wide(left[-1:]) or _is_wide(right[:1])


def _is_wide(char: str) -> bool:
    return not char.isascii() and east_asian_width(char) in "WF"
