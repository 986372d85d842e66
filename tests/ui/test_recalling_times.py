"""`/recall yesterday`: what the user said then is shown, restored and pinned."""

from __future__ import annotations

import time

from chatting import tiny
from saved_chats import Chat, refusal

DAY = 86_400


def chat_of_days(*said: tuple[int, str]) -> Chat:
    """A chat with messages of so many days ago."""
    chat = Chat(tiny(), policy="sink", max_new_tokens=4, pin_system=False, save=False, decay=1.0)
    for days, text in said:
        chat.say(text)
        for turn in chat.session.turns[-2:]:
            turn.time = int(time.time()) - days * DAY
    return chat


def pinned(chat: Chat) -> str:
    rows = chat.session.tokens(chat.session.ledger.pinned_positions.tolist())
    return "".join(row.text for row in rows)


def test_what_was_said_at_a_time_is_restored_and_pinned() -> None:
    talk = [(0, "Tell me a joke, please, and another one, and a third one.")] * 4
    chat = chat_of_days((3, "My name is Anna."), (1, "I live in Rome."), *talk)
    assert "yesterday: I live in Rome." in chat.do("/recall yesterday")
    assert pinned(chat) == "I live in Rome."
    chat.do("/recall 3 days ago")
    assert pinned(chat) == "My name is Anna.I live in Rome."
    assert "you said nothing at this time: last month" in refusal(chat, "/recall last month")


def test_first_and_last_mean_places_and_words_stay_words() -> None:
    chat = chat_of_days((0, "My name is Anna."), (0, "I met her yesterday."))
    chat.do("/recall first")
    assert pinned(chat) == "My name is Anna."
    chat.do('/recall "yesterday"')
    assert "yesterday" in pinned(chat)
