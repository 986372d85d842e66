"""The `sirchat bench` commands, which measure speed and memory; `bench.yaml` has their flags."""

import inspect
from typing import Any

import typer

from sirchat.cli.flags import with_flags
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile, resolve
from sirchat.errors import SirchatError, UsageError
from sirchat.lab.commands.study_flags import whole_numbers
from sirchat.paths import read_yaml

bench_app = typer.Typer(add_completion=False, invoke_without_command=True)

_declared = read_yaml(__file__, "bench")


@bench_app.command()
@with_flags(**_declared["decode"])
def decode(json: bool, **given: Any) -> None:
    seen, cache = given["seen"], given["cache"]
    numbers = seen.split(",")
    if len(numbers) < 2 or not all(one.isdecimal() for one in numbers):
        raise UsageError(
            f"--seen {seen!r} is not two numbers EARLY,LATE", hint="for example: --seen 2000,100000"
        )
    if int(numbers[0]) < cache:
        raise UsageError(f"--seen {seen}: EARLY must be at least {cache}, the value of --cache")
    profile = _profile(given)
    from sirchat.lab.bench.decode import bench_decode
    from sirchat.lab.bench.peers import peer_for
    from sirchat.lab.bench.ratio import BenchOptions, bench_model, load_unpacked
    from sirchat.lab.bench.report import print_ratios
    from sirchat.models.devices import use_threads

    use_threads(profile.threads)  # llama.cpp gets as many
    options = BenchOptions(cache, given["rounds"], tuple(map(int, numbers)))
    with peer_for(profile.model, given["llama_cpp"], cache) as peer:
        how = profile.device, profile.dtype, profile.quantize
        loaded = bench_model(profile.model, *how, compile=profile.compile)
        bare = load_unpacked(loaded, profile)
        measured = bench_decode(loaded, options, bare=bare, peer=peer)
        print_ratios(measured, loaded, options, as_json=json)


def bench(context: typer.Context, **flags: Any) -> None:
    """Compare sirchat's speed with a plain loop of transformers, as ratios of times.

    A ratio below 1 says that sirchat is faster.

    Without a subcommand, this runs `decode`.
    """
    if context.invoked_subcommand is None:
        decode(**flags)
        return
    for name in context.params:  # a flag before the subcommand would have no effect
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag, command = f"--{name}", context.invoked_subcommand
            raise UsageError(f"{flag} has no effect before {command}", hint=f"put {flag} after it")


_flags = inspect.signature(decode)
_context = inspect.signature(bench).parameters["context"]
bench.__signature__ = _flags.replace(  # type: ignore[attr-defined]
    parameters=[_context, *_flags.parameters.values()]
)
bench_app.callback()(bench)


@bench_app.command()
@with_flags(**_declared["start"])
def start(json: bool, **given: Any) -> None:
    profile = _profile(given)
    longs = whole_numbers("tokens", given["tokens"])
    if min(longs, default=0) < 1:
        raise UsageError(f"--tokens {given['tokens']!r} must be numbers from 1 on")
    from sirchat.lab.bench.peers import peer_for
    from sirchat.lab.bench.report import print_start
    from sirchat.lab.bench.start import REPLY, bench_start
    from sirchat.models.devices import use_threads

    use_threads(profile.threads)  # llama.cpp gets as many
    with peer_for(profile.model, given["llama_cpp"], max(longs) + REPLY) as peer:
        rounds, with_chat = given["rounds"], given["chat"]
        measured = bench_start(profile, rounds, peer, longs, with_chat=with_chat)
        print_start(measured, profile.model, peer.note if peer else "", as_json=json)


@bench_app.command()
@with_flags(**_declared["gpu"])
def gpu(device: str, minutes: float, only: str, json: str | None) -> None:
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device!r} must be cuda or cpu")
    from sirchat.lab.bench.gpu import bench_gpu

    if not bench_gpu(device, minutes, only, json):
        raise SirchatError(
            "nothing could be measured",
            hint=f"the rows' notes say why, unless none has a word of --only {only!r}",
        )


def _profile(given: dict[str, Any]) -> Profile:
    names = ("model", "device", "dtype")
    profile = resolve(None, {name: given[name] for name in names}, {})
    for name in ("quantize", "compile"):
        profile = changed_profile(profile, f"--{name}", **{name: given[name]})
    return profile
