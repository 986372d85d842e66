"""What the documents say can be done: every command is one, and figures have a command."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from command import run
from sirchat.cli.app import app
from sirchat.cli.registry import EXAMPLES

ROOT = Path(__file__).parents[2]
_INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*sirchat [a-z][^`]*)`")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=")
# Numbers and names in place of the words that stand for them.
_STANDS_FOR = {
    "N": "20000", "M": "30000", "N,M": "20000,30000", "EARLY,LATE": "2000,3000", "X": "1MiB",
    "SHAPE": "1b", "NAME=VALUE": "FILE=x",
}  # fmt: skip

_ENDLESS = ("serve", "tutorial", "train", "pull")


def documents() -> list[Path]:
    """The repository's README.md and all Markdown documents of the package."""
    return [ROOT / "README.md", *sorted((ROOT / "sirchat").rglob("*.md"))]


def commands_in_blocks(path: Path) -> list[str]:
    """The commands in the code blocks marked `sh`, one a line; \\ joins a line with the next."""
    blocks = (code for kind, code in _FENCED.findall(path.read_text("utf-8")) if kind == "sh")
    lines = (line for code in blocks for line in code.replace("\\\n", "").splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


def shown() -> list[str]:
    """Every command of sirchat in a document, in blocks of code and within text, and in a help."""
    found = {
        " ".join(command.split())
        for path in documents()
        for command in _INLINE.findall(path.read_text(encoding="utf-8"))
    }
    in_blocks = {line for path in documents() for line in commands_in_blocks(path)}
    return sorted(found | in_blocks | set(EXAMPLES.values()))


def simple(line: str) -> list[list[str]]:
    """The words of each program that a line runs, without variables and redirections."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.wordchars += "@:,+%[]{}!"
    programs: list[list[str]] = [[]]
    words = iter(reader)
    for word in words:
        if word in ("&&", "|", ";"):
            programs.append([])
        elif word in ("<", ">", ">>"):
            next(words)
        elif programs[-1] or not _VARIABLE.match(word):
            programs[-1].append(word)
    return programs


@cache
def _root() -> Any:
    return get_command(app)


@cache
def _subcommand(group: Any, name: str) -> Any:
    return group.get_command(click.Context(group), name)


def check_sirchat(words: list[str]) -> None:
    """Let the command's own parser take the words."""
    command = _root()
    words = [_STANDS_FOR.get(word, word) for word in words if word not in ("...", "…")]
    while hasattr(command, "list_commands") and words:
        if words[0] not in command.list_commands(click.Context(command)):
            break
        command = _subcommand(command, words.pop(0))
    if "--help" not in words:
        context = command.make_context("x", words, resilient_parsing=not words)
        if hasattr(command, "list_commands"):
            unknown = [one for one in context._protected_args if not one.isupper()]
            assert not unknown, f"no command {unknown}"


def check_python(words: list[str]) -> None:
    """A module that is there, whose source names its flags; others are of `serve`."""
    assert words[0] == "-m", words
    if words[1] not in ("pytest", "venv", "pip"):
        source = (ROOT / words[1].replace(".", "/")).with_suffix(".py").read_text("utf-8")
        own = re.findall(r'"(--[\w-]+)"', source)
        after_own = pairwise(words[1:])
        theirs = [word for before, word in after_own if not {before, word} & {*own}]
        if any(word.startswith("-") for word in theirs):
            check_sirchat(["serve", *theirs])


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = [one for word in words for one in re.findall(r"\[(.*?)\]", word)]
    assert {one for name in named for one in name.split(",")} <= set(extras), words


def test_every_command_that_is_shown_is_one() -> None:
    checks = {"sirchat": check_sirchat, "python": check_python, "pip": check_pip}
    others, wrong = ("git", "curl", "python3", ".", "export", "man", "serve", "torchrun"), {}
    for line in shown():
        for program, *words in simple(line):
            try:
                assert program in checks or program in others, program
                checks.get(program, len)(words)
            except Exception as error:
                wrong[line] = f"{type(error).__name__}: {error}"
    assert not wrong, wrong
    assert len(shown()) > 60


@pytest.mark.parametrize("wrong", ["eval grocery --polices x", "eval grocer", "ask --budgt 5"])
def test_what_is_no_command_is_seen(wrong: str) -> None:
    with pytest.raises(Exception, match=r"--polices|grocer|budgt"):
        check_sirchat(wrong.split())


def test_every_table_of_results_has_a_command_in_its_section() -> None:
    lacking = []
    for path in (one for one in documents() if one.name == "RESULTS.md"):
        for section in re.split(r"^#+ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            has_figures = re.search(r"^\|.*\d\.\d.*\|$", section, re.MULTILINE)
            if has_figures and not (_INLINE.search(section) or "python -m sirchat." in section):
                lacking.append(f"{path.parent.name}: {section.splitlines()[0]}")
    assert not lacking


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands in blocks of code read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SIRCHAT_MAX_NEW_TOKENS", "8")
    monkeypatch.setenv("SIRCHAT_MODEL", "tiny")  # not the real one, if that is installed
    talk = (
        '{"role": "user", "content": "My name is Anna."}\n{"role": "assistant", "content": "Hi."}\n'
    )
    Path("talk.jsonl").write_text(talk * 2, encoding="utf-8")
    Path("notes.txt").write_text("I leave at noon.", encoding="utf-8")
    return tmp_path


def quick() -> list[str]:
    """Commands in blocks of code that need nothing that is not here, and end soon."""
    lines = [line for path in documents() for line in commands_in_blocks(path)]
    return sorted(
        line
        for line in lines
        for words in (simple(line)[-1],)
        if words[0] == "sirchat"
        and not set(words) & {*_ENDLESS, "smollm2", "--model", "-m"}
        and words != ["sirchat", "-c"]  # opens a chat, which needs a terminal
    )


@pytest.mark.parametrize("line", quick())
def test_a_command_in_a_block_of_code_runs(line: str, here: Path) -> None:
    text = Path("talk.jsonl").read_text(encoding="utf-8") if "<" in line else "Hello\n"
    done = run(*simple(line)[-1][1:], text=text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
