"""Replies of a chat that are JSON by the schema in a file, from `/set format FILE` until `off`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chatting import notices, session, tiny
from command import refused, run
from fake_terminal import FakeTerminal
from json_replies import PERSON, check_person, write_schema
from saved_chats import Chat, completions, refusal
from sirchat.chat.events import Called
from sirchat.chat.retry import go_on
from sirchat.chat.tool_loop import ChatTool
from sirchat.engine.sampling import Sampler, Sampling, TokenFilter
from sirchat.errors import SettingError
from sirchat.text.reply_parts import Marks
from template_shapes import tool_tiny
from typed_chat import TypedChat

COLOUR = {"enum": ["red", "green"]}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_schema(tmp_path / "person.json")


def test_replies_are_json_by_the_file_until_off(file: str, own_home: Path) -> None:
    chat, plain = Chat(tiny(), max_new_tokens=90), Chat(tiny(), max_new_tokens=90)
    assert f"json_schema: off -> {file}"[:60] in chat.do(f'/set format "{file}"')
    assert f"json_schema is {file}" in chat.do("/show format")
    for text in ("My name is Anna.", "Tell me a joke."):
        chat.say(text)
        check_person(chat.session.turns[-1].text)
    chat.do("/set format off")
    for one in (chat, plain):
        one.do("/reset")
        one.say("My name is Anna.")
    assert chat.session.turns[-1].text == plain.session.turns[-1].text


def test_a_file_that_is_no_schema_is_not_set(file: str, tmp_path: Path, own_home: Path) -> None:
    chat = Chat(tiny())
    assert "there is no file" in refusal(chat, "/set format nowhere.json")
    bad = write_schema(tmp_path / "bad.json", {"type": "strin"})
    assert refusal(chat, f"/set json_schema {bad}").endswith("Invalid type: strin")
    assert chat.session.profile.json_schema == "off"


_ENDLESS = "has a schema that no JSON of a possible length can meet"
_CRASHES = "has a schema with a value of -1,000,000,000,000,000,000 or less"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, _ENDLESS),
        ({"type": "array", "minItems": 20_000, "items": {"const": "a"}}, _ENDLESS),
        ({"const": -(2**63)}, _CRASHES),
        ({"type": "integer", "minimum": -1e25, "maximum": -1e20}, _CRASHES),
        ({"enum": [{"a": [1 - 2**63]}]}, _CRASHES),
        ({"$ref": "#/default", "default": {"const": -(2**63)}}, _CRASHES),
    ],
)
def test_a_schema_that_no_reply_can_keep_is_refused_in_one_line(
    schema: dict[str, Any], problem: str, tmp_path: Path, own_home: Path
) -> None:
    bad = write_schema(tmp_path / "bad.json", schema)
    assert problem in refused("ask", "--json-schema", bad, "Hello.")[1]


NOT_KEPT = 'a part of the schema is not kept: Unimplemented keys: ["uniqueItems"]'


def test_a_changed_file_is_read_anew_and_a_vanished_one_keeps_the_message_unread(
    file: str,
) -> None:
    chat = session(tiny(), json_schema=file, max_new_tokens=90)
    assert notices(list(chat.ask("Hello."))) == []
    write_schema(Path(file), {**PERSON, "uniqueItems": True})
    changed = [f"{file} has changed: replies are as it says now"]
    assert notices(list(chat.ask("Hello."))) == [*changed, NOT_KEPT]
    write_schema(Path(file), COLOUR)
    assert notices(list(chat.ask("Which colour?"))) == changed
    assert json.loads(chat.turns[-1].text) in COLOUR["enum"]
    write_schema(Path(file), {"enum": ["blue"]})
    assert notices(list(chat.retry())) == changed
    Path(file).unlink()
    seen, turns = chat.seen, list(chat.turns)
    for refused_one in (chat.ask("Hello."), chat.retry()):
        with pytest.raises(SettingError, match=r"there is no file .* lets replies be text"):
            list(refused_one)
        assert (chat.seen, chat.turns) == (seen, turns)
    chat.switch("/set", json_schema="off")
    list(chat.ask("Hello."))
    assert len(chat.turns) == len(turns) + 2


def test_what_json_says_is_shown_as_it_is_written(
    tmp_path: Path, terminal: FakeTerminal, own_home: Path
) -> None:
    file = write_schema(tmp_path / "bold.json", {"const": "a **b** `c` \\*d"})
    with TypedChat(terminal, json_schema=file) as chat:
        assert chat.ask("Hello.").split("\n")[0] == json.dumps("a **b** `c` \\*d")


@pytest.mark.parametrize("archive", ["ram", "off"])  # without one, the reply is generated again
def test_a_cut_reply_goes_on_as_json(file: str, archive: Any) -> None:
    chat = session(tiny(), json_schema=file, max_new_tokens=6, archive=archive)
    list(chat.ask("My name is Anna."))
    begun = chat.turns[-1].text
    for _ in range(14):
        if chat.turns[-1].finish == "length":
            list(go_on(chat))
    assert chat.turns[-1].text.startswith(begun)
    check_person(chat.turns[-1].text)


def test_a_reply_that_began_as_text_does_not_go_on_as_json(file: str) -> None:
    chat = session(tiny(), max_new_tokens=3)
    list(chat.ask("My name is Anna."))
    chat.switch("/set", json_schema=file)
    with pytest.raises(SettingError, match="does not allow how the reply has begun"):
        list(go_on(chat))
    list(chat.retry())
    assert chat.turns[-1].text.startswith("{")


def test_with_tools_replies_are_calls_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies begin with a call, and then with a text, as far as the format lets them.

    The file is read once for a message, whatever tools do to it.
    """
    encode = tool_tiny().tokenizer.encode
    begun = [encode(text, add_special_tokens=False) for text in ("<tool_call>", '"')]

    def sampler(sampling: Sampling, attempt: int, allowed: TokenFilter | None) -> Sampler:
        assert allowed is not None
        first = begun.pop(0)

        def forced(ids: Any) -> Any:
            mask = allowed(ids)
            return torch.arange(len(mask)) == first[len(ids)] if len(ids) < len(first) else mask

        return Sampler(sampling, attempt, forced)

    monkeypatch.setattr("sirchat.chat.conversation.Sampler", sampler)
    file = write_schema(tmp_path / "colour.json", COLOUR)
    chat = session(tool_tiny(), json_schema=file, max_new_tokens=300)
    schema = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}

    def weather(city: str) -> str:
        """The weather in a city."""
        Path(file).write_text("no JSON")
        return f"It snows in {city}."

    tool = replace(ChatTool.of(weather), parameters=schema)
    events = list(chat.ask("How is the weather?", tools=[tool]))
    called = {event.arguments["city"] for event in events if isinstance(event, Called)}
    assert called
    assert called <= {"Oslo", "Rome"}
    assert json.loads(chat.turns[-1].text) in COLOUR["enum"]


