"""Parts of torch are imported only when they are used, or may be needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # each imports torch anew

BEGIN = """
import importlib.util, os, sys, threading
from sirchat.models.torch_imports import defer_parts_of_torch
defer_parts_of_torch()
(finder,) = (one for one in sys.meta_path if hasattr(one, "import_deferred"))
LEFT_OUT = ("torch._meta_registrations", "torch.export")

def left_out():
    return [name for name in LEFT_OUT if type(sys.modules.get(name)).__name__ == "_DeferredModule"]

def all_is_there():
    import torch
    importlib.util.find_spec("transformers")
    assert finder not in sys.meta_path and not left_out()
    assert torch.export.export and torch.export is sys.modules["torch.export"]
    assert torch._meta_registrations is sys.modules["torch._meta_registrations"]
    assert torch.nn.Conv1d(2, 3, 4, device="meta")(torch.ones(2, 9, device="meta")).shape == (3, 6)
    defer_parts_of_torch()
    assert finder not in sys.meta_path
"""
# Each case runs in a process of its own, forked after the import.
FORKED = """
import torch
assert left_out() == list(LEFT_OUT), "was torch updated? try it, then change _TESTED_VERSION"
assert "torch._decomp" not in sys.modules
for case in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(case)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""


CHAT = """
assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 1), torch.full((2, 1), 3.0))
assert torch.empty(2, 3, device="meta").shape == (2, 3)
drawn = torch.randn(4, generator=torch.Generator().manual_seed(3), requires_grad=True)
(slope,) = torch.autograd.grad((drawn.softmax(0) * torch.arange(4)).sum(), drawn)
assert torch.linalg.svdvals(torch.eye(3)).sum() == torch.fft.fft(torch.ones(3))[0].real == 3
import torch.export
assert left_out() == list(LEFT_OUT)
assert slope.shape == torch.func.jacfwd(torch.sin)(drawn).diagonal().shape
"""

THREADS = """
errors, ready = [], threading.Barrier(6)

def work(use):
    ready.wait()
    try:
        exec(use)
        torch.export.export, torch._meta_registrations.meta_mm
    except BaseException as error:
        errors.append(error)

uses = (
    "from torch.export import *; assert export",
    "assert not hasattr(torch.export, 'nothing')",
    # one thread: torch's own circles can't be imported by several, whoever does it
    "import torch._dynamo, torch._functorch.aot_autograd",
    "torch._meta_registrations.meta_mm",
    "importlib.util.find_spec('transformers')",
    "import torch.export.unflatten",
)
threads = [threading.Thread(target=work, args=(use,), daemon=True) for use in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
assert not errors, errors
all_is_there()
"""

FAILING = """
class Fails:
    def find_spec(self, name, path, target=None):
        if name == "torch.export.exported_program":
            raise ImportError("no memory")

for use in ("torch.export.export", "importlib.util.find_spec('transformers')"):
    sys.meta_path.insert(0, Fails())
    try:
        exec(use)
    except ImportError as error:
        assert "no memory" in str(error)
    else:
        raise SystemExit("no error")
    del sys.meta_path[0]
all_is_there()
"""


OTHER_VERSION = """
found = lambda: [type(finder)().find_spec(name, torch.__path__) for name in LEFT_OUT]
assert all(found())
torch.__version__ = "2.12.1"
assert not any(found())
"""


def test_a_chat_does_not_need_them_and_all_is_there_once_one_is_used() -> None:
    """By one thread, by several at once, and at the next use after an error.

    Another version of torch is imported as a whole.
    """
    cases = (CHAT, THREADS, FAILING, OTHER_VERSION)
    subprocess.run([sys.executable, "-c", BEGIN + FORKED, *cases], check=True, timeout=120)
