"""A program that stands in for `python`; run by `warm_python.warm_python`, by path.

It hands its streams, arguments, environment and folder to the process that listens on the socket
named first, passes on the signals it gets, and ends as the program run there ends. It imports
little, so it starts in hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGWINCH", "SIGUSR1")


def main() -> None:
    streams = [number for number in range(3) if _is_open(number)]
    early: list[int] = []
    numbers = [getattr(signal, name) for name in PASSED_ON]
    for number in numbers:
        signal.signal(number, lambda got, frame: early.append(got))
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    request = repr((streams, sys.argv[2:], dict(os.environ), os.getcwd())).encode()
    socket.send_fds(server, [len(request).to_bytes(4)], streams)
    server.sendall(request)
    pid = int.from_bytes(server.recv(4))
    for number in numbers:
        signal.signal(number, lambda got, frame: os.kill(pid, got))
    for number in early:
        os.kill(pid, number)
    code = int.from_bytes(server.recv(4), signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


main()
