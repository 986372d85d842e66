"""The `sirchat eval` commands that measure what a model remembers under a policy.

Each function builds a study from its options. The decorator `study` makes it a command, and adds
the flags that all studies have.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sirchat.config.profile import Profile
from sirchat.lab.commands.eval_mechanisms import mechanisms_app
from sirchat.lab.commands.study_flags import (
    Budgets,
    Compared,
    Decays,
    Defaults,
    Policies,
    Sweep,
    settings_of,
    study,
    whole_numbers,
)

if TYPE_CHECKING:
    from sirchat.lab.studies.choice import Scoring
    from sirchat.lab.studies.study import Study

eval_app = typer.Typer(
    add_completion=False,
    help="Measure what a model remembers under a policy.",
    no_args_is_help=True,
)
eval_app.add_typer(mechanisms_app)

_PAPERS = "full,entropy,sink,random,interval,reservoir"

Scored = Annotated[
    str,
    typer.Option(
        help="Choose an option by the probability of its letter (paper) or of its text (text), "
        "as in SirLLM's code (released), or as named in the generated reply (reply).",
        metavar="paper|text|released|reply",
    ),
]
FactCounts = Annotated[
    str, typer.Option(help="Number of facts told in each conversation.", metavar="N,M,...")
]
Distances = Annotated[
    str, typer.Option(help="Numbers of rounds between facts and questions.", metavar="N,M,...")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Folder of SirLLM's released files, or one file in their format; "
        "default: generated data.",
        metavar="PATH",
    ),
]


@study(
    eval_app,
    "facts",
    Defaults(
        "entropy,sink", budgets="128", limit=300, of="Number of questions for each table cell."
    ),
)
def facts(
    compared: Compared,
    facts: FactCounts = "1,4,8",
    between: Distances = "20,60",
) -> "Study":
    """Measure recall of several facts: tell them, talk of other things, then ask for each.

    The report has the share of answers that are right word for word, and the perplexity of the text
    after the facts.
    """
    from sirchat.lab.studies.facts import Facts

    return Facts(
        **compared,
        facts=whole_numbers("facts", facts),
        between=whole_numbers("between", between),
    )


@study(
    eval_app,
    "policies",
    Defaults(
        "salience,entropy,sink,random,reservoir,h2o,tova,snapkv",
        budgets="96,128,256,512",
        limit=300,
        of="Number of questions for each table cell.",
    ),
)
def policies(
    compared: Compared,
    parts: Annotated[
        str, typer.Option(help="Parts of the study to run, separated by commas.", metavar="A,B,...")
    ] = "ablation,grocery,rock-paper-scissors,facts",
    facts: FactCounts = "1,4,8",
    between: Distances = "20,60",
    at: Annotated[int, typer.Option(help="Budget of all parts except facts.", min=1)] = 128,
    data: Data = None,
) -> "Study":
    """Compare eviction policies by four studies, or by some of them.

    The study facts measures recalled facts and perplexity. The studies grocery and
    rock-paper-scissors are SirLLM's tasks. The ablation turns off parts of each policy.
    """
    from sirchat.lab.studies.policies import Policies

    return Policies(
        **compared,
        parts=tuple(parts.split(",")),
        facts=whole_numbers("facts", facts),
        between=whole_numbers("between", between),
        at=at,
        data=data,
    )


@study(
    eval_app,
    "facts-in-dialogue",
    Defaults("full,entropy,sink", budgets="256", of="Number of questions for each length."),
    former="chatter",
)
def facts_in_dialogue(
    compared: Compared,
    data: Annotated[
        str,
        typer.Option(
            help="Real conversations: SirLLM's DailyDialog, LoCoMo, Realtalk, or a transcript.",
            metavar="PATH",
        ),
    ],
    lengths: Annotated[
        str, typer.Option(help="Lengths of the conversations, in tokens.", metavar="N,M,...")
    ] = "1000",
    facts: Annotated[
        int, typer.Option(help="Number of facts told in each conversation.", min=1)
    ] = 5,
    reply_tokens: Annotated[
        int,
        typer.Option(help="Maximum number of tokens in a reply; 0 generates no replies.", min=0),
    ] = 32,
    summary: Annotated[
        str,
        typer.Option(
            help="Also make summaries, as /summarize does, and count the facts in them: extract, "
            "model, or both.",
            metavar="WAY,...",
        ),
    ] = "",
) -> "Study":
    """Measure recall in real conversations: insert facts, ask for each at the end, score answers.

    The report has the share of right choices among four replies, the share of generated replies
    that say the fact, and the surprisal of the right replies.
    """
    from sirchat.lab.studies.facts_in_dialogue.study import FactsInDialogue

    return FactsInDialogue(
        **compared,
        data=data,
        lengths=whole_numbers("lengths", lengths),
        facts=facts,
        reply_tokens=reply_tokens,
        summary=tuple(filter(None, summary.split(","))),
    )


@study(eval_app, "dailydialog", Defaults(_PAPERS))
def dailydialog(
    compared: Compared,
    scoring: Scored = "paper",
    data: Data = None,
) -> "Study":
    """Run SirLLM's DailyDialog task: multiple-choice questions in conversations.

    The report has the share of right choices.
    """
    return _multiple_choice(compared, "dailydialog", scoring, (), data)


@study(eval_app, "grocery", Defaults(_PAPERS))
def grocery(
    compared: Compared,
    scoring: Scored = "paper",
    shots: Annotated[
        str,
        typer.Option(
            help="Numbers of examples (shots); each number adds a row to the table.",
            metavar="1,2,3",
        ),
    ] = "",
    data: Data = None,
) -> "Study":
    """Run SirLLM's Grocery Shopping task: name an item to buy, ask for it 20 questions later.

    The report has the share of right choices.
    """
    counts = whole_numbers("shots", shots) if shots else ()
    return _multiple_choice(compared, "grocery", scoring, counts, data)


@study(
    eval_app,
    "rock-paper-scissors",
    Defaults(
        "entropy,sink",
        budgets="1024",
        decays="0.9",
        limit=10,
        of="Number of matches against each player.",
    ),
)
def rock_paper_scissors(
    compared: Compared,
    rounds: Annotated[int, typer.Option(help="Number of rounds in a match.", min=1)] = 300,
    scoring: Scored = "paper",
    data: Data = None,
) -> "Study":
    """Run SirLLM's rock-paper-scissors task: the model plays against three players with habits.

    Each player prefers one move. The report has the share of rounds that the model wins.
    """
    from sirchat.lab.studies.rock_paper_scissors import RockPaperScissors

    return RockPaperScissors(**compared, rounds=rounds, scoring=cast("Scoring", scoring), data=data)


@study(
    eval_app,
    "perplexity",
    Defaults("full,window,sink,entropy", limit=20_000, of="Number of tokens to read."),
)
def perplexity(
    compared: Compared,
    text: Annotated[
        str | None, typer.Option(help="Text file to read; default: generated talk.", metavar="FILE")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Real conversations, read turn by turn as in a chat.", metavar="PATH"),
    ] = None,
    readings: Annotated[
        int,
        typer.Option(help="Number of times to read the text, each time from a later start.", min=1),
    ] = 1,
) -> "Study":
    """Measure perplexity under a budget: read a long text, and report its surprisal.

    The report has the mean surprisal per token, in nats, along the text.
    """
    from sirchat.lab.studies.perplexity import Perplexity

    return Perplexity(**compared, text=text, data=data, readings=readings)


@study(
    eval_app,
    "locomo",
    Defaults(
        "window,sink,entropy",
        budgets="512",
        limit=50,
        of="Number of questions for each conversation.",
    ),
)
def locomo(
    compared: Compared,
    data: Annotated[
        str, typer.Option(help="LoCoMo's locomo10.json, or Realtalk's files.", metavar="PATH")
    ],
    conversations: Annotated[
        str,
        typer.Option(
            help="Numbers of the conversations to use, from 0; default: all.", metavar="N,M,..."
        ),
    ] = "",
    reply_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens in a reply; 0: no replies, no F1.", min=0)
    ] = 24,
    retrievers: Annotated[
        str,
        typer.Option(
            help="Retrievers to compare, separated by commas; default: the value of --recall.",
            metavar="A,B,...",
        ),
    ] = "",
    counts: Annotated[
        str, typer.Option(help="Numbers of tokens that retrievers restore.", metavar="N,M,...")
    ] = "100,200,400",
) -> "Study":
    """Measure recall in conversations over weeks (LoCoMo or Realtalk): ask questions about them.

    The report has the scores of the answers. It also says how much evidence (the messages with the
    answer) is still in the cache.
    """
    from sirchat.lab.studies.locomo import Locomo

    if not retrievers and compared["settings"][0].recall != "off":
        retrievers = compared["settings"][0].recall
    return Locomo(
        **compared,
        data=data,
        conversations=whole_numbers("conversations", conversations) if conversations else (),
        reply_tokens=reply_tokens,
        retrievers=tuple(retrievers.split(",")) if retrievers else (),
        counts=whole_numbers("counts", counts),
    )


def _multiple_choice(
    compared: Compared, task: str, scoring: str, shots: tuple[int, ...], data: str | None
) -> "Study":
    from sirchat.lab.studies.multiple_choice import MultipleChoice

    return MultipleChoice(
        **compared, task=task, scoring=cast("Scoring", scoring), shots=shots, data=data
    )


if TYPE_CHECKING:
    from sirchat.lab.studies.study import Study


@study(eval_app, "lm-eval", None)
def lm_eval(
    profile: Profile,
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval, or groups or tags of tasks.", metavar="A,B,...")
    ],
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            help="Number of examples before each question; default: what the task sets.", min=0
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of documents from each task; default: all.", min=1)
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with task files of your own.", metavar="DIR")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Apply the model's chat template.")
    ] = False,
    piece: Annotated[
        int | None,
        typer.Option(
            help="Split each context into rounds of this many tokens; default: one round.",
            min=1,
        ),
    ] = None,
    policies: Policies = "full,sink,entropy",
    budgets: Budgets = "256",
    decays: Decays = "1",
    sweep: Sweep = None,
) -> "Study":
    """Run tasks of EleutherAI's lm-evaluation-harness under several settings of sirchat.

    The report has the metrics of each task under each setting.
    """
    settings = settings_of(profile, policies, budgets, decays, sweep or ())
    from sirchat.lab.studies.lm_eval.study import Harness, LmEval

    folder = None if include_path is None else str(include_path)
    harness = Harness(shots=num_fewshot, limit=limit, folder=folder, chat=apply_chat_template)
    return LmEval(settings, tasks=tuple(tasks.split(",")), harness=harness, piece=piece)
