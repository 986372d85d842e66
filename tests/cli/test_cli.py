"""The command line: fast help, clear errors, exit codes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_group

from command import run
from sirchat.cli.app import app

_LIGHT = (
    ["--help"],
    ["replay", "--help"],
    ["bench", "--help"],
    ["profiles", "list"],
    ["models"],
    ["--version"],
    ["--show-completion"],
)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", _LIGHT, ids=" ".join)
def test_help_and_lists_import_no_torch(arguments: list[str]) -> None:
    probe = (
        "import sys; from sirchat.cli.app import app\n"
        f"try: app({arguments!r}, standalone_mode=False)\n"
        "except BaseException: pass\n"
        "assert not {'torch', 'transformers', 'prompt_toolkit'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_help_is_there_in_a_blink() -> None:
    """It needs no library; a command's own help takes a few times what its libraries take."""
    libraries = seconds_of("-c", "import typer, pydantic, rich.markdown")
    assert seconds_of("-m", "sirchat", "--help") < libraries
    assert seconds_of("-m", "sirchat", "ask", "--help") < 4 * libraries


def test_help_is_one_screen_with_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert run("-h").stdout == run("--policy", "sink", "--help").stdout == done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 79
    told = {line.split()[0] for line in lines if line.startswith("  ")}
    commands = get_group(app)
    assert told >= set(commands.list_commands(Context(commands)))


def test_all_settings_have_a_help_of_their_own() -> None:
    told = run("--help-settings", COLUMNS="100").stdout
    assert all(f"--{name.replace('_', '-')}" in told for name in ("policy", "recall_n", "archive"))
    assert "--help-settings" in run("--help").stdout


@pytest.mark.parametrize(
    "group", ["bench", "eval", "models", "policies", "profiles", "sessions", "train"]
)
def test_a_group_that_is_loaded_when_asked_for_has_its_commands(group: str) -> None:
    assert f"sirchat {group}" in run(group, "--help").stdout
    assert run(group, "--nonsense").returncode == 2


