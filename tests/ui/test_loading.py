"""Loading a model reports how far it is, and transformers itself draws nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatting import save_babbler
from sirchat.models.model import load_model


def test_loading_reports_its_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(save_babbler(tmp_path))
    capfd.readouterr()
    reports: list[tuple[str, int, int | None]] = []
    load_model(
        folder,
        device="cpu",
        progress=lambda what, done, total: reports.append((what, done, total)),
    )
    what, done, total = reports[-1]
    assert what == "Loading weights"
    assert done == total
    assert capfd.readouterr() == ("", "")


def test_without_a_listener_nothing_is_drawn_either(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_babbler(tmp_path))
    capfd.readouterr()
    load_model(folder, device="cpu")
    assert capfd.readouterr() == ("", "")
