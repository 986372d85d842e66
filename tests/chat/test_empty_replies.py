"""A reply that is empty says why; a model without a chat template ends where it goes on as USER."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from chatting import babbler, held_text, notices, session, tell, tiny
from command import run
from sirchat.chat.events import Delta, Evicted, Notice, TurnDone, to_json
from sirchat.engine.sampling import ForcedPrefixSampler, Sampler, Sampling
from sirchat.models.model import LoadedModel, wrap_model
from sirchat.text.template import Template
from sirchat.ui.status import describe_turn
from speaking import saying

IT = tiny().tokenizer


def says(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    monkeypatch.setattr(
        "sirchat.chat.conversation.Sampler", lambda *_: ForcedPrefixSampler(ids, Sampling())
    )


@pytest.mark.parametrize(
    ("text", "end", "why"),
    [
        ("", "<|end|>", "the reply is empty: the model ended it at once, with <|end|>"),
        ("", "<|user|>", "the reply is empty: it began with the control token <|user|>, which "),
        ("<think>a", "<|end|>", "the reply has no answer: <|end|> ended it after its reasoning"),
        ("<think>a</think>", "<|user|>", "the reply has no answer: <|user|> ended it after its"),
        (" ", "<|end|>", "the reply is empty: the model ended it at once, with <|end|>"),
        ("<think>a</think>b", "<|end|>", ""),
        ("b", "<|user|>", ""),
    ],
)
def test_an_empty_reply_says_why(
    monkeypatch: pytest.MonkeyPatch, text: str, end: str, why: str
) -> None:
    ids = IT.encode(text, add_special_tokens=False)
    says(monkeypatch, [*ids, IT.convert_tokens_to_ids(end)])
    told = notices(session(tiny()).ask("Hello."))
    assert [one[: len(why)] for one in told] == [why] * bool(why)


def test_a_reply_that_is_all_reasoning_says_what_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("<think>I wonder, and wonder, and wonder."))
    (why,) = notices(session(tiny(), max_new_tokens=6).ask("Hello."))
    assert why == (
        "the reply has no answer: all of the 6 tokens that --max-new-tokens allows were reasoning"
    )
    done = run("ask", "Hi.", "--max-new-tokens", "6", "--thinking", "hide")
    assert done.stdout.strip() == ""
    assert why in done.stderr


def plain(source: str | None = None) -> LoadedModel:
    """The bundled model, as if it had no chat template, or this one."""
    without = copy.deepcopy(IT)
    without.chat_template = source
    return wrap_model("plain", tiny().module, without)


def _template(head: str, end: str) -> str:
    """A template whose turns have this head, with the role as {}, and this end."""
    loop = "{% for m in messages %}" + head.format("{{ m.role }}") + "{{ m.content }}" + end
    asked = head.format("assistant")
    return f"{loop}{{% endfor %}}{{% if add_generation_prompt %}}{asked}{{% endif %}}"


@pytest.mark.parametrize(
    ("head", "end", "goes_on"),
    [
        ("<|im_start|>{}\n", "<|im_end|>\n", "<|im_end|>\n<|im_start|>user\nAnd you?"),
        ("<|im_start|>{}\n", "<|im_end|>\n", "<|im_end|>"),
        ("<start_of_turn>{}\n", "<end_of_turn>\n", "<end_of_turn>\n<start_of_turn>user\nAnd you?"),
        ("### {}:\n", "\n\n", "\n\n### user:\nAnd you?\n\n### assistant:"),
    ],
)
def test_a_reply_ends_where_the_template_s_mark_of_its_end_is_written_as_text(
    monkeypatch: pytest.MonkeyPatch, head: str, end: str, goes_on: str
) -> None:
    said = "I am fine. <|im_e> ## user: 5 < 6\n#"
    model = plain(_template(head, end))
    assert len(model.tokenizer.encode(end, add_special_tokens=False)) > 1
    monkeypatch.setattr(Sampler, "pick", saying(f"{said}{goes_on}"))
    chat = session(model, max_new_tokens=90)
    events = list(chat.ask("Hello."))
    (reply,) = (e for e in events if isinstance(e, TurnDone) and e.role == "assistant")
    assert (reply.text.rstrip(), reply.finish) == (said, "stop")
    assert "".join(event.text for event in events if isinstance(event, Delta)) == reply.text
    held = held_text(chat)
    assert "And you?" not in held


@pytest.mark.parametrize("goes_on", ["\nUSER: And you?\nASSISTANT: I", "\nUSER:", "\nUSER: \n" * 9])
def test_without_a_chat_template_a_reply_ends_where_the_user_s_next_line_begins(
    monkeypatch: pytest.MonkeyPatch, goes_on: str
) -> None:
    wanted = session(plain(), max_new_tokens=60)
    tell(wanted, "Hello.", reply="I am fine. USER: a\nUSE")
    monkeypatch.setattr(Sampler, "pick", saying(f"I am fine. USER: a\nUSE{goes_on}"))
    chat = session(plain(), max_new_tokens=60)
    events = list(chat.ask("Hello."))
    (reply,) = (e for e in events if isinstance(e, TurnDone) and e.role == "assistant")
    assert (reply.text, reply.finish) == ("I am fine. USER: a\nUSE", "stop")
    assert "".join(event.text for event in events if isinstance(event, Delta)) == reply.text
    assert reply.tokens_out < 40
    assert any(isinstance(event, Evicted) for event in events)
    held, read = (held_text(s) for s in (chat, wanted))
    assert "".join(held.split()) == "".join(read.split())
    chat.switch("test", policy="full")  # what was written too much is never restored
    assert held_text(chat) == held


def test_a_model_without_a_chat_template_says_so_once() -> None:
    def told(model: LoadedModel) -> list[Any]:
        events = session(model).opening_events()
        return [e for e in events if isinstance(e, Notice) and "no chat template" in e.text]

    assert len(told(plain())) == 1
    assert not told(tiny())


TOKENIZER, DECLARED = babbler().tokenizer, babbler().module.generation_config.eos_token_id
CONTROL = sorted({*TOKENIZER.added_tokens_decoder} - Template(TOKENIZER).end_ids(DECLARED))
END = TOKENIZER.eos_token_id
WORDS = TOKENIZER.encode("some words", add_special_tokens=False)


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the model generates next, and then the end of the reply."""
    ids: list[int] = []

    def pick(self: Sampler, *arguments: object) -> int:
        return next(left)

    def endless() -> Iterator[int]:
        while True:
            yield ids.pop(0) if ids else END

    left = endless()
    monkeypatch.setattr(Sampler, "pick", pick)
    return ids


@pytest.mark.parametrize("control", CONTROL)
def test_a_control_token_ends_the_reply_and_is_neither_shown_nor_held(
    generated: list[int], control: int
) -> None:
    usual = session(babbler())
    generated += [*WORDS, END]
    *_, ended = (event for event in usual.ask("Hello") if isinstance(event, TurnDone))
    assert ended.finish == "stop"
    generated += [*WORDS, control]
    chat = session(babbler())
    events = list(chat.ask("Hello"))
    shown = "".join(event.text for event in events if isinstance(event, Delta))
    (reply,) = (
        event for event in events if isinstance(event, TurnDone) and event.role == "assistant"
    )
    assert shown.strip() == reply.text.strip() == "some words"
    ids = [[row.id for row in each.tokens(range(each.seen))] for each in (chat, usual)]
    assert ids[0] == ids[1]
    assert to_json(reply)["finish"] == "control"
    assert describe_turn(reply, chat.budget).endswith("ended at a control token")