def seconds_of(*arguments: str) -> float:
    """The processor's time that Python takes, the best of several."""
    best = 100.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "entropie"], ["--policy", "entropie", "entropy"]),
        (["--decay", "1.5"], ["--decay", "1.5", "at most 1"]),
        (["--budget", "10"], ["--budget", "10", "20"]),
        (["--budget", "lots"], ["--budget", "lots"]),
        (["--budget", "999999"], ["999999", "2048"]),
        (["--profile", "sirllm-grocry"], ["sirllm-grocery"]),
        (["--option", "samples=3", "--policy", "reservoir"], ["samples", "sample"]),
        (["--polcy", "entropy"], ["--polcy"]),
        (["--model", "/no/such/model.gguf"], ["/no/such/model.gguf"]),
        (["replay", "/no/such/file"], ["/no/such/file"]),
        (["profiles", "show", "nothing"], ["nothing"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_word_gets_one_line_that_helps(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_flag_over_environment_over_profile() -> None:
    def budget(*flags: str, **variables: str) -> int:
        done = run("--json", *flags, **variables)
        return int(json.loads(done.stdout.splitlines()[0])["profile"]["budget"])

    profile = ("--profile", "sirllm-dailydialog")
    assert budget(*profile) == 512
    assert budget(*profile, SIRCHAT_BUDGET="600") == 600
    assert budget(*profile, "--budget", "700", SIRCHAT_BUDGET="600") == 700


@pytest.mark.parametrize("name", ["SIRCHAT_BUGDET", "SIRCHAT_POLCY", "SIRCHAT_MODLE"])
def test_a_misspelt_variable_is_refused(name: str) -> None:
    done = run("--json", **{name: "256"})
    assert done.returncode == 2
    assert name in done.stderr
    assert "did you mean SIRCHAT_" in done.stderr


def test_other_variables_are_none_of_our_business() -> None:
    assert run("--json", SIRCHAT_DATA="x", SIRCHAT_WEBSITE="x").returncode == 0


def test_numbers_can_be_given_as_they_are_shown() -> None:
    done = run("--json", "--budget", "1,024")
    assert json.loads(done.stdout.splitlines()[0])["profile"]["budget"] == 1024
    assert run("--json", "--budget", "10,24").returncode == 2


@pytest.mark.parametrize(
    ("group", "word"), [("sessions", "no saved chats"), ("profiles", "sirllm")]
)
def test_a_group_of_things_alone_lists_them(group: str, word: str, tmp_path: Path) -> None:
    done = run(group, SIRCHAT_HOME=str(tmp_path))
    assert done.returncode == 0
    assert word in done.stdout + done.stderr


@pytest.mark.parametrize("group", ["eval", "train"])
def test_a_group_of_commands_alone_shows_its_help(group: str) -> None:
    done = run(group)
    assert done.returncode == 2
    assert "Usage" in done.stdout
    assert done.stderr == ""


def test_booleans_can_be_set_both_ways() -> None:
    def profile(*flags: str) -> dict[str, bool]:
        record = json.loads(run("--json", *flags).stdout.splitlines()[0])
        found: dict[str, bool] = record["profile"]
        return found

    assert profile("--no-protect")["protect"] is False
    assert profile("--profile", "sirllm-rps", "--protect")["protect"] is True
    assert profile("--no-pin-system")["pin_system"] is False


def test_a_flag_before_a_subcommand_is_refused_not_ignored() -> None:
    done = run("--budget", "64", "profiles", "show", "default")
    assert done.returncode == 2
    assert "--budget" in done.stderr


def test_every_shipped_profile_opens_a_chat() -> None:
    listed = run("profiles", "list").stdout
    names = [line.split()[0] for line in listed.splitlines()[1:]]
    assert {"default", "sirllm-grocery", "sirllm-rps", "streaming-llm", "anchor"} <= set(names)
    for name in names:
        assert run("--json", "--profile", name).returncode == 0


def test_policies_are_listed_with_options_and_source() -> None:
    listed = run("policies").stdout
    for name in ("full", "window", "sink", "entropy", "random", "interval", "reservoir", "anchor"):
        assert f"\n{name} " in listed
    assert "sample = None" in listed
    assert "SirLLM" in listed


def test_an_outside_policy_is_checked_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text(
        "from sirchat.memory.policies.base import ScorePolicy\n"
        "class Oldest(ScorePolicy):\n"
        "    'Keeps the oldest.'\n"
        "    def score(self, rows): return -rows.position\n"
        "class Broken(ScorePolicy):\n"
        "    'Keeps too much.'\n"
        "    def score(self, rows): return rows.position\n"
        "    def keep(self, rows, num_keep): return rows.position\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("policies", "check", "ours:Oldest").returncode == 0
    assert run("policies", "check", "ours:Broken").returncode == 1
    assert run("--json", "--policy", "ours:Oldest").returncode == 0
    assert run("--json", "--policy", "ours:Absent").returncode == 2
    assert run("--json", "--policy", "json:JSONDecoder").returncode == 2


@pytest.mark.slow
def test_a_policy_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        "from sirchat.memory.policies.sink import Sink\nclass Mine(Sink): 'Like sink.'\n",
        encoding="utf-8",
    )
    root = str(Path(__file__).parents[2])
    probe = f"import sys; sys.path[0] = {root!r}; from sirchat.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", probe, "policies", "check", "here:Mine"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["entropy", "random", "reservoir"])
def test_our_policies_keep_their_contract(name: str) -> None:
    assert "keeps the contract" in run("policies", "check", name).stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert (files("sirchat") / "py.typed").is_file()


@pytest.mark.parametrize("words", [["sessions"], ["paths"], ["-m", "tiny"], ["ask", "Hi"]])
def test_a_home_of_a_user_that_does_not_exist_is_one_line(words: list[str]) -> None:
    done = run(*words, SIRCHAT_HOME="~no-such-user/x")
    assert done.returncode == 2
    assert done.stderr == (
        'sirchat: SIRCHAT_HOME "~no-such-user/x" names a user that does not exist\n'
    )


def test_a_model_in_the_home_of_a_user_that_does_not_exist_is_one_line() -> None:
    done = run("ask", "-m", "~no-such-user/x", "Hi")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "RuntimeError" not in done.stderr
