"""The `sirchat eval` commands."""

import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sirchat.errors import SettingError, shown
from sirchat.flags import with_settings
from sirchat.launch import Debug, Trust, load, profile_of
from sirchat.memory.policies import policy_class
from sirchat.profile import Profile, changed, parse_value

eval_app = typer.Typer(help="Measure what a model under a policy still remembers.")

Policies = Annotated[str, typer.Option(help="Policies to compare, with commas.", metavar="A,B,...")]
Budgets = Annotated[str, typer.Option(help="Budgets to compare, with commas.", metavar="N,M,...")]
Decays = Annotated[str, typer.Option(help="Decays to compare, with commas.", metavar="X,Y,...")]
Json = Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")]


@eval_app.command("recall")
@with_settings
def eval_recall(
    flags: dict[str, Any],
    policies: Policies = "full,entropy,sink",
    budgets: Budgets = "256",
    decays: Decays = "1",
    dialogues: Annotated[int, typer.Option(help="Conversations for each setting.", min=1)] = 300,
    between: Annotated[
        str, typer.Option(help="Rounds between fact and question.", metavar="N,M,...")
    ] = "20",
    before: Annotated[int, typer.Option(help="Rounds before the fact.", min=0)] = 0,
    ask: Annotated[
        str, typer.Option(help="What is asked for.", metavar="told|corrected|untold")
    ] = "told",
    kinds: Annotated[
        str, typer.Option(help="Kinds of fact, with commas; default: all.", metavar="A,B,...")
    ] = "",
    generate: Annotated[
        bool, typer.Option("--generate", help="Answer the rounds between, too, and score them.")
    ] = False,
    trust_remote_code: Trust = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell a fact, talk of other things, ask for it: the share of exact answers."""
    profile = profile_of(flags)
    settings = _grid(profile, policies, budgets, decays)
    from sirchat.tasks.recall import KIND_NAMES, Ask, RecallOptions
    from sirchat.tasks.recall_report import print_recall

    chosen = tuple(kinds.split(",")) if kinds else KIND_NAMES
    distances = _counts("between", between)
    options = RecallOptions(
        dialogues, distances, before, chosen, cast(Ask, ask), profile.seed, generate
    )
    model = load(profile, trust_remote_code)
    print_recall(model, settings, options, command=_command(), as_json=json)


@eval_app.command("rock-paper-scissors")
@with_settings
def eval_rock_paper_scissors(
    flags: dict[str, Any],
    policies: Policies = "entropy,sink",
    budgets: Budgets = "1024",
    decays: Decays = "0.9",
    rounds: Annotated[int, typer.Option(help="Rounds against each player.", min=1)] = 300,
    matches: Annotated[int, typer.Option(help="Matches against each player.", min=1)] = 10,
    trust_remote_code: Trust = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Play against three players who prefer a move each; the share of rounds won."""
    profile = profile_of(flags)
    settings = _grid(profile, policies, budgets, decays)
    from sirchat.tasks.rock_paper_scissors import MatchOptions
    from sirchat.tasks.rock_paper_scissors_report import print_matches

    options = MatchOptions(rounds, matches, profile.seed)
    model = load(profile, trust_remote_code)
    print_matches(model, settings, options, command=_command(), as_json=json)


@eval_app.command("retrieval")
@with_settings
def eval_retrieval(
    flags: dict[str, Any],
    task: Annotated[
        str, typer.Option(help="What is told.", metavar="stories-3|stories-10|facts-12|facts-40")
    ] = "facts-12",
    dialogues: Annotated[int, typer.Option(help="Conversations.", min=1)] = 200,
    base: Annotated[int, typer.Option(help="Base budget in tokens.", min=24)] = 72,
    counts: Annotated[
        str, typer.Option(help="How many tokens come back.", metavar="N,M,...")
    ] = "10,20,50,100,200",
    measures: Annotated[
        str, typer.Option(help="Measures to compare, with commas.", metavar="A,B,...")
    ] = "mips,cosine,cosine-pairwise,attention,random",
    weights: Annotated[
        str, typer.Option(help="Weights to compare.", metavar="none,surprisal")
    ] = "none,surprisal",
    spans: Annotated[
        str, typer.Option(help="Neighbours that come along.", metavar="N,M,...")
    ] = "0,2",
    out: Annotated[
        Path | None, typer.Option(help="A folder for results as they come, a table and a plot.")
    ] = None,
    trust_remote_code: Trust = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Let a small budget forget, bring tokens back by each measure: the share of exact answers."""
    profile = profile_of(flags)
    from sirchat.tasks.retrieval import RetrievalOptions
    from sirchat.tasks.retrieval_report import print_retrieval

    options = RetrievalOptions(
        task,
        dialogues,
        base,
        _counts("counts", counts),
        tuple(measures.split(",")),
        tuple(weights.split(",")),
        _counts("spans", spans),
        profile.seed,
    )
    for measure, weight in product(options.measures, options.weights):
        changed(profile, "eval", recall=measure, recall_weight=weight)
    model = load(profile, trust_remote_code)
    print_retrieval(model, profile, options, command=_command(), out=out, as_json=json)


def _command() -> str:
    """The command line, as it could be given again."""
    return shlex.join(["sirchat", *sys.argv[1:]])


def _grid(profile: Profile, policies: str, budgets: str, decays: str) -> list[Profile]:
    """A profile for each cell of a comparison; `full` has no budget and no decay."""
    cells: list[Profile] = []
    for policy, budget, decay in product(
        policies.split(","), budgets.split(","), decays.split(",")
    ):
        settings: dict[str, object] = {"policy": policy}
        if policy_class(policy).bounded:
            settings |= {
                "budget": parse_value("budget", budget),
                "decay": parse_value("decay", decay),
            }
        cell = changed(profile, "eval", **settings)
        if cell not in cells:
            cells.append(cell)
    return cells


def _counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(f"{option} is {shown(text)}, must be numbers of 0 or more, with commas")
    return tuple(map(int, parts))
