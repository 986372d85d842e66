"""The `sirchat train` commands: anchors and sentence encoders; `train.yaml` has their flags."""

from typing import Any, get_args

import typer

from sirchat.cli.flags import Trust, with_flags
from sirchat.lab.commands.study_flags import whole_numbers
from sirchat.paths import read_yaml

train_app = typer.Typer(
    add_completion=False,
    help="Train a model with anchor tokens, or a sentence encoder.",
    no_args_is_help=True,
)
_declared = read_yaml(__file__, "train")


@train_app.command("anchor")
@with_flags(**_declared["anchor"])
def train_anchor(trust_remote_code: Trust = False, **given: Any) -> None:
    from sirchat.lab.studies.study import refuse_unknown
    from sirchat.lab.training.anchor import TRAINED, AnchorOptions
    from sirchat.lab.training.anchor_trainer import Attention, Schedule
    from sirchat.lab.training.display import train_anchor_with_progress
    from sirchat.text.anchors import Per

    names = {"variant": TRAINED, "per": get_args(Per)}
    names |= {"schedule": get_args(Schedule), "attention": get_args(Attention)}
    for name, known in names.items():
        refuse_unknown(f"--{name}", (given[name],), known)
    given["data"] = tuple(given["data"] or ())
    train_anchor_with_progress(AnchorOptions(**given, trust_remote_code=trust_remote_code))


@train_app.command("encoder")
@with_flags(**_declared["encoder"])
def train_encoder(trust_remote_code: Trust = False, **given: Any) -> None:
    from sirchat.lab.studies.study import refuse_unknown
    from sirchat.lab.training.display import train_encoder_with_progress
    from sirchat.lab.training.encoder import EncoderOptions
    from sirchat.models.devices import DeviceName

    refuse_unknown("--device", (given["device"],), get_args(DeviceName))
    lesson = given.pop("lesson")
    layers = whole_numbers("layers", given["layers"])
    given |= {"data": tuple(given["data"] or ()), "layers": layers}
    options = EncoderOptions(**given, trust_remote_code=trust_remote_code)
    train_encoder_with_progress(options, lesson)
