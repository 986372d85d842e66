"""Tries real clients: `python tests/server/clients/tried.py [NAME ...]`, with their packages.

`serve_by_heart` must be running. Prints a table client x feature: yes, no and why, or - where a
client has no way to ask for it. `tried.mjs` tries those in JavaScript.
"""

from __future__ import annotations

import sys

from tried_libraries import LIBRARIES
from tried_programs import PROGRAMS
from trying import FEATURES

CLIENTS = LIBRARIES | PROGRAMS


def main() -> None:
    """Print the table; clients that are not installed are left out."""
    write = sys.stdout.write
    write(f"| client | {' | '.join(FEATURES)} |\n{'|---' * (len(FEATURES) + 1)}|\n")
    for name in sys.argv[1:] or CLIENTS:
        try:
            features = CLIENTS[name]()
        except ImportError as error:
            write(f"not tried: {name} ({error})\n")
            continue
        cells = []
        for feature in FEATURES:
            cell = "-"
            if feature in features:
                try:
                    features[feature]()
                    cell = "yes"
                except Exception as error:
                    cell = f"no: {type(error).__name__} {str(error)[:200]}".replace("\n", " ")
            cells.append(cell)
        write(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
