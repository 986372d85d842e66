"""What a row of `sirchat bench gpu` measures; this module is imported without torch."""

from typing import NamedTuple


class Value(NamedTuple):
    """One number that a row measured; None, and the reason as `note`, if it could not."""

    name: str
    value: float | None
    unit: str = ""  # `x` for a ratio of times
    note: str = ""
    row: str = ""
