"""Finds the figures in sirchat's documents with the commands that made them; repeats the commands.

The Markdown files themselves show which command made a figure. A claim is a command in backticks
that stands in a table row or in a paragraph with figures. A table right before a paragraph belongs
to the paragraph.
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
    """A command in a document, and the text of the document with the command's figures.

    `place` names the document and the heading. `text` is the table row with the command, or the
    paragraph with the command and the table before it.
    """

    place: str
    command: str
    text: str

    def lacking(self) -> list[str]:
        """The placeholders in the command, such as FILE or PYTHON."""
        words = [word.rpartition("=")[2] for word in shlex.split(self.command)]
        return [word for word in words if _PLACEHOLDER.fullmatch(word)]

    def put(self, given: Mapping[str, str]) -> Claim:
        """A copy of the claim, in whose command each key of `given` is replaced by its value."""
        words = [given.get(word, word) for word in shlex.split(self.command)]
        return Claim(self.place, shlex.join(words).replace("'&&'", "&&"), self.text)


def documents() -> list[Path]:
    """The paths of sirchat's Markdown documents.

    The README.md of the repository is one of them only in a source tree: an installed package
    does not contain it.
    """
    package = Path(__file__).parents[2]
    first = package.parent / "README.md"
    is_source = (package.parent / "pyproject.toml").exists()
    return [*([first] if is_source else []), *sorted(package.rglob("*.md"))]


def claims() -> list[Claim]:
    """The claims in all documents, document by document."""
    return [claim for path in documents() for claim in claims_of(path)]


def claims_of(path: Path) -> Iterator[Claim]:
    """The claims in one document."""
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
    """The commands in all code blocks marked `sh` in a document; \\ at a line's end joins lines."""
    blocks = (code for kind, code in _FENCED.findall(path.read_text("utf-8")) if kind == "sh")
    lines = (line for code in blocks for line in code.replace("\\\n", "").splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


def repeat(claim: Claim) -> int:
    """Run a claim's command, which writes to the terminal; returns its exit status.

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
