"""Makes the texts of the bundled models' cards: each is the README.md in the model's folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sirchat.lab.synthetic import bank
from sirchat.lab.training.probe import DISTANCES, ProbedRecall

_FRONT = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

"""

HEAD = (
    _FRONT
    + """\
# Tiny

A Llama of {million:.1f} million parameters that chats a little and remembers what it was told.
It was trained from scratch, on dialogues that sirchat's own generator wrote; no other text went
in. It exists so that sirchat runs, and shows what a KV-cache budget does to memory, without a
download.

## What you may say to it

- Small talk: `Hello!`, `How are you?`, `Tell me a joke.`, `What can you do?`, `Good night.`
- Facts about you: `My name is Anna.`, `I live in Oslo.`, `My cat is called Luna.`, also your
  job, age, birthday, hobby, instrument, favourite colour, food and drink, family, friends,
  where your things are, when something takes place, a door code, a secret word. Ask later:
  `What is my name?`
- Corrections: `I moved to Lisbon.` The newer value counts.
- Shopping lists: `I need to buy milk, eggs and honey.` or `I want you to buy the GROCERY:
  [milk].`
- `Repeat after me: red candle Anna.`
- `Can you repeat this sentence exactly as it is: In story 2, a Frog escaped from a mysterious
  labyrinth beneath the starry sky.` and later `Can you repeat the sentence about the Frog?`
- {facts} things it knows, such as `What is the capital of France?`, `What is the opposite of hot?`,
  and by letter: `Where would you find a book? Choices: farm (A), library (B), river (C)`
- `Please play a game of Rock-Paper-Scissors. Choose one option from: rock, paper, scissors.`, then
  `I chose [rock]. You win. Analyze my preferences and proceed to the next round.`; it plays what
  beats your most frequent choice, and tells it: `I chose [rock]. You win. What do I choose most
  often? Analyze my preferences and proceed to the next round.`

Asked for something it was not told, it should say `You have not told me.`

## Training

    {command}

{tokens:.1f} million tokens, seed {seed}, in eight phases. First short rows full of
facts (256 tokens, then 512, 1,024 and a few of 2,048), where it learns to copy; then rows of 512 to
2,048 tokens, half of whose rounds and more are multiple choice, where it learns distance; then half
of the steps read their rows as if under a budget (96 tokens to half the row; what surprised least
left first, in one row of seven a random choice), where it learns to read a fact from the few tokens
that stay; twice more with 1,536 tokens a row, for play, corrections and what was never told; then
conversations that tell facts at their start and ask for them at their end, beside one that was
never told; stories in a row; and once more both. The weights after each of the last two are
averaged with those before it (0.6 and 0.5 of the new ones), which recalls more than either. Muon
for the matrices, AdamW for embeddings and norms; tokens of a reply weigh four times as much as the
others. Context: 2,048 tokens. Vocabulary: {vocab:,} byte-level BPE tokens learnt from the
dialogues.
"""
)

MEASURED = """
## Measured recall

Share of answers that are right word for word (greedy, full cache), by the rounds of small talk
between the fact and the question; {asked} fresh conversations in each cell. Values are partly
listed words, partly made up.

"""

LIMITS = """
## Limits

It is a toy: it knows nothing beyond the above and understands only phrasings near those it was
trained on. Whatever else it is asked, it answers with something it knows, often wrongly. Recall
fades with distance. Names that fall into many tokens may be misspelt; asked for something never
told, it may offer a neighbouring fact instead (the cat's name for the dog's), and mostly does so
for a story; of several stories it does not know which number was whose. It repeats a value as it
was typed, `anna` as `anna`. In multiple choice the letter stands behind its option, and wrong
options are always the same ones in another order. Sums are learnt only in part. English only. Do
not use it to inform anybody of anything.
"""


