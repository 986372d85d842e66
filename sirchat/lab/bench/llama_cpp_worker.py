"""Runs llama-cpp-python for `peers.py`, in another process and maybe another Python.

It imports nothing of sirchat. It reads commands from stdin, one JSON list per line, and answers
each command with a number. These commands are answered with the time they took, in seconds:
["load", path, threads, rows, rearranges]; ["read", ids], which reads ids into an empty cache; and
["decode", ids], which reads ids one by one after those in the cache. ["resident"] is answered with
the memory of the process in bytes, and ["peak"] with the highest value of that memory so far.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def load(path: str, threads: int, rows: int, rearranges: bool) -> Any:
    """Load a model whose cache has room for `rows` tokens, with `threads` threads.

    `rearranges` says whether llama.cpp stores the weights in another order, for faster kernels.
    """
    # No module of this folder may be imported instead of one that llama_cpp needs.
    sys.path[:] = [one for one in sys.path if one != str(Path(__file__).parent)]
    import llama_cpp

    usual = llama_cpp.llama_cpp.llama_model_default_params

    def chosen() -> Any:
        settings = usual()
        settings.use_extra_bufts = rearranges
        return settings

    llama_cpp.llama_cpp.llama_model_default_params = chosen
    return llama_cpp.Llama(
        path, n_ctx=rows, n_threads=threads, n_threads_batch=threads, verbose=False
    )


def main() -> None:
    """Answer commands until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the library may print
    model: Any = None
    pages, status = Path("/proc/self/statm"), Path("/proc/self/status")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        start = time.perf_counter()
        if name == "load":
            model = load(*arguments)
        elif name == "read":
            model.reset()
            model.eval(*arguments)
        elif name == "decode":
            for token_id in arguments[0]:
                model.eval([token_id])
        taken: float = time.perf_counter() - start
        if name == "resident":
            taken = 4096 * int(pages.read_text().split()[1]) if pages.exists() else 0
        if name == "peak":
            lines = status.read_text().splitlines() if status.exists() else []
            found = [one for one in lines if one.startswith("VmHWM:")]
            taken = 1024 * int(found[0].split()[1]) if found else 0
        answers.write(f"{taken}\n")
        answers.flush()


if __name__ == "__main__":
    main()
