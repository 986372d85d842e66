"""Torch's library is loaded without Python's lock."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only done on Linux")
def test_the_library_is_loaded_and_torch_is_not_imported() -> None:
    program = (
        "import sys; from pathlib import Path; from sirchat.ui.startup import preload_torch\n"
        "preload_torch(); assert 'torch' not in sys.modules\n"
        "assert 'libtorch_cpu.so' in Path('/proc/self/maps').read_text()\n"
        "import torch; torch.ones(2).sum()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
