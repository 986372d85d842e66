"""`sirchat paths`: where files lie, and how to remove all of them."""

from pathlib import Path

import typer

from sirchat import paths
from sirchat.ui.text import displayable

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def show_paths() -> None:
    """Where sirchat keeps files, how much lies there, and how to remove everything."""
    kept = {
        "profiles": paths.user_profiles_dir(),
        "saved chats": paths.sessions_dir(),
        "models": paths.models_dir(),
        "archives": paths.archives_dir(),
        "what you typed": paths.history_file(),
        "compiled": paths.compiled_dir(),
    }
    rows = [(name, paths.abbreviated(path), size_of(path)) for name, path in kept.items()]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, place, size in rows:
        typer.echo(displayable(f"{name:<{wide[0]}}  {place:<{wide[1]}}  {size}"))
    folders = dict.fromkeys([paths.config_dir(), paths.data_dir(), paths.state_dir()])
    kept_in = ", ".join(map(paths.abbreviated, folders))
    typer.echo(
        displayable(
            f"\nTo remove sirchat: delete {kept_in}; then pip uninstall sirchat. Models from the "
            "Hugging Face hub lie in its own cache, which other programs share."
        )
    )


def size_of(path: Path) -> str:
    """How much a file or a folder holds, in words."""
    if not path.exists():
        return "nothing yet"
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    size, power = float(sum(one.stat().st_size for one in files)), 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    number = f"{size:.0f}" if power == 0 else f"{size:.1f}"
    return f"{number} {_UNITS[power]} in {len(files):,} file{'s' * (len(files) != 1)}"
