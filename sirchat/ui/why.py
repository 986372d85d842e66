"""`/why`: says in words whether tokens were held for the last reply, and why they are held or not.

A token is held if it is in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from sirchat.chat.session import Session
from sirchat.chat.targets import turn_of_target, without_quotes
from sirchat.chat.why import AttentionPaid, TokenRank, last_round, related_turn
from sirchat.errors import UsageError
from sirchat.recall import RecalledTurn
from sirchat.text.detokenizer import sentence_bounds
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_token_ranks
from sirchat.ui.text import displayable_line, messages_ago, restored_from_bits, shorten

_ALL = re.compile(r"(?:^|\s)--all(?=\s|$)")
_LITTLE = 0.5  # a reply that paid less than this share of the mean attention missed the tokens
_LEAST_USED = 4  # tokens held of a sentence that is named as used most
_SENTENCE = 120  # characters of it
_LENGTH = 40  # most characters that are quoted of the words asked for
_HIDDEN = "How much attention the reply paid to which words can't be read from this model."

_FADING = ("entropy", "salience")  # policies that rank by surprisal after the decays
_OF_WORDS = {"word", "template", "neighbours"}  # the factors of salience, with its usual options

# How to say why a token ranks higher under a policy: singular verb, plural verb, object.
_RANKED_BY = {
    "entropy": ("surprised", "surprised", "the model more"),
    "salience": ("stands", "stand", "in or beside words that surprised the model more"),
    **dict.fromkeys(("sink", "window"), ("is", "are", "newer")),
    **dict.fromkeys(("random", "reservoir"), ("was", "were", "luckier in the draw")),
    **dict.fromkeys(("h2o", "tova", "snapkv"), ("gets", "get", "more attention")),
}


def show_why(session: Session, screen: Screen, rest: str) -> None:
    """Run `/why [TARGET] [--all]`; TARGET is words or a turn, or else the last reply is meant.

    `--all` adds a table with each token's numbers. Raises UsageError if no token matches TARGET, or
    if there is neither a TARGET nor a reply.
    """
    target, all_numbers = _ALL.sub("", rest).strip(), bool(_ALL.search(rest))
    last, paid = last_round(session.turns), None
    if last is not None:
        paid = session.attention_paid(last[1])
    if target:
        ranks = session.why(target)
        lines = _why(session, ranks, target, paid)
    elif last is None or paid is None:
        raise UsageError("there is no reply yet", hint="/why TEXT tells why words are held or not")
    else:
        related = related_turn(session.turns, last[0])
        ranks = session.why(f"turn {related[0]}") if related else session.why(f"turn {last[0]}")
        lines = [_about_related(session, ranks, related, paid), *_most_used(session, paid)]
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if all_numbers:
        parts.append(draw_token_ranks(ranks, screen.theme, screen.width))
    screen.page(Group(*parts))


def describe_use(
    ranks: Sequence[TokenRank], what: str, paid: AttentionPaid, *, can_retry: bool
) -> str:
    """Say whether tokens, called `what`, were held for the last reply, and what attention they got.

    `can_retry`: whether to advise `/retry full`. "" if no token is older than the reply.
    """
    before, had = _read_before_reply(ranks, paid), _held_for_reply(ranks, paid)
    if not before:
        return ""
    if not had:
        if any(rank.state == "held" for rank in before):
            return f"{what} was evicted when the last reply was generated, and restored after it."
        return f"{what} was evicted, so the {_could_not_use(can_retry)}"
    recalled = any(rank.row.position in paid.recalled for rank in had)
    is_part = len(had) < len(before)
    part = f" only in part ({len(had):,} of {len(before):,} tokens)" if is_part else ""
    was = f"{what} was {'recalled for the last reply' if recalled else 'held'}{part}"
    if paid.shares is None:
        return f"{was}. {_HIDDEN}"
    shares = [paid.shares[at] for rank in had if (at := rank.row.position) in paid.shares]
    if not shares:
        if any(rank.state == "held" for rank in had):
            return f"{was}."
        return f"{was} when the last reply was generated, and evicted after it."
    share = sum(shares) / len(shares)
    times = f"({share:.1f} times an average token)"
    if share < _LITTLE:
        advice = "/retry full may help" if can_retry else "/retry draws another reply"
        return f"{was}, but the reply made little use of it {times}; {advice}."
    if share < 1:
        return f"{was}, and the reply paid it some attention {times}."
    return f"{was}, and the reply paid attention to it {times}."


def explain_state(
    ranks: Sequence[TokenRank], target: str, policy: str, recalled: Sequence[RecalledTurn] = ()
) -> str:
    """Say in one or two sentences why the tokens of `target` are held, or why they are not.

    `recalled` are the turns of which recall has restored tokens for this round.
    """
    by_words = {turn.turn: turn.words for turn in recalled if turn.words}
    what, held = _named(target, ranks), [rank for rank in ranks if rank.state == "held"]
    best = min(held or ranks, key=lambda rank: (rank.rank is None, rank.rank))
    if not held:
        return f"{what} is evicted{_why_evicted(best, policy)} {_way_back(ranks, target)}"
    bits = [int(flag[0]) for rank in held for flag in rank.row.flags if flag.endswith(" bits")]
    is_held = (
        f"is held{restored_from_bits(min(bits, default=0))}{_why_held(best, policy, by_words)}"
    )
    if len(held) == len(ranks):
        return f"{what} {is_held}"
    share = f"{len(held):,} {'is' if len(held) == 1 else 'are'} held"
    return f"Of the {len(ranks):,} tokens of {what}, {share}. The best of these {is_held}"


def _why(
    session: Session, ranks: Sequence[TokenRank], target: str, paid: AttentionPaid | None
) -> list[str]:
    explained = explain_state(ranks, target, session.profile.policy, session.recall.turns)
    if paid is None:
        return [explained]
    can_retry = _can_retry_full(session)
    use = describe_use(ranks, _named(target, ranks), paid, can_retry=can_retry)
    if all(rank.state != "held" for rank in ranks) and not _held_for_reply(ranks, paid):
        return [f"{explained} The {_could_not_use(can_retry)}" if use else explained]
    return list(filter(None, [use, explained]))


def _could_not_use(can_retry: bool) -> str:
    advice = "; /retry full answers with everything held" if can_retry else ""
    return f"last reply could not use it{advice}."


def _read_before_reply(ranks: Sequence[TokenRank], paid: AttentionPaid) -> list[TokenRank]:
    """The tokens that were read before the last reply; without sinks, if there are others."""
    before = [rank for rank in ranks if rank.row.position < paid.start]
    return [rank for rank in before if "sink" not in rank.row.flags] or before


def _held_for_reply(ranks: Sequence[TokenRank], paid: AttentionPaid) -> list[TokenRank]:
    """The tokens read before the last reply and held for it; or held now, if that is not known."""
    return [
        rank
        for rank in _read_before_reply(ranks, paid)
        if (rank.state == "held" if paid.held is None else rank.row.position in paid.held)
    ]


def _about_related(
    session: Session,
    ranks: Sequence[TokenRank],
    related: tuple[int, tuple[str, ...]] | None,
    paid: AttentionPaid,
) -> str:
    """Could the reply use the earlier turn that is most similar to the user's last message?

    `related` has that turn's index, and the words that both share; `ranks` are its tokens.
    """
    if related is None:
        return "No earlier message shares a telling word with your last message."
    turn, words = related
    text = shorten(displayable_line(session.turns[turn].text), _LENGTH)
    whose = "Your" if session.turns[turn].role == "user" else "The model's"
    ago = messages_ago(turn, session.turns)
    what = f"{whose} “{text}”, {ago}, which shares {_listed(words[:2])} with your message,"
    return describe_use(ranks, what, paid, can_retry=_can_retry_full(session))


def _most_used(session: Session, paid: AttentionPaid) -> list[str]:
    """A line with the earlier sentence whose tokens got most attention each, at least some."""
    if not (shares := paid.shares):
        return [_HIDDEN] if shares is None else []
    asked = (last_round(session.turns) or (0, 0))[0]
    rows = [row for row in session.tokens(sorted(shares)) if row.turn < asked]
    best, used = 0.0, ("", "")
    for _, of_turn in groupby(rows, key=lambda row: row.turn):
        said = list(of_turn)
        for start, end in pairwise(sentence_bounds([row.text for row in said])):
            share = fmean(shares[row.position] for row in said[start:end])
            if end - start >= _LEAST_USED and share > best:
                best, used = share, ("".join(row.text for row in said[start:end]), said[0].role)
    text = shorten(displayable_line(used[0]).strip(), _SENTENCE)
    whose = "yours" if used[1] == "user" else "the model's" if used[1] == "assistant" else used[1]
    return [f"Of earlier sentences it used most, of {whose}: “{text}”."] if best else []


def _can_retry_full(session: Session) -> bool:
    return session.resident < session.seen and session.profile.archive != "off"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(f"“{displayable_line(word)}”" for word in words)


def _named(target: str, ranks: Sequence[TokenRank]) -> str:
    if turn_of_target(target, ()) is not None:
        return f"turn {ranks[0].row.turn}"
    return f"“{shorten(displayable_line(without_quotes(target)), _LENGTH)}”"


def _why_held(best: TokenRank, policy: str, by_words: Mapping[int, Sequence[str]]) -> str:
    flags, higher = best.row.flags, _higher(best, policy)
    if "pinned" in flags:
        return " because it is pinned."
    if "sink" in flags:
        return " because it is among the first tokens of the chat, which always stay."
    if "recalled" in flags:
        words = _listed(by_words.get(best.row.turn, ()))
        return f" for this round only: it was recalled{' by the words ' if words else ''}{words}."
    if best.rank is None:
        return f"; policy {policy} gives it no rank{_since(best)}."
    if best.is_evicted_next and best.rank <= best.held // 2:
        return ", but will be evicted next: what ranks lower is pinned, or among the newest."
    if best.is_evicted_next:
        return f", but will be evicted next: {higher}."
    if best.threshold is not None and (best.row.score or 0.0) <= best.threshold:
        return f" only because it is new: {higher}."
    return f": {higher}."


def _why_evicted(best: TokenRank, policy: str) -> str:
    if best.rank is None:
        return f"; policy {policy} gives it no rank{_since(best)}."
    higher = _higher(best, policy)
    is_low = best.threshold is not None and (best.row.score or 0.0) <= best.threshold
    if best.rank <= best.held // 2 and not is_low:
        return f": it was evicted earlier, or under other settings. Now, {higher}."
    return f": {higher}."


def _since(rank: TokenRank) -> str:
    return "" if rank.is_measured else ", as no attention to it was recorded"


def _higher(rank: TokenRank, policy: str) -> str:
    """How many held tokens rank higher, such as "of the 120 held tokens, 8 are newer"."""
    name = displayable_line(policy)
    default = ("has", "have", f"a higher score under policy {name}")
    has_other = policy == "salience" and rank.factors.keys() != _OF_WORDS
    singular, plural, what = default if has_other else _RANKED_BY.get(policy, default)
    if rank.factors.get("template") == 0:
        return f"policy {name} evicts what the chat template adds before all else"
    above = (rank.rank or 1) - 1
    verb = singular if above == 1 else plural
    fading = " (older surprise counts less)" if rank.decayed_to < 1 and policy in _FADING else ""
    count = f"{above:,}" if above else "none"
    return f"of the {rank.held:,} held tokens, {count} {verb} {what}{fading}"


def _way_back(ranks: Sequence[TokenRank], target: str) -> str:
    if all(rank.state == "not_stored" for rank in ranks):
        return "The tokens are no longer archived, so they can't be restored."
    is_lost = any(rank.state == "rereadable" for rank in ranks)
    what, does = ("not all archived", "reads") if is_lost else ("archived", "restores")
    if turn_of_target(target, ()) is not None:
        return f"The tokens are {what}: /pin {does} them{' again' if is_lost else ''}."
    words = displayable_line(without_quotes(target))
    return f'The tokens are {what}: /recall "{words}" {does} them{" again" if is_lost else ""}.'
