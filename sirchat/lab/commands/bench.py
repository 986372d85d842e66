"""The `sirchat bench` commands, which measure speed and memory side by side with a baseline."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sirchat.cli.flags import Debug, misplaced_flag_error
from sirchat.config.profile import Profile, parse_size
from sirchat.config.profile_files import changed_profile, resolve
from sirchat.errors import SirchatError, UsageError
from sirchat.lab.commands.study_flags import Json, whole_numbers

if TYPE_CHECKING:
    from sirchat.lab.bench.ratio import BenchOptions, Ratio
    from sirchat.models.model import LoadedModel

# Flags that `sirchat bench` once had, and the subcommands that replace them
_MOVED = {
    "--panel": "panel",
    "--attention": "attention",
    "--limits": "archive --tokens N",
    "--training": "training --tokens N",
}


class _BenchGroup(TyperGroup):
    """The command group `sirchat bench`, which refuses flags that it no longer has.

    The error message names the subcommand that replaces the flag.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in (one.partition("=")[0] for one in args):
            if flag in _MOVED:
                raise UsageError(
                    f"{flag} is now a subcommand", hint=f"use sirchat bench {_MOVED[flag]}"
                )
        return super().parse_args(ctx, args)


bench_app = typer.Typer(add_completion=False, cls=_BenchGroup, invoke_without_command=True)

Model = Annotated[
    str, typer.Option(help="A model, or a shape with random weights: 135m, 1b, 4b or 8b.")
]
Cache = Annotated[int, typer.Option(help="Number of tokens held while decoding.", min=64)]
Rounds = Annotated[int, typer.Option(help="Number of pairs of timings that are compared.", min=2)]
Seen = Annotated[
    str,
    typer.Option(
        metavar="EARLY,LATE[,...]", help="Numbers of tokens read before an early and a late timing."
    ),
]
Device = Annotated[
    str, typer.Option(metavar="auto|cuda|mps|cpu", help="Device on which the model runs.")
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16", help="Number type that the model computes with."
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        metavar="auto|none|packed|int8|int4",
        help="How weights are quantized; the transformers loop always uses float32.",
    ),
]
Compile = Annotated[
    str,
    typer.Option(
        help="Whether sirchat computes single tokens with a compiled program.",
        metavar="auto|on|off",
    ),
]
LlamaCppPython = Annotated[
    str | None,
    typer.Option(
        "--llama-cpp",
        metavar="PYTHON",
        help="Compare with llama.cpp on the same GGUF file. PYTHON is an interpreter with "
        "llama-cpp-python; default: the interpreter that runs sirchat, if it has that package.",
    ),
]
SirLLMPython = Annotated[
    str | None,
    typer.Option(
        "--sirllm",
        metavar="PYTHON",
        help="Compare with SirLLM's released code. PYTHON is an interpreter with that code and "
        "transformers 4.33.",
    ),
]


