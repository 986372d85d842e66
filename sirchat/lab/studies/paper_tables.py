"""The results that the papers print, as tables to compare our own with.

The tables use sirchat's names: SirLLM's StreamLLM, RandomLLM and IntervalLLM are `sink`, `random`
and `interval`, and SirLLM itself is `entropy`. A budget is the paper's cache size, sinks included.
"""

from __future__ import annotations

from sirchat.lab.studies.report import Table, Value

_POLICIES = ("sink", "random", "interval", "entropy")
_SHOTS = ("sink", "1-shot", "2-shot", "3-shot", "entropy")

# For each model: per cent right under sink, random, interval and entropy; then entropy's decay.
_DAILYDIALOG = {
    "Yi-6b": ((76.90, 71.10, 65.20, 83.85), 0.7),
    "Yi-34b": ((85.35, 82.17, 70.70, 90.35), 0.7),
    "Vicuna-7b": ((57.55, 57.48, 54.45, 59.15), 0.5),
    "Vicuna-13b": ((71.10, 69.27, 62.05, 71.40), 0.6),
}

# For each model: the paper's accuracies ACCc and ACCg under the same policies. For two models the
# paper has results of only two policies.
_GROCERY: dict[str, tuple[tuple[float, float] | None, ...]] = {
    "Yi-6b": ((71.33, 25.73), (70.33, 77.55), (63.98, 21.72), (72.44, 99.27)),
    "Vicuna-7b": ((50.84, 28.65), (50.97, 85.04), (47.21, 23.72), (51.04, 96.17)),
    "Vicuna-13b": ((60.10, 24.45), None, None, (60.23, 97.08)),
    "Yi-34b": ((81.35, 26.29), None, None, (81.44, 89.60)),
}

_FEW_SHOT = {
    "Yi-6b": ((71.33, 25.73), (58.66, 25.00), (63.95, 25.36), (65.42, 23.72), (72.44, 99.27)),
    "Yi-34b": ((81.35, 26.29), (75.14, 23.91), (78.50, 24.64), (79.20, 25.18), (81.44, 89.60)),
    "Vicuna-7b": ((50.84, 28.65), (48.54, 27.01), (49.11, 27.19), (49.81, 27.55), (51.04, 96.17)),
    "Vicuna-13b": ((60.10, 24.45), (55.34, 22.26), (58.94, 26.46), (60.44, 27.01), (60.23, 97.08)),
}

# For each model and policy: per cent of rounds won against the players who prefer paper, rock and
# scissors, and against all players; then the decay.
_ROCK_PAPER_SCISSORS = {
    "Yi-6b": (
        ((31.10, 30.90, 46.45, 36.15), 1.0),
        ((20.00, 49.73, 27.18, 32.31), 1.0),
        ((19.45, 50.00, 27.35, 32.27), 1.0),
        ((30.65, 30.90, 50.45, 37.33), 0.9),
    ),
    "Yi-34b": (
        ((48.55, 41.05, 32.20, 40.60), 1.0),
        ((30.57, 19.08, 51.70, 33.78), 1.0),
        ((45.40, 35.45, 26.20, 35.68), 1.0),
        ((48.45, 40.60, 37.05, 42.03), 0.8),
    ),
    "Vicuna-7b": (
        ((28.75, 19.80, 51.20, 33.25), 1.0),
        ((19.57, 49.82, 27.68, 32.36), 1.0),
        ((29.15, 24.40, 28.25, 27.27), 1.0),
        ((26.20, 27.40, 48.60, 34.07), 0.7),
    ),
    "Vicuna-13b": (
        ((30.25, 22.60, 51.20, 34.68), 1.0),
        ((44.02, 30.43, 28.32, 34.26), 1.0),
        ((29.80, 21.80, 50.25, 33.95), 1.0),
        ((28.50, 33.70, 48.10, 36.77), 0.7),
    ),
}

_RETRIEVAL = (("cosine-pairwise", 0, 0, 0), ("cosine", 0, 0, 0), ("mips", 0, 0, 1))


def dailydialog() -> Table:
    """SirLLM's results for DailyDialog (the paper's Table 1): share of right answers by policy.

    The budget is 512 tokens, 4 of them sinks (first tokens, which are never evicted).
    """
    rows: list[tuple[Value, ...]] = []
    for model, (every, decay) in _DAILYDIALOG.items():
        for policy, right in zip(_POLICIES, every, strict=True):
            ours = decay if policy == "entropy" else 1.0
            rows.append((_row_name(model, policy, 512, ours), _share(right)))
    return Table("Published: SirLLM, Table 1", ("setting", "right"), tuple(rows))


def grocery() -> Table:
    """SirLLM's results for Grocery Shopping (the paper's Table 2): right answers by policy."""
    rows: list[tuple[Value, ...]] = []
    for model, every in _GROCERY.items():
        for policy, both in zip(_POLICIES, every, strict=True):
            if both is not None:
                rows.append((_row_name(model, policy, 1024), *map(_share, both)))
    return Table("Published: SirLLM, Table 2", ("setting", "ACCc", "ACCg"), tuple(rows))


def few_shot() -> Table:
    """SirLLM's Table 4: shares of right answers in Grocery Shopping.

    The rows are the policies `sink` and `entropy`, and 1 to 3 examples before each question.
    """
    rows: list[tuple[Value, ...]] = []
    for model, every in _FEW_SHOT.items():
        for name, both in zip(_SHOTS, every, strict=True):
            rows.append((f"{model} {name}", *map(_share, both)))
    return Table("Published: SirLLM, Table 4", ("setting", "ACCc", "ACCg"), tuple(rows))


def rock_paper_scissors() -> Table:
    """SirLLM's results for rock-paper-scissors (the paper's Table 3): shares of rounds won.

    The budget is 1,024 tokens, 4 of them sinks (first tokens, which are never evicted).
    """
    rows: list[tuple[Value, ...]] = []
    for model, every in _ROCK_PAPER_SCISSORS.items():
        for policy, ((paper, rock, scissors, average), decay) in zip(_POLICIES, every, strict=True):
            won = map(_share, (rock, paper, scissors, average))
            rows.append((_row_name(model, policy, 1024, decay), *won))
    columns = ("setting", "rock", "paper", "scissors", "all")
    return Table("Published: SirLLM, Table 3", columns, tuple(rows))


def retrieval() -> Table:
    """Table 1 of the paper Retrieval-Augmented StreamingLLM, with Llama 2."""
    return Table(
        "Published: Retrieval-Augmented StreamingLLM, Table 1, one reply each",
        ("tokens restored", "20", "50", "200"),
        _RETRIEVAL,
    )


def _row_name(model: str, policy: str, budget: int, decay: float = 1.0) -> str:
    return f"{model} {policy} {budget}" + (f" decay {decay:g}" if decay != 1 else "")


def _share(percent: float) -> float:
    return percent / 100
