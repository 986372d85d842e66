"""Runs a server of tools, and ends it, with all that it has started, when the chat is gone.

It is run as a program, and imports little, so that a server starts at once.
"""

import os
import signal
import subprocess
import sys
import time

_SECONDS = 0.2  # between two looks


def main() -> None:
    chat, server = os.getppid(), subprocess.Popen(sys.argv[1:])
    while server.poll() is None:
        if sys.platform != "win32" and os.getppid() != chat:
            os.killpg(0, signal.SIGKILL)  # this process, too
        time.sleep(_SECONDS)
    sys.exit(server.returncode)


if __name__ == "__main__":
    main()
