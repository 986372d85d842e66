"""A program that runs llama.cpp; `peers.py` starts it in another process, to measure its speed.

The program imports nothing of sirchat, so that any Python with llama-cpp-python can run it. It
reads commands from stdin, one JSON list per line, and answers each command with a number.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def load(path: str, threads: int, rows: int, rearranges: bool) -> Any:
    """Load the GGUF file `path` with llama.cpp, and return the model."""
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
    """Read commands from stdin until it ends, and write the answer to each command to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the library may print
    model: Any = None
    status, memory = Path("/proc/self/status"), {"resident": "VmRSS:", "peak": "VmHWM:"}
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
        if name in memory:
            lines = status.read_text().splitlines() if status.exists() else []
            found = [one for one in lines if one.startswith(memory[name])]
            taken = 1024 * int(found[0].split()[1]) if found else 0
        answers.write(f"{taken}\n")
        answers.flush()


if __name__ == "__main__":
    main()
