"""What `/why` says: whether the last reply had some words, and why they are held or not."""

from __future__ import annotations

import io
import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from chatting import answer, babbler, session, tiny
from held_rows import state
from sirchat.chat.events import Notice
from sirchat.chat.session import Session
from sirchat.chat.tool_loop import Toolbox
from sirchat.chat.why import AttentionPaid
from sirchat.errors import UsageError
from sirchat.memory.policies import policy_names
from sirchat.ui.screen import Screen
from sirchat.ui.why import _most_used_sentence, describe_use, explain_state, show_why

SAID = ("My name is Anna.", "I live in Lisbon.", "Tell me a joke.", "What is a tree?")


def _told(policy: str, **settings: Any) -> Session:
    chat = session(tiny(), policy=policy, budget=64, recent=8, **settings)
    for text in SAID:
        list(chat.ask(text))
    return chat


def _said(chat: Session, target: str) -> str:
    return explain_state(chat.why(target), target, chat.profile.policy)


def test_a_word_that_is_held_is_said_to_be_with_how_many_rank_above() -> None:
    chat = _told("entropy")
    (best,) = {rank.rank for rank in chat.why("tree")}
    assert best == 1
    assert _said(chat, "tree") == (
        "“tree” is held: of the 59 held tokens, none surprised the model more."
    )
    above = r"“Anna” is held: of the 59 held tokens, (\d) surprised the model more\."
    match = re.fullmatch(above, _said(chat, "Anna"))
    assert match
    assert int(match[1]) == min(rank.rank or 99 for rank in chat.why("Anna")) - 1
    ranks = [replace(rank, is_evicted_next=True) for rank in chat.why("tree")]
    assert "is held, but will be evicted next: " in explain_state(ranks, "tree", "entropy")
    assert "what ranks lower is pinned, or among the newest" in explain_state(
        ranks, "tree", "entropy"
    )
    low = [replace(rank, rank=rank.held) for rank in ranks]
    assert "surprised the model more" in explain_state(low, "tree", "entropy")


def test_under_salience_words_and_those_beside_them_are_counted() -> None:
    chat = _told("salience")
    nats = {row.position: row.surprisal or 0.0 for row in chat.snapshot().rows}
    ((at, own),) = ((rank.row.position, nats[rank.row.position]) for rank in chat.why("Tell"))
    above = {p for p in nats if nats[p] > own}  # these are words of one token
    beside = {p for p in nats if max(nats.get(p - 1, 0), nats.get(p + 1, 0)) / 2 > own}
    count = len(above | beside)
    assert count > len(above) > 0
    assert at not in above | beside
    assert _said(chat, "Tell") == (
        f"“Tell” is held: of the 59 held tokens, {count} stand in or beside words that "
        "surprised the model more."
    )
    weighted = _told("salience", policy_options={"user_weight": 2})
    assert "a higher score under policy salience." in _said(weighted, "Tell")


def test_a_word_that_is_evicted_is_said_to_be_with_the_way_back() -> None:
    chat = _told("sink")
    gone = (
        "“Anna” is evicted: of the 59 held tokens, 55 are newer. The tokens are archived: "
        '/recall "Anna" restores them.'
    )
    assert _said(chat, "Anna") == gone
    assert _shown(chat, "Anna") == [
        f"{gone} The last reply could not use it; /retry full answers with everything held."
    ]
    states = [rank.state for rank in chat.why("Lisbon")]
    held = f"Of the {len(states)} tokens of “Lisbon”, {states.count('held')} are held. "
    assert _said(chat, "Lisbon").startswith(held)
    assert "will be evicted next" in _said(chat, "Lisbon")
    lost = "The tokens are no longer archived, so they can't be restored."
    unarchived = _told("sink", archive="off")
    assert lost in _said(unarchived, "Anna")
    assert " gone " in _shown(unarchived, "Anna --all")[-1]
    assert _said(_told("window"), "turn 0").endswith("The tokens are archived: /pin restores them.")


@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv"])
def test_right_after_a_switch_no_attention_is_compared_as_none_is_recorded(policy: str) -> None:
    chat = _told("sink")
    told = [e.text for e in chat.switch("/policy", policy=policy) if isinstance(e, Notice)]
    assert told == [
        "attention is recorded from the next message on; until then, policy "
        f"{policy} keeps the newest tokens"
    ]
    held = chat.ledger.held_positions
    assert held[-60:].tolist() == [*range(chat.seen - 60, chat.seen)]
    assert len(held) == 64
    gone, later = _said(chat, "Anna"), _said(chat, "tree")
    assert " is evicted: of the 64 held tokens" in gone or "gives it no rank" in gone
    none = f" is held; policy {policy} gives it no rank, as no attention to it was recorded."
    assert later.endswith(none)
    assert "the reply paid attention to it" in _shown(chat, "tree")[0]
    list(chat.ask("Tell me a joke."))
    assert "more attention" in _said(chat, f"turn {len(chat.turns) - 1}")
    again = [*chat.switch("/policy", policy="sink"), *chat.switch("/policy", policy=policy)]
    assert not any(isinstance(event, Notice) for event in again)


