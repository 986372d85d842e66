"""Explains what the model had in memory: ranks of tokens, and the attention that a reply paid."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, zip_longest

import numpy as np
import torch

from sirchat.chat.events import TokenRow
from sirchat.chat.panel_snapshot import Snapshot
from sirchat.chat.state import Turn
from sirchat.chat.token_rows import is_measured, policy_scores, score_factors, token_rows
from sirchat.engine.engine import Engine
from sirchat.engine.extra_passes import attention_from
from sirchat.memory.key_values import Positions
from sirchat.memory.ledger import Placement, Role, State
from sirchat.recall.word_index import DISCOUNT, FIRST_CJK, STOP_WORDS, letter_groups, terms_of
from sirchat.text.detokenizer import Texts, sentence_bounds

_ONES = re.findall(
    r"\w+",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_BELOW_TEN = ("", *(f"-{one}" for one in _ONES[:9]))
_NUMBERS = [*_ONES, *(ten + one for ten in _TENS for one in _BELOW_TEN), "one-hundred"]  # from 1
# What stands around a file's text, questions, and what has no words
_NO_STATEMENT = re.compile(r"""```|.*[?\uff1f]["'”’»]*$|[\W\d_]*$""", re.DOTALL)
_MIN_WRAPPED_CHARS = 50  # of a row of prose that goes on in the next one
# A word that may go on in a row: no item of a list, no time
_ROW_START = re.compile(r""" {0,3}([("“]?(?:[^\W\d_]\S*|\d+(?:[.,]\d+)*(?=\s)))""")
_CONFIRMS = re.compile(r"\W*(?:yes|no|true|false|correct|right|sure|indeed)\b", re.IGNORECASE)
# English endings, so that "move" and "moving" are one word
_ENDING = re.compile(r"(?<=\w{3})(?:ing|ed|es|e|s)$")
# Without "one", which is mostly a pronoun
_NUMBER = re.compile(rf"\b(?:{'|'.join(reversed(_NUMBERS[1:])).replace('-', '[- ]')})\b", re.I)


@dataclass(frozen=True)
class TokenRank:
    """How one token ranks among the held tokens."""

    row: TokenRow
    state: str  # `held`, `archived`, `rereadable` (see `KeyValueStore`), `not_stored`
    decayed_to: float  # product of the decay factors since the token was read; 1 without decay
    factors: dict[str, float]  # of the score, by name, but for surprisal and decay
    rank: int | None  # by score among the held tokens, as if held; 1 is highest; null: no scores
    held: int  # number of held tokens
    threshold: float | None  # as in `Snapshot`
    is_evicted_next: bool  # whether it is among the tokens that will be evicted next
    is_measured: bool = True  # false if the policy ranks by attention, and none to it is recorded


@dataclass(frozen=True)
class AttentionPaid:
    """The attention that the tokens of a reply paid to earlier tokens."""

    start: int  # stream position of the reply's first token
    held: frozenset[int] | None  # positions held when the reply ended; None if not known
    # By position, the attention that each earlier held token received, divided by the mean over
    # these tokens; None if the model does not expose its attention weights.
    shares: dict[int, float] | None
    recalled: frozenset[int] = frozenset()  # positions of those that recall had restored
    aside: frozenset[int] = frozenset()  # of those that had stepped aside for these


def token_ranks(
    engine: Engine, texts: Texts, positions: Positions, now: Snapshot
) -> list[TokenRank]:
    """Score, rank and state of each token at the stream `positions`, which are ascending.

    `now` is a snapshot of the current cache.
    """
    ledger = engine.ledger
    among = np.union1d(ledger.held_positions, positions)
    asked = np.searchsorted(among, positions)
    scores = policy_scores(engine, among)
    ranks: list[int | None] = [None] * len(positions)
    if scores is not None:
        held = np.sort(scores[np.searchsorted(among, ledger.held_positions)])
        above = len(held) - np.searchsorted(held, scores[asked], side="right")
        ranks = [int(count) + 1 for count in above]
    asked_scores = None if scores is None else scores[asked]
    rows = token_rows(engine, positions, texts, asked_scores)
    decayed_to = np.exp(ledger.log_decay - ledger.column("birth_decay")[positions])
    states = [State(state).name.lower() for state in ledger.column("state")[positions].tolist()]
    for index in np.flatnonzero(np.isin(positions, engine.store.rereadable(positions))).tolist():
        states[index] = "rereadable"
    leaving, measured = set(now.evicted_next), is_measured(engine, positions)
    factors = {  # surprisal and decay have columns of their own
        name: values[asked]
        for name, values in score_factors(engine, among).items()
        if name not in ("surprisal", "decay")
    }
    return [
        TokenRank(
            row=row,
            state=states[i],
            decayed_to=float(decayed_to[i]),
            factors={name: float(values[i]) for name, values in factors.items()},
            rank=ranks[i] if measured[i] else None,
            held=ledger.held_count,
            threshold=now.threshold,
            is_evicted_next=row.position in leaving,
            is_measured=bool(measured[i]),
        )
        for i, row in enumerate(rows)
    ]


def attention_paid(engine: Engine, turn: int, placement: Placement | None) -> AttentionPaid:
    """The attention of the reply with turn index `turn` to each token that was held before it.

    The model reads the reply again over the tokens held then; no state changes. `placement` is the
    one at the end of the chat's last reply; None if anything was read since.
    """
    if placement is None:
        return _attention_paid(engine, turn, None)
    then = frozenset(placement.held.tolist())
    if not placement.has_recall or not engine.store.has(placement.held):
        return _attention_paid(engine, turn, then)
    with engine.store.placed(placement):
        paid = _attention_paid(engine, turn, then)
    recalled, aside = (frozenset(at.tolist()) for at in (placement.recalled, placement.aside))
    return replace(paid, recalled=recalled, aside=aside)


def _attention_paid(engine: Engine, turn: int, then: frozenset[int] | None) -> AttentionPaid:
    # If anything was read or undone since, the reply attends to all that is held now. Sinks and
    # the template's tokens are left out: models attend to these whatever the text is.
    ledger = engine.ledger
    held, role = ledger.held_positions, ledger.column("role")
    said = np.flatnonzero((ledger.column("turn") == turn) & (role == Role.ASSISTANT))
    queries = np.flatnonzero(np.isin(held + 1, said))
    start = int(said[0]) if len(said) else ledger.seen
    if not len(queries):
        return AttentionPaid(start, then, {})
    visible = np.ones(len(held), bool)
    if then is not None:
        visible = (held >= start) | np.isin(held, [*then])
    weights = attention_from(engine.reader, torch.from_numpy(queries), visible)
    if weights is None:
        return AttentionPaid(start, then, None)
    counts = visible & (held < start) & (role[held] != Role.TEMPLATE)
    counts &= held >= max(1, engine.settings.sinks)
    shares = weights[counts] / max(weights[counts].mean() if counts.any() else 0.0, 1e-12)
    return AttentionPaid(
        start, then, dict(zip(held[counts].tolist(), shares.tolist(), strict=True))
    )


def last_round(turns: Sequence[Turn]) -> tuple[int, int] | None:
    """Indices of the last user turn with a reply, and of the reply; summaries are skipped."""
    for index in range(len(turns) - 1, 0, -1):
        asked = turns[index - 1]
        is_pair = (asked.role, turns[index].role) == ("user", "assistant")
        if is_pair and not asked.is_summary:
            return index - 1, index
    return None


def related_turn(turns: Sequence[Turn], asked: int) -> tuple[int, tuple[str, ...]] | None:
    """The turn before turn `asked` that shares most words with it, and these words, rarest first.

    Words count in any form, rare ones more, those of a question or of the model half. None if no
    turn shares a word.
    """
    forms = {_ENDING.sub("", word): word for word in sorted(_telling_words(turns[asked].text))}
    texts = [
        {forms.get(_ENDING.sub("", word), "") for word in _telling_words(turn.text)}
        for turn in turns[:asked]
    ]
    query = set(forms.values())
    count = Counter(word for words in texts for word in words & query)
    rarity = {word: math.log(1 + asked / n) for word, n in count.items()}
    best: tuple[float, int, tuple[str, ...]] = (0.0, -1, ())
    for index, words in enumerate(texts):
        common = query & words
        is_question = turns[index].text.rstrip().endswith("?")
        score = sum(rarity[word] for word in sorted(common)) * (DISCOUNT if is_question else 1.0)
        score *= DISCOUNT if turns[index].role == "assistant" else 1.0
        if score > 0 and score >= best[0]:
            best = score, index, tuple(sorted(common, key=lambda word: (-rarity[word], word)))
    return (best[1], best[2]) if best[2] else None


def supporting_sentence(answer: str, question: str, text: str) -> tuple[str, bool]:
    """The statement in a text that shares most words with an answer, or "", and `is_said`.

    Of the answer its sentence nearest to the question counts. Words count in any form, rare ones
    more, numbers double, the question's half. `is_said` is False if no statement has a word that
    only the answer has, except for a yes or no, or in Chinese.
    """
    text = _unwrapped(text)
    sentences = [text[start:end].strip() for start, end in pairwise(sentence_bounds(text))]
    sentences = [one for one in sentences if not _NO_STATEMENT.match(one)]
    terms = [set(terms_of(_in_digits(one))) for one in sentences]
    question, scores = _in_digits(question), np.zeros(len(sentences) + 1)
    asked, asked_words = set(terms_of(question)), _telling_words(question)
    parts = [answer[start:end] for start, end in pairwise(sentence_bounds(answer))]
    parts.sort(key=lambda part: -len(asked.intersection(terms_of(_in_digits(part)))))
    for part in [*parts, answer]:
        scores, is_near, own, found = np.zeros_like(scores), np.zeros(len(scores), bool), 0, 0
        said = _telling_words(_in_digits(part))
        for word in sorted(said | asked_words):
            groups = set(letter_groups(word))
            having = [index for index, these in enumerate(terms) if _is_among(groups, these)]
            rarity = math.log(1 + len(terms) / max(1, len(having)))
            is_asked = _is_among(groups, asked)
            scores[having] += rarity * (DISCOUNT if is_asked else 2 if word.isdecimal() else 1)
            is_near[having] |= word in said
            own, found = own + (not is_asked), found + (not is_asked and bool(having))
        scores *= is_near
        if found:
            break
    is_dense = max(answer, default="") >= FIRST_CJK
    is_said = found > 0 or not own or is_dense or bool(_CONFIRMS.match(answer))
    return sentences[int(scores.argmax())] if scores.any() else "", is_said


def _unwrapped(text: str) -> str:
    """A text with rows of prose joined: those that the next word would make the longest nearby."""
    joined = ""
    for _, block in groupby(text.split("\n"), key=lambda row: bool(row.strip())):
        rows = list(block)
        for row, after in zip_longest(rows, rows[1:], fillvalue=""):
            word = _ROW_START.match(after)
            is_full = word and len(row) + len(word[1]) >= max(map(len, rows))
            joined += row + (" " if is_full and len(row) >= _MIN_WRAPPED_CHARS else "\n")
    return joined


def _is_among(groups: set[str], terms: set[str]) -> bool:
    """Whether most of a word's groups of letters are among these terms."""
    return 2 * len(groups & terms) > len(groups)


def _in_digits(text: str) -> str:
    """A text with its numbers, and English number words to a hundred, in digits without commas."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return _NUMBER.sub(
        lambda word: str(_NUMBERS.index(word[0].casefold().replace(" ", "-")) + 1), text
    )


def _telling_words(text: str) -> set[str]:
    words = {word.casefold() for word in re.findall(r"[^\W_]+", text)}
    return {word for word in words if len(word) > 1 or word.isdecimal()} - STOP_WORDS
