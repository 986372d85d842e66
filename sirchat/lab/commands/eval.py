"""The `sirchat eval` commands that measure what a model remembers under a policy.

`eval.yaml` declares each study's own flags; `add_study` adds those that all studies have.
"""

import typer

from sirchat.lab.commands.study_flags import add_study
from sirchat.paths import read_yaml

eval_app = typer.Typer(
    add_completion=False,
    help="Measure what a model remembers under a policy.",
    no_args_is_help=True,
)

for _name, _declaration in read_yaml(__file__, "eval").items():
    add_study(eval_app, _name, **_declaration)
