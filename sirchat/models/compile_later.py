"""Compiles in a process that may outlive a command, as `compiling.py` begins it.

`python -m sirchat.models.compile_later FILE...`: to the last file the pickled graph of standard
input, unless that is empty, and to others the library of products.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from sirchat.models import background

_LOOK = 0.2  # seconds between two looks whether others have ended


def main(paths: list[Path]) -> None:
    """Compile, after what else runs in the background; but if another process does, end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the chat
    background.lower_priority(background.LOWEST)
    pickled = sys.stdin.buffer.read()
    if background.lock(background.lock_of(paths[-1])) is None:
        return
    while background.lock(background.BACKGROUND) is None:
        time.sleep(_LOOK)
    from sirchat.models.compiling import compile_missing

    compile_missing(paths, pickled)


if __name__ == "__main__":
    os.umask(0o077)
    main([Path(name) for name in sys.argv[1:]])
