"""A stand-in for a CUDA graph, on the CPU: operations are recorded, and repeated on their memory.

What was a number of the host when they were recorded stays as it was; only what is in tensors,
which keep their addresses, can change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations within its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(made)))
        return made

    @torch.inference_mode()
    def replay(self) -> None:
        """Do all operations again, in order; their results are where they were the first time."""
        for func, args, kwargs, results in self._calls:
            for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
