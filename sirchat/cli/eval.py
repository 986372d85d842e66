"""The `sirchat eval` commands: each makes a study, of its own options and those of all."""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from sirchat.cli.study_flags import Compared, Defaults, study, whole_numbers
from sirchat.config.layers import changed
from sirchat.config.profile import Profile
from sirchat.config.values import parse_value

if TYPE_CHECKING:
    from sirchat.tasks.choice import Scoring
    from sirchat.tasks.recall import Ask
    from sirchat.tasks.study import Study
    from sirchat.text.anchors import Per

eval_app = typer.Typer(help="Measure what a model under a policy still remembers.")

_PAPERS = "full,entropy,sink,random,interval,reservoir"

Scored = Annotated[
    str, typer.Option(help="How an option is taken.", metavar="paper|released|reply")
]
Conversations = Annotated[int, typer.Option(help="Conversations.", min=1)]
Told = Annotated[str, typer.Option(help="Facts told in a conversation.", metavar="N,M,...")]
Distances = Annotated[
    str, typer.Option(help="Rounds between facts and questions.", metavar="N,M,...")
]
Base = Annotated[int, typer.Option(help="Base budget in tokens.", min=24)]
Data = Annotated[
    str | None,
    typer.Option(help="A folder with the paper's released files; else questions of our own."),
]


@study(eval_app, "recall", Defaults("full,entropy,sink", limit=300))
def recall(
    compared: Compared,
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
) -> "Study":
    """Tell a fact, talk of other things, ask for it: the share of exact answers."""
    from sirchat.tasks.recall import KIND_NAMES, RecallStudy

    chosen = tuple(kinds.split(",")) if kinds else KIND_NAMES
    distances = whole_numbers("between", between)
    return RecallStudy(*compared, distances, before, chosen, cast("Ask", ask), generate)


@study(eval_app, "facts", Defaults("entropy,sink", "128", limit=300, of="Questions for each cell."))
def facts(
    compared: Compared,
    facts: Told = "1,4,8",
    between: Distances = "20,60",
) -> "Study":
    """Tell facts, talk of other things, ask for each: the share of exact answers, perplexity."""
    from sirchat.tasks.facts import Facts

    return Facts(*compared, whole_numbers("facts", facts), whole_numbers("between", between))


@study(
    eval_app,
    "policies",
    Defaults(
        "salience,entropy,sink,random,reservoir,attention",
        "96,128,256,512",
        limit=300,
        of="Questions for each cell.",
    ),
)
def policies(
    compared: Compared,
    parts: Annotated[
        str, typer.Option(help="What is asked; all of it unless named here.", metavar="A,B,...")
    ] = "ablation,grocery,rock-paper-scissors,facts",
    facts: Told = "1,4,8",
    between: Distances = "20,60",
    at: Annotated[int, typer.Option(help="Budget of ablation, lists and games.", min=1)] = 128,
    data: Data = None,
) -> "Study":
    """Compare policies: facts, SirLLM's lists and games, and the perplexity of what follows."""
    from sirchat.tasks.policies import Policies

    counts, distances = whole_numbers("facts", facts), whole_numbers("between", between)
    return Policies(*compared, tuple(parts.split(",")), counts, distances, at, data)


@study(eval_app, "topics", Defaults("entropy", "128", "1,0.95,0.9,0.8,auto", limit=75))
def topics(
    compared: Compared,
    topics: Annotated[int, typer.Option(help="Topics that follow each other.", min=1)] = 3,
    facts: Annotated[int, typer.Option(help="Facts told of each.", min=1)] = 4,
    between: Annotated[int, typer.Option(help="Rounds of small talk behind them.", min=0)] = 20,
) -> "Study":
    """Change the topic: the share of exact answers about the last one, and the first."""
    from sirchat.tasks.topics import Topics

    return Topics(*compared, topics, facts, between)


@study(eval_app, "dailydialog", Defaults(_PAPERS))
def dailydialog(
    compared: Compared,
    scoring: Scored = "paper",
    data: Data = None,
) -> "Study":
    """SirLLM's DailyDialog: conversations of multiple-choice questions."""
    return _multiple_choice(compared, "dailydialog", scoring, (), data)


@study(eval_app, "grocery", Defaults(_PAPERS))
def grocery(
    compared: Compared,
    scoring: Scored = "paper",
    shots: Annotated[
        str, typer.Option(help="Few-shot rows beside the policies.", metavar="1,2,3")
    ] = "",
    data: Data = None,
) -> "Study":
    """SirLLM's Grocery Shopping: what to buy, 20 questions, which of four it was."""
    counts = whole_numbers("shots", shots) if shots else ()
    return _multiple_choice(compared, "grocery", scoring, counts, data)


@study(
    eval_app,
    "rock-paper-scissors",
    Defaults("entropy,sink", "1024", "0.9", 10, "Matches against each player."),
)
def rock_paper_scissors(
    compared: Compared,
    rounds: Annotated[int, typer.Option(help="Rounds of a match.", min=1)] = 300,
    scoring: Scored = "paper",
    data: Data = None,
) -> "Study":
    """Play against three players who prefer a move each; the share of rounds won."""
    from sirchat.tasks.rock_paper_scissors import RockPaperScissors

    return RockPaperScissors(*compared, rounds, cast("Scoring", scoring), data)


