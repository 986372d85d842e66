"""The pager that shows what is taller than the window."""

import io
import os
from pathlib import Path

import pytest
from rich.text import Text

from sirchat.ui.screen import Screen


class _Window(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pager_cannot_start_a_shell_or_an_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = tmp_path / "pager"
    pager.write_text(f'#!/bin/sh\ncat >/dev/null\necho "$LESSSECURE" >{tmp_path}/secure\n')
    os.chmod(pager, 0o700)
    for name, value in {"PAGER": pager, "TERM": "xterm", "LINES": 20, "COLUMNS": 80}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LESSSECURE", "0")
    Screen(_Window(), _Window()).page(Text("a line\n" * 100))
    assert (tmp_path / "secure").read_text() == "1\n"