def test_a_model_that_always_reasons_first_is_refused_before_the_message_is_read(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirchat.text.template.Template.marks", Marks(opens_in_header=True))
    chat = session(tiny(), json_schema=file)
    with pytest.raises(SettingError, match="begins every reply with reasoning"):
        list(chat.ask("Hello."))
    assert not chat.seen


def test_a_transcript_is_answered_in_json(file: str, own_home: Path) -> None:
    said = "My name is Anna.\nWhat is my name?\n"
    lines = run("--quiet", text=said, SIRCHAT_JSON_SCHEMA=file).stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        check_person(line)


def test_a_saved_chat_keeps_the_setting_and_opens_without_the_file(
    file: str, own_home: Path
) -> None:
    chat = Chat(tiny(), json_schema=file, max_new_tokens=90)
    chat.say("My name is Anna.")
    chat.do("/save holiday")
    chat.saved_chat.close()
    check_person(run("ask", "--resume", "holiday", "Hello.").stdout.strip())
    Path(file).unlink()
    assert "there is no file" in refused("ask", "--resume", "holiday", "Hello.")[1]
    plain = run("ask", "--resume", "holiday", "--json-schema", "off", "Hello.")
    assert plain.returncode == 0
    code, error = refused("ask", "--resume", "holiday", "--json-schema", "nowhere", "Hello.")
    assert (code, error.startswith("sirchat: json_schema: there is no file nowhere")) == (2, True)


def test_names_of_files_follow_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_schema(tmp_path / "my person.json")
    for name in ("format", "json_schema"):
        assert completions(f"/set {name} my") == ['"my person.json"']
