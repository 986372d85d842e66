"""Parts of torch are imported only when they are used, or may be needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # each imports torch anew

PROGRAM = """
import sys
from sirchat.models.importing import defer_parts_of_torch
defer_parts_of_torch()
import torch
(finder,) = (one for one in sys.meta_path if hasattr(one, "waiting"))
assert set(finder.waiting) == {"torch._meta_registrations", "torch.export"}
assert "torch._decomp" not in sys.modules
assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 1), torch.full((2, 1), 3.0))
assert torch.empty(2, 3, device="meta").shape == (2, 3)
drawn = torch.randn(4, generator=torch.Generator().manual_seed(3), requires_grad=True)
(slope,) = torch.autograd.grad((drawn.softmax(0) * torch.arange(4)).sum(), drawn)
assert slope.shape == torch.func.jacfwd(torch.sin)(drawn).diagonal().shape
assert torch.linalg.svdvals(torch.eye(3)).sum() == torch.fft.fft(torch.ones(3))[0].real == 3
import torch.export
assert finder.waiting
"""


@pytest.mark.parametrize(
    "use",
    [
        "from torch.export import export",
        "import importlib.util; importlib.util.find_spec('transformers')",
    ],
)
def test_all_of_torch_is_there_once_it_is_used(use: str) -> None:
    whole = (
        "assert not finder.waiting and finder not in sys.meta_path\n"
        "assert torch.export.export and torch._meta_registrations.meta_mm\n"
        "defer_parts_of_torch(); assert finder not in sys.meta_path\n"
    )
    subprocess.run([sys.executable, "-c", f"{PROGRAM}{use}\n{whole}"], check=True, timeout=120)
