"""Programs that ask the server, each with what it has of the features in `trying`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trying import BOTH, COUNT, HI, HOST, OSLO, Features, Person, check, is_left

FUNCTION = 'def weather(city: str) -> str:\n    "The weather."\n    return f"{city}: -3 degrees"'


class Program:
    """A program that is called with these words before all others, in a folder of its own."""

    def __init__(self, *words: str, **environment: str) -> None:
        if shutil.which(words[0]) is None:
            raise ImportError(f"there is no program {words[0]}")
        self._words, self.folder = words, Path(tempfile.mkdtemp())
        self._environment = os.environ | {"LLM_USER_PATH": str(self.folder)} | environment

    def __call__(self, *words: str) -> str:
        """What the program prints."""
        with self.started(words) as process:
            return process.communicate(timeout=90)[0]

    def started(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """The running program."""
        return subprocess.Popen(
            [*self._words, *words],
            cwd=self.folder,
            env=self._environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def leave(self, *words: str, bytes_read: int = 1) -> None:
        """End the program when it has printed so much, and check that the server has noticed."""
        with self.started(words) as process:
            assert process.stdout is not None
            check(process.stdout.read(bytes_read))
            process.kill()
        is_left()


def says(text: str, words: str) -> None:
    """Check that words are in a text."""
    check(words in text, text[-300:])


def llm(kind: str) -> Features:
    ask = Program("llm", "-m", "own" if kind == "openai" else "ollama/tiny")
    models = {"model_id": "own", "model_name": "tiny", "api_base": f"{HOST}/v1"}
    can = {"supports_tools": True, "supports_schema": True}
    (ask.folder / "extra-openai-models.yaml").write_text(json.dumps([models | can]))
    tools = ("--functions", FUNCTION)
    schema = json.dumps(Person.model_json_schema())
    bad = ("frequency_penalty", "1") if kind == "openai" else ("num_predict", "-5")
    return {
        "chat": lambda: says(ask("How many degrees?", "--no-stream"), "-3"),
        "stream": lambda: says(ask("How many degrees?"), "-3"),
        "auto": lambda: says(ask(OSLO, *tools), "-3"),
        "parallel": lambda: says(ask(BOTH, *tools), "-3"),
        "schema": lambda: Person.model_validate_json(ask(HI, "--schema", schema)),
        "errors": lambda: says(ask(HI, "-o", *bad), bad[0]),
        "cancel": lambda: ask.leave(COUNT),
    }


def aider() -> Features:
    quiet: tuple[str, ...] = (
        "--no-git",
        "--yes",
        "--no-check-update",
        "--no-show-model-warnings",
        "--no-pretty",
    )
    quiet += ("--analytics-disable", "--no-show-release-notes", "--map-tokens=0")
    program = Program(
        "aider",
        "--model",
        "openai/tiny",
        *quiet,
        OPENAI_API_BASE=f"{HOST}/v1",
        OPENAI_API_KEY="none",
    )
    strange = {"name": "openai/tiny", "extra_params": {"extra_body": {"n": 3}}}
    (program.folder / "bad.yml").write_text(json.dumps([strange]))

    def replied(*words: str) -> None:
        text = program(*words)
        says(text, "It is -3 degrees.")

    def leave() -> None:
        with program.started(["--message", COUNT]) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "and" in line.split():
                    break
            process.kill()
        is_left()

    return {
        "chat": lambda: replied("--no-stream", "--message", "How many degrees?"),
        "stream": lambda: replied("--message", "How many degrees?"),
        "errors": lambda: says(
            program("--model-settings-file", "bad.yml", "--message", HI), "n can't be 3"
        ),
        "cancel": leave,
    }


PROGRAMS: dict[str, Callable[[], Any]] = {
    "llm": lambda: llm("openai"),
    "llm-ollama": lambda: llm("ollama"),
    "aider": aider,
}
