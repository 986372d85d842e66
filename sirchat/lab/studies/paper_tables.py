"""The results that the papers print, as tables to compare our own with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sirchat.lab.studies.report import Table

_PRINTED: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def published(name: str) -> Table:
    """The table of this name in `paper_tables.yaml`."""
    table = _PRINTED[name]
    return Table(table["title"], tuple(table["columns"]), tuple(map(tuple, table["rows"])))
