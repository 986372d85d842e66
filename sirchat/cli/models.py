"""The commands `sirchat models ...`, which list, measure, choose, download and check models."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sirchat import paths
from sirchat.cli.flags import print_remark, with_flags
from sirchat.config.profile import Profile
from sirchat.config.profile_files import resolve, write_default_setting
from sirchat.errors import ModelError, UsageError
from sirchat.models.hub import require_available
from sirchat.paths import read_yaml
from sirchat.ui.text import displayable_line

if TYPE_CHECKING:
    from sirchat.ui.lists import ListedModel

_FLAGS = read_yaml(__file__, "models")
models_app = typer.Typer(add_completion=False, invoke_without_command=True)


@models_app.callback()
def models(context: typer.Context) -> None:
    """List the models on this machine; with a command, download or choose a model."""
    if context.invoked_subcommand is None:
        models_list()


@models_app.command("list")
@with_flags(_FLAGS["models_list"])
def models_list(folders: list[Path] | None = None, budget: str | None = None) -> None:
    """List the models that --model can name.

    These are the bundled models, smollm2, models in your own folder (`sirchat paths` names this
    folder) and models in the Hugging Face cache. The size of the KV cache is what a chat would
    allocate at its budget. The last column is the largest budget, in tokens, for which the free
    memory suffices; sirchat models fit NAME tells more.
    """
    from sirchat.ui.lists import print_models
    from sirchat.ui.screen import make_console

    print_models(listed_models(folders or (), budget), make_console())


def listed_models(folders: Sequence[Path], budget: str | None) -> "list[ListedModel]":
    """The models on this machine and in `folders`; raises UsageError if a folder is missing."""
    from sirchat.chat.model_defaults import affordable_rows
    from sirchat.memory.free_memory import free_memory
    from sirchat.models.fit import compute_fit
    from sirchat.models.listing import find_model, find_models
    from sirchat.models.shape import cache_bytes
    from sirchat.ui.lists import ListedModel

    folders = [Path(os.path.expanduser(folder)) for folder in folders]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--in: there is no folder {str(folder)!r}")
    profile, free = _resolve_profile(budget), free_memory()
    models: list[ListedModel] = []
    found = find_models(folders)
    named, default = paths.name_or_absolute_path, paths.name_or_absolute_path(profile.model)
    if all(named(model.name) != default for model in found):  # a file or a folder elsewhere
        with suppress(ModelError):
            found.append(find_model(profile.model))
    for model in found:
        shape, is_default = model.shape, named(model.name) == default
        if shape is None or shape.context_length is None:
            models.append(ListedModel(model, None, None, is_default=is_default))
            continue
        rows, largest = affordable_rows(profile, model.name, shape.context_length), None
        with suppress(ModelError):  # the weights can't be read
            largest = compute_fit(model, profile, free).choices[0].largest_budget
        cache = cache_bytes(shape, profile, rows)
        models.append(ListedModel(model, rows, cache, largest, is_default))
    return models


@models_app.command("fit")
@with_flags(_FLAGS["models_fit"])
def models_fit(name: str) -> None:
    """Show how much memory a model takes, and the largest budget that fits.

    Only headers and config files are read. The first row is for your settings, the others for other
    settings. The largest budget is what the free memory has room for, after the weights and
    500 MB for the program itself, and no more than the model's context.
    """
    from sirchat.memory.free_memory import free_memory
    from sirchat.models.fit import compute_fit
    from sirchat.models.listing import find_model
    from sirchat.ui.lists import print_fit
    from sirchat.ui.screen import make_console

    print_fit(compute_fit(find_model(name), _resolve_profile(None), free_memory()), make_console())


@models_app.command("default")
@with_flags(_FLAGS["models_default"])
def models_default(name: str | None = None) -> None:
    """Show or choose the default model, which a chat uses if you name none."""
    if name is None:
        typer.echo(displayable_line(resolve(None, {}, os.environ).model))
        return
    require_available(name)
    name = paths.name_or_absolute_path(name)  # it is meant in other folders, too
    path = write_default_setting("model", name)
    print_remark(f"{name} is now the default model ({paths.with_tilde(path)})")
    if (other := os.environ.get("SIRCHAT_MODEL")) and other != name:
        print_remark(f"here the environment variable SIRCHAT_MODEL still says {other}")


@models_app.command("pull")
@with_flags(_FLAGS["models_pull"])
def models_pull(name: str, file: str | None = None) -> None:
    """Download a model from the Hugging Face hub.

    The model goes into the Hugging Face cache, which other programs share. After an interrupt, the
    same command continues the download.
    """
    from sirchat.models.hub import pull
    from sirchat.models.names import cached_folder, snapshot_folder
    from sirchat.models.shape import shape_of_folder
    from sirchat.ui.lists import format_bytes
    from sirchat.ui.screen import make_notes_console
    from sirchat.ui.status import download_bar

    try:
        with download_bar(make_notes_console()) as progress:
            pulled = pull(name, file, progress)
    except KeyboardInterrupt:
        print_remark("sirchat: what was downloaded stays; the same command downloads the rest")
        raise
    advice = f"to chat with this model: sirchat -m {pulled.name}"
    folder = snapshot_folder(cached_folder(name))
    if file is None and folder is not None:
        try:
            shape_of_folder(folder)
        except ModelError as error:
            advice = str(error.args[0]).replace(str(folder), "it")
    print_remark(f"{pulled.name}: {format_bytes(pulled.size)}; {advice}")


@models_app.command("recommend")
def models_recommend() -> None:
    """Name one model of the Hugging Face hub that fits this machine, and the command to get it.

    It is the largest of a few well known ones that fits the free memory with a budget of 4,096
    tokens, and is not too slow without a GPU. Nothing is downloaded or asked of the network.
    """
    from sirchat.memory.free_memory import free_memory
    from sirchat.models.fit import recommend_model
    from sirchat.models.shape import uses_cpu
    from sirchat.ui.lists import format_bytes

    free = free_memory()
    model = recommend_model(free, on_cpu=uses_cpu(_resolve_profile(None)))
    free_text = "the system does not say what is free"
    if free is not None:
        comparison = "more than is " if model["memory"] > free else ""
        free_text = f"{comparison}free here, in main memory: {format_bytes(free)}"
    need = f"takes about {format_bytes(model['memory'])} of memory; {free_text}"
    typer.echo(f"{model['file'].removesuffix('.gguf')}: {model['use']}; {need}")
    command = f"sirchat models pull {model['name']} --file {model['file']}"
    typer.echo(f"to download it ({format_bytes(model['download'])}): {command}")


def _resolve_profile(budget: str | None) -> Profile:
    return resolve(None, {"budget": budget} if budget else {}, os.environ)
