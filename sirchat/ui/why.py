"""`/why`: says whether tokens were held for the last reply, and why they are held or not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from sirchat.chat.events import TokenRow
from sirchat.chat.retry import settings_for_full
from sirchat.chat.session import Session
from sirchat.chat.targets import turn_of_target, without_quotes
from sirchat.chat.token_rows import is_punctuation
from sirchat.chat.why import AttentionPaid, TokenRank, last_round, related_turn
from sirchat.errors import UsageError
from sirchat.recall import RecalledTurn
from sirchat.text.detokenizer import sentence_bounds
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_token_ranks, text_of_rows
from sirchat.ui.text import displayable_line, messages_ago, restored_from_bits, shorten

_ALL_FLAG = re.compile(r"(?:^|\s)--all(?=\s|$)")
_LITTLE_ATTENTION = 0.5  # share of the mean attention below which a reply missed the tokens
_MIN_SENTENCE_TOKENS = 4  # held, of a sentence that is named as used most
_MAX_SENTENCE_CHARS = 120  # of that sentence
_MAX_QUOTED_CHARS = 40  # of the words asked for
_NO_ATTENTION = "How much attention the reply paid to which words can't be read from this model."

_DECAYING_POLICIES = ("entropy", "salience")  # they rank by surprisal after the decays
_SALIENCE_FACTORS = {"word", "template", "neighbours"}  # with its usual options

# How to say why a token ranks higher under a policy: singular verb, plural verb, object.
_REASONS_TO_RANK_HIGHER = {
    "entropy": ("surprised", "surprised", "the model more"),
    "salience": ("stands", "stand", "in or beside words that surprised the model more"),
    **dict.fromkeys(("sink", "window"), ("is", "are", "newer")),
    **dict.fromkeys(("random", "reservoir"), ("was", "were", "luckier in the draw")),
    **dict.fromkeys(("h2o", "tova", "snapkv"), ("gets", "get", "more attention")),
}


def show_why(session: Session, screen: Screen, rest: str) -> None:
    """Run `/why [TARGET] [--all]`; TARGET is words or a turn, by default the last reply.

    `--all` adds a table with each token's numbers. Raises UsageError if no token matches TARGET, or
    if there is neither a TARGET nor a reply.
    """
    target = _ALL_FLAG.sub("", rest).strip()
    question, reply = last_round(session.turns) or (0, None)
    is_empty = reply is not None and not session.turns[reply].text + session.turns[reply].thinking
    paid = None if reply is None or is_empty else session.attention_paid(reply)
    if target:
        ranks = session.why(target)
        lines = _explain_target(session, ranks, target, paid)
    elif is_empty:
        ranks = session.why(f"turn {question}")
        lines = ["The last reply has no words, so it used nothing; /retry draws another."]
    elif paid is None:
        raise UsageError("there is no reply yet", hint="/why TEXT tells why words are held or not")
    elif related := related_turn(session.turns, question):
        turn, shared_words = related
        ranks = session.why(f"turn {turn}")
        use = _describe_related(session, ranks, turn, shared_words, paid)
        lines = [use, *_most_used_sentence(session, paid, question)]
    else:
        ranks = session.why(f"turn {question}")
        lines = ["No earlier message shares a telling word with your last message."]
        lines += _most_used_sentence(session, paid, question)
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if _ALL_FLAG.search(rest):
        parts.append(draw_token_ranks(ranks, screen.theme, screen.width))
    screen.page(Group(*parts))


def describe_use(
    ranks: Sequence[TokenRank], what: str, paid: AttentionPaid, *, can_retry: bool
) -> str:
    """Say whether tokens, called `what`, were held for the last reply, and their attention.

    `can_retry` says whether to advise `/retry full`. "" if no token is older than the reply.
    """
    before, held = _read_before_reply(ranks, paid), _held_for_reply(ranks, paid)
    if not before:
        return ""
    if not held:
        if any(rank.row.position in paid.aside for rank in before):
            return (
                f"{what} had stepped aside for what was recalled for the last reply, and is back."
            )
        if any(rank.state == "held" for rank in before):
            return f"{what} was evicted when the last reply was generated, and restored after it."
        return f"{what} was evicted, so the {_could_not_use(can_retry)}"
    is_recalled = any(rank.row.position in paid.recalled for rank in held)
    is_part = len(held) < len(before)
    part = f" only in part ({len(held):,} of {len(before):,} tokens)" if is_part else ""
    was = f"{what} was {'recalled for the last reply' if is_recalled else 'held'}{part}"
    if paid.shares is None:
        return f"{was}. {_NO_ATTENTION}"
    positions = [rank.row.position for rank in held]
    shares = [paid.shares[position] for position in positions if position in paid.shares]
    if not shares:
        if any(rank.state == "held" for rank in held):
            return f"{was}."
        return f"{was} when the last reply was generated, and evicted after it."
    share = fmean(shares)
    times = f"({share:.1f} times an average token)"
    if share < _LITTLE_ATTENTION:
        lacks = any(not is_punctuation(rank.row.text) for rank in before if rank not in held)
        advice = "/retry full may help" if can_retry and lacks else "/retry draws another reply"
        return f"{was}, but the reply made little use of it {times}; {advice}."
    if share < 1:
        return f"{was}, and the reply paid it some attention {times}."
    return f"{was}, and the reply paid attention to it {times}."


def explain_state(
    ranks: Sequence[TokenRank], target: str, policy: str, recalled: Sequence[RecalledTurn] = ()
) -> str:
    """Say in one or two sentences why the tokens of `target` are held, or why they are not."""
    query_words = {turn.turn: turn.words for turn in recalled if turn.words}
    what, held = _target_name(target, ranks), [rank for rank in ranks if rank.state == "held"]
    best = min(held or ranks, key=lambda rank: (rank.rank is None, rank.rank))
    if not held:
        return f"{what} is evicted{_why_evicted(best, policy)} {_restore_hint(ranks, target)}"
    bits = [int(flag[0]) for rank in held for flag in rank.row.flags if flag.endswith(" bits")]
    restored = restored_from_bits(min(bits, default=0))
    is_held = f"is held{restored}{_why_held(best, policy, query_words)}"
    if len(held) == len(ranks):
        return f"{what} {is_held}"
    share = f"{len(held):,} {'is' if len(held) == 1 else 'are'} held"
    return f"Of the {len(ranks):,} tokens of {what}, {share}. The best of these {is_held}"


def _explain_target(
    session: Session, ranks: Sequence[TokenRank], target: str, paid: AttentionPaid | None
) -> list[str]:
    state = explain_state(ranks, target, session.profile.policy, session.recall.turns)
    if paid is None:
        return [state]
    can_retry = _can_retry_full(session, ranks)
    use = describe_use(ranks, _target_name(target, ranks), paid, can_retry=can_retry)
    if not use:
        return [state]
    if all(rank.state != "held" for rank in ranks) and not _held_for_reply(ranks, paid):
        return [f"{state} The {_could_not_use(can_retry)}"]
    return [use, state]


def _could_not_use(can_retry: bool) -> str:
    advice = "; /retry full answers with everything held" if can_retry else ""
    return f"last reply could not use it{advice}."


def _read_before_reply(ranks: Sequence[TokenRank], paid: AttentionPaid) -> list[TokenRank]:
    """The tokens read before the last reply; without sinks, if there are others."""
    before = [rank for rank in ranks if rank.row.position < paid.start]
    return [rank for rank in before if "sink" not in rank.row.flags] or before


def _held_for_reply(ranks: Sequence[TokenRank], paid: AttentionPaid) -> list[TokenRank]:
    """The tokens held for the last reply, of those read before; if unknown, those held now."""
    return [
        rank
        for rank in _read_before_reply(ranks, paid)
        if (rank.state == "held" if paid.held is None else rank.row.position in paid.held)
    ]


def _describe_related(
    session: Session,
    ranks: Sequence[TokenRank],
    turn: int,
    shared_words: Sequence[str],
    paid: AttentionPaid,
) -> str:
    text = shorten(displayable_line(session.turns[turn].text), _MAX_QUOTED_CHARS)
    whose = "Your" if session.turns[turn].role == "user" else "The model's"
    shares = f"which shares {_quote_words(shared_words[:2])} with your message"
    what = f"{whose} “{text}”, {messages_ago(turn, session.turns)}, {shares},"
    return describe_use(ranks, what, paid, can_retry=_can_retry_full(session, ranks))


def _most_used_sentence(session: Session, paid: AttentionPaid, question: int) -> list[str]:
    """The sentence before turn `question` whose tokens got most attention each, as a line."""
    if not (shares := paid.shares):
        return [_NO_ATTENTION] if shares is None else []
    rows = [row for row in session.tokens(sorted(shares)) if row.turn < question]
    sentences = [
        turn[start:end]
        for turn in (list(group) for _, group in groupby(rows, key=lambda row: row.turn))
        for start, end in pairwise(sentence_bounds([row.text for row in turn]))
        if end - start >= _MIN_SENTENCE_TOKENS
    ]

    def attention(sentence: Sequence[TokenRow]) -> float:
        return fmean(shares[row.position] for row in sentence)

    best = max(sentences, key=attention, default=None)
    if best is None or not attention(best):
        return []
    quoted = shorten(displayable_line(text_of_rows(best)), _MAX_SENTENCE_CHARS)
    role = best[0].role
    whose = {"user": "yours", "assistant": "the model's"}.get(role, role)
    return [f"Of earlier sentences it used most, of {whose}: “{quoted}”."]


def _can_retry_full(session: Session, ranks: Sequence[TokenRank]) -> bool:
    """Whether `/retry full` is allowed, and would hold all these tokens, of which some are not."""
    missing = [rank for rank in ranks if rank.state != "held"]
    if not missing or session.profile.archive == "off" or session.toolbox.tools:
        return False
    is_stored = all(rank.state != "not_stored" for rank in missing)
    return is_stored and not settings_for_full(session)[1]


def _quote_words(words: Sequence[str]) -> str:
    return " and ".join(f"“{displayable_line(word)}”" for word in words)


def _target_name(target: str, ranks: Sequence[TokenRank]) -> str:
    if turn_of_target(target, ()) is not None:
        return f"turn {ranks[0].row.turn}"
    return f"“{shorten(displayable_line(without_quotes(target)), _MAX_QUOTED_CHARS)}”"


def _why_held(best: TokenRank, policy: str, query_words: Mapping[int, Sequence[str]]) -> str:
    """Why a token is held; `query_words` made recall restore a turn's tokens."""
    flags, higher_ranked = best.row.flags, _higher_ranked(best, policy)
    if "pinned" in flags:
        return " because it is pinned."
    if "sink" in flags:
        return " because it is among the first tokens of the chat, which always stay."
    if "recalled" in flags:
        words = _quote_words(query_words.get(best.row.turn, ()))
        return f" for this round only: it was recalled{' by the words ' if words else ''}{words}."
    if best.rank is None:
        return _no_rank(best, policy)
    if best.is_evicted_next and best.rank <= best.held // 2:
        return ", but will be evicted next: what ranks lower is pinned, or among the newest."
    if best.is_evicted_next:
        return f", but will be evicted next: {higher_ranked}."
    if _is_below_threshold(best):
        return f" only because it is new: {higher_ranked}."
    return f": {higher_ranked}."


