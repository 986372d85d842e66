"""Runs a server of tools until it ends or the chat is gone; then ends all that it has started.

It is run as a program, as `guard.py CHAT COMMAND ...` with the chat's process id, and imports
little, so that a server starts at once.
"""

import os
import signal
import subprocess
import sys
import time

_SECONDS = 0.2  # between two looks


def main() -> None:
    chat, server = int(sys.argv[1]), subprocess.Popen(sys.argv[2:])
    if sys.platform != "win32":
        while server.poll() is None and os.getppid() == chat:
            time.sleep(_SECONDS)
        os.killpg(os.getpid(), signal.SIGKILL)  # this process, too


if __name__ == "__main__":
    main()
