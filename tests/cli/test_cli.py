"""The command line: fast help, clear errors, exit codes; `doctor` and `paths`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_group

from chatting import tiny
from command import refused, run
from import_graph import loaded_with, within
from saved_chats import Chat
from sirchat import paths
from sirchat.cli.app import app
from sirchat.memory.policies import ALIASES, policy_names


def test_help_and_lists_import_no_heavy_library() -> None:
    lines = ("--help", "replay --help", "bench --help", "profiles list", "models", "--version")
    probe = (
        "import sys; from sirchat.cli import main\n"
        f"for line in {(*lines, 'models fit tiny', '--show-completion')!r}:\n"
        "    sys.argv = ['sirchat', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers', 'huggingface_hub', 'prompt_toolkit'}\n"
        "    assert not heavy & set(sys.modules), (line, heavy & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


_OF_THE_SERVER = ("starlette", "uvicorn", "torch", "sirchat.server")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("sirchat", ("torch", "pydantic")),
        *((module, _OF_THE_SERVER) for module in ("sirchat.cli.app", "sirchat.cli.serve")),
        ("sirchat.models.hub", ("torch", "transformers")),
    ],
)
def test_a_module_loads_no_library_that_only_some_commands_need(
    module: str, heavy: tuple[str, ...]
) -> None:
    assert not [name for name in loaded_with(module) if within(name, *heavy)]


def test_help_is_one_screen_with_every_command_and_names_that_of_the_settings() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert run("-h").stdout == run("--policy", "sink", "--help").stdout == done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 79
    told = {line.split()[0] for line in lines if line.startswith("  ")}
    commands = get_group(app)
    assert told >= set(commands.list_commands(Context(commands)))
    assert "--help-settings" in done.stdout
    settings = run("--help-settings", COLUMNS="100").stdout
    assert all(f"--{name}" in settings for name in ("policy", "recall-n", "archive"))


@pytest.mark.parametrize(
    "group", ["bench", "eval", "models", "policies", "profiles", "sessions", "train"]
)
def test_a_group_has_its_commands_and_alone_lists_its_things(group: str, tmp_path: Path) -> None:
    assert f"sirchat {group}" in run(group, "--help").stdout
    assert run(group, "--nonsense").returncode == 2
    things = {"sessions": "no saved chats", "profiles": "sirllm"}
    if group in things:
        done = run(group, SIRCHAT_HOME=str(tmp_path))
        assert done.returncode == 0
        assert things[group] in done.stdout + done.stderr
    elif group in ("eval", "train"):
        done = run(group)
        assert (done.returncode, done.stderr) == (2, "")
        assert "Usage" in done.stdout


def test_every_shipped_profile_opens_a_chat() -> None:
    listed = run("profiles", "list").stdout
    names = [line.split()[0] for line in listed.splitlines()[1:]]
    assert {"default", "sirllm-grocery", "sirllm-rps", "streaming-llm", "anchor"} <= set(names)
    for name in names:
        assert run("--json", "--profile", name).returncode == 0


def test_policies_are_listed_in_a_line_each_and_one_is_shown_with_options_and_source() -> None:
    done = run("policies", COLUMNS="80", SIRCHAT_POLICY="sink")
    lines = done.stdout.splitlines()
    assert {line[2:].split()[0] for line in lines} == {*policy_names(), *ALIASES}
    assert len(lines) == len(policy_names()) + len(ALIASES)
    assert not [line for line in lines if "…" in line or not line.rstrip().endswith(".")]
    assert [line[:6] for line in lines if line.startswith("*")] == ["* sink"]
    assert "sirchat policies show NAME tells more" in done.stderr
    shown = run("policies", "show", "reservoir").stdout
    for told in ("Keeps the sinks, ", "--option sample=none: ", "--recent 32: ", "source: "):
        assert f"\n{told}" in f"\n{shown}"
    assert ": --budget, --sinks, --seed\n" in shown
    assert refused("policies", "show", "snik")[1].endswith("(did you mean sink?)\n")


def test_a_healthy_installation_has_no_problem_and_no_private_word_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("doctor", SIRCHAT_HOME=str(tmp_path / "all"))
    assert done.returncode == 0, done.stdout
    assert "<-" not in done.stdout
    for word in ("torch", "Python", "cores", "tiny: float32 on"):
        assert word in done.stdout
    assert str(tmp_path) not in done.stdout
    chosen = {"SIRCHAT_HOME": str(tmp_path), "SIRCHAT_MODEL": "tiny-anchor"}
    found = run("doctor", **chosen).stdout
    assert "<-" not in found
    assert all(f"\n{name}" in found for name in ("memory", "compiled step"))
    assert "tiny-anchor: float32 on" in found


def test_problems_are_named_and_end_with_1(tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    done = run("doctor", "-m", str(broken), SIRCHAT_HOME=str(tmp_path))
    assert done.returncode == 1
    problems = [line for line in done.stdout.splitlines() if "<-" in line]
    assert [line.split()[0] for line in problems] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask"], ["no question", "sirchat ask"]),
        (["ask", "hi", "--resume", "none"], ["none"]),
        (["--feed", "ask", "hi"], ["No such option: --feed"]),
        (["hello"], ['"hello"', "sirchat ask hello"]),
        (["sesions"], ["sirchat sessions"]),
        (["completion", "tcsh"], ["no completion for 'tcsh'; allowed: bash, zsh, fish"]),
        (["--policy", "entropie"], ["--policy", "entropie", "entropy"]),
        (["--decay", "1.5"], ["--decay", "1.5", "less than or equal to 1"]),
        (["--budget", "999999"], ["999999", "2048"]),
        (["--profile", "sirllm-grocry"], ["sirllm-grocery"]),
        (["--option", "samples=3", "--policy", "reservoir"], ["samples", "sample"]),
        (["--bugdet", "5"], ["--budget"]),
        (["--model", "/no/such/model.gguf"], ["/no/such/model.gguf"]),
        (["ask", "-m", "~no-such-user/x", "Hi"], ["~no-such-user/x"]),
        (["--budget", "64", "profiles", "show", "default"], ["No such option: --budget"]),
        (["--seed", "1", "bench", "decode"], ["--seed after the command: sirchat bench"]),
        (["replay", "/no/such/file"], ["/no/such/file"]),
        (["serve", "--cors", "*"], ['--cors can\'t be "*"']),
        (["serve", "--host", "0.0.0.0"], ["so an API key is needed (set SIRCHAT_API_KEY, or give"]),
        (["serve", "--host", "10.1.2.3"], ['--host "10.1.2.3" lets other machines ask']),
        (["serve", "--api-key", " "], ["the API key is empty (give a key, or none)"]),
        (["serve", "--host", "no such", "--api-key", "k"], ['listen at "no such", port 8080: ']),
        (["serve", "--port", "70000"], ["'--port': Input should be less than or equal to 65535"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_word_gets_one_line_that_helps(arguments: list[str], words: list[str]) -> None:
    code, error = refused(*arguments)
    is_missing = {"none", "-m", "--model", "no such"} & {*arguments}
    assert code == (1 if is_missing else 2)  # what is asked for is not there; usage
    assert all(word in error for word in words), error


def test_a_policy_is_checked_and_an_outside_one_is_used(
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
    assert "keeps the contract" in run("policies", "check", "reservoir").stdout
    assert run("policies", "check", "ours:Oldest").returncode == 0
    assert run("policies", "check", "ours:Broken").returncode == 1
    assert run("--json", "--policy", "ours:Oldest").returncode == 0
    assert run("--json", "--policy", "ours:Absent").returncode == 2
    assert run("--json", "--policy", "json:JSONDecoder").returncode == 2


@pytest.mark.parametrize("words", [["sessions"], ["paths"], ["-m", "tiny"], ["ask", "Hi"]])
def test_a_home_of_a_user_that_does_not_exist_is_one_line(words: list[str]) -> None:
    error = 'sirchat: SIRCHAT_HOME "~no-such-user/x" names a user that does not exist\n'
    assert refused(*words, SIRCHAT_HOME="~no-such-user/x") == (2, error)


def test_paths_say_what_lies_where(own_home: Path) -> None:
    assert run("paths").stdout.count("nothing yet") == 8
    chat = Chat(tiny())
    chat.say("Hello.")
    chat.saved_chat.close()
    told = run("paths").stdout
    (line,) = (one for one in told.splitlines() if one.startswith("saved chats"))
    assert str(paths.sessions_dir()) in line
    assert "in 2 files" in line  # the chat, and its keys and values
    assert "pip uninstall sirchat" in told
    for kept in (paths.config_dir(), paths.data_dir(), paths.state_dir()):
        assert str(kept) in told
