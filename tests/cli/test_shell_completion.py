"""Completion in the shell, and options by the names that other chat programs give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import run
from sirchat.cli.app import _OTHER_FLAGS, app
from sirchat.config.profile import Profile


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


def test_an_unknown_shell_is_refused_in_one_line() -> None:
    done = run("completion", "tcsh")
    assert done.returncode == 2
    assert done.stderr == ("sirchat: there is no completion for 'tcsh'; allowed: bash, zsh, fish\n")


def test_options_may_have_the_names_that_other_programs_give_them(tmp_path: Path) -> None:
    long = run("ask", "--max-new-tokens", "2", "Tell me a joke.", SIRCHAT_HOME=str(tmp_path))
    for flags in (["--max-tokens", "2"], ["--num-predict=2"]):
        done = run("ask", *flags, "Tell me a joke.", SIRCHAT_HOME=str(tmp_path))
        assert (done.stdout, done.returncode) == (long.stdout, 0)
    assert "--max-tokens" not in run("--help-settings").stdout
    settings = [name.replace("_", "-") for name in Profile.model_fields]
    assert set(_OTHER_FLAGS.values()) <= {f"--{name}" for name in (*settings, "resume")}
    assert not set(_OTHER_FLAGS) & {f"--{name}" for name in settings}


def test_what_stands_after_a_double_dash_is_text() -> None:
    done = run("ask", "--", "--bad", "--temp")
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["run", "pull", "ls"])
def test_a_command_of_another_program_is_answered_with_ours(name: str) -> None:
    done = run(name, "llama3")
    assert done.returncode == 2
    assert done.stderr.startswith(f'sirchat: there is no command "{name}" (sirchat ')
    assert name not in [command.name for command in app.registered_commands]