@study(
    eval_app, "perplexity", Defaults("full,window,sink,entropy", limit=20_000, of="Tokens to read.")
)
def perplexity(
    compared: Compared,
    text: Annotated[
        str | None, typer.Option(help="A text file; else talk of our own.", metavar="FILE")
    ] = None,
    readings: Annotated[
        int, typer.Option(help="Times to read it, each from further on.", min=1)
    ] = 1,
) -> "Study":
    """Read a long text: what a token costs, in nats, as the text goes on."""
    from sirchat.tasks.perplexity import Perplexity

    return Perplexity(*compared, text, readings)


@study(eval_app, "context", Defaults("full,anchor", "2048", limit=50, of="Conversations."))
def context(
    compared: Compared,
    lengths: Annotated[
        str, typer.Option(help="Tokens of context.", metavar="N,M,...")
    ] = "128,256,512,1024,2048",
) -> "Study":
    """Read conversations: perplexity by the length of the context."""
    from sirchat.tasks.context import Context

    return Context(*compared, whole_numbers("lengths", lengths))


@study(
    eval_app,
    "demonstrations",
    Defaults("full,anchor", "1024", limit=50, of="Sets of demonstrations for each setting."),
)
def demonstrations(
    compared: Compared,
    shots: Annotated[str, typer.Option(help="How many demonstrations.", metavar="N,M,...")] = "0,5",
    questions: Annotated[int, typer.Option(help="Questions behind each set.", min=1)] = 4,
    places: Annotated[
        str,
        typer.Option(
            help="Where anchors are put, beside where the model has them.",
            metavar="tokens,random,...",
        ),
    ] = "",
) -> "Study":
    """Ask behind demonstrations that are read once: accuracy, cache and speed of anchors."""
    from sirchat.tasks.demonstrations import Demonstrations

    put = cast("tuple[Per, ...]", tuple(places.split(",")) if places else ())
    return Demonstrations(*compared, whole_numbers("shots", shots), questions, put)


@study(eval_app, "anchor-attention", None)
def anchor_attention(
    profile: Profile,
    limit: Conversations = 50,
    facts: Annotated[int, typer.Option(help="Facts told in each.")] = 5,
) -> "Study":
    """Tell facts and ask for one: which rounds' anchors its answer attends to."""
    from sirchat.tasks.anchor_attention import AnchorAttention

    return AnchorAttention(profile, limit, facts)


@study(eval_app, "attention", None)
def attention(
    profile: Profile,
    limit: Annotated[int, typer.Option(help="Texts.", min=1)] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens read of each text.")] = 40,
    text: Annotated[
        str | None, typer.Option(help="A file with a text a line; else talk of our own.")
    ] = None,
) -> "Study":
    """SirLLM's Figure 3: what attention tokens get, by how much they surprise."""
    from sirchat.tasks.attention import AttentionStudy

    return AttentionStudy(profile, limit, tokens, text)


@study(
    eval_app, "uniformity", Defaults("reservoir,random", "96", "1", 300, "Lots for each setting.")
)
def uniformity(
    compared: Compared,
    rounds: Annotated[int, typer.Option(help="Rounds of the stream.", min=1)] = 8,
) -> "Study":
    """Read one stream with many lots: how often each tenth of it is still held."""
    from sirchat.tasks.uniformity import Uniformity

    return Uniformity(*compared, rounds)


@study(eval_app, "retrieval", None)
def retrieval(
    profile: Profile,
    task: Annotated[
        str, typer.Option(help="What is told.", metavar="stories-3|facts-12|...")
    ] = "facts-12",
    limit: Conversations = 200,
    base: Annotated[str, typer.Option(help="Base budgets in tokens.", metavar="N,M,...")] = "72",
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
    soft: Annotated[
        str, typer.Option(help="Roots shared with neighbours, or not.", metavar="off,on")
    ] = "off,on",
    data: Annotated[
        str | None, typer.Option(help="A file of conversations, instead of a task's.")
    ] = None,
) -> "Study":
    """Let a small budget forget, bring tokens back by each measure: the share of exact answers."""
    from sirchat.tasks.retrieval import Retrieval

    return Retrieval(
        profile,
        task,
        limit,
        whole_numbers("base", base),
        whole_numbers("counts", counts),
        tuple(measures.split(",")),
        tuple(weights.split(",")),
        whole_numbers("spans", spans),
        tuple(parse_value("recall_soft", one) is True for one in soft.split(",")),
        data,
    )


@study(eval_app, "privacy", None)
def privacy(
    profile: Profile,
    task: Annotated[
        str, typer.Option(help="What is told.", metavar="facts-12|facts-40|stories-10|...")
    ] = "facts-12",
    limit: Conversations = 100,
    base: Base = 72,
    counts: Annotated[
        str, typer.Option(help="How many tokens come back; 0 for none.", metavar="N,M,...")
    ] = "0,10,20,50,100,200",
) -> "Study":
    """Bring back more and more: how much of an old turn is let out, and what it is good for."""
    from sirchat.tasks.privacy import Privacy

    if profile.recall == "off":
        profile = changed(profile, "eval", recall="on")
    return Privacy(profile, task, limit, base, whole_numbers("counts", counts))


def _multiple_choice(
    compared: Compared, task: str, scoring: str, shots: tuple[int, ...], data: str | None
) -> "Study":
    from sirchat.tasks.multiple_choice import MultipleChoice

    return MultipleChoice(*compared, task, cast("Scoring", scoring), shots, data)
