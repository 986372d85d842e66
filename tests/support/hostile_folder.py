"""A current folder whose files have the names of modules that every program imports."""

from __future__ import annotations

from pathlib import Path


def hostile_modules(folder: Path) -> None:
    """Modules in `folder` that write the file `ran` there when they are imported."""
    for name in ("pickle", "socket", "statistics"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
