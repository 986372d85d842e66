"""Finds the measured figures in sirchat's Markdown documents, and repeats their measurement.

The documents name the command that made a figure. A claim is a command in backticks together with
its figures, which stand in the same table row or in the same paragraph. A table right before a
paragraph belongs to the paragraph.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sirchat.errors import UsageError

_SHOWN = re.compile(r"`((?:[A-Z_]+=\S+ )*sirchat (?:bench|eval|train) \w[^`]*)`")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"\d")
_PLACEHOLDER = re.compile(r"[A-Z]{2,}")


@dataclass(frozen=True)
class Claim:
    """A measuring command that a document names, and the part of the document with its figures.

    `place` names the document and the heading. `text` is the table row with the command, or the
    paragraph with the command and the table before it.
    """

    place: str
    command: str
    text: str

    def lacking(self) -> list[str]:
        """The placeholders in the claim's command, words such as FILE or PYTHON."""
        words = [word.rpartition("=")[2] for word in shlex.split(self.command)]
        return [word for word in words if _PLACEHOLDER.fullmatch(word)]

    def put(self, given: Mapping[str, str]) -> Claim:
        """Replace words of the claim's command, such as FILE, by values; returns a new claim.

        `given` maps each of these words to its value.
        """
        words = [given.get(word, word) for word in shlex.split(self.command)]
        return Claim(self.place, shlex.join(words).replace("'&&'", "&&"), self.text)


def documents() -> list[Path]:
    """The paths of sirchat's Markdown documents, which are searched for measured figures.

    In a source tree, the first path is that of the repository's README.md. An installed package
    does not contain this file.
    """
    package = Path(__file__).parents[2]
    first = package.parent / "README.md"
    is_source = (package.parent / "pyproject.toml").exists()
    return [*([first] if is_source else []), *sorted(package.rglob("*.md"))]


def claims() -> list[Claim]:
    """All claims (measured figures with their commands) in sirchat's documents, in order."""
    return [claim for path in documents() for claim in claims_of(path)]


def claims_of(path: Path) -> Iterator[Claim]:
    """Yield the claims (measured figures with their commands) in one Markdown document."""
    name = "/".join(path.parts[-2:])
    heading = table = ""
    for block in _FENCED.sub("", path.read_text(encoding="utf-8")).split("\n\n"):
        block = block.strip("\n")
        if block.startswith("#"):
            heading, table = block.splitlines()[0].lstrip("# "), ""
        elif block.startswith("|"):
            rows = block.splitlines()
            for row in rows[2:]:
                yield from _claims_in(row, "\n".join([*rows[:2], row]), f"{name}, {heading}")
            table = block
        else:
            text = f"{table}\n\n{block}" if table else block
            yield from _claims_in(" ".join(block.split()), text, f"{name}, {heading}")
            table = ""


def _claims_in(line: str, text: str, place: str) -> Iterator[Claim]:
    if not _FIGURE.search(_SHOWN.sub("", text)):
        return
    for command in _SHOWN.findall(line):
        yield Claim(place, command, text)


def commands_in_blocks(path: Path) -> list[str]:
    """The commands in those code blocks of a Markdown document that are marked `sh`.

    Each line of a block is one command. A \\ at the end of a line joins it with the next line.
    """
    blocks = (code for kind, code in _FENCED.findall(path.read_text("utf-8")) if kind == "sh")
    lines = (line for code in blocks for line in code.replace("\\\n", "").splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


def repeat(claim: Claim) -> int:
    """Run the command of a claim again, with its output on the terminal; returns its exit status.

    Raises UsageError if the command still has a placeholder, such as FILE.
    """
    if lacking := claim.lacking():
        raise UsageError(
            f"{claim.command}: {lacking[0]} is not given", hint=f"--put {lacking[0]}=VALUE"
        )
    for part in claim.command.split(" && "):
        words = shlex.split(part)
        at = words.index("sirchat")
        environ = os.environ | dict(one.split("=", 1) for one in words[:at])
        command = [sys.executable, "-P", "-m", "sirchat", *words[at + 1 :]]
        if status := subprocess.run(command, env=environ, check=False).returncode:
            return status
    return 0
