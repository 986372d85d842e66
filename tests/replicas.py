"""Two replicas of one server on this machine: `python -m tests.replicas model=tiny`.

Ray Serve starts them. Six conversations take five rounds each; then one replica is killed, and each
conversation takes one round more. The table has, for each reply, how many tokens its conversation
had seen before, and how many of these were not read again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve

from sirchat.server.cluster import app, replica_of

_NAMES = ("Anna", "Tom", "Eva", "Kim", "Leo", "Mia")
_QUESTIONS = ("Where am I from?", "What do I like?", "And what else?", "Who am I?", "Goodbye.")
_URL, _CHAT = "http://127.0.0.1:8000/v1", "/chat/completions"


def _get(path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['SIRCHAT_API_KEY']}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{_URL}{path}", data, headers)) as response:
        return json.load(response)


class Conversation:
    """One client's conversation; `seen` is how many tokens it has."""

    def __init__(self, name: str) -> None:
        self.messages = [{"role": "user", "content": f"My name is {name}."}]
        body = json.dumps({"messages": self.messages}).encode()
        self.replica = replica_of(2, _CHAT, body)
        self.seen = 0

    def ask(self, then: str) -> str:
        """Ask for a reply; returns how much of the memory was found, and how long it took."""
        begun = time.monotonic()
        reply = _get(_CHAT, {"messages": self.messages})
        found = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        line = f"{found}/{self.seen}"
        self.seen = reply["sirchat"]["seen"]
        said = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
        self.messages += [said, {"role": "user", "content": then}]
        return f"{line} ({time.monotonic() - begun:.1f} s)"


def _kill(number: int) -> None:
    """Kill the process of a replica."""
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in actors if f"#replica-{number}#" in name]
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)


def main() -> None:
    """Let the conversations go on, and print the table."""
    given = dict(pair.split("=", 1) for pair in sys.argv[1:])
    os.environ.setdefault("SIRCHAT_API_KEY", "key")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"replicas": "2", "folder": folder, "max_new_tokens": "24", **given}
        ray.init(log_to_driver=False)
        serve.run(app(settings))
        talks = [Conversation(name) for name in _NAMES]
        for number, question in enumerate(_QUESTIONS):
            asked = [f"{talk.replica}: {talk.ask(question)}" for talk in talks]
            sys.stdout.write(f"round {number + 1}  {'  '.join(asked)}\n")
        files = {path.name: len(list(path.glob("*.sqlite"))) for path in Path(folder).iterdir()}
        sys.stdout.write(f"files {sorted(files.items())}\n")
        _kill(0)
        asked = [f"{talk.replica}: {talk.ask('Hello again.')}" for talk in talks]
        sys.stdout.write(f"after replica 0 was killed  {'  '.join(asked)}\n")
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
