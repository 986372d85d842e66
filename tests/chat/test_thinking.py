"""A reply's reasoning is told from its answer, saved, and evicted at its end if asked for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from by_heart import ANSWER, NAME, QUESTION, SHAPES, assistant, rendered, teach, tokenizer, user
from by_heart import THOUGHT as THOUGHT_OF_FRANCE
from chatting import ids_of, notices, session, smallest, tell, tiny
from saved_chats import saved_and_resumed
from sirchat.chat.events import Delta, Evicted
from sirchat.chat.session import Session
from sirchat.chat.state import GeneratedReply
from sirchat.engine.sampling import Sampler
from sirchat.models.model import wrap_model
from speaking import saying
from template_shapes import template, with_template

THOUGHT = "<think>She is called Anna, so I greet her.</think>"


def _chat(reply: str, **settings: Any) -> tuple[Session, list[Evicted]]:
    chat = session(tiny(), budget=256, **settings)
    list(chat.read_user("My name is Anna."))
    events = list(chat.read_reply(reply))
    return chat, [event for event in events if isinstance(event, Evicted)]


def _held(chat: Session, turn: int = 1) -> str:
    rows = chat.snapshot().rows
    return "".join(row.text for row in rows if row.turn == turn and row.role == "assistant")


@pytest.mark.parametrize(
    ("reply", "stays"),
    [
        (f"{THOUGHT}Hello, Anna.", "Hello, Anna."),
        (f"Well. {THOUGHT} Hello.", f"Well. {THOUGHT} Hello."),
        ("<think>never closed", "<think>never closed"),
        ("no thought, Anna", "no thought, Anna"),
    ],
)
def test_reasoning_is_evicted_if_that_is_asked_for_and_the_rest_stays(
    reply: str, stays: str
) -> None:
    plain, evicted = _chat(reply)
    assert (_held(plain).strip(), evicted) == (reply.strip(), [])
    chat, evicted = _chat(reply, evict_thinking=True)
    assert _held(chat).strip() == stays.strip()
    assert bool(evicted) == (stays != reply)
    turn = chat.turns[1]
    assert turn.text.strip() in (stays.strip(), "")
    assert bool(turn.thinking) == (turn.text != reply)
    marks = [[r.text for r in c.snapshot().rows if r.role == "template"] for c in (plain, chat)]
    assert marks[0] == marks[1]


def test_no_switch_restores_evicted_reasoning_and_undo_takes_back_the_turn() -> None:
    chat, _ = _chat(f"{THOUGHT}Hello.", evict_thinking=True)
    chat.switch("/policy", policy="sink", budget=512)
    assert "called" not in _held(chat)
    tell(chat, "And now?", reply=f"{THOUGHT}Now this.")
    chat.undo()
    assert _held(chat).strip() == "Hello."
    chat.undo()
    assert chat.seen == 0


@pytest.mark.usefixtures("own_home")
def test_reasoning_stays_evicted_after_a_resume() -> None:
    chat, _ = _chat(f"{THOUGHT}Hello.", evict_thinking=True)
    again = saved_and_resumed(chat, session(tiny(), budget=256, evict_thinking=True))
    again.switch("/budget", budget=300)
    assert _held(again) == _held(chat)
    assert "called" not in _held(again)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, shape in SHAPES.items() if "{thought}" in shape.thinking]
)
def test_what_stays_of_a_reply_is_what_the_template_writes_in_a_history(name: str) -> None:
    shape = SHAPES[name]
    model = wrap_model(name, teach(shape), tokenizer(shape))
    chat = session(model, budget=256, temperature=0, max_new_tokens=60, evict_thinking=True)
    list(chat.ask(QUESTION))
    assert (chat.turns[1].text, chat.turns[1].thinking) == (ANSWER, THOUGHT_OF_FRANCE)
    thought = [row.text for row in chat.tokens(range(chat.seen)) if "thinking" in row.flags]
    assert "".join(thought).count(THOUGHT_OF_FRANCE) == 1
    list(chat.read_user(NAME))
    whole = rendered(shape, [user(QUESTION), assistant(ANSWER), user(NAME)])
    held = [row.id for row in chat.snapshot().rows]
    assert held == tokenizer(shape).encode(whole, add_special_tokens=False)


def test_of_a_reply_in_several_messages_only_the_reasoning_goes() -> None:
    shape = SHAPES["gpt-oss"]
    chat = session(smallest("heart", tokenizer(shape)), budget=256, evict_thinking=True)
    begin = "<|start|>assistant"
    kept = f"<|channel|>commentary<|message|>Wait.<|end|>{begin}"
    after = "<|channel|>final<|message|>Yes."
    thought = f"<|channel|>analysis<|message|>Why?<|end|>{begin}"
    ids = tokenizer(shape).encode(thought + kept + thought + after, add_special_tokens=False)
    list(chat.ask("Hi.", reply=GeneratedReply(tuple(ids), "stop")))
    assert (chat.turns[1].text, chat.turns[1].thinking) == ("Wait.\n\nYes.", "Why?\n\nWhy?")
    assert _held(chat) == kept + after


def test_reasoning_of_a_reply_that_nobody_reads_on_is_known_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("<think>I wonder, and wonder, and wonder"))
    chat = session(tiny(), budget=256)
    events = chat.ask("Hi.")
    next(event for event in events if isinstance(event, Delta) and "and" in event.text)
    events.close()  # type: ignore[attr-defined]
    said = [row for row in chat.tokens(range(chat.seen)) if row.turn == 1]
    thought = "".join(row.text for row in said if "thinking" in row.flags)
    assert thought.startswith("<think>I wonder, and")


def test_a_thought_without_an_answer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "pick", saying("<think>I wonder, and wonder,"))
    chat = session(tiny(), budget=256, evict_thinking=True)
    assert not any(isinstance(event, Evicted) for event in chat.ask("Hi."))
    assert (chat.turns[1].text, chat.turns[1].thinking) == ("", "I wonder, and wonder,")
    assert _held(chat) == "<think>I wonder, and wonder,"


_EFFORT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}{% endif %}"
)
_TWO_WAYS = _EFFORT.replace("{% if reasoning", "{% if thinking %}<think>{% endif %}{% if reasoning")


def _switchable(source: str) -> Session:
    model = smallest(f"switchable {hash(source)}", with_template(source))
    return session(model, policy="full", system="Be brief.")


@pytest.mark.parametrize(
    ("source", "reasoning", "variables"),
    [
        (template("qwen3"), "auto", {}),
        (template("qwen3"), "on", {"enable_thinking": True}),
        (template("qwen3"), "off", {"enable_thinking": False}),
        (template("qwen3"), "low", {"enable_thinking": True}),
        (_EFFORT, "on", {}),
        (_EFFORT, "high", {"reasoning_effort": "high"}),
        (_EFFORT, "off", {"reasoning_effort": "low"}),
        (_TWO_WAYS, "off", {"thinking": False}),
        (_TWO_WAYS, "low", {"thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_reasoning_is_switched_by_the_variables_of_the_template(
    source: str, reasoning: str, variables: dict[str, Any]
) -> None:
    chat = _switchable(source)
    messages = [{"role": "system", "content": "Be brief."}]
    for number, wanted in enumerate(("auto", reasoning)):  # live
        chat.switch("/set", reasoning=wanted)
        messages.append(user(f"Hello {number}."))
        list(chat.read_user(messages[-1]["content"]))
        (text,), _ = render_jinja_template(
            [messages],
            chat_template=source,
            add_generation_prompt=True,
            **({} if wanted == "auto" else variables),
        )
        assert ids_of(chat) == chat.model.tokenizer.encode(text, add_special_tokens=False)
        messages.append(assistant("Yes."))
        list(chat.read_reply("Yes."))


@pytest.mark.parametrize(
    ("source", "reasoning", "said"),
    [
        (template("qwen3"), "off", ""),
        (template("chatml"), "off", "reasoning off has no effect: the model's chat template has"),
        (template("chatml"), "auto", ""),
        (_EFFORT, "off", "can't be switched off; its effort is low"),
        (_EFFORT, "medium", ""),
        (_TWO_WAYS, "off", ""),
    ],
)
def test_what_a_template_can_not_switch_is_said(source: str, reasoning: str, said: str) -> None:
    chat = _switchable(source)
    told = notices(chat.switch("/set", reasoning=reasoning))
    assert len(told) == bool(said)
    assert said in "".join(told)
    opening = notices(chat.opening_events())
    assert [text for text in opening if "reasoning" in text] == told


def test_a_reply_that_the_template_opens_with_reasoning_has_none_if_that_is_off() -> None:
    source = template("qwen3").replace(
        "{% if enable_thinking is defined",
        "{% if enable_thinking is not defined %}<think>\n"
        "{% endif %}{% if enable_thinking is defined",
    )
    chat = _switchable(source)
    assert chat.template.marks.opens_in_header
    chat.switch("/set", reasoning="off")
    assert not chat.template.marks.opens_in_header
