"""The `sirchat bench` commands that work on files: records and made-up models."""

from pathlib import Path
from typing import Annotated

import typer

from sirchat.cli.flags import Debug
from sirchat.errors import UsageError

files_app = typer.Typer(add_completion=False)


@files_app.command("compare")
def compare_two(
    first: Annotated[Path, typer.Argument(help="A record that `bench all --json` has printed.")],
    second: Annotated[Path, typer.Argument(help="Another record, of another machine for example.")],
    debug: Debug = False,
) -> None:
    """Show the measurements in two records of `sirchat bench all --json` side by side."""
    from sirchat.lab.bench.record import read_record
    from sirchat.lab.bench.report import print_compared

    print_compared(read_record(first), read_record(second))


@files_app.command()
def make_model(
    shape: Annotated[str, typer.Argument(help="135m, 1b, 4b or 8b.", metavar="SHAPE")],
    path: Annotated[
        Path, typer.Argument(help="The GGUF file to write.", dir_okay=False, metavar="PATH")
    ],
    type: Annotated[
        str, typer.Option(metavar="Q4_0|Q4_1|Q4_K", help="How the matrices are stored.")
    ] = "Q4_K",
    debug: Debug = False,
) -> None:
    """Write a GGUF file with random weights, to measure models of sizes that are not bundled.

    The shapes are those of SmolLM2 135M, Llama 3.2 1B, Qwen3 4B and Llama 3.1 8B; the tokenizer is
    that of `tiny`. Embeddings and output head are stored as Q6_K. The model's text is nonsense.
    """
    from sirchat.lab.bench.made_model import write_model
    from sirchat.lab.bench.ratio import SHAPES

    if shape not in SHAPES:
        raise UsageError(
            f"unknown shape of a model {shape!r}", hint=f"the shapes are {', '.join(SHAPES)}"
        )
    if path.exists():
        raise UsageError(f"{path} exists already", hint="name a new file, or delete it first")
    write_model(path, SHAPES[shape], type)