def test_pins_sinks_and_fading_are_named() -> None:
    chat = _told("entropy", decay=0.5)
    assert "(older surprise counts less)" in _said(chat, "Lisbon")
    chat.pin("Lisbon")
    assert _said(chat, '"Lisbon"') == "“Lisbon” is held because it is pinned."
    assert "the first tokens of the chat" in _said(_told("interval"), "turn 0")


def test_a_word_that_was_held_got_so_much_attention() -> None:
    chat = _told("entropy")
    paid = chat.attention_paid(7)
    assert paid.shares is not None
    assert any(rank.row.position in paid.shares for rank in chat.why("tree"))
    said, held = _shown(chat, "What")
    assert "an average token)" in said
    assert held.startswith(("“What” is held", "Of the "))
    rank = next(rank for rank in chat.why("Lisbon") if rank.row.turn == 2)
    for share, how in (
        (0.3, "made little use of it (0.3 times an average token); /retry draws"),
        (2.0, "attention to"),
    ):
        shares = AttentionPaid(paid.start, None, {rank.row.position: share})
        sentence = describe_use([rank], "“Lisbon”", shares, can_retry=True)
        assert f"({share} times an average token)" in sentence
        assert how in sentence
    shares = AttentionPaid(paid.start, frozenset([rank.row.position]), {rank.row.position: 0.3})
    for text, can_retry, advice in (
        (" Lisbon", True, "/retry full may help."),
        (".", True, "/retry draws another reply."),
        (" Lisbon", False, "/retry draws another reply."),
    ):
        row = replace(rank.row, position=rank.row.position + 1, text=text)
        both = [rank, replace(rank, row=row, state="archived")]
        assert describe_use(both, "It", shares, can_retry=can_retry).endswith(advice)
    hidden = describe_use([rank], "“Lisbon”", replace(shares, shares=None), can_retry=True)
    assert hidden.endswith("can't be read from this model.")


def test_a_retry_with_all_held_is_advised_only_where_it_is_allowed_and_all_fits() -> None:
    chat, advice = _told("sink"), "; /retry full answers with everything held."
    assert _shown(chat, "Anna")[0].endswith(advice)

    def weather(city: str) -> str:
        return city

    chat.toolbox = Toolbox([weather])
    assert _shown(chat, "Anna")[0].endswith("could not use it.")
    longer = session(replace(tiny(), context_length=96), policy="sink", budget=64, recent=8)
    for text in SAID:
        list(longer.ask(text))
    assert _shown(longer, "Anna")[0].endswith("could not use it.")


def test_what_was_restored_after_the_reply_was_not_there_for_it() -> None:
    chat = _told("sink")
    chat.pin("Anna")
    restored = "“Anna” was evicted when the last reply was generated, and restored after it."
    assert _shown(chat, "Anna")[0] == restored
    chat.pin("Anna", pinned=False)
    list(chat.ask("Tell me a joke."))
    chat.switch("/budget", budget=32)
    evicted = next(rank for rank in chat.why("turn 6") if rank.state != "held")
    paid = chat.attention_paid(9)
    assert "evicted after it" in describe_use([evicted], "It", paid, can_retry=True)


def test_what_stepped_aside_for_what_was_recalled_is_not_called_evicted() -> None:
    settings: dict[str, Any] = {"policy": "sink", "budget": 64, "recent": 0, "recall_n": 20}
    chat = session(tiny(), max_new_tokens=8, recall="words", **settings)
    for text in ("My cat is called Luna.", *SAID[2:] * 2, "What is my cat called?"):
        list(chat.ask(text))
    paid = chat.attention_paid(len(chat.turns) - 1)
    held = [row for row in chat.snapshot().rows if row.position in paid.aside]
    assert held
    ranks = [rank for rank in chat.why(f"turn {held[-1].turn}") if rank.row.position in paid.aside]
    said = "It had stepped aside for what was recalled for the last reply, and is back."
    assert describe_use(ranks, "It", paid, can_retry=True) == said


