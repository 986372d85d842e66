"""Runs the command `sirchat` when Python is started with `python -m sirchat`."""

from sirchat.cli import main

if __name__ == "__main__":
    main()
