"""A client goes on in a conversation by its name, whatever of the messages it sends again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatting import quick
from serving import CHAT, Message, Served, assistant, cached, held_text, said, served, system, user
from template_shapes import WEATHER, script, tool_quick

ANNA, NAME, AGAIN = (
    "My name is Anna, and I live in Oslo.",
    "What is my name?",
    "And where do I live?",
)


def talk(server: Served, messages: list[Any], name: str | None = "mine", **fields: Any) -> Any:
    own = {} if name is None else {"sirchat": {"conversation": name}}
    return server.ask(messages, **own, **fields)


def whole(server: Served, texts: list[str]) -> list[Message]:
    """A chat of these messages and the replies to them, without a name, sent as a whole."""
    messages: list[Message] = []
    for text in texts:
        messages.append(user(text))
        messages.append(assistant(said(server.ask(messages, temperature=0))))
    return messages


@pytest.mark.parametrize("window", [1, 3, 4, 99])
def test_a_client_may_send_what_is_new_a_window_or_all(window: int) -> None:
    """The replies are those to the whole chat, and nothing is read twice."""
    texts = [ANNA, NAME, AGAIN, NAME]
    with served(quick(), policy="full", max_new_tokens=8) as one:
        wanted = whole(one, texts)
    with served(quick(), policy="full", max_new_tokens=8) as one:
        messages: list[Message] = []
        seen, idents = 0, set()
        for text in texts:
            messages.append(user(text))
            reply = talk(one, messages[-window:], temperature=0)
            assert cached(reply) == seen
            seen = reply["sirchat"]["seen"]
            idents.add(reply["sirchat"]["id"])
            messages.append(assistant(said(reply)))
        assert messages == wanted
        assert len(idents) == 1


def test_a_client_that_changes_what_it_said_has_only_that_read_again() -> None:
    """Its first message, for example, after each round."""
    with served(quick(), policy="full", max_new_tokens=6) as one:
        messages: list[Message] = []
        for number in range(8):
            messages.append(user(f"{number} is a number."))
            changed = [user(f"Cleared {number}."), *messages[1:]] if number else messages
            reply = talk(one, changed)
            assert reply["usage"]["prompt_tokens"] - cached(reply) < 50
            assert reply["usage"]["prompt_tokens"] < 60 + 30 * number
            messages.append(assistant(said(reply)))
        assert len(one.client.get("/v1/sirchat/sessions").json()["data"]) == 1


def test_the_same_message_is_said_twice_and_asked_again_is_answered_anew() -> None:
    with served(quick(), policy="full", max_new_tokens=6) as one:
        talk(one, [user(ANNA)])
        first = talk(one, [user("Go on.")])
        second = talk(one, [user("Go on.")])
        assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
        window = [assistant(said(first)), user("Go on.")]
        third = talk(one, window)  # the last reply is wanted again
        assert third["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_names_are_kept_on_disk_and_belong_to_one_conversation_each(tmp_path: Path) -> None:
    with served(quick(), policy="full", max_new_tokens=6, folder=tmp_path) as one:
        mine, other = talk(one, [user(ANNA)]), talk(one, [user("Hello!")], "other")
        assert mine["sirchat"]["id"] != other["sirchat"]["id"]
    with served(quick(), policy="full", max_new_tokens=6, folder=tmp_path, conversations=1) as one:
        for _ in range(2):
            for name, before in (("mine", mine), ("other", other)):
                reply = talk(one, [user(NAME)], name)
                assert reply["sirchat"]["id"] == before["sirchat"]["id"]
                assert cached(reply) >= before["sirchat"]["seen"]
        listed = one.client.get("/v1/sirchat/sessions").json()["data"]
        assert {each["name"] for each in listed} == {"mine", "other"}


def test_another_system_prompt_is_read_and_nothing_else() -> None:
    """Also one whose client sends only what is new; without one, it stays as it was."""
    with served(tool_quick(), policy="full", max_new_tokens=6) as one:
        first = talk(one, [system("Be brief. It is 9:00."), user(ANNA)])
        second = talk(one, [system("Be brief. It is 9:05."), user(NAME)])
        assert second["sirchat"]["id"] == first["sirchat"]["id"]
        assert second["usage"]["prompt_tokens"] - cached(second) < 50
        third = talk(one, [user(AGAIN)])
        assert cached(third) == second["sirchat"]["seen"]
        text = held_text(one, third)
        assert "9:05" in text
        assert "9:00" not in text
        assert text.count("Anna, and") == 1


def test_tools_and_their_results_go_on_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with served(tool_quick(), policy="full", max_new_tokens=90) as one:
        script(monkeypatch, [call, "It rains.", "Yes.", "No."])
        first = talk(one, [user("Weather?")], tools=[WEATHER])
        (made,) = first["choices"][0]["message"]["tool_calls"]
        messages = [
            user("Weather?"),
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": "rain"},
        ]
        second = talk(one, messages, tools=[WEATHER])
        assert cached(second) == first["sirchat"]["seen"]
        third = talk(one, [assistant("It rains."), user("Sure?")], tools=[WEATHER])
        assert cached(third) == second["sirchat"]["seen"]
        monkeypatch.setattr("sirchat.server.replies.edited", lambda *_: [])  # all is read again
        last = talk(one, [system("Be brief."), user("Really?")])
        assert (said(last), cached(last)) == ("No.", 0)
        text = held_text(one, last)
        for part in ("Be brief.", "Oslo", "rain", "It rains.", "Yes.", "Really?"):
            assert part in text


def test_a_header_and_the_field_of_responses_are_names_too() -> None:
    with served(quick(), policy="full", max_new_tokens=6) as one:
        first = talk(one, [user(ANNA)], "Zoë")
        body = {"model": "tiny", "messages": [user(NAME)]}
        headers = {b"X-Sirchat-Conversation": "Zoë".encode()}
        second = one.client.post(CHAT, json=body, headers=headers).json()
        third = one.send("/v1/responses", input=AGAIN, conversation={"id": "Zoë"})
        assert third["conversation"] == {"id": "Zoë"}
        assert {first["sirchat"]["id"], second["sirchat"]["id"], third["sirchat"]["id"]} == {
            first["sirchat"]["id"]
        }
        assert cached(third) == second["sirchat"]["seen"]


@pytest.mark.parametrize(
    ("other", "slides", "conversations"),  # any two values of two of them meet in one case
    [(None, True, 8), (None, False, 1), ("other", True, 1), ("other", False, 8)],
)
def test_a_named_conversation_is_its_clients_alone(
    tmp_path: Path, other: str | None, slides: bool, conversations: int
) -> None:
    """Another client whose chat begins alike, or is a window of it, reads its own; both go on."""
    long = " ".join(f"The number {number} is a number." for number in range(20))
    secret = "The secret word is Zebulon."
    settings: Any = {"policy": "full", "max_new_tokens": 6, "folder": tmp_path}
    with served(quick(), conversations=conversations, **settings) as one:
        first = talk(one, [user(ANNA)], temperature=0)
        second = talk(one, [user(long)], temperature=0)
        begun = [user(ANNA), assistant(said(first)), user(long), assistant(said(second))]
        theirs = talk(one, [*begun[2 * slides :], user(secret)], other, temperature=0)
        assert theirs["sirchat"]["id"] != second["sirchat"]["id"]
        mine = talk(one, [user(NAME)], temperature=0)
        assert mine["sirchat"]["id"] == second["sirchat"]["id"]
        assert cached(mine) == second["sirchat"]["seen"]
        assert "Zebulon" not in held_text(one, mine)


def test_other_tools_leave_the_system_prompt_that_was_not_sent_again() -> None:
    with served(tool_quick(), policy="full", max_new_tokens=6) as one:
        first = talk(one, [system("Be brief and kind."), user(ANNA)])
        second = talk(one, [user(NAME)], tools=[WEATHER])
        third = talk(one, [user(AGAIN)], tools=[WEATHER])
        assert cached(third) == second["sirchat"]["seen"]
        assert third["sirchat"]["id"] == first["sirchat"]["id"]
        text = held_text(one, third)
        assert text.count("Be brief and kind.") == 1
        assert "weather" in text


@pytest.mark.parametrize("name", ["mine", None])
def test_a_refused_request_for_another_reply_leaves_the_one_before(name: str | None) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    with served(quick(), policy="salience", recall="off", max_new_tokens=6) as one:
        messages: list[Any] = [user(ANNA)]
        messages.append(assistant(said(talk(one, messages, name))))
        messages.append(user(NAME))
        first = talk(one, messages, name)
        sent, own = messages[1:] if name else messages, {"conversation": name}
        assert one.post(sent, sirchat=own, response_format=wrong).is_error
        messages += [assistant(said(first)), user(AGAIN)]
        after = talk(one, messages, name)
        assert cached(after) == first["sirchat"]["seen"]
