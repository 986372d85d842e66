"""Prints the answers to `/help`, `/why`, `/evicted` and `/thinking`; the chat is not changed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sirchat.chat.events import RecalledTurn
from sirchat.chat.evicted_text import evicted_turns
from sirchat.chat.reasoning import thought
from sirchat.chat.session import Session
from sirchat.chat.targets import turn_of_target, without_quotes
from sirchat.chat.why import AttentionPaid, TokenRank, last_round, related_turn
from sirchat.chat.words import around, said, words_at
from sirchat.errors import UsageError
from sirchat.recall.terms import STOP_WORDS
from sirchat.ui.screen import Screen
from sirchat.ui.tables import draw_evicted, draw_token_ranks
from sirchat.ui.text import displayable, displayable_line, shorten


def show_evicted(session: Session, screen: Screen) -> None:
    """Print the evicted words of each turn, except words that another token in the cache repeats.

    A turn that lost only repeated words and punctuation is not listed; the number of these turns is
    printed.
    """
    turns = list(evicted_turns(session))
    named = [turn for turn in turns if turn.words]
    if named:
        screen.page(draw_evicted(named, screen.theme, screen.width))
        screen.note('/recall "words" restores words, and the words around them')
    if others := len(turns) - len(named):
        went = "lost only repeats and punctuation"
        screen.note(f"{others:,} {'more ' * bool(named)}message{'s' * (others > 1)} {went}")
    if not turns:
        screen.note("nothing is evicted")


def show_thought(session: Session, screen: Screen) -> None:
    """Print the reasoning (`<think>`) of the last reply that has some, or that there is none."""
    is_open = session.template.opens_reasoning
    replies = [one.text for one in session.turns if one.role == "assistant"]
    thoughts = (thought(reply, is_open=is_open) for reply in reversed(replies))
    if text := next(filter(None, thoughts), ""):
        screen.page(Text(displayable(text), screen.theme.quiet))
    else:
        screen.note("no reply so far contains reasoning")


_ALL = re.compile(r"(?:^|\s)--all(?=\s|$)")
_MOST_ATTENDED = 5  # words that are named


def show_why(session: Session, screen: Screen, rest: str) -> None:
    """Run `/why`: print whether some words were held for the last reply, and whether they are now.

    A token is held if it is in the cache. `rest` has the arguments, `[TARGET] [--all]`. TARGET is
    words or a turn; without TARGET, the answer is about the last reply. `--all` adds a table with
    the numbers of each token. Raises UsageError if no token matches TARGET, or if there is neither
    a TARGET nor a reply.
    """
    target, all_numbers = _ALL.sub("", rest).strip(), bool(_ALL.search(rest))
    found, paid = last_round(session.turns), None
    if found is not None:
        paid = session.attention_paid(found[1])
    if target:
        ranks = session.why(target)
        lines = _why(session, ranks, target, paid)
    elif found is None or paid is None:
        raise UsageError("there is no reply yet", hint="/why TEXT tells why words are held or not")
    else:
        related = related_turn(session.turns, found[0])
        ranks = session.why(f"turn {related[0]}") if related else session.why(f"turn {found[0]}")
        lines = [*_about_related(session, ranks, related, paid), *_most_attended(session, paid)]
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if all_numbers:
        parts.append(draw_token_ranks(ranks, screen.theme, screen.width))
    screen.page(Group(*parts))


def _why(
    session: Session, ranks: Sequence[TokenRank], target: str, paid: AttentionPaid | None
) -> list[str]:
    """The lines that answer `/why TARGET`; `ranks` are the tokens of TARGET.

    The lines say whether the last reply could use these tokens, and why the tokens are in the cache
    or not. `paid` is the attention that the last reply paid to the tokens before it; None if there
    is no reply.
    """
    explained = explain(ranks, target, session.profile.policy, session.recalled_turns)
    if paid is None:
        return [explained]
    can_retry = _can_retry_full(session)
    said = describe_use(ranks, _named(target, ranks), paid, can_retry=can_retry)
    if all(one.state != "held" for one in ranks) and not _had(ranks, paid):
        return [f"{explained} The {_could_not_use(can_retry)}" if said else explained]
    return list(filter(None, [said, explained]))


def _could_not_use(can_retry: bool) -> str:
    help_ = "; /retry full answers with everything held" if can_retry else ""
    return f"last reply could not use it{help_}."


def _before(ranks: Sequence[TokenRank], paid: AttentionPaid) -> list[TokenRank]:
    """The tokens of `ranks` that were read before the last reply, without sinks.

    Sinks are the first tokens of the chat. If all tokens read before the reply are sinks, the sinks
    are returned.
    """
    before = [one for one in ranks if one.row.position < paid.start]
    return [one for one in before if "sink" not in one.row.flags] or before


def _had(ranks: Sequence[TokenRank], paid: AttentionPaid) -> list[TokenRank]:
    """The tokens of `ranks` that are older than the last reply, and were in the cache for it.

    Sinks (the first tokens of the chat) are left out if there are other tokens. If it is not known
    what the cache held for the reply, the tokens that are in the cache now are returned.
    """
    return [
        one
        for one in _before(ranks, paid)
        if (one.state == "held" if paid.held is None else one.row.position in paid.held)
    ]


def _about_related(
    session: Session,
    ranks: Sequence[TokenRank],
    related: tuple[int, tuple[str, ...]] | None,
    paid: AttentionPaid,
) -> list[str]:
    """The lines that answer `/why` without a target: could the reply use a related earlier turn?

    `related` has the index of the earlier turn that is most similar to the user's last message, and
    the words that both share; it is None if no turn shares a word. `ranks` are the tokens of that
    turn.
    """
    if related is None:
        return ["No earlier message shares a telling word with your last message."]
    turn, words = related
    said = shorten(displayable_line(session.turns[turn].text), _LENGTH)
    shared = " and ".join(f"“{displayable_line(one)}”" for one in words[:2])
    what = f"Turn {turn} (“{said}”), which shares {shared} with your message,"
    return [describe_use(ranks, what, paid, can_retry=_can_retry_full(session))]


def _most_attended(session: Session, paid: AttentionPaid) -> list[str]:
    """A list with one line that names the words to which the last reply paid most attention.

    If the model does not expose its attention weights, the line says so. The list is empty if there
    are no words to name.
    """
    if not paid.shares:
        return [_HIDDEN] if paid.shares is None else []
    best = sorted(paid.shares, key=paid.shares.__getitem__, reverse=True)[: 8 * _MOST_ATTENDED]
    rows = said(session.tokens(around(best, session.seen)))
    words = {word: paid.shares[at] for at in reversed(best) for word in words_at([at], rows)}
    telling = [one for one in words if one.casefold() not in STOP_WORDS]
    named = sorted(telling, key=words.__getitem__, reverse=True)[:_MOST_ATTENDED]
    if not named:
        return []
    return [f"The reply paid most attention to: {', '.join(map(displayable_line, named))}."]


def _can_retry_full(session: Session) -> bool:
    return session.resident < session.seen and session.profile.archive != "off"


_LITTLE = 0.5
"""If the attention to some tokens is less than this share of the mean, the reply missed them."""

_HIDDEN = "How much attention the reply paid to which words can't be read from this model."


def describe_use(
    ranks: Sequence[TokenRank], what: str, paid: AttentionPaid, *, can_retry: bool
) -> str:
    """Say whether tokens were in the cache for the last reply, and how much attention they got.

    `ranks` are the tokens, and `what` is what the text calls them. `paid` is the attention that the
    reply paid. `can_retry` is true if the text may advise `/retry full`. Returns "" if none of the
    tokens is older than the reply.
    """
    before, had = _before(ranks, paid), _had(ranks, paid)
    if not before:
        return ""
    if not had:
        if any(one.state == "held" for one in before):
            return f"{what} was evicted when the last reply was generated, and restored after it."
        return f"{what} was evicted, so the {_could_not_use(can_retry)}"
    recalled = any("recalled" in one.row.flags for one in had)
    part = f" only in part ({len(had):,} of {len(before):,} tokens)" * (len(had) < len(before))
    was = f"{what} was {'recalled for the last reply' if recalled else 'held'}{part}"
    if paid.shares is None:
        return f"{was}. {_HIDDEN}"
    shares = [paid.shares[at] for one in had if (at := one.row.position) in paid.shares]
    if not shares:
        is_gone = all(one.state != "held" for one in had)
        return f"{was}{' when the last reply was generated, and evicted after it' * is_gone}."
    share = sum(shares) / len(shares)
    times = f"({share:.1f} times an average token)"
    if share < _LITTLE:
        help_ = "/retry full may help" if can_retry else "/retry draws another reply"
        return f"{was}, but the reply made little use of it {times}; {help_}."
    if share < 1:
        return f"{was}, and the reply paid it some attention {times}."
    return f"{was}, and the reply paid attention to it {times}."


_LENGTH = 40  # most characters that are quoted of the words asked for
_FEW = 4  # at most one token in this number is "only" a few

_FADING = ("entropy", "salience")  # policies that rank by surprisal after the decays
_RANKED_BY = {
    **dict.fromkeys(_FADING, ("surprised", "surprised", "the model more")),
    **dict.fromkeys(("sink", "window"), ("is", "are", "newer")),
    **dict.fromkeys(("random", "reservoir"), ("was", "were", "luckier in the draw")),
    **dict.fromkeys(("h2o", "tova", "snapkv"), ("gets", "get", "more attention")),
}
"""For each policy, how to say why a token ranks higher: singular verb, plural verb, object."""


def explain(
    token_ranks: Sequence[TokenRank],
    target: str,
    policy: str,
    recalled: Sequence[RecalledTurn] = (),
) -> str:
    """Say in one or two sentences why the tokens of `target` are in the cache, or why they are not.

    `token_ranks` are these tokens with their ranks, and `target` is words or names a turn. `policy`
    is the eviction policy. `recalled` are the turns of which recall has restored tokens for this
    round.
    """
    by_words = {one.turn: one.words for one in recalled if one.words}
    what, held = _named(target, token_ranks), [one for one in token_ranks if one.state == "held"]
    best = min(held or token_ranks, key=lambda one: (one.rank is None, one.rank))
    if not held:
        way_back = _way_back(token_ranks, target)
        return f"{what} is evicted{_why_evicted(best, policy)} {way_back}"
    if len(held) == len(token_ranks):
        return f"{what} is held{_why_held(best, policy, by_words)}"
    share = f"{len(held):,} {'is' if len(held) == 1 else 'are'} held"
    return (
        f"Of the {len(token_ranks):,} tokens of {what}, {share}. "
        f"The best of these is held{_why_held(best, policy, by_words)}"
    )


def _named(target: str, token_ranks: Sequence[TokenRank]) -> str:
    if turn_of_target(target, ()) is not None:
        return f"turn {token_ranks[0].row.turn}"
    return f"“{shorten(displayable_line(without_quotes(target)), _LENGTH)}”"


def _why_held(best: TokenRank, policy: str, by_words: Mapping[int, Sequence[str]]) -> str:
    flags, higher = best.row.flags, _higher(best, policy)
    if "pinned" in flags:
        return " because it is pinned."
    if "sink" in flags:
        return " because it is among the first tokens of the chat, which always stay."
    if "recalled" in flags:
        words = " and ".join(
            f"“{displayable_line(one)}”" for one in by_words.get(best.row.turn, ())
        )
        return f" for this round only: it was recalled{' by the words ' * bool(words)}{words}."
    if best.rank is None:
        return f"; policy {policy} gives no token a rank."
    if best.leaves and best.rank <= best.held // 2:
        return ", but will be evicted next: what ranks lower is pinned, or among the newest."
    if best.leaves:
        return f", but will be evicted next: {higher}."
    if best.threshold is not None and (best.row.score or 0.0) <= best.threshold:
        return f" only because it is new: {higher}."
    return f": {higher}."


def _why_evicted(best: TokenRank, policy: str) -> str:
    if best.rank is None:
        return f"; policy {policy} gives no token a rank."
    higher = _higher(best, policy)
    is_low = best.threshold is not None and (best.row.score or 0.0) <= best.threshold
    if best.rank <= best.held // 2 and not is_low:
        return f": it was evicted earlier, or under other settings. Now, {higher}."
    return f": {higher}."


def _higher(one: TokenRank, policy: str) -> str:
    """Say how many held tokens rank higher than `one`: "of the 120 held tokens, 8 are newer"."""
    default = ("has", "have", f"a higher score under policy {displayable_line(policy)}")
    singular, plural, what = _RANKED_BY.get(policy, default)
    above = (one.rank or 1) - 1
    few = "only " * (0 < above * _FEW <= one.held)
    verb = singular if above == 1 else plural
    fading = " (older surprise counts less)" if one.decayed_to < 1 and policy in _FADING else ""
    count = f"{few}{above:,}" if above else "none"
    return f"of the {one.held:,} held tokens, {count} {verb} {what}{fading}"


def _way_back(token_ranks: Sequence[TokenRank], target: str) -> str:
    if all(one.state == "gone" for one in token_ranks):
        return "The tokens are no longer archived, so they can't be restored."
    if turn_of_target(target, ()) is not None:
        return "The tokens are archived: /pin restores them."
    words = displayable_line(without_quotes(target))
    return f'The tokens are archived: /recall "{words}" restores them.'


GROUPS: Final[dict[str, dict[str, str]]] = {
    "Talk": {
        "/edit": "change your last message",
        "/retry": "replace the last reply",
        "/undo": "remove last message and reply",
        "/read FILE": "send a file's text, like @FILE",
        "/copy": "put a reply on the clipboard",
        "/thinking": "show a reply's reasoning",
    },
    "Memory": {
        "/evicted": "list evicted words",
        '/recall "WORDS"': "restore evicted words",
        "/pin, /unpin": "never evict words; allow it",
        "/summarize": "pin a summary of the chat",
        "/erase": "erase words for good",
        "/reset": "start an empty conversation",
    },
    "Look": {
        "/panel": "show all held tokens",
        "/tokens": "list held tokens with scores",
        "/why WORDS": "tell whether words were held",
        "/stats": "show token counts and speed",
        "/clear": "clear the screen only",
    },
    "Chats": {
        "/save NAME": "save this chat under a name",
        "/load NAME": "go on with a saved chat",
        "/branch NAME": "go on in a copy of this chat",
        "/branches": "list the branches of this chat",
        "/switch NAME": "go on with another branch",
        "/export": "write chat or panel to a file",
    },
    "Settings": {
        "/model NAME": "go on with another model",
        "/policy NAME": "choose how tokens are evicted",
        "/budget N": "set how many tokens are held",
        "/decay": "set how fast old tokens lose score",
        "/sinks, /recent": "first, newest tokens to keep",
        "/system TEXT": "set the system prompt",
        "/profile NAME": "apply a set of settings",
        "/set, /show": "set one setting; list all",
    },
    "Help": {
        "/help COMMAND": "explain one command",
        "/exit": "leave sirchat, as Ctrl-D does",
    },
}
"""The help that `/help` prints: for each group, its commands and what they do.

