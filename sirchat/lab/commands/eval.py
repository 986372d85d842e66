"""The `sirchat eval` commands that measure what a model remembers under a policy.

Each function declares a study's own flags; the decorator `study` adds those that all studies have.
"""

from typing import Annotated

import typer

from sirchat.lab.commands.study_flags import Defaults, study

eval_app = typer.Typer(
    add_completion=False,
    help="Measure what a model remembers under a policy.",
    no_args_is_help=True,
)

_PAPERS = "full,entropy,sink,random,interval,reservoir"
_QUESTIONS = "Number of questions for each table cell."

Scored = Annotated[
    str,
    typer.Option(
        help="Choose an option by the probability of its letter (paper) or of its text (text), "
        "as in SirLLM's code (released), or as named in the generated reply (reply).",
        metavar="paper|text|released|reply",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Folder of SirLLM's released files, or one file in their format; "
        "default: generated data.",
        metavar="PATH",
    ),
]
Conversations = Annotated[int, typer.Option(help="Number of conversations.", min=1)]
Base = Annotated[int, typer.Option(help="Budget, not counting restored tokens.", min=24)]


@study(
    eval_app,
    "focus",
    Defaults("salience", budgets="4096", limit=60, of=_QUESTIONS),
    "facts_in_dialogue.question_study:focus_study",
)
def focus(
    data: Annotated[
        str,
        typer.Option(
            help="Real conversations: SirLLM's DailyDialog, LoCoMo, Realtalk, or a transcript.",
            metavar="PATH",
        ),
    ],
) -> None:
    """Measure whether a model answers better from what recall finds than from all that it holds.

    The report compares the setting focus, off and on, by questions about facts that were told in
    real conversations, and by the surprisal of ordinary replies.
    """


@study(
    eval_app,
    "facts-in-dialogue",
    Defaults("full,entropy,sink", budgets="256", of="Number of questions for each length."),
    "facts_in_dialogue.question_study:facts_study",
    former="chatter",
)
def facts_in_dialogue(
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
            help="Also make summaries, as /summarize does, and count the facts in them: extract.",
            metavar="WAY,...",
        ),
    ] = "",
    questions: Annotated[
        str,
        typer.Option(
            help="Types of questions, instead of the study's first ones: shared, paraphrase, "
            "corrected, listed, two-step.",
            metavar="A,B,...",
        ),
    ] = "",
    half: Annotated[
        str,
        typer.Option(
            help="The half of the kinds of facts that is asked for: choose numbers with one, "
            "judge them with the other.",
            metavar="a|b|all",
        ),
    ] = "all",
) -> None:
    """Measure recall in real conversations: insert facts, ask for each at the end, score answers.

    The report has the share of right choices among four replies, the share of generated replies
    that say the fact, and the surprisal of the right replies. With --questions there is a table for
    each type of question, and one of the conversations' own replies.
    """


@study(
    eval_app, "dailydialog", Defaults(_PAPERS), "multiple_choice:MultipleChoice", task="dailydialog"
)
def dailydialog(scoring: Scored = "paper", data: Data = None) -> None:
    """Run SirLLM's DailyDialog task: multiple-choice questions in conversations.

    The report has the share of right choices.
    """


@study(eval_app, "grocery", Defaults(_PAPERS), "multiple_choice:MultipleChoice", task="grocery")
def grocery(
    scoring: Scored = "paper",
    shots: Annotated[
        str,
        typer.Option(
            help="Numbers of examples (shots); each number adds a row to the table.",
            metavar="1,2,3",
        ),
    ] = "",
    data: Data = None,
) -> None:
    """Run SirLLM's Grocery Shopping task: name an item to buy, ask for it 20 questions later.

    The report has the share of right choices.
    """


@study(
    eval_app,
    "rock-paper-scissors",
    Defaults("entropy,sink", "1024", "0.9", 10, "Number of matches against each player."),
    "rock_paper_scissors:RockPaperScissors",
)
def rock_paper_scissors(
    rounds: Annotated[int, typer.Option(help="Number of rounds in a match.", min=1)] = 300,
    scoring: Scored = "paper",
    data: Data = None,
) -> None:
    """Run SirLLM's rock-paper-scissors task: the model plays against three players with habits.

    Each player prefers one move. The report has the share of rounds that the model wins.
    """


@study(
    eval_app,
    "perplexity",
    Defaults("full,window,sink,entropy", limit=20_000, of="Number of tokens to read."),
    "perplexity:Perplexity",
)
def perplexity(
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
) -> None:
    """Measure perplexity under a budget: read a long text, and report its surprisal.

    The report has the mean surprisal per token, in nats, along the text.
    """


@study(
    eval_app,
    "locomo",
    Defaults(
        "window,sink,entropy",
        budgets="512",
        limit=50,
        of="Number of questions for each conversation.",
    ),
    "locomo:locomo_study",
)
def locomo(
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
) -> None:
    """Measure recall in conversations over weeks (LoCoMo or Realtalk): ask questions about them.

    The report has the scores of the answers. It also says how much evidence (the messages with the
    answer) is still in the cache.
    """


@study(eval_app, "context", Defaults("full,anchor", "2048", limit=50), "perplexity:Context")
def context(
    lengths: Annotated[
        str, typer.Option(help="Lengths of the context, in tokens.", metavar="N,M,...")
    ] = "128,256,512,1024,2048",
) -> None:
    """Measure the perplexity of synthetic conversations at several lengths of the context."""


@study(eval_app, "retrieval", None, "retrieval:Retrieval")
def retrieval(
    task: Annotated[
        str,
        typer.Option(
            help="How many stories or facts are told and asked for.",
            metavar="stories-3|facts-12|...",
        ),
    ] = "facts-12",
    limit: Conversations = 200,
    bases: Annotated[
        str,
        typer.Option("--base", help="Budgets, not counting restored tokens.", metavar="N,M,..."),
    ] = "72",
    counts: Annotated[
        str, typer.Option(help="Numbers of tokens that are restored.", metavar="N,M,...")
    ] = "10,20,50,100,200",
    retrievers: Annotated[
        str, typer.Option(help="Retrievers to compare, separated by commas.", metavar="A,B,...")
    ] = "mips,cosine,cosine-pairwise,attention,words,random",
    weights: Annotated[
        str, typer.Option(help="Values of recall_weight to compare.", metavar="none,surprisal")
    ] = "none,surprisal",
    data: Annotated[
        str | None,
        typer.Option(help="Use the conversations in this file instead of the task's own."),
    ] = None,
) -> None:
    """Compare retrievers, which choose the evicted tokens that recall restores for a question.

    The report says, for each retriever, what share of the answers is exact.
    """


@study(eval_app, "privacy", None, "retrieval:privacy_study")
def privacy(
    task: Annotated[
        str,
        typer.Option(
            help="How many stories or facts are told and asked for.",
            metavar="facts-12|facts-40|stories-10|...",
        ),
    ] = "facts-12",
    limit: Conversations = 100,
    base: Base = 72,
    counts: Annotated[
        str,
        typer.Option(help="Numbers of tokens that are restored; 0 for none.", metavar="N,M,..."),
    ] = "0,10,20,50,100,200",
) -> None:
    """Measure how much of a private, evicted turn recall reveals, with more and more tokens.

    The report also has the share of right answers to questions that need no memory.
    """