def test_a_sentence_with_evicted_words_is_quoted_with_gaps() -> None:
    chat = _told("entropy")
    paid = chat.attention_paid(7)
    assert paid.shares is not None
    of_turn = [at for at in paid.shares if chat.ledger.column("turn")[at] == 2]
    for at in paid.shares:
        paid.shares[at] = 9.0 * (at in of_turn)
    shown = _most_used_sentence(chat, paid, 6)[0]
    assert len(of_turn) >= 4
    assert "“I live in Lisbon.”" in shown
    del paid.shares[of_turn[2]]
    shown = _most_used_sentence(chat, paid, 6)[0]
    assert re.search("“I live … Lisbon.”", shown)


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
def test_under_every_policy_the_sentence_agrees_with_the_state(policy: str) -> None:
    budget = 64 if policy != "full" else 512
    chat = session(babbler(), policy=policy, budget=budget, max_new_tokens=8)
    for text in SAID:
        list(chat.ask(text))
    for target in ("Anna", "Lisbon", "turn 0", "last"):
        states = {rank.state for rank in chat.why(target)}
        said = _said(chat, target)
        assert ("is evicted" in said) == ("held" not in states)
        assert said.startswith("Of the ") == (len(states) > 1 and "held" in states)
        assert "\n" not in said


def _shown(chat: Session, rest: str = "") -> list[str]:
    """The lines of `/why`."""
    out = io.StringIO()
    screen = Screen(out, out)
    screen.console.width = 400
    show_why(chat, screen, rest)
    return out.getvalue().strip().splitlines()


def test_why_alone_tells_of_the_earlier_turn_that_fits_and_of_what_got_attention() -> None:
    chat = session(tiny(), policy="sink", budget=64)
    for text in ("My dog is called Rex.", "I live in Lisbon.", "Tell me a joke.", "A dog is what?"):
        list(chat.ask(text))
    turn, used = _shown(chat)
    assert turn.startswith("Your “My dog is called Rex.”, 8 messages ago, which shares “dog” with")
    assert "/retry full" in turn
    paid, column = chat.attention_paid(7).shares or {}, chat.ledger.column
    told = re.fullmatch("Of earlier sentences it used most, of (yours|the model's): “(.*)”.", used)
    assert told
    means = dict[str, float]()
    for index, said in enumerate(chat.turns[:6]):  # each is one sentence
        of_turn = [share for at, share in paid.items() if column("turn")[at] == index]
        if len(of_turn) >= 4:
            means[said.role] = max(sum(of_turn) / len(of_turn), means.get(said.role, 0.0))
    assert max(means, key=means.__getitem__) == {"yours": "user"}.get(told[1], "assistant")
    with pytest.raises(UsageError, match="no reply yet"):
        _shown(session(tiny()))
    with pytest.raises(UsageError, match="these words are not in this chat"):
        _shown(chat, "Pelican")


def test_reading_the_reply_once_more_leaves_no_trace() -> None:
    chat, other = _told("h2o"), _told("h2o")
    before = state(chat)
    for rest in ("", "Lisbon --all", "tree"):
        _shown(chat, rest)
    assert state(chat) == before
    assert answer(list(chat.ask("And now?"))) == answer(list(other.ask("And now?")))
    assert state(chat) == state(other)


def test_the_attention_is_that_of_the_models_own_weights() -> None:
    """The oracle reads the whole chat in one pass, with eager attention, which returns weights."""
    chat = session(babbler(), policy="full", max_new_tokens=9)
    for text in SAID[:2]:
        list(chat.ask(text))
    rows, module = chat.tokens(range(chat.seen)), deepcopy(babbler().module)
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        out = module(torch.tensor([[row.id for row in rows]]), output_attentions=True)
    weights = torch.stack(out.attentions)[:, 0].mean((0, 1))  # [n, n]
    reply = [row.position for row in rows if (row.turn, row.role) == (3, "assistant")]
    received = weights[[at - 1 for at in reply]].mean(0)
    at = [r.position for r in rows if 4 <= r.position < reply[0] and r.role != "template"]
    expected = received[at] / received[at].mean()
    shares = chat.attention_paid(3).shares
    assert shares is not None
    assert list(shares) == at
    assert list(shares.values()) == pytest.approx(expected.tolist(), rel=1e-4)


def test_why_alone_finds_other_forms_of_a_word_and_what_you_said_before_what_the_model_said() -> (
    None
):
    chat = session(tiny(), policy="sink", budget=256, max_new_tokens=8)
    list(chat.read_user("In June I am moving to Valparaiso."))
    list(chat.read_reply("That sounds like a great move!"))
    for text in ("Tell me a joke.", "Which city do I move to?"):
        list(chat.ask(text))
    said = "Your “In June I am moving to Valparaiso.”, 6 messages ago, which shares “move” with"
    assert _shown(chat)[0].startswith(said)


def test_of_a_reply_without_words_nothing_is_said_to_be_used() -> None:
    chat = session(tiny(), policy="sink", budget=64)
    list(chat.ask("My dog is called Rex."))
    list(chat.read_user("A dog is what?"))
    list(chat.read_reply(""))
    assert _shown(chat) == [
        "The last reply has no words, so it used nothing; /retry draws another."
    ]
    assert len(_shown(chat, "Rex")) == 1
