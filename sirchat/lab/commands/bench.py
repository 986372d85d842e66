"""The `sirchat bench` commands, which measure speed and memory side by side with a baseline."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sirchat.cli.flags import Debug, misplaced_flag_error
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile, resolve
from sirchat.errors import SirchatError, UsageError
from sirchat.lab.commands.study_flags import Json, whole_numbers

if TYPE_CHECKING:
    pass


bench_app = typer.Typer(add_completion=False, invoke_without_command=True)

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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the speed of decode and prefill with a plain loop of transformers, and other ways.

    Decode is also compared with transformers' `generate` with a static cache, with reading the
    weights once, and with decode without an archive. Decode late in a chat is compared with decode
    early in it.

    A compiled model (see --compile) is also compared with the same model, not compiled. With a GGUF
    model, llama.cpp is measured too if llama-cpp-python is installed.
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
    from sirchat.lab.bench.peers import peer_for
    from sirchat.lab.bench.ratio import BenchOptions, bench_model, load_unpacked
    from sirchat.lab.bench.report import print_ratios
    from sirchat.models.compiling import use_compiled
    from sirchat.models.devices import use_threads

    use_threads(profile.threads)  # llama.cpp gets as many
    options = BenchOptions(cache=cache, rounds=rounds, seen=tuple(map(int, numbers)))
    with peer_for(profile.model, llama_cpp, cache) as peer:
        loaded = bench_model(profile.model, profile.device, profile.dtype, profile.quantize)
        use_compiled(loaded, profile.compile)
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
        if name != "debug" and source is not None and source.name == "COMMANDLINE":
            raise misplaced_flag_error(f"--{name}", context.invoked_subcommand)


_flags = inspect.signature(decode)
_context = inspect.signature(bench).parameters["context"]
bench.__signature__ = _flags.replace(  # type: ignore[attr-defined]
    parameters=[_context, *_flags.parameters.values()]
)
bench_app.callback()(bench)


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
