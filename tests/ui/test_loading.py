"""A model loads behind one progress bar; no library draws, warns or logs; torch comes early."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers import AutoTokenizer

from chatting import save_babbler, tiny
from fake_terminal import FakeTerminal
from gguf_file import write_gguf
from plain_model import load_model
from sirchat.ui.screen import Screen
from sirchat.ui.status import loading_bar
from warm_python import warm_python


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a GGUF file."""
    pytest.importorskip("gguf")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


def load_reporting(name: str) -> list[tuple[str, int, int | None]]:
    reports: list[tuple[str, int, int | None]] = []
    load_model(
        name, device="cpu", progress=lambda what, done, total: reports.append((what, done, total))
    )
    return reports


def test_loading_reports_its_progress_and_draws_nothing(
    gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_babbler(tmp_path))
    capfd.readouterr()
    for name in (folder, str(gguf)):
        tensors = [report for report in load_reporting(name) if report[0] == "Reading weights"]
        assert tensors[-1][1] == tensors[-1][2]
    assert tensors[-1][1] == len(tiny().module.state_dict()) - 1
    load_model(folder, device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["[/x]", "[v2]/m", "[link=http://evil]x"])
def test_a_bar_shows_a_models_name_as_it_is(terminal: FakeTerminal, name: str) -> None:
    with loading_bar(Screen(terminal, terminal), name) as report:
        assert report is not None
        report(name, 1, 2)
        shown = terminal.getvalue()
    assert name in shown
    assert "\x1b]8" not in shown


@pytest.mark.slow
def test_a_pipe_gets_nothing_but_our_own_lines(gguf: Path) -> None:
    command = [*warm_python(), "-m", "sirchat", "--device", "cpu", "--model", str(gguf)]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    done = subprocess.run(
        command, input="hello", capture_output=True, text=True, check=True, timeout=120, env=environ
    )
    assert done.stdout.startswith("USER: hello\nASSISTANT: ")
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["turn", "turn"]


def test_what_libraries_say_while_loading_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_babbler(tmp_path))
    real = AutoTokenizer.from_pretrained
    without_bars: list[bool] = []

    def noisy(*args: Any, **kwargs: Any) -> Any:
        without_bars.append(are_progress_bars_disabled())
        warnings.warn("a warning", UserWarning, stacklevel=1)
        logging.getLogger("huggingface_hub").warning("a log line")
        logging.getLogger("transformers").error("an error line")
        return real(*args, **kwargs)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noisy)
    enable_progress_bars()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(folder, device="cpu", for_hub=True)
    assert without_bars == [True]
    assert (caught, caplog.messages) == ([], [])
    logging.getLogger("huggingface_hub").warning("afterwards")
    assert caplog.messages == ["afterwards"]


# --- torch


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only done on Linux")
def test_the_library_is_loaded_and_torch_is_not_imported() -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from sirchat.models.torch_imports import preload_torch\n"
        "preload_torch(); assert 'torch' not in sys.modules\n"
        "assert 'libtorch_cpu.so' in Path('/proc/self/maps').read_text()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
