"""A program that runs SirLLM's released code; `peers.py` starts it, to measure its speed.

It runs in a process and a Python of its own, imports nothing of sirchat, and contains no code of
SirLLM.
"""

import json
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

# Number of sinks (first tokens that are never evicted), as SirLLM's program has it by default
START = 4


class Loop:
    """SirLLM's way to read turns, with a Llama model of random weights.

    Before each turn, SirLLM evicts tokens of low entropy to make room, and multiplies the stored
    entropies by `decay`. `configuration` has the arguments of transformers' LlamaConfig.
    """

    def __init__(
        self,
        configuration: dict[str, Any],
        device: str,
        dtype: str,
        threads: int,
        held: int,
        decay: float,
    ):
        import torch
        from sir_llm.enable_streaming_llm import enable_streaming_llm
        from sir_llm.eval_utils import Evaluator
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(threads)
        model = LlamaForCausalLM(LlamaConfig(**configuration)).eval()
        model = model.to(device, getattr(torch, dtype))
        self._tensor, self._decay = partial(torch.tensor, device=device), decay
        self._cache = enable_streaming_llm(model, START, 0, held - START)
        tokenizer = SimpleNamespace(decode=lambda ids: "")  # compares option texts
        options = SimpleNamespace(model_name_or_path="", decay_ratio=decay)
        self._evaluator = Evaluator(model, tokenizer, options)
        self._past: Any = None
        self._entropy: Any = None

    def read(self, turns: list[list[int]]) -> None:
        """Read turns (lists of ids) into the cache; before each turn, evict tokens to make room."""
        import numpy as np

        for ids in turns:
            if self._entropy is not None:
                self._past, self._entropy = self._cache.evict_for_space_token_entropy(
                    self._past, self._entropy, len(ids)
                )
                self._entropy = (np.array(self._entropy) * self._decay).tolist()
            self._past, new, _ = self._evaluator._greedy_generate_token_entropy(
                self._tensor([ids]), 1, self._past, self._entropy
            )
            self._entropy = (self._entropy or []) + new


def main() -> None:
    """Read commands from stdin until it ends, and write the seconds of each command to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr  # SirLLM prints
    loop: Any = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        start = time.perf_counter()
        if name == "load":
            loop = Loop(*arguments)
        elif name == "read":
            loop.read(*arguments)
        answers.write(f"{time.perf_counter() - start}\n")
        answers.flush()


if __name__ == "__main__":
    main()
