"""Messages that are given, replies too, are read as the template writes them in that history."""

from __future__ import annotations

import os
import random
import re
from functools import cache
from typing import Any

import pytest

from by_heart import SHAPES
from by_heart import tokenizer as tokenizer_of
from chatting import ids_of, session, smallest
from sirchat.chat.events import Delta, Event
from sirchat.chat.rereading import reread_session
from sirchat.chat.session import Session
from sirchat.chat.state import GeneratedReply
from sirchat.models.model import LoadedModel
from sirchat.text.transcript import join_reasoning, split_reasoning
from template_shapes import HEADERS, with_template

MANY = int(os.environ.get("SIRCHAT_ATTACK", "1"))
_TEXTS = ("Hello.", "a  b\n\n- c", "Ağaç, ığdır 12?", "x")
_REPLIES = (*_TEXTS, "Fine.", "<think>\nThey ask.\n</think>\n\nI am Anna.", "<think>Hm.</think>No")
_KEYS = ("reasoning_content", "reasoning", "thinking")
# Others refuse two messages of the user in a row.
_ALL = [*HEADERS, *(name for name in SHAPES if name not in ("gemma3", "llama2", "mistral"))]

Message = dict[str, Any]


@cache
def model(name: str) -> LoadedModel:
    """A model with the template."""
    tokenizer = with_template(HEADERS[name]) if name in HEADERS else tokenizer_of(SHAPES[name])
    return smallest(name, tokenizer)


def drawn(draw: random.Random) -> list[Message]:
    """A history that ends with a message of the user, who may write several in a row."""
    messages = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(0, 3)):
        messages += [_user(draw)] * draw.choice((1, 1, 2))
        messages.append({"role": "assistant", "content": draw.choice(_REPLIES)})
    return messages + [_user(draw) for _ in range(draw.choice((1, 1, 2)))]


def _user(draw: random.Random) -> Message:
    return {"role": "user", "content": draw.choice(_TEXTS)}


def read(chat: Session, messages: list[Message]) -> None:
    """Let the session read the messages; a reply follows the last one."""
    roles = [message["role"] for message in messages[1:]]
    for message, following in zip(messages, [*roles, None], strict=True):
        if message["role"] == "user":
            list(chat.read_user(message["content"], next_role=following))
        elif message["role"] == "assistant":
            list(chat.read_reply(message["content"]))


def whole(tokenizer: Any, messages: list[Message]) -> list[int]:
    """The ids of the whole history, with the reasoning apart where the template takes it so."""
    source, told = tokenizer.chat_template, []
    for message in messages:
        thought = re.match(r"<think>(.*?)</think>\s*(.*)", message["content"], re.DOTALL)
        if message["role"] == "assistant" and thought and any(key in source for key in _KEYS):
            parts = dict.fromkeys(_KEYS, thought[1].strip())
            message = {"role": "assistant", "content": thought[2], **parts}
        told.append(message)
    ids: list[int] = tokenizer.apply_chat_template(
        told, add_generation_prompt=True, return_dict=False
    )
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", _ALL)
@pytest.mark.parametrize("seed", range(MANY))
def test_a_history_is_read_as_the_template_writes_it(name: str, seed: int) -> None:
    messages = drawn(random.Random(seed))
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    chat = session(model(name), policy="full", system=system)
    read(chat, messages)
    wanted = whole(model(name).tokenizer, messages)
    assert ids_of(chat) == wanted, messages
    for message in messages:  # the session stores reasoning apart, without its blanks
        if message["role"] == "assistant":
            message["content"] = join_reasoning(*split_reasoning(message["content"]))
    assert ids_of(reread_session(chat)) == whole(model(name).tokenizer, messages)


@pytest.mark.parametrize(("most", "finish"), [(2, "interrupt"), (99, "stop")])
def test_a_given_reply_that_is_interrupted_says_so(most: int, finish: str) -> None:
    chat, said = session(), list[Event]()
    given = GeneratedReply(tuple(chat.model.tokenizer.encode("Hello there, and welcome.")), "stop")

    def stops() -> bool:
        return sum(isinstance(event, Delta) for event in said) > most

    for event in chat.ask("Hi.", stops, reply=given):
        said.append(event)
    assert chat.turns[-1].finish == finish
    assert chat.turns[-1].text.startswith("Hello")
