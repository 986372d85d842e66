"""The `sirchat eval` commands that study how something works.

They study anchors, attention, policies that choose at random, and recall.
"""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed
from sirchat.config.values import parse_value
from sirchat.lab.commands.study_flags import Compared, Defaults, study, whole_numbers

if TYPE_CHECKING:
    from sirchat.lab.studies.study import Study
    from sirchat.text.anchors import Per

mechanisms_app = typer.Typer(add_completion=False)

Conversations = Annotated[int, typer.Option(help="Number of conversations.", min=1)]
Base = Annotated[int, typer.Option(help="Budget, not counting restored tokens.", min=24)]


@study(
    mechanisms_app,
    "context",
    Defaults(
        "full,anchor", budgets="2048", limit=50, of="Number of conversations for each setting."
    ),
)
def context(
    compared: Compared,
    lengths: Annotated[
        str, typer.Option(help="Lengths of the context, in tokens.", metavar="N,M,...")
    ] = "128,256,512,1024,2048",
) -> "Study":
    """Measure the perplexity of synthetic conversations at several lengths of the context."""
    from sirchat.lab.studies.perplexity import Context

    return Context(**compared, lengths=whole_numbers("lengths", lengths))


@study(
    mechanisms_app,
    "demonstrations",
    Defaults(
        "full,anchor",
        budgets="1024",
        limit=50,
        of="Number of sets of demonstrations for each setting.",
    ),
)
def demonstrations(
    compared: Compared,
    shots: Annotated[
        str, typer.Option(help="Numbers of demonstrations in a set.", metavar="N,M,...")
    ] = "0,5",
    questions: Annotated[int, typer.Option(help="Number of questions after each set.", min=1)] = 4,
    places: Annotated[
        str,
        typer.Option(
            help="Other ways to place anchors, to compare with the model's own.",
            metavar="tokens,random,...",
        ),
    ] = "",
) -> "Study":
    """Let the model read demonstrations (questions with answers) once, then ask it new questions.

    The report has the share of right answers, the number of held tokens and the speed-up.
    """
    from sirchat.lab.studies.demonstrations import Demonstrations

    put = cast("tuple[Per, ...]", tuple(places.split(",")) if places else ())
    return Demonstrations(
        **compared, shots=whole_numbers("shots", shots), questions=questions, places=put
    )


@study(mechanisms_app, "anchor-attention", None)
def anchor_attention(
    profile: Profile,
    limit: Conversations = 50,
    facts: Annotated[int, typer.Option(help="Number of facts told in each conversation.")] = 5,
) -> "Study":
    """Measure which anchor tokens an answer attends to: tell facts, and ask for one of them.

    Each fact is told in its own round. The report has the share of the attention to anchors that
    goes to the round with the fact.
    """
    from sirchat.lab.studies.anchor_attention import AnchorAttention

    return AnchorAttention(profile, limit=limit, facts=facts)


@study(mechanisms_app, "attention", None)
def attention(
    profile: Profile,
    limit: Annotated[int, typer.Option(help="Number of texts.", min=1)] = 256,
    tokens: Annotated[int, typer.Option(help="Number of tokens read of each text.")] = 40,
    text: Annotated[
        str | None, typer.Option(help="File with one text per line; default: generated talk.")
    ] = None,
) -> "Study":
    """Measure whether tokens of high surprisal receive more attention, as in SirLLM's Figure 3."""
    from sirchat.lab.studies.attention import AttentionStudy

    return AttentionStudy(profile, limit=limit, tokens=tokens, text=text)


@study(
    mechanisms_app,
    "uniformity",
    Defaults("reservoir,random", budgets="96", limit=300, of="Number of seeds for each setting."),
)
def uniformity(
    compared: Compared,
    rounds: Annotated[int, typer.Option(help="Number of rounds in the stream.", min=1)] = 8,
) -> "Study":
    """Test whether policies that choose at random are uniform: read one text with many seeds.

    The report has the share of each tenth of the text that is still held at the end.
    """
    from sirchat.lab.studies.uniformity import Uniformity

    return Uniformity(**compared, rounds=rounds)


@study(mechanisms_app, "retrieval", None)
def retrieval(
    profile: Profile,
    task: Annotated[
        str,
        typer.Option(
            help="How many stories or facts are told and asked for.",
            metavar="stories-3|facts-12|...",
        ),
    ] = "facts-12",
    limit: Conversations = 200,
    base: Annotated[
        str, typer.Option(help="Budgets, not counting restored tokens.", metavar="N,M,...")
    ] = "72",
    counts: Annotated[
        str, typer.Option(help="Numbers of tokens that are restored.", metavar="N,M,...")
    ] = "10,20,50,100,200",
    retrievers: Annotated[
        str, typer.Option(help="Retrievers to compare, separated by commas.", metavar="A,B,...")
    ] = "mips,cosine,cosine-pairwise,attention,bm25,hybrid,random",
    weights: Annotated[
        str, typer.Option(help="Values of recall_weight to compare.", metavar="none,surprisal")
    ] = "none,surprisal",
    spans: Annotated[
        str, typer.Option(help="Numbers of neighbours restored with each token.", metavar="N,M,...")
    ] = "0,2",
    soft: Annotated[
        str,
        typer.Option(help="Values of recall_soft to compare.", metavar="off,on"),
    ] = "off,on",
    data: Annotated[
        str | None,
        typer.Option(help="Use the conversations in this file instead of the task's own."),
    ] = None,
) -> "Study":
    """Compare retrievers, which choose the evicted tokens that recall restores for a question.

    The report says, for each retriever, what share of the answers is exact.
    """
    from sirchat.lab.studies.retrieval import Retrieval

    return Retrieval(
        profile,
        task=task,
        limit=limit,
        bases=whole_numbers("base", base),
        counts=whole_numbers("counts", counts),
        retrievers=tuple(retrievers.split(",")),
        weights=tuple(weights.split(",")),
        spans=whole_numbers("spans", spans),
        soft=tuple(parse_value("recall_soft", one) is True for one in soft.split(",")),
        data=data,
    )


@study(mechanisms_app, "privacy", None)
def privacy(
    profile: Profile,
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
) -> "Study":
    """Measure how much of a private, evicted turn recall reveals, with more and more tokens.

    The report also has the share of right answers to questions that need no memory.
    """
    from sirchat.lab.studies.retrieval import Privacy

    if profile.recall == "off":
        profile = changed(profile, "eval", recall="on")
    return Privacy(
        profile, task=task, limit=limit, base=base, counts=whole_numbers("counts", counts)
    )
