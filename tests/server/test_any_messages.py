"""Whatever messages a client sends, one request after another, all is as in a new session.

`SIRCHAT_ATTACK=500` tries so many clients.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chatting import hub_tokenizer
from sirchat.config.profile import Profile
from sirchat.engine.engine import Generation, step
from sirchat.engine.sampling import ForcedPrefixSampler, Sampling
from sirchat.server.conversation import History, ServedConversation
from sirchat.server.fields import make_request
from sirchat.server.pool import ConversationPool, Limits
from sirchat.server.replies import ReplyGenerator, ReplyOptions
from sirchat.server.requests import ChatRequest
from template_shapes import WEATHER, tool_quick

MANY = int(os.environ.get("SIRCHAT_ATTACK", "2"))
PROFILE = Profile(policy="full", decay=0.9, max_new_tokens=20, save=False)
REPLY = "I see."

Message = dict[str, Any]


def call(number: int) -> Message:
    function = {"name": "weather", "arguments": json.dumps({"city": f"Oslo {number}"})}
    return {"id": f"call{number:05}", "type": "function", "function": function}


# Parts of a chat: what stands between two parts is a message that a client may send as the last.
_PARTS: list[list[Message]] = [
    [{"role": "user", "content": "Hello."}],
    [{"role": "user", "content": "My name is Anna."}],
    [{"role": "user", "content": "Who am I?"}, {"role": "assistant", "content": REPLY}],
    [{"role": "user", "content": "Who am I?"}, {"role": "assistant", "content": "You are Anna."}],
    [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": ""}],
    [
        {"role": "user", "content": "Is it cold?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "tool_call_id": "call00001", "content": "Snow."},
        {"role": "tool", "tool_call_id": "call00002", "content": "Sun."},
    ],
    [
        {"role": "user", "content": "Is it cold?"},
        {"role": "assistant", "content": None, "tool_calls": [call(1)]},
        {"role": "tool", "tool_call_id": "call00001", "content": "Snow."},
        {"role": "assistant", "content": "It is."},
    ],
]
_TWICE = [message for part in _PARTS[:2] for message in part]
_SYSTEM: list[list[Message]] = [[], [], [{"role": "system", "content": "Be brief."}]]
_LAST = st.sampled_from(["Hello.", "My name is Anna.", "Who am I?", "Go on."])


@st.composite
def _clients(draw: st.DrawFn) -> list[tuple[list[Message], int | None]]:
    """Requests of one client: it goes on, goes back, changes what was said, or leaves early.

    A number says how often the server asks until it finds that the client has left.
    """
    talks: list[list[list[Message]]] = [[draw(st.sampled_from(_SYSTEM))]]
    asked = []
    for _ in range(draw(st.integers(2, 4))):
        parts = [*draw(st.sampled_from(talks))]
        parts = parts[: 1 + draw(st.integers(0, len(parts) - 1))]
        parts += draw(st.lists(st.sampled_from(_PARTS), max_size=3))
        messages = [message for part in parts for message in part]
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            parts.append([{"role": "user", "content": draw(_LAST)}])
            messages += parts[-1]
        talks.append([*parts, [{"role": "assistant", "content": REPLY}]])
        asked.append((messages, draw(st.sampled_from([None, None, None, 1, 2, 4, 9]))))
    return asked


@pytest.fixture(autouse=True)
def reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model always give the same reply."""
    ids = tool_quick().tokenizer
    written = [*ids.encode(REPLY, add_special_tokens=False), ids.eos_token_id]
    monkeypatch.setattr(
        "sirchat.chat.conversation.Sampler", lambda *_: ForcedPrefixSampler(written, Sampling())
    )


def ask(
    pool: ConversationPool, messages: Sequence[Message], leaves: int | None = None
) -> ServedConversation:
    """Send the messages, as a request does; the client may leave early."""
    request = make_request(ChatRequest, {"messages": list(messages), "tools": [WEATHER]})
    history = History.of(request.system, request.turns, json.dumps([WEATHER]))
    continuation = pool.take(history)
    conversation = continuation.conversation
    asked = count(1)
    gone = (lambda: False) if leaves is None else (lambda: next(asked) >= leaves)
    parts, done = ReplyGenerator(continuation, ReplyOptions(), gone).steps(), None
    with suppress(StopIteration):
        while True:
            part = parts.send(done)
            done = step([part])[0] if isinstance(part, Generation) else None
    pool.release(conversation)
    return conversation


def rows(conversation: ServedConversation) -> list[tuple[Any, ...]]:
    """Of each token: id, role, round, and the decay at its birth."""
    ledger = conversation.session.ledger
    names = ("token_id", "role", "round", "birth_decay")
    columns = [np.asarray(ledger.column(name)).tolist() for name in names]
    return list(zip(*columns, strict=True))


@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@example([(_TWICE, None), ([_TWICE[0], {"role": "assistant", "content": "Hi."}, _TWICE[1]], None)])
@example([(_PARTS[5], None), ([*_PARTS[6], *_PARTS[0]], None)])  # calls that the model did not make
@given(_clients())
def test_a_session_is_that_of_a_client_who_sent_only_these_messages(
    asked: list[tuple[list[Message], int | None]],
) -> None:
    pool = ConversationPool(tool_quick(), PROFILE, Limits(conversations=3), Path())
    for messages, leaves in asked:
        conversation = ask(pool, messages, leaves)
        if leaves is not None:
            continue
        fresh = ask(ConversationPool(tool_quick(), PROFILE, Limits(), Path()), messages)
        assert rows(conversation) == rows(fresh)
        assert ids_before_reply(fresh) == whole(messages)


def ids_before_reply(conversation: ServedConversation) -> list[int]:
    session = conversation.session
    said = np.flatnonzero(session.ledger.column("turn") == len(session.turns) - 1)
    ids: list[int] = session.ledger.column("token_id").tolist()
    return ids[: said[0]]


def whole(messages: Sequence[Message]) -> list[int]:
    """The ids of all messages and of the header of a reply, as transformers renders them."""
    told = json.loads(json.dumps(messages))
    for message in told:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
        message["content"] = message["content"] or ""
    ids: list[int] = hub_tokenizer().apply_chat_template(
        told,
        chat_template=tool_quick().tokenizer.chat_template,
        tools=[WEATHER],
        add_generation_prompt=True,
        return_dict=False,
    )
    return ids
