"""A server for real clients: `python -m tests.server.clients.serve_by_heart`, until Ctrl-C.

The model is the bundled one, but for calls of tools and a long reply, which it knows by heart.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import torch
import uvicorn

from serving import served
from sirchat.chat import session
from sirchat.chat.settings import build_sampling
from sirchat.engine.sampling import Allowed, Sampler
from template_shapes import tool_tiny

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
BARE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
LAST = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "It is -3."}}\n</tool_call>'
READ, PAGES = '<tool_call>\n{"name": "read", "arguments": {"page": %d}}\n</tool_call>', 200
# What the model says where these words are in a message: the first that the format allows.
SAID = {
    "weather in Oslo": ["Let me look.\n" + CALL % "Oslo", CALL % "Oslo", BARE],
    "weather in both": [CALL % "Oslo" + "\n" + CALL % "Rome"],
    "degrees": ["It is -3 degrees.", LAST],
    "Count": [" ".join(f"{n} and" for n in range(60))],
}


def pages(text: str) -> list[str]:
    """What is said while `long_run.py` reads pages: the call for the next one."""
    number = 0 if text == "Read all pages." else -1
    if found := re.match(r"Page (\d+)\.", text):
        number = int(found[1])
    return [] if number < 0 else ["All is read." if number == PAGES else READ % (number + 1)]


def known(text: str, allowed: Allowed | None) -> Allowed | None:
    """What limits the reply to a message; ids that a format forbids are not said."""
    model = tool_tiny()
    replies = pages(text) or next((said for words, said in SAID.items() if words in text), [])
    if not replies:
        return allowed
    end = model.tokenizer.convert_tokens_to_ids("<|end|>")
    ways = [[*model.tokenizer.encode(one, add_special_tokens=False), end] for one in replies]

    def mask(said: Sequence[int]) -> torch.Tensor:
        size, done = model.vocab_size, len(said)
        free = torch.ones(size, dtype=torch.bool) if allowed is None else allowed(said)
        next_ids = [ids[done] for ids in ways if ids[:done] == list(said) and done < len(ids)]
        right = next((one for one in next_ids if free[one]), None)
        return free if right is None else torch.arange(size) == right

    return mask


def main() -> None:
    """Serve on port 8059."""
    said: list[str] = []
    usual = session.Session.read_user

    def read_user(self: Any, text: str, *others: Any, **named: Any) -> Any:
        said[:] = [text]
        return usual(self, text, *others, **named)

    def sampler(profile: Any, reply: Any, attempt: int, allowed: Any) -> tuple[Sampler, int]:
        limits = known(said[-1], allowed)
        return Sampler(build_sampling(profile), attempt, limits), profile.max_new_tokens

    with (
        patch.object(session, "build_sampler", sampler),
        patch.object(session.Session, "read_user", read_user),
        served(
            tool_tiny(),
            policy="sink",
            pin_system=False,
            budget=1024,
            max_new_tokens=300,
            recall="words",
        ) as one,
    ):
        uvicorn.run(one.server.app, port=8059, log_level="warning")


if __name__ == "__main__":
    main()
