"""Runs a server of tools until it ends or the chat is gone; then ends all that it has started.

It passes on what the server writes, but for a message that is too long to be read.
It is run as a program, as `guard.py CHAT COMMAND ...` with the chat's process id, and imports
little, so that a server starts at once.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

LONGEST = 16_000_000  # bytes of a message; more would take the memory that the chat needs
_TOO_LONG = f'"a message of more than {LONGEST:,} bytes, which is not read"\n'.encode()
_SECONDS = 0.2  # between two looks


def _pass_on(messages: BinaryIO, steps: list[int]) -> None:
    """Copy messages, one a line, to standard output; of one that is too long, a line says so.

    The only number in `steps` grows with each message, and is odd while one is written.
    """
    for line in iter(lambda: messages.readline(LONGEST), b""):
        is_whole = len(line) < LONGEST or line.endswith(b"\n")
        steps[0] += 1
        sys.stdout.buffer.write(line if is_whole else _TOO_LONG)
        sys.stdout.buffer.flush()
        steps[0] += 1
        while not is_whole:
            rest = messages.readline(1 << 16)
            is_whole = not rest or rest.endswith(b"\n")
    os.close(sys.stdout.fileno())  # the server has closed its own, so the chat need not wait


def main() -> None:
    chat, server = int(sys.argv[1]), subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE)
    assert server.stdout
    steps, before = [0], -1
    copying = threading.Thread(target=_pass_on, args=(server.stdout, steps), daemon=True)
    copying.start()
    if sys.platform != "win32":
        while server.poll() is None and os.getppid() == chat:
            time.sleep(_SECONDS)
        copying.join(_SECONDS)
        # What else the server has started may keep the pipe open, so its end is not waited for.
        while copying.is_alive() and (steps[0] % 2 or steps[0] > before) and os.getppid() == chat:
            before = steps[0]
            copying.join(_SECONDS)
        os.killpg(os.getpid(), signal.SIGKILL)  # this process, too


if __name__ == "__main__":
    main()
