"""Of what a client sends again, nothing is read twice; and the replies are those of a new session.

The slow way to the same reply is a new session that reads all messages (`told`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from chatting import answer, babbler, quick, session
from serving import Served, assistant, cached, refusal, said, served, system, told, user, waiting
from sirchat.server.conversation import History
from sirchat.server.fields import RequestError
from sirchat.server.replies import ReplyEnd, ReplyText
from sirchat.server.reply_thread import SentPart

ANNA, NAME, THANKS = "My name is Anna.", "What is my name?", "Thanks."
TALK = [user(ANNA), assistant("Hello, Anna!"), user("Say something.")]


@pytest.fixture
def server() -> Iterator[Served]:
    with served(quick(), policy="full", max_new_tokens=12) as one:
        yield one


def test_without_a_system_message_the_system_prompt_is_the_servers() -> None:
    with served(quick(), policy="full", system="Be kind.", max_new_tokens=12) as server:
        own = server.ask([user(ANNA)])
        asked = server.ask([system("Be kind."), user(ANNA)])
        none = server.ask([system(""), user(ANNA)])
    assert own["usage"]["prompt_tokens"] == asked["usage"]["prompt_tokens"]
    assert own["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"]


TEXTS = (ANNA, NAME, THANKS, "My dog is called Rex.", "What is my dog called?")


@pytest.mark.parametrize("change", [str, str.strip, lambda text: f" {text}\n"])
def test_a_client_that_sends_everything_again_gets_the_replies_of_a_prompt(
    change: Callable[[str], str],
) -> None:
    """Blanks around a reply do not count."""
    settings: dict[str, Any] = {"policy": "salience", "budget": 128, "max_new_tokens": 12}
    prompt = session(quick(), system="Be kind.", **settings)
    messages = [system("Be kind.")]
    with served(quick(), **settings) as server:
        for number in range(8):
            text = f"{TEXTS[number % len(TEXTS)]} It is day {number}."
            messages.append(user(text))
            seen, reply = prompt.seen, server.ask(messages)
            assert said(reply) == answer(list(prompt.ask(text)))
            assert cached(reply) == seen  # so only the new message is read
            assert reply["sirchat"]["seen"] == prompt.seen
            messages.append(assistant(change(said(reply))))
    assert prompt.resident <= 128 < prompt.seen


def test_after_an_edit_both_branches_go_on_without_being_read_again(server: Served) -> None:
    first = [user(ANNA)]
    first.append(assistant(server.reply(first)))
    branches = [[*first, user(text)] for text in (NAME, THANKS, "Where do I live?")]
    before = []
    for messages in branches:
        reply = server.ask(messages)
        before.append(reply["sirchat"]["seen"])
        messages.append(assistant(said(reply)))
    for messages in branches:
        messages.append(user("Tell me more."))
        reply = server.ask(messages)
        assert cached(reply) == before.pop(0)
        assert said(reply) == told(messages, quick, max_new_tokens=12)


@pytest.mark.parametrize("on_disk", [False, True])
def test_without_room_for_both_the_other_branch_goes_to_the_disk_if_there_is_one(
    tmp_path: Path, on_disk: bool
) -> None:
    folder = tmp_path if on_disk else None
    with served(quick(), policy="full", max_new_tokens=8, conversations=1, folder=folder) as server:
        first = [user(ANNA)]
        first.append(assistant(server.reply(first)))
        old = [*first, user(NAME)]
        old += [assistant(server.reply(old)), user("Tell me more.")]
        edited = [*first, user(THANKS)]
        reply = server.ask(edited)
        assert cached(reply) > 0
        assert said(reply) == told(edited, quick, max_new_tokens=8)
        back = server.ask(old)
        assert said(back) == told(old, quick, max_new_tokens=8)
        assert (cached(back) > cached(reply)) == on_disk


def test_a_client_that_always_changes_the_replies_makes_no_branches(tmp_path: Path) -> None:
    with served(quick(), max_new_tokens=8, folder=tmp_path) as server:
        messages = [user(ANNA)]
        for text in (NAME, THANKS, NAME, THANKS):
            messages += [assistant(server.reply(messages) + " Really."), user(text)]
        server.reply(messages)
    # One file of the first round alone, and one that goes on.
    assert len(list(tmp_path.glob("*.sqlite"))) == 2


def test_the_conversation_used_longest_ago_is_dropped_first() -> None:
    with served(quick(), conversations=2, max_new_tokens=8) as server:
        talks = {}
        for name in ("Anna", "Tom", "Eva"):
            messages = [user(f"My name is {name}.")]
            talks[name] = [*messages, assistant(server.reply(messages)), user(NAME)]
        kept = {name: cached(server.ask(talks[name])) > 0 for name in ("Tom", "Eva", "Anna")}
    assert kept == {"Tom": True, "Eva": True, "Anna": False}


def test_what_an_edit_can_t_undo_is_read_anew() -> None:
    with served(quick(), policy="sink", budget=64, archive="off", max_new_tokens=8) as server:
        messages = [user(ANNA)]
        for n in range(6):
            messages += [assistant(server.reply(messages)), user(f"The number {n} is a number.")]
        server.reply(messages)
        edited = [*messages[:3], assistant("Other words."), user(NAME)]
        reply = server.ask(edited)
        assert cached(reply) == 0
        assert reply["usage"]["prompt_tokens"] > 0


def test_requests_for_the_same_conversation_wait_for_each_other() -> None:
    with served(quick(), policy="full", max_new_tokens=12) as server:
        first = server.ask([user(ANNA)])
        ends = [NAME, THANKS, NAME]
        asked = [[user(ANNA), assistant(said(first)), user(text)] for text in ends]
        found: dict[int, dict[str, dict[str, dict[str, int]]]] = {}

        def ask(number: int) -> None:
            found[number] = server.ask(asked[number])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, messages in enumerate(asked):
        assert cached(found[number]) >= first["sirchat"]["seen"]  # more, if it was asked before
        assert said(found[number]) == told(messages, quick, max_new_tokens=12)


def test_a_long_reply_does_not_keep_others_waiting() -> None:
    parts: SimpleQueue[tuple[str, SentPart]] = SimpleQueue()
    with served(babbler(), budget=256) as server:
        for name, most in (("long", 300), ("short", 4)):
            send = partial(lambda name, part: parts.put((name, part)), name)
            server.server.replies.submit(waiting(name, send, most))
            if name == "long":
                parts.get()  # it has begun
        got = (parts.get() for _ in range(2000))
        assert next(name for name, part in got if isinstance(part, ReplyEnd)) == "short"


def test_who_asks_for_one_reply_waits_for_one_of_anothers_and_not_for_all() -> None:
    ended: SimpleQueue[str] = SimpleQueue()

    def send(client: str, part: SentPart) -> None:
        if not isinstance(part, ReplyText):
            ended.put(client)

    with served(babbler(), budget=256, conversations=2) as server:
        busy = server.server.replies.call(lambda: time.sleep(0.1))  # until all are there
        for number, client in enumerate([*"aaaaaaaa", "b"]):
            reply = waiting(f"say {number}", partial(send, client), 6, client)
            server.server.replies.submit(reply)
        busy.result()
        assert "b" in [ended.get() for _ in range(4)]


def test_if_the_thread_of_all_replies_fails_each_ends_with_an_error_and_no_new_one_waits() -> None:
    def fail(_: SentPart) -> None:
        raise ValueError("a fault of the server itself")

    parts = SimpleQueue[SentPart]()
    with served(babbler(), budget=256, max_new_tokens=100_000) as server:
        replies = server.server.replies
        for text, send in ((ANNA, parts.put), (NAME, fail)):
            replies.submit(waiting(text, send))
        got = (parts.get(timeout=60) for _ in range(100_000))
        assert next(part for part in got if isinstance(part, RequestError)).status == 503
        assert refusal(server.post([user(THANKS)], model="babbler"), 503)


def test_under_policy_full_a_history_longer_than_the_context_is_an_error() -> None:
    with served(quick(), policy="full", max_new_tokens=8) as server:
        first = server.ask([user(ANNA)])
        messages = [user(ANNA), assistant(said(first)), user("one two three " * 3000)]
        assert refusal(server.post(messages))["code"] == "context_length_exceeded"
        # The conversation goes on from where it was.
        assert cached(server.ask([*messages[:2], user(NAME)])) == first["sirchat"]["seen"]


def test_the_marks_of_messages_do_not_depend_on_where_texts_are_divided() -> None:
    histories = [
        History.of(None, [("user", "a"), ("user", "b")]),
        History.of(None, [("user", "ab"), ("user", "")]),
        History.of("a", [("user", ""), ("user", "b")]),
        History.of("", [("user", "a"), ("user", "b")]),
        History.of(None, [("user", "a"), ("assistant", "b")]),
    ]
    assert len({(each.prompt_mark, each.marks) for each in histories}) == len(histories)


def test_a_message_that_is_sent_again_is_not_read_again(server: Served, tmp_path: Path) -> None:
    """Also the first one, under policies that evict, and after a stop; else it is read anew."""
    for settings in ({"policy": "full"}, {"policy": "salience", "budget": 64, "recall": "words"}):
        with served(quick(), max_new_tokens=12, **settings) as one:
            for chat in (TALK[:1], [system("Be kind."), *TALK]):
                first = one.ask(chat, temperature=0)
                again = one.ask(chat, temperature=0)
                assert said(again) == said(first)
                assert cached(again) == first["usage"]["prompt_tokens"]
                assert again["sirchat"]["seen"] == first["sirchat"]["seen"]
                assert again["sirchat"]["held"] == first["sirchat"]["held"]
                other = one.ask(chat, temperature=0, max_tokens=3)
                assert cached(other) == first["usage"]["prompt_tokens"]
                after = one.ask([*chat, assistant(said(other)), user("And?")])
                assert cached(after) == other["sirchat"]["seen"]
    with served(quick(), max_new_tokens=12, folder=tmp_path) as one:
        first = one.ask(TALK, temperature=0)
    with served(quick(), max_new_tokens=12, folder=tmp_path) as one:
        # Where the reply began is not known.
        again = one.ask(TALK, temperature=0)
        assert said(again) == said(first)
