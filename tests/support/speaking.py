"""`python -m tests.support.speaking FILE ARGUMENTS`: sirchat, with a model that says that text.

Everything but the choice of the next token, and how often frames come, is as always.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sirchat.cli import main
from sirchat.engine.sampling import Sampler
from sirchat.paths import tiny_model_dir
from sirchat.ui import live

SECONDS = 0.002  # pause before each token, so that a reply is seen in many states


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir())


def saying(text: str) -> Callable[..., int]:
    """A `Sampler.pick` with which every reply is this text, in tokens of the bundled tokenizer."""
    tokenizer = _tokenizer()
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    said: dict[int, int] = {}

    def pick(self: Any, logits: Any, recent_ids: Callable[[int], list[int]], position: int) -> int:
        time.sleep(SECONDS)
        said[id(self)] = said.get(id(self), -1) + 1
        return int(ids[said[id(self)] % len(ids)])

    return pick


if __name__ == "__main__":
    said = Path(sys.argv.pop(1)).read_text(encoding="utf-8")
    Sampler.pick = saying(said)  # type: ignore[method-assign]
    live.MAX_TIME_SHARE = 1.0  # frames come as often on a slow machine
    sys.argv[0] = "sirchat"
    main()
