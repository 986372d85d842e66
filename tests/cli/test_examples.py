"""Every command's help opens with an example that its parser takes; and the manual page."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import pytest
from typer.main import get_command

from command import run
from sirchat.cli.app import app
from sirchat.cli.registry import EXAMPLES, commands
from sirchat.config.profile import Profile


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        yield " ".join((*path, name)), command
        if hasattr(command, "list_commands"):
            yield from _commands(command, (*path, name))


ALL = dict(_commands(get_command(app)))


def test_there_is_an_example_for_every_command_and_no_other() -> None:
    assert set(EXAMPLES) == set(ALL)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_one_of_the_command_and_its_parser_takes_it(name: str) -> None:
    line = EXAMPLES[name].rpartition("| ")[2].partition(" > ")[0].partition(" && ")[0]
    program, *words = shlex.split(line)
    assert program == "sirchat"
    own = name.split()
    assert words[: len(own)] == own
    while " ".join(own + words[len(own) : len(own) + 1]) in ALL and len(own) < len(words):
        own.append(words[len(own)])
    rest = words[len(own) :]
    if rest != ["--help"]:
        ALL[" ".join(own)].make_context("x", rest)
    assert len(line) <= 90


def test_only_sirchat_itself_installs_its_completion() -> None:
    for name in ("models", "eval"):
        assert "--install-completion" not in run(name, "--help").stdout


def test_a_renamed_study_runs_by_its_former_name_and_says_so() -> None:
    done = run("eval", "chatter", "--data", "nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("note: chatter is now called facts-in-dialogue\nsirchat: data ")


def test_help_opens_with_the_example() -> None:
    for words in (["ask"], ["sessions", "export"], ["eval", "facts-in-dialogue"]):
        shown = " ".join(run(*words, "--help").stdout.split())
        example = EXAMPLES[" ".join(words)]
        assert re.search(rf"Usage: .*? Example: {re.escape(example)} ", shown), words


def test_the_manual_page_names_every_command_and_setting() -> None:
    page = run("man").stdout.replace("\\-", "-")
    assert all(f".B {name}\n" in page for name in commands())
    flags = {f"--{name.replace('_', '-')}" for name in Profile.model_fields}
    flags -= {"--description", "--policy-options"}
    assert all(f".B {flag}\n" in page for flag in flags)


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_manual_page_is_formatted_without_a_warning() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8"], input=run("man").stdout.encode(), capture_output=True
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"git diff | sirchat ask" in done.stdout


def test_a_list_of_commands_says_what_they_do() -> None:
    shown = " ".join(run("sessions", "--help").stdout.split())
    assert "rm Delete a saved chat" in shown
    assert "Example: sirchat sessions rm" not in shown
