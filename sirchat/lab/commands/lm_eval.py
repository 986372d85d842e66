"""The command `sirchat eval lm-eval`: tasks of lm-evaluation-harness under several settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sirchat.config.profile import Profile
from sirchat.lab.commands.study_flags import Budgets, Decays, Policies, Sweep, settings_of, study

if TYPE_CHECKING:
    from sirchat.lab.studies.study import Study


lm_eval_app = typer.Typer()


@study(lm_eval_app, "lm-eval", None)
def lm_eval(
    profile: Profile,
    tasks: Annotated[str, typer.Option(help="Tasks, groups or tags.", metavar="A,B,...")],
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before a question; default: the task's.", min=0)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Documents of each task; default: all.", min=1)
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with task files of your own.", metavar="DIR")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask in the model's chat template.")
    ] = False,
    piece: Annotated[
        int | None,
        typer.Option(help="Read a context in rounds of so many tokens; default: as one.", min=1),
    ] = None,
    policies: Policies = "full,sink,entropy",
    budgets: Budgets = "256",
    decays: Decays = "1",
    sweep: Sweep = None,
) -> "Study":
    """Any task of EleutherAI's lm-evaluation-harness: its metrics under each setting."""
    settings = settings_of(profile, policies, budgets, decays, sweep or ())
    from sirchat.lab.studies.lm_eval.harness import Harness
    from sirchat.lab.studies.lm_eval.study import LmEval

    folder = None if include_path is None else str(include_path)
    harness = Harness(shots=num_fewshot, limit=limit, folder=folder, chat=apply_chat_template)
    return LmEval(settings, tasks=tuple(tasks.split(",")), harness=harness, piece=piece)
