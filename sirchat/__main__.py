"""Runs the command `sirchat` for `python -m sirchat`."""

from sirchat.cli import main

if __name__ == "__main__":
    main()
