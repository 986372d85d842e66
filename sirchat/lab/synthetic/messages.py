"""Messages of the generated dialogues, and how a user types them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Speaker = Literal["system", "user", "assistant"]
Key = tuple[str, str]  # kind and subject of a fact


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `recall` is the kind of fact that a reply must recall.

    `fact` is the key of the one fact that the user tells here, with the words `value`, or that the
    reply recalls.
    """

    role: Speaker
    text: str
    recall: str | None = None
    fact: Key | None = None
    value: str = ""


Round = tuple[Message, Message]


def capital(text: str) -> str:
    """`text` with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]


def fill(template: str, subject: str, value: str, number: int = 0) -> str:
    """Fill subject, value (`{v:c}`: capitalised) and number into a template, with `a` or `an`."""
    for placeholder, word in (("{s}", subject), ("{v}", value)):
        if word[:1].lower() in ("a", "e", "i", "o", "u"):
            template = template.replace(f" a {placeholder}", f" an {placeholder}")
    template = template.replace("{n}", str(number)).replace("{s}", subject)
    return template.replace("{v:c}", capital(value)).replace("{v}", value)


def lower_start(template: str) -> str:
    """A template as the second half of a sentence: `My name` becomes `my name`, `I` stays."""
    if template.startswith(("I ", "I'", "{")):
        return template
    return template[:1].lower() + template[1:]


def spell(rng: Random, text: str) -> str:
    """American spelling half of the time."""
    if rng.random() < 0.5:
        return text
    return text.replace("favourite", "favorite").replace("colour", "color")


@dataclass(frozen=True, slots=True)
class Style:
    """How carefully a user types one message."""

    lower: bool = False
    bare: bool = False  # no punctuation at the end, no apostrophes

    @staticmethod
    def draw(rng: Random) -> Style:
        """Mostly careful, sometimes hasty."""
        return rng.choices(
            (Style(), Style(lower=True), Style(bare=True), Style(True, True)), (66, 10, 12, 12)
        )[0]

    def apply(self, text: str) -> str:
        """`text` in this style."""
        if self.bare:
            text = text.rstrip(".?!")
        if self.lower:
            text = text.lower()
        return text.replace("'", "") if self.lower and self.bare else text


def reply(user: str, assistant: str, recall: str | None = None) -> Round:
    """A round of a user message and a reply."""
    return Message("user", user), Message("assistant", assistant, recall)