def _why_evicted(best: TokenRank, policy: str) -> str:
    if best.rank is None:
        return _no_rank(best, policy)
    higher_ranked = _higher_ranked(best, policy)
    if best.rank <= best.held // 2 and not _is_below_threshold(best):
        return f": it was evicted earlier, or under other settings. Now, {higher_ranked}."
    return f": {higher_ranked}."


def _no_rank(rank: TokenRank, policy: str) -> str:
    reason = "" if rank.is_measured else ", as no attention to it was recorded"
    return f"; policy {policy} gives it no rank{reason}."


def _is_below_threshold(rank: TokenRank) -> bool:
    return rank.threshold is not None and (rank.row.score or 0.0) <= rank.threshold


def _higher_ranked(rank: TokenRank, policy: str) -> str:
    """How many held tokens rank higher, such as "of the 120 held tokens, 8 are newer"."""
    name = displayable_line(policy)
    if rank.factors.get("template") == 0:
        return f"policy {name} evicts what the chat template adds before all else"
    by_score = ("has", "have", f"a higher score under policy {name}")
    is_custom_salience = policy == "salience" and rank.factors.keys() != _SALIENCE_FACTORS
    reason = by_score if is_custom_salience else _REASONS_TO_RANK_HIGHER.get(policy, by_score)
    singular, plural, what = reason
    count = (rank.rank or 1) - 1
    verb = singular if count == 1 else plural
    is_decayed = rank.decayed_to < 1 and policy in _DECAYING_POLICIES
    fading = " (older surprise counts less)" if is_decayed else ""
    how_many = f"{count:,}" if count else "none"
    return f"of the {rank.held:,} held tokens, {how_many} {verb} {what}{fading}"


def _restore_hint(ranks: Sequence[TokenRank], target: str) -> str:
    if all(rank.state == "not_stored" for rank in ranks):
        return "The tokens are no longer archived, so they can't be restored."
    words = displayable_line(without_quotes(target))
    command = "/pin" if turn_of_target(target, ()) is not None else f'/recall "{words}"'
    if any(rank.state == "rereadable" for rank in ranks):
        return f"The tokens are not all archived: {command} reads them again."
    return f"The tokens are archived: {command} restores them."