@bench_app.callback()
def bench(
    context: typer.Context,
    model: Model = "tiny",
    cache: Cache = 1024,
    rounds: Rounds = 15,
    seen: Seen = "2000,100000",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "auto",
    compile: Compile = "auto",
    llama_cpp: LlamaCppPython = None,
    sirllm: SirLLMPython = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare sirchat's speed with a plain loop of transformers, as ratios of times.

    A ratio below 1 says that sirchat is faster.

    Without a subcommand, this runs `decode`.
    """
    if context.invoked_subcommand is None:
        how = device, dtype, quantize, compile
        decode(model, cache, rounds, seen, *how, llama_cpp, sirllm, json)
        return
    for name in context.params:  # a flag before the subcommand would have no effect
        source = context.get_parameter_source(name)
        if name != "debug" and source is not None and source.name == "COMMANDLINE":
            raise misplaced_flag_error(f"--{name}", context.invoked_subcommand)


@bench_app.command()
def decode(
    model: Model = "tiny",
    cache: Cache = 1024,
    rounds: Rounds = 15,
    seen: Seen = "2000,100000",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "auto",
    compile: Compile = "auto",
    llama_cpp: LlamaCppPython = None,
    sirllm: SirLLMPython = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the speed of decode and prefill with a plain loop of transformers, and other ways.

    Decode is also compared with transformers' `generate` with a static cache, with reading the
    weights once, and with decode without an archive. Decode late in a chat is compared with decode
    early in it.

    A compiled model (see --compile) is also compared with the same model, not compiled. With a GGUF
    model, llama.cpp is measured too if llama-cpp-python is installed. With --sirllm, reading is
    also compared with SirLLM's released code.
    """
    numbers = seen.split(",")
    if len(numbers) < 2 or not all(one.isdecimal() for one in numbers):
        raise UsageError(
            f"--seen {seen!r} is not two numbers EARLY,LATE", hint="for example: --seen 2000,100000"
        )
    if int(numbers[0]) < cache:
        raise UsageError(f"--seen {seen}: EARLY must be at least {cache}, the value of --cache")
    profile = _profile(model, device, dtype, quantize=quantize, compile=compile)
    from sirchat.lab.bench.decode import bench_decode
    from sirchat.lab.bench.peers import peer_for, sirllm_by
    from sirchat.lab.bench.ratio import BenchOptions, load_unpacked
    from sirchat.models.compiling import use_compiled
    from sirchat.models.devices import use_threads

    use_threads(profile.threads)  # llama.cpp gets as many
    options = BenchOptions(cache=cache, rounds=rounds, seen=tuple(map(int, numbers)))
    with peer_for(profile.model, llama_cpp, cache) as peer, sirllm_by(sirllm) as code:
        loaded = _load(profile)
        use_compiled(loaded, profile.compile)
        bare = load_unpacked(loaded, profile)
        _measure(partial(bench_decode, bare=bare, peer=peer, sirllm=code), options, loaded, json)


@bench_app.command()
def start(
    model: Model = "tiny",
    rounds: Annotated[int, typer.Option(help="Number of starts that are timed.", min=1)] = 5,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "auto",
    compile: Compile = "auto",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens in the long texts.", metavar="N[,M...]")
    ] = "512,1000",
    chat: Annotated[
        bool, typer.Option(help="Measure the start of a chat in a terminal, too.")
    ] = True,
    llama_cpp: LlamaCppPython = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the start of a model in a new process: loading, first token, long texts, memory.

    The first start, which finds nothing that others have kept, is measured apart.
    With a GGUF model, llama.cpp is measured too if llama-cpp-python is installed.
    """
    profile = _profile(model, device, dtype, quantize=quantize, compile=compile)
    longs = whole_numbers("tokens", tokens)
    from sirchat.lab.bench.peers import peer_for
    from sirchat.lab.bench.report import print_start
    from sirchat.lab.bench.start import REPLY, bench_start
    from sirchat.models.devices import use_threads

    use_threads(profile.threads)  # llama.cpp gets as many
    with peer_for(profile.model, llama_cpp, max(longs) + REPLY) as peer:
        measured = bench_start(profile, rounds, peer, longs, with_chat=chat)
        print_start(measured, profile.model, peer.note if peer else "", as_json=json)


@bench_app.command()
def memory(
    model: Annotated[str, typer.Option(help="A model on this machine.")] = "tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the memory that `sirchat models fit` states for a model with the memory it takes.

    The model is loaded, and its KV cache filled to the length of the model's context.
    """
    profile = _profile(model, device, dtype, quantize=quantize)
    from sirchat.lab.bench.archive import bench_memory
    from sirchat.lab.bench.report import print_memory

    print_memory(bench_memory(profile), profile.model, as_json=json)


@bench_app.command("all")
def measure_all(
    model: Model = "smollm2",
    rounds: Rounds = 8,
    compile: Compile = "on",
    llama_cpp: LlamaCppPython = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure decode, start and recall of a model; --json prints all results as one record.

    The record also names the machine. `sirchat bench compare` shows two records side by side, for
    example of two machines.
    """
    profile = _profile(model, compile=compile)
    from sirchat.lab.bench.everything import bench_everything
    from sirchat.lab.bench.report import print_json, print_record

    (print_json if json else print_record)(bench_everything(profile, rounds, llama_cpp))


@bench_app.command()
def panel(
    model: Model = "tiny",
    cache: Cache = 1024,
    rounds: Rounds = 15,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the time of decoding a token with the live panel and without it."""
    profile = _profile(model, device, dtype)
    from sirchat.lab.bench.panel import bench_panel
    from sirchat.lab.bench.ratio import BenchOptions

    _measure(bench_panel, BenchOptions(cache=cache, rounds=rounds), _load(profile), json)


@bench_app.command()
def attention(
    model: Model = "tiny",
    cache: Cache = 1024,
    rounds: Rounds = 15,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the time of decoding under policies with attention weights and without them."""
    profile = _profile(model, device, dtype)
    from sirchat.lab.bench.decode import bench_attention
    from sirchat.lab.bench.ratio import BenchOptions

    _measure(bench_attention, BenchOptions(cache=cache, rounds=rounds), _load(profile), json)


@bench_app.command()
def recall(
    model: Model = "tiny",
    archived: Annotated[
        str, typer.Option(help="Lengths of the searched chats, in tokens.", metavar="N,M,...")
    ] = "4000,100000,1000000",
    retrievers: Annotated[
        str, typer.Option(help="Retrievers to measure, separated by commas.", metavar="A,B,...")
    ] = "words",
    cache: Cache = 1024,
    rounds: Rounds = 15,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the time of a turn with recall and without, and of the search, in long chats."""
    profile = _profile(model, device, dtype, quantize=quantize)
    sizes = whole_numbers("archived", archived)
    from sirchat.lab.bench.ratio import BenchOptions
    from sirchat.lab.bench.recall import bench_recall

    names = [
        changed_profile(profile, "--retrievers", recall=one).recall for one in retrievers.split(",")
    ]
    measure = partial(bench_recall, sizes=sizes, retrievers=names)
    _measure(measure, BenchOptions(cache=cache, rounds=rounds), _load(profile), json)


@bench_app.command()
def archive(
    tokens: Annotated[int, typer.Option(help="Number of tokens to read.", min=1)],
    archive_limit: Annotated[
        str, typer.Option(help="Maximum size of the archive, such as 1GiB.")
    ] = "256MiB",
    model: Model = "tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the memory and disk space of the archive of evicted tokens, in a long text."""
    profile = _profile(model, device, dtype, archive_limit=archive_limit)
    from sirchat.lab.bench.archive import bench_archive
    from sirchat.lab.bench.report import print_archive

    loaded = _load(profile)
    limit = parse_size(profile.archive_limit) or 0
    print_archive(bench_archive(loaded, tokens, limit), loaded, tokens, as_json=json)


@bench_app.command()
def training(
    tokens: Annotated[int, typer.Option(help="Number of tokens in a training row.", min=2)],
    model: Model = "tiny",
    rounds: Rounds = 15,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the time of an anchor training step with its attention mask and without a mask.

    On a GPU, a dense mask is also compared with a block mask.
    """
    profile = _profile(model, device, dtype)
    from sirchat.lab.bench.ratio import BenchOptions
    from sirchat.lab.bench.training import bench_training

    _measure(
        partial(bench_training, tokens=tokens),
        BenchOptions(rounds=rounds),
        _load(profile, for_hub=True),
        json,
    )


@bench_app.command()
def gpu(
    minutes: Annotated[
        float,
        typer.Option(help="Maximum number of minutes in all; other rows are left out.", min=0),
    ] = 9,
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="A GPU; cpu tries the rows at tiny sizes.")
    ] = "cuda",
    only: Annotated[
        str, typer.Option(metavar="A,B,...", help="Measure rows with such a word in their names.")
    ] = "",
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write all numbers to FILE as JSON; - stands for stdout."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure all of decoding on a GPU in one run, on models with random weights.

    The rows are decoding and its parts with 135m, 1b and 8b, packed too, and whether results are
    exact. The most important ones come first; an error in one is shown, and the others go on.
    """
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device!r} must be cuda or cpu")
    from sirchat.lab.bench.gpu import bench_gpu

    if not bench_gpu(device, minutes, only, json):
        raise SirchatError("nothing could be measured", hint="the rows' notes say why")


@bench_app.command("compare")
def compare_two(
    first: Annotated[Path, typer.Argument(help="A record that `bench all --json` has printed.")],
    second: Annotated[Path, typer.Argument(help="Another record, of another machine for example.")],
    debug: Debug = False,
) -> None:
    """Show the measurements in two records of `sirchat bench all --json` side by side."""
    from sirchat.lab.bench.record import read_record
    from sirchat.lab.bench.report import print_compared

    print_compared(read_record(first), read_record(second))


@bench_app.command()
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


def _profile(model: str, device: str = "auto", dtype: str = "auto", **more: str) -> Profile:
    profile = resolve(None, {"model": model, "device": device, "dtype": dtype}, {})
    for name, value in more.items():
        profile = changed_profile(profile, f"--{name.replace('_', '-')}", **{name: value})
    return profile


def _measure(
    benchmark: "Callable[[LoadedModel, BenchOptions], Iterator[Ratio]]",
    options: "BenchOptions",
    model: "LoadedModel",
    json: bool,
) -> None:
    """Run a benchmark that yields ratios of times, and print the ratios as a table or as JSON."""
    from sirchat.lab.bench.report import print_ratios

    print_ratios(benchmark(model, options), model, options, as_json=json)


def _load(profile: Profile, *, for_hub: bool = False) -> "LoadedModel":
    from sirchat.lab.bench.ratio import bench_model

    model, kind = profile.model, profile.dtype
    return bench_model(model, profile.device, kind, profile.quantize, for_hub)
