"""Each command's help begins with an example of it; manual page; completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from command import refused, run
from sirchat.cli.app import _OTHER_FLAGS, app
from sirchat.cli.registry import EXAMPLES
from sirchat.config.profile import Profile


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        yield " ".join((*path, name))
        if hasattr(command, "list_commands"):
            yield from _commands(command, (*path, name))


def test_there_is_an_example_for_every_command_and_help_opens_with_it() -> None:
    assert set(EXAMPLES) == set(_commands(get_command(app)))
    for name, line in EXAMPLES.items():  # whose words test_attack_claims lets the parsers take
        assert f"sirchat {name}" in line
        assert len(line.rpartition("| ")[2].partition(" > ")[0].partition(" && ")[0]) <= 90
    for words in (["ask"], ["sessions", "export"], ["eval", "facts-in-dialogue"]):
        shown = " ".join(run(*words, "--help").stdout.split())
        example = EXAMPLES[" ".join(words)]
        assert re.search(rf"Usage: .*? Example: {re.escape(example)} ", shown), words
    for name in ("models", "eval"):  # only sirchat itself installs its completion
        assert "--install-completion" not in run(name, "--help").stdout
    shown = " ".join(run("sessions", "--help").stdout.split())
    assert "rm Delete a saved chat" in shown
    assert "Example: sirchat sessions rm" not in shown


def completed(words: str, **environ: str) -> list[str]:
    """What bash is offered for the last word of a command line."""
    last = len(words.split(" ")) - 1
    done = run(_SIRCHAT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(last), **environ)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("sirchat comp", ["compare", "completion"]),
        ("sirchat completion ", ["bash", "zsh", "fish"]),
        ("sirchat --policy sin", ["sink"]),
        ("sirchat --profile sirllm-g", ["sirllm-grocery"]),
        ("sirchat --model tiny", ["tiny", "tiny-anchor"]),
        ("sirchat models default tiny-", ["tiny-anchor"]),
        ("sirchat ask --resume la", ["last"]),
        ("sirchat sessions show la", ["last"]),
    ],
)
def test_commands_settings_and_names_are_completed(words: str, offered: list[str]) -> None:
    assert sorted(completed(words)) == sorted(offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed_or_installed(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run("completion", shell).stdout
    assert f"complete_{shell}" in script
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("completion", shell, "--install")
    assert done.returncode == 0
    assert done.stdout.startswith("installed in ~/")
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(f"complete_{shell}" in text for text in written)


def test_options_may_have_the_names_that_other_programs_give_them(tmp_path: Path) -> None:
    long = run("ask", "--max-new-tokens", "2", "Tell me a joke.", SIRCHAT_HOME=str(tmp_path))
    for flags in (["--max-tokens", "2"], ["--num-predict=2"]):
        done = run("ask", *flags, "Tell me a joke.", SIRCHAT_HOME=str(tmp_path))
        assert (done.stdout, done.returncode) == (long.stdout, 0)
    assert "--max-tokens" not in run("--help-settings").stdout
    settings = [name.replace("_", "-") for name in Profile.model_fields]
    assert set(_OTHER_FLAGS.values()) <= {f"--{name}" for name in (*settings, "resume")}
    assert not set(_OTHER_FLAGS) & {f"--{name}" for name in settings}


@pytest.mark.parametrize("name", ["run", "pull", "ls"])
def test_a_command_of_another_program_is_answered_with_ours(name: str) -> None:
    code, error = refused(name, "llama3")
    assert code == 2
    assert error.startswith(f'sirchat: there is no command "{name}" (sirchat ')
    assert name not in [command.name for command in app.registered_commands]
