"""What clients are asked in `tried.py`, and what must come of it."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

from pydantic import BaseModel

HOST = "http://127.0.0.1:8059"
OWN = {"base_url": f"{HOST}/v1", "api_key": "none"}
os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{HOST}/v1", "OLLAMA_HOST": HOST}
FEATURES = [
    "chat",
    "stream",
    "auto",
    "required",
    "parallel",
    "schema",
    "names",
    "system-later",
    "errors",
    "cancel",
]
OSLO, BOTH, HI, COUNT = "What is the weather in Oslo?", "And the weather in both?", "Hi.", "Count."
TALK = [("user", HI), ("assistant", "Hello."), ("system", "Be brief."), ("user", "And now?")]
LATER: list[Any] = [{"role": role, "content": text} for role, text in TALK]
NAMED: list[Any] = [{"role": "user", "content": HI, "name": "Anna"}]
Features = dict[str, Callable[[], Any]]


class Person(BaseModel, extra="forbid"):
    """What a reply by a schema has."""

    first: bool
    mood: bool


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"{city}: -3 degrees"


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def check(found: Any, why: Any = "") -> Any:
    """Fail if `found` is not true."""
    if not found:
        raise AssertionError(str(why))
    return found


def refused(call: Callable[[], Any], words: str) -> None:
    """Check that a call fails, with the server's words."""
    try:
        call()
    except Exception as error:
        check(words in str(error), error)
    else:
        raise AssertionError("not refused")


def leaves(stream: Any) -> None:
    """Take a piece of a long reply, leave, and check that the server has ended it."""
    next(iter(stream))
    getattr(stream, "close", lambda: None)()
    del stream
    gc.collect()  # some close their connection only then
    is_left()


def is_left() -> None:
    """Check that soon no reply is under way."""
    for _ in range(50):
        with urlopen(f"{HOST}/v1/sirchat/sessions") as response:
            sessions = json.load(response)["data"]
        if not any(one["busy"] for one in sessions):
            return
        time.sleep(0.05)
    raise AssertionError("the reply goes on")
