"""The `sirchat train` commands: anchors and sentence encoders; `train.yaml` has their flags."""

from typing import Any, get_args

import typer

from sirchat.cli.flags import Debug, Trust
from sirchat.errors import SettingError, nearest
from sirchat.lab.commands.declared_flags import declared, with_flags

train_app = typer.Typer(
    add_completion=False,
    help="Train a model with anchor tokens, or a sentence encoder.",
    no_args_is_help=True,
)
_declared = declared("train")


@train_app.command("anchor")
@with_flags(_declared["anchor"])
def train_anchor(trust_remote_code: Trust = False, debug: Debug = False, **given: Any) -> None:
    from sirchat.lab.training.anchor import TRAINED, AnchorOptions
    from sirchat.lab.training.anchor_trainer import Attention, Schedule
    from sirchat.lab.training.display import train_anchor_with_progress
    from sirchat.text.anchors import Per

    _refuse_unknown("variant", given["variant"], TRAINED)
    _refuse_unknown("per", given["per"], get_args(Per))
    _refuse_unknown("schedule", given["schedule"], get_args(Schedule))
    _refuse_unknown("attention", given["attention"], get_args(Attention))
    given["data"] = tuple(given["data"] or ())
    train_anchor_with_progress(AnchorOptions(**given, trust_remote_code=trust_remote_code))


@train_app.command("encoder")
@with_flags(_declared["encoder"])
def train_encoder(trust_remote_code: Trust = False, debug: Debug = False, **given: Any) -> None:
    from sirchat.lab.training.display import train_encoder_with_progress
    from sirchat.lab.training.encoder import EncoderOptions

    given |= {"data": tuple(given["data"] or ()), "layers": _layers(given["layers"])}
    train_encoder_with_progress(EncoderOptions(**given, trust_remote_code=trust_remote_code))


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
