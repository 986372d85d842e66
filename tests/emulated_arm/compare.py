"""Compares what `logits.py` wrote here and on an emulated processor: `python compare.py FOLDER`."""

# ruff: noqa: T201

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    """Print the differences of logits, and assert that those on ARM are no larger."""
    names = ("here-auto", "arm-auto", "arm-again", "here-own", "arm-own", "here-float32")
    found = (dict(np.load(folder / f"{name}.npz")) for name in names)
    here, there, again, own_here, own_there, exact = found

    def differs(one: Any, other: Any) -> float:
        return float(np.linalg.norm(one - other) / np.linalg.norm(other))

    errors = [differs(one["logits"], exact["logits"]) for one in (here, there)]
    print(f"blocks of {here['block']} rows here, of {there['block']} on ARM")
    print(f"logits differ from float32's by {errors[0]:.4f} here, by {errors[1]:.4f} on ARM,")
    print(f"from one another by {differs(there['logits'], here['logits']):.4f}")
    own_errors = [differs(one["logits"], exact["logits"]) for one in (own_here, own_there)]
    print(f"with our own products by {own_errors[0]:.4f} here, by {own_errors[1]:.4f} on ARM")
    print(f"a weight takes {there['size'] / there['weights']:.3f} bytes on ARM, unpacked 4")
    assert errors[1] < max(1.2 * errors[0], 2**-8)
    assert own_errors[1] < 1.2 * own_errors[0]
    assert not np.array_equal(own_there["logits"], there["logits"])  # they were used
    assert np.array_equal(again["logits"], there["logits"])  # from what the first start prepared
    assert there["weights"] == here["weights"] > 0
    assert there["size"] * 6 <= there["weights"] * 4


main(Path(sys.argv[1]))
