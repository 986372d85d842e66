"""Compares kvpress's presses (compression methods) with sirchat's policies on a needle task.

The needle and RULER benchmarks of kvpress take their texts from data sets of the Hugging Face hub.
Here the same kind of task is made without a network: sentences that state a number or a word (the
needles) stand amid utterances of DailyDialog, and some of them are asked for after the context was
compressed. All presses run in kvpress's own pipeline, and the results are one table.

    python -m sirchat.lab.studies.kvpress.needles MODEL --data dailydialog.jsonl --out out.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sirchat.memory.policies.entropy import Entropy
from sirchat.memory.policies.learned import Learned
from sirchat.memory.policies.salience import Salience
from sirchat.models.scorer import Scorer

_NOUNS = ("lighthouse", "violin", "garden", "harbor", "carpet", "engine", "castle", "lantern")
_PEOPLE = ("Greta", "Omar", "Pavel", "Ines", "Tomoko", "Bruno", "Selma", "Idris")
_WORDS = ("copper", "thistle", "marble", "saffron", "walnut", "cobalt", "juniper", "velvet")
_EACH = 3  # needles of each kind (number, word) in a context; only one kind is asked for


@dataclass(frozen=True)
class Needle:
    """A sentence in the context, the question for it, and the right answer."""

    sentence: str
    question: str
    value: str


@dataclass(frozen=True)
class Haystack:
    """A context, the needles in it that are asked for, and the words that begin each reply."""

    text: str
    asked: tuple[Needle, ...]
    prefix: str


def haystacks(
    utterances: Sequence[str], length: Callable[[str], int], tokens: int, count: int, seed: int
) -> Iterator[Haystack]:
    """Yield `count` contexts of about `tokens` tokens: needles among successive `utterances`.

    A needle is a sentence that is asked for later. `length` counts the tokens of a text.
    """
    for number in range(count):
        rng = Random(f"needles/{seed}/{number}")
        needles = list(_needles(rng))
        lines, at = list[str](), rng.randrange(len(utterances))
        size = sum(length(one.sentence) for one in needles)
        while size < tokens:
            lines.append(utterances[at % len(utterances)])
            size, at = size + length(lines[-1]) + 1, at + 1
        places = sorted(rng.sample(range(len(lines) + 1), len(needles)), reverse=True)
        for needle, place in zip(needles, places, strict=True):
            lines.insert(place, needle.sentence)
        kind, prefix = ((0, "The secret number of the"), (1, "The password of"))[number % 2]
        yield Haystack("\n".join(lines), tuple(needles[kind * _EACH :][:_EACH]), prefix)


def _needles(rng: Random) -> Iterator[Needle]:
    for noun in rng.sample(_NOUNS, _EACH):
        value = str(rng.randrange(100_000, 1_000_000))
        what = f"the secret number of the {noun}"
        yield Needle(f"By the way, {what} is {value}.", f"What is {what}?", value)
    for person in rng.sample(_PEOPLE, _EACH):
        value = "-".join(rng.sample(_WORDS, 2))
        what = f"the password of {person}"
        yield Needle(f"By the way, {what} is {value}.", f"What is {what}?", value)


def utterances_of(path: Path) -> list[str]:
    """The utterances in a file of SirLLM's DailyDialog, in order."""
    lines = path.read_text("utf-8").splitlines()
    said = (" ".join(json.loads(one)["question"]["stem"].split()) for one in lines if one)
    return [one for one in said if one]


def presses(tokenizer: Any, scorer: Scorer) -> dict[str, Callable[[float], Any]]:
    """A dict from a press's name to a function that creates the press for a compression ratio.

    A press is a method of kvpress to compress the KV cache. The policy `learned` is left out if
    `scorer` is empty.
    """
    from kvpress import KeyDiffPress, KnormPress, RandomPress, SnapKVPress, StreamingLLMPress

    from sirchat.lab.studies.kvpress.press import PolicyPress

    def ours(policy: Any) -> Callable[[float], Any]:
        return lambda ratio: PolicyPress(
            compression_ratio=ratio, policy=policy, tokenizer=tokenizer, scorer=scorer
        )

    found: dict[str, Callable[[float], Any]] = {
        "sirchat surprisal (`entropy`)": ours(Entropy()),
        "sirchat `salience`": ours(Salience()),
        "sirchat `learned`": ours(Learned()),
        "KnormPress": lambda ratio: KnormPress(compression_ratio=ratio),
        "KeyDiffPress": lambda ratio: KeyDiffPress(compression_ratio=ratio),
        "SnapKVPress": lambda ratio: SnapKVPress(compression_ratio=ratio),
        "StreamingLLMPress": lambda ratio: StreamingLLMPress(compression_ratio=ratio),
        "RandomPress": lambda ratio: RandomPress(compression_ratio=ratio, seed=0),
    }
    if not scorer.layers:
        del found["sirchat `learned`"]
    return found


def main() -> None:
    """Ask all questions under every press, and print a Markdown table of the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder with the model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="SirLLM's dailydialog.jsonl")
    parser.add_argument("--scorer", type=Path, help="the model's scorer, for `learned`")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="results, one line for each reply")
    given = parser.parse_args()

    import torch
    from kvpress import KVPressTextGenerationPipeline
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    module = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    pipeline = KVPressTextGenerationPipeline(model=module, tokenizer=tokenizer, device="cpu")
    scorer = Scorer.load(given.scorer) if given.scorer else Scorer()
    settings: list[tuple[str, float, Any]] = [("all tokens", 0.0, None)]
    for name, make in presses(tokenizer, scorer).items():
        settings += [(name, ratio, make(ratio)) for ratio in given.ratios]

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    stacks = haystacks(utterances_of(given.data), length, given.tokens, given.contexts, given.seed)
    with given.out.open("w", encoding="utf-8") as out:
        for number, stack in enumerate(stacks):
            for name, ratio, press in settings:
                for needle, reply in zip(
                    stack.asked, _replies(pipeline, stack, press), strict=True
                ):
                    row = {"press": name, "ratio": ratio, "context": number, "reply": reply}
                    row |= {"value": needle.value, "right": needle.value in reply}
                    out.write(json.dumps(row) + "\n")
                out.flush()
    sys.stdout.write(table(given.out) + "\n")


def _replies(pipeline: Any, stack: Haystack, press: Any) -> list[str]:
    """The model's reply to each question about the context of `stack`.

    The context is read only once, and compressed by `press`.
    """
    questions = ["\n\n" + one.question for one in stack.asked]
    how: dict[str, Any] = {"press": press, "answer_prefix": stack.prefix, "max_new_tokens": 20}
    replies: list[str] = pipeline(stack.text, questions=questions, **how)["answers"]
    return replies


def table(path: Path) -> str:
    """A Markdown table of the share of right replies, by press and compression ratio.

    `path` is a file with one JSON object for each reply. Each share has its 95 % interval.
    """
    from sirchat.lab.studies.intervals import clustered_mean

    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    ratios = sorted({one["ratio"] for one in rows})
    lines = ["| press | " + " | ".join(f"{one:.0%} evicted" for one in ratios) + " |"]
    lines.append("|---" * (len(ratios) + 1) + "|")
    for press in dict.fromkeys(one["press"] for one in rows):
        cells = [press]
        for ratio in ratios:
            by_context: dict[int, list[float]] = {}
            for one in rows:
                if (one["press"], one["ratio"]) == (press, ratio):
                    by_context.setdefault(one["context"], []).append(float(one["right"]))
            found = clustered_mean(list(by_context.values()))
            shown = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
            cells.append(shown if by_context else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
