"""`/help NAME`, `/policy`, `/theme`, `/search`, and the ways out of what is not the prompt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from saved_chats import SAYINGS, Chat, refusal, saved
from sirchat.config.profile import Profile
from sirchat.config.values import policy_choices
from sirchat.ui import commands
from sirchat.ui.commands import Commands

pytestmark = pytest.mark.usefixtures("folder")


LONG = "9 some words and 81 more of them, and a heron"


def test_each_command_has_a_paragraph_and_an_example_of_it() -> None:
    text = Path(commands.__file__).with_name("help.yaml").read_text(encoding="utf-8")
    for name, told in yaml.safe_load(text)["commands"].items():
        words = told["example"].split()
        assert words[0] == f"/{name}"
        assert len(words) == 1 or told["arguments"], name  # one that takes no argument
        assert told["more"].strip()[-1] == ".", name
        assert hasattr(Commands, f"do_{name}") or name in Profile.model_fields
    methods = {name.removeprefix("do_") for name in vars(Commands) if name.startswith("do_")}
    assert methods < {*Commands.names()}
    shown = Chat().do("/help recall")
    assert "Restore archived tokens" in shown
    assert "With recall on, sirchat looks in all that was evicted" in " ".join(shown.split())
    assert shown.endswith("Example: /recall passport number\n")


def test_policies_are_listed_with_a_line_each() -> None:
    lines = Chat(policy="entropy").do("/policy").splitlines()
    listed = dict(line[2:].split(None, 1) for line in lines if not line.startswith("policy is"))
    assert set(listed) >= set(policy_choices())
    assert listed["snapkv"].startswith("the tokens that the newest queries attend to most")
    assert listed["full"].startswith("everything")
    assert listed["random"].startswith("a random choice")
    assert [line for line in lines if line.startswith("*")] == [f"* entropy    {listed['entropy']}"]
    assert "policy is entropy; /policy NAME chooses" in lines[-1]


def test_search_finds_messages_of_this_chat_held_or_evicted_and_saved_chats(folder: Path) -> None:
    other = saved(folder, "trip")
    chat = Chat(budget=64)
    chat.say("The Pelican of Oslo is grey.", *SAYINGS[2:4], "A pelican flies", LONG)
    assert chat.session.resident < chat.session.seen
    shown = chat.do("/search pelican")
    assert "  you: …81 more of them, and a heron\n" in chat.do("/search heron")
    assert shown.startswith("in this chat:\n  you: The Pelican of Oslo is grey.\n")
    assert "  you: A pelican flies\n" in shown
    assert "saved chats" not in shown
    shown = chat.do("/search pelican oslo")
    assert shown.count("you:") == 1
    shown = chat.do("/search some words")
    assert re.search(rf"in saved chats, which /load ID opens:\n{other} (.|\n)*trip", shown)
    assert chat.saved_chat._autosave.id not in shown.partition("saved chats")[2]
    assert "no message and no saved chat has all of" in refusal(chat, "/search Ostrich")
    assert "has no word to search for" in refusal(chat, "/search ...")