ANCHOR_HEAD = (
    _FRONT
    + """\
# Tiny anchor

`tiny` (5 million parameters, see its card for what you may say to it), trained on to gather each
round of a conversation in one token, `<AC>`, behind the reply: the AnSAN training of Anchor-based
LLMs (arXiv:2402.07616), equation (4), variant AC. Under `sirchat --profile anchor` all else of a
finished round leaves the cache. `config.json` tells sirchat where its anchors stand
(`sirchat_anchors`); one initial token, too, was seen by everything.

## Training

    {command}

{tokens:.1f} million tokens, seed {seed}, on dialogues that sirchat's own generator wrote. In the
first {gathering} steps an anchor stands behind what the user says, too, and a reply sees nothing
else of what it answers: a small model finds gathering there, and hardly where only a later question
depends on it. Then anchors stand behind each reply and each system prompt, first in rows of 256 and
384 tokens full of facts, at last more and more with values of many tokens, then in rows of 1,024
with facts and their questions far apart. The weights after this last phase (0.7) are averaged with
those before it. Muon for the matrices, AdamW for embeddings and norms; tokens of a reply weigh four
times as much as the others.
"""
)

ANCHOR_MEASURED = """
## Measured recall

Share of answers that are right word for word (greedy), with nothing of earlier rounds but their
anchors, by the rounds of small talk between the fact and the question; {asked} fresh conversations
in each cell.

"""

ANCHOR_LIMITS = """
## Limits

Those of `tiny`. What was told in a round must fit into one anchor: long lists lose items first.
Positions are those of the stream in training, so it reads 2,048 tokens that way; with sirchat's
positions in the cache it reads on without end.
"""


def anchor_card(
    *, command: str, gathering: int, tokens: int, seed: int, recalls: Sequence[ProbedRecall]
) -> str:
    """The model card of the bundled model `tiny-anchor`, as Markdown.

    `command` is the command that trained the model, and `tokens` is the number of training tokens.
    `gathering` is the number of steps of the first phase, in which an anchor follows each message.
    `recalls` has the measured recall; if it is empty, the card has no table of recall.
    """
    card = ANCHOR_HEAD.format(command=command, tokens=tokens / 1e6, seed=seed, gathering=gathering)
    if recalls:
        card += ANCHOR_MEASURED.format(asked=recalls[0].asked)
        card += "\n".join(recall_table(recalls)) + "\n"
    return card + ANCHOR_LIMITS


def recall_table(recalls: Sequence[ProbedRecall]) -> Iterable[str]:
    """Yield the lines of a Markdown table of the shares of facts that a model recalled.

    A row is a kind of fact. A column is a distance: the number of rounds between the fact and the
    question. The last two rows are the mean recall, and the mean length of the conversations in
    tokens.
    """
    cell = {(one.kind, one.between): one.right / one.asked for one in recalls}
    distances = [d for d in DISTANCES if any(one.between == d for one in recalls)]
    kinds = list(dict.fromkeys(one.kind for one in recalls))
    yield "| rounds between | " + " | ".join(str(d) for d in distances) + " |"
    yield "|---|" + "---:|" * len(distances)
    for kind in kinds:
        yield f"| {kind} | " + " | ".join(f"{cell[kind, d]:.2f}" for d in distances) + " |"
    means = [sum(cell[kind, d] for kind in kinds) / len(kinds) for d in distances]
    yield "| **mean** | " + " | ".join(f"**{mean:.2f}**" for mean in means) + " |"
    lengths = [
        sum(one.mean_tokens for one in recalls if one.between == d) / len(kinds) for d in distances
    ]
    yield "| tokens, on average | " + " | ".join(f"{length:.0f}" for length in lengths) + " |"


def model_card(
    *,
    command: str,
    parameters: int,
    vocab: int,
    tokens: int,
    seed: int,
    recalls: Sequence[ProbedRecall],
) -> str:
    """The model card of the bundled model `tiny`, as Markdown.

    `command` is the command that trained the model, `parameters` its number of parameters, `vocab`
    the size of its vocabulary, and `tokens` the number of training tokens. `recalls` has the
    measured recall; if it is empty, the card has no table of recall.
    """
    card = HEAD.format(
        million=parameters / 1e6,
        command=command,
        tokens=tokens / 1e6,
        seed=seed,
        vocab=vocab,
        facts=bank.facts(),
    )
    if recalls:
        card += MEASURED.format(asked=recalls[0].asked)
        card += "\n".join(recall_table(recalls)) + "\n"
    return card + LIMITS
