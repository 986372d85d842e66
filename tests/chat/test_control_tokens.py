"""A model that generates a control token which replies don't have: left out, and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatting import babbler, session
from saved_chats import Chat, resumed
from sirchat.chat.events import Delta, TurnDone, to_json
from sirchat.engine.sampling import Sampler
from sirchat.paths import sessions_dir
from sirchat.saved.session_list import list_sessions
from sirchat.text.template import Template
from sirchat.ui.status import describe_turn

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


def test_stats_count_replies_ended_by_control_tokens_also_after_a_resume(
    generated: list[int], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path_factory.mktemp("home")))
    chat = Chat()
    chat.say("Hello")
    generated += [*WORDS, CONTROL[0]]
    chat.say("Hello again")
    chat.saved_chat.close()
    (saved,) = list_sessions(sessions_dir()).sessions
    again, _ = resumed(sessions_dir(), saved.id)
    assert [turn.finish for turn in again.turns] == ["read", "stop", "read", "control"]
