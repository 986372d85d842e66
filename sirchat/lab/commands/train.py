"""The `sirchat train` commands: anchors and sentence encoders."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from sirchat.cli.flags import Debug, Trust
from sirchat.errors import SettingError, nearest

train_app = typer.Typer(
    add_completion=False,
    help="Train a model with anchor tokens, or a sentence encoder.",
    no_args_is_help=True,
)

Out = Annotated[Path, typer.Option(help="Folder for the finished model.")]
Resume = Annotated[bool, typer.Option(help="Continue from the last checkpoint.")]


@train_app.command("anchor")
def train_anchor(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="smollm2, a GGUF file, a folder, or a Hugging Face name.")
    ] = "tiny",
    out: Out = Path("anchor"),
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text, transcript or JSONL file; can be repeated; default: generated talk."
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="Anchors are added tokens (ac), the last token of each sentence (ep), or none.",
            metavar="ac|ep|none",
        ),
    ] = "ac",
    per: Annotated[
        str,
        typer.Option(
            help="Where the added tokens of ac are placed.", metavar="sentence|round|tokens|random"
        ),
    ] = "sentence",
    scratch: Annotated[
        bool,
        typer.Option("--scratch", help="Start from random weights; keep the shape of the model."),
    ] = False,
    attention: Annotated[
        str,
        typer.Option(
            help="How attention is computed: a dense mask, or a block mask (GPU).",
            metavar="sdpa|flex",
        ),
    ] = "sdpa",
    tokens: Annotated[int, typer.Option(help="Number of tokens in a training row.", min=2)] = 4096,
    batch: Annotated[int, typer.Option(help="Number of rows in a training step.", min=1)] = 512,
    per_device: Annotated[
        int,
        typer.Option(
            help="Number of rows per device in a forward pass; several passes make one step.", min=1
        ),
    ] = 1,
    steps: Annotated[
        int | None,
        typer.Option(help="Number of steps; default: as many as read all data once.", min=1),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop after this many minutes, counting earlier runs.", min=0, metavar="MINUTES"
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.", min=0)] = 2e-5,
    warmup: Annotated[
        int, typer.Option(help="Number of warm-up steps, in which the learning rate rises.", min=0)
    ] = 20,
    schedule: Annotated[
        str,
        typer.Option(help="Learning-rate schedule after the warm-up.", metavar="constant|cosine"),
    ] = "constant",
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16.")] = True,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Recompute activations: takes less memory and more time.",
        ),
    ] = False,
    checkpoint_every: Annotated[
        int, typer.Option(help="Number of steps between checkpoints.", min=1)
    ] = 250,
    seed: Annotated[int, typer.Option(help="Random seed for generated talk and new weights.")] = 0,
    resume: Resume = False,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Train a model further, to compress each sentence or round into one token (AnSAN).

    The defaults are those of the paper, Anchor-based LLMs. To train on all GPUs or on several
    machines, start it with `torchrun --nproc-per-node 8 -m sirchat train anchor ...`.
    """
    from sirchat.lab.training.anchor import TRAINED, AnchorOptions
    from sirchat.lab.training.anchor_trainer import Attention, Schedule
    from sirchat.lab.training.display import train_anchor_with_progress
    from sirchat.text.anchors import Per

    _refuse_unknown("variant", variant, TRAINED)
    _refuse_unknown("per", per, get_args(Per))
    _refuse_unknown("schedule", schedule, get_args(Schedule))
    _refuse_unknown("attention", attention, get_args(Attention))
    given = {name: value for name, value in context.params.items() if name != "debug"}
    options = AnchorOptions(**given | {"out": out, "data": tuple(data or ())})
    train_anchor_with_progress(options)


@train_app.command("encoder")
def train_encoder(
    model: Annotated[
        str, typer.Option(help="smollm2, tiny, a GGUF file, a folder, or a Hugging Face name.")
    ] = "smollm2",
    teacher: Annotated[
        str,
        typer.Option(help="Sentence encoder to learn from: a folder, or a name on the hub."),
    ] = "sentence-transformers/all-MiniLM-L6-v2",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Conversations to learn from: a transcript, or a data file of `sirchat eval`; "
            "can be repeated; generated talk and text that the model writes are added up to "
            "--tokens."
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            help="Numbers of the layers whose hidden states are mapped, separated by commas; "
            "default: at 4, 8 and 12 fifteenths of the depth.",
            metavar="N,M,...",
        ),
    ] = "",
    tokens: Annotated[int, typer.Option(help="Number of tokens to read.", min=1000)] = 40_000,
    out: Annotated[
        Path | None, typer.Option(help="File for the encoder; default: where chats look for it.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Random seed for generated text and the order of data.")
    ] = 0,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Train a sentence encoder, by which recall finds what is said in other words.

    It maps the model's hidden states to a teacher's vectors, which takes minutes on a CPU.
    """
    from sirchat.lab.training.display import train_encoder_with_progress
    from sirchat.lab.training.encoder import EncoderOptions

    files, chosen = tuple(data or ()), _layers(layers)
    train_encoder_with_progress(
        EncoderOptions(model, teacher, files, chosen, tokens, out, seed, trust_remote_code)
    )


def _layers(value: str) -> tuple[int, ...]:
    """Parse a comma-separated list of layer numbers; raises SettingError for any other text."""
    try:
        return tuple(int(one) for one in value.split(",") if value)
    except ValueError:
        raise SettingError(
            f"--layers can't be {value!r}; it must be numbers, separated by commas",
            hint="for example: 1,10,20",
        ) from None


def _refuse_unknown(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(
            f"--{name} can't be {value!r}; it must be one of {', '.join(allowed)}",
            hint=nearest(value, allowed),
        )