The text before the colon may have arguments, and may name two commands.
"""

KEYS: Final = (
    "Alt-Enter, Ctrl-J, or Enter after \\ begins a new line; "
    '""" opens and closes a block of lines; // sends a text that begins with a slash. '
    "Esc or Ctrl-C stops a reply; Ctrl-D leaves the chat."
)

_NAMES, _COLUMN = 16, 50  # widths in cells: of the commands; of a column of groups and its gap
_MOST = 3  # columns


def draw_help(width: int) -> RenderableType:
    """Draw the help of all commands, in groups, in as many columns as fit into `width` cells."""
    count = max(1, min(_MOST, (width + 2) // _COLUMN))
    names = list(GROUPS)
    share = -(-len(names) // count)
    columns = [names[start : start + share] for start in range(0, len(names), share)]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(*(Group(*map(_group, column)) for column in columns))
    return table


def _group(name: str) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_NAMES)
    for commands, meaning in GROUPS[name].items():
        table.add_row(Text(f" {commands}", no_wrap=True), Text(meaning))
    return Group(Text(name, style="bold"), table)


def draw_command(
    name: str, arguments: str, description: str, others: Sequence[str]
) -> RenderableType:
    """Draw the help of one command: how it is typed, its other names `others`, and what it does."""
    aliases = f" (also {', '.join(f'/{one}' for one in others)})" if others else ""
    usage = Text.assemble((f"/{name} {arguments}".rstrip(), "bold"), aliases)
    return Group(usage, Text(description))
