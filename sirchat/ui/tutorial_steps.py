"""The steps of `sirchat tutorial`: what is said, the line that is sent, what should come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

SETTINGS: Final[dict[str, Any]] = {
    "policy": "sink",
    "budget": 48,
    "temperature": 0.0,
    "panel": "off",
}
"""What the tutorial starts with: a memory so small that it is full after two messages."""

COMMANDS: Final = {
    *("policy", "budget", "decay", "sinks", "recent", "recall", "set", "system"),
    *("show", "panel", "tokens", "stats", "evicted", "why", "pin", "unpin"),
    *("help", "?", "undo", "reset", "clear", "exit", "quit", "bye"),
}
"""Commands that may be tried: they change this chat's memory, or show it, and write no file."""


@dataclass(frozen=True)
class Effect:
    """Where a word should be found once a step is done, and where not; None for either.

    `word` in the model's reply, and in the text of the tokens that are held.
    """

    word: str
    in_reply: bool | None = None
    in_memory: bool | None = None


@dataclass(frozen=True)
class TutorialStep:
    """One step.

    Attributes:
        before: said first.
        line: the message or command that Enter sends.
        after: said when all effects have shown.
        effects: what should come of the line.
        shows_panel: whether `after` speaks of the compact panel.
    """

    before: str
    line: str
    after: str = ""
    effects: tuple[Effect, ...] = ()
    shows_panel: bool = False


WELCOME: Final = (
    "In three minutes you see what a chat holds, what it evicts, and how to restore that. "
    "You talk with tiny, a toy model that comes with sirchat and works offline. Every reply is its "
    "own. Nothing is saved.\n"
    "Enter sends the line that is shown. You may type something of your own instead; the line is "
    "then offered again. q or Ctrl-D leaves."
)

STEPS: Final = (
    TutorialStep(
        "A model reads text as tokens: words, or pieces of words. It knows only the tokens that "
        "it holds in memory. Here these are at most 48: the budget. Tell it something.",
        "My name is Anna.",
        "The line below the reply counts tokens: how many were read, how many were written, how "
        "fast, and how many of the 48 places in memory are taken.",
    ),
    TutorialStep("One more fact.", "My cat is called Luna."),
    TutorialStep(
        "Now some small talk, until the memory is full.",
        "Tell me a joke.",
        'Old tokens were "evicted": the line counts them, and names the words of yours among them.',
        (Effect("Anna", in_memory=False),),
    ),
    TutorialStep(
        "Which tokens go is decided by a policy. This one is called sink: it keeps the first four "
        "tokens of all (they help the model to write well) and the newest. Let us look into the "
        "memory: this draws it below each reply, as the panel.",
        "/panel turn",
    ),
    TutorialStep(
        "Does it still know you?",
        "What is my name?",
        "It can't know: the name is no longer in its memory. The lines above are the panel. Its "
        'bar shows how full the memory is. After "turns" stands a mark for each message: a full '
        'block if all of it is held, a dot if nothing is. After "evicted next": what will be '
        'evicted; after "evicted": what just was. The last lines are the text that the model still '
        "sees, as much as fits: ⋯ and a number stand for so many evicted tokens; you: and "
        "model: say who speaks.",
        (Effect("Anna", in_reply=False, in_memory=False),),
        shows_panel=True,
    ),
    TutorialStep(
        "Another policy, entropy, keeps the tokens that surprised the model most. Small talk is "
        "easy to guess; a name is not. Evicted tokens are in an archive, so a new policy "
        "chooses from everything that was ever read.",
        "/policy entropy",
        '"restored" counts tokens that returned from the archive. The name is one of them.',
        (Effect("Anna", in_memory=True),),
    ),
    TutorialStep(
        "More small talk. entropy, too, must now evict something.",
        "What is the capital of Italy?",
        "The cat's name went, too, but not Anna, which had surprised the model more.",
        (Effect("Anna", in_memory=True), Effect("Luna", in_memory=False)),
    ),
    TutorialStep(
        "The same question as before.",
        "What is my name?",
        "It knows, in the same 48 places. The panel now says how much surprise a token needs to "
        "stay. Surprise is measured in nats: 0 for what was certain, more for what was not "
        "expected. The first lines of the text are what is left of the first messages.",
        (Effect("Anna", in_reply=True),),
        shows_panel=True,
    ),
    TutorialStep(
        "And the cat?",
        "What is my cat called?",
        "48 places are few: the line below the answer about Italy already named Luna as evicted.",
        (Effect("Luna", in_reply=False, in_memory=False),),
    ),
    TutorialStep(
        "What was evicted can be listed, the most surprising words of each message first.",
        "/evicted",
        "Luna is in the list: evicted, and still in the archive.",
        (Effect("Luna", in_memory=False),),
    ),
    TutorialStep(
        "You can restore a word yourself, with the words beside it.",
        '/recall "Luna"',
        "They are back, and pinned: they stay, under every policy but window. Others had to go for "
        "them, as the memory was full.",
        (Effect("Luna", in_memory=True),),
    ),
    TutorialStep(
        "And ask again.",
        "What is my cat called?",
        "It knows again. To make room, Anna went: the text in the panel has Luna, and Anna no "
        "more. In 48 places, what is pinned leaves little for the rest. (/recall on looks for what "
        "fits each message, and restores that by itself.)",
        (Effect("Luna", in_reply=True), Effect("Anna", in_memory=False)),
        shows_panel=True,
    ),
)

GOODBYE: Final = (
    "sirchat alone opens a chat, with 1,024 places and the policy salience, which keeps whole "
    "words by their surprise. In it:"
)

MORE: Final = {
    "/evicted": "lists what was evicted",
    '/recall "words"': "restores it",
    "/branch NAME": "goes on in a copy of the chat",
    "/edit": "changes your last message, and goes on from there",
    "@FILE": "in a message, sends the text of a file",
    "/model NAME": "goes on with another model; sirchat models lists them",
    "/help": "lists all commands",
}
"""Named at the end."""
