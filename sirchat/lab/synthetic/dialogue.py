"""Generates random synthetic dialogues of any length, message by message.

The user tells facts, asks for them later, corrects them, or asks for facts that were never told,
with small talk between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from sirchat.lab.synthetic.facts import KINDS, STORY, FactKind, item_list
from sirchat.lab.synthetic.rounds import (
    TALK,
    Key,
    Message,
    Round,
    Style,
    fill,
    game,
    knowledge,
    lower_start,
    make_round,
    open_quiz,
    quiz,
    repeat_after_me,
    spell,
)
from sirchat.lab.synthetic.texts import WORDS

UNTOLD = "You have not told me."


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each kind of round occurs, as shares from 0 to 1; the rest is small talk."""

    tell: float  # rounds in which the user tells a fact
    ask: float  # rounds in which the user asks for a told fact
    repeat: float  # rounds in which the user asks the model to repeat words
    game: float = 0.01  # rounds that begin a match of rock-paper-scissors
    story: float = 0.05  # told facts that are stories
    quiz: float = 0.0  # rounds with a question from the question bank
    untold: float = 0.0  # rounds in which the user asks for a fact that was never told
    long_list: float = 0.0  # told shopping lists that have five or six items


# A mix that has only small talk
SMALL_TALK = Mix(tell=0.0, ask=0.0, repeat=0.0, game=0.0)


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that the user tells; `number` is that of a story."""

    kind: FactKind
    subject: str
    value: str
    number: int = 0

    def fill(self, template: str) -> str:
        return fill(template, self.subject, self.value, self.number)

    @property
    def answer(self) -> str:
        """The one right answer to every question about this fact."""
        return self.fill(self.kind.answer)


def draw_fact(rng: Random, kind: FactKind, style: Style) -> Fact:
    """Draw a fact of a kind, in lower case if the style is."""
    subject = kind.subject(rng) if kind.subject else ""
    value = kind.value(rng)
    if style.lower:
        subject, value = subject.lower(), value.lower()
    return Fact(kind, subject, value, rng.randint(1, 9))


def other_value(rng: Random, fact: Fact, style: Style) -> Fact:
    """Draw another value for a fact."""
    while True:
        other = replace(draw_fact(rng, fact.kind, style), subject=fact.subject)
        if other.value.lower() != fact.value.lower():
            return other


def draw_kind(rng: Random, mix: Mix) -> FactKind:
    if rng.random() < mix.story:
        return STORY
    return rng.choices(KINDS, [kind.weight for kind in KINDS])[0]


@dataclass
class Dialogue:
    """Generates one synthetic conversation, message by message."""

    rng: Random
    mix: Mix
    facts: dict[Key, Fact] = field(default_factory=dict)  # told facts
    asked: dict[Key, int] = field(default_factory=dict)  # questions for each since it was told
    jokes: list[str] = field(default_factory=list)  # jokes that the model has told

    def messages(self, rounds: int) -> Iterator[Message]:
        """Yield the messages of a conversation of about `rounds` rounds.

        At its end the user asks for up to six facts that were not asked for.
        """
        if self.rng.random() < 0.12:
            yield Message("system", self.rng.choice(TALK["system_prompts"]))
        done = 0
        while done < rounds:
            for pair in self.some_rounds():
                done += 1
                yield from pair
        for key in [key for key in self.facts if not self.asked.get(key)][:6]:
            yield from self.ask(key)

    def some_rounds(self) -> Iterator[Round]:
        """Yield one round of a random kind, or all rounds of a game."""
        roll = self.rng.random()
        for share, make in (
            (self.mix.tell, self.tell),
            (self.mix.ask, self.ask_any),
            (self.mix.repeat, lambda: repeat_after_me(self.rng)),
            (self.mix.quiz, self.ask_bank),
            (self.mix.untold, self.ask_untold),
        ):
            if roll < share:
                yield make()
                return
            roll -= share
        if roll < self.mix.game:
            yield from game(self.rng)
        else:
            yield self.small_talk()

    def tell(self) -> Round:
        """A round in which the user tells one or two facts, or corrects one; else small talk."""
        style = Style.draw(self.rng)
        old = [fact for fact in self.facts.values() if fact.kind.updates]
        if old and self.rng.random() < 0.18:
            return self.tell_one(other_value(self.rng, self.rng.choice(old), style), style)
        fact = self.new_fact(style)
        if fact is None:
            return self.small_talk()
        if fact.kind.joins and self.rng.random() < 0.12:
            second = self.new_fact(style, joined=fact)
            if second is not None:
                return self.tell_both(fact, second, style)
        return self.tell_one(fact, style)

    def new_fact(self, style: Style, joined: Fact | None = None) -> Fact | None:
        """Draw a fact that the user can tell, alone or in one message with `joined`.

        None if eight draws give no such fact.
        """
        for _ in range(8):
            fact = self.draw(style)
            known = (fact.kind.key, fact.subject) in self.facts
            if joined and (known or not fact.kind.joins or fact.kind is joined.kind):
                continue
            if not known or (fact.kind.updates and self.rng.random() < 0.3):
                return fact
        return None

    def draw(self, style: Style) -> Fact:
        """Draw a random fact, told before or not; a shopping list may have five or six items."""
        fact = draw_fact(self.rng, draw_kind(self.rng, self.mix), style)
        may_be_long = fact.kind.key == "groceries" and self.mix.long_list > 0
        if may_be_long and self.rng.random() < self.mix.long_list:
            items = item_list(self.rng.sample(WORDS["groceries"], self.rng.choice((5, 6))))
            return Fact(fact.kind, "", items, fact.number)
        return fact

    def remember(self, fact: Fact) -> bool:
        """Add a fact to the told facts; returns whether it replaced an older value."""
        key = (fact.kind.key, fact.subject)
        known = key in self.facts
        self.facts[key] = fact
        self.asked[key] = 0
        return known

    def tell_one(self, fact: Fact, style: Style) -> Round:
        """A round in which the user tells `fact`, or corrects it if it was told before."""
        known = self.remember(fact)
        template = self.rng.choice(fact.kind.updates if known else fact.kind.tells)
        user = style.apply(spell(self.rng, fact.fill(template)))
        recall = "repeat" if fact.kind is STORY else None
        one, other = make_round(user, fact.fill(self.rng.choice(fact.kind.acks)), recall)
        return replace(one, fact=(fact.kind.key, fact.subject), value=fact.value), other

    def tell_both(self, fact: Fact, second: Fact, style: Style) -> Round:
        self.remember(fact)
        self.remember(second)
        one = fact.fill(self.rng.choice(fact.kind.tells)).rstrip(".")
        two = second.fill(lower_start(self.rng.choice(second.kind.tells)))
        acks = " ".join(x.fill(self.rng.choice(x.kind.acks[:2])) for x in (fact, second))
        return make_round(style.apply(spell(self.rng, f"{one} and {two}")), acks)

    def ask_any(self) -> Round:
        """A round that asks for a told fact, sometimes for two, rarely for one never told."""
        roll = self.rng.random()
        if roll < 0.07 or not self.facts:
            return self.ask_untold() if roll < 0.2 else self.small_talk()
        keys = list(self.facts)
        fresh = [key for key in keys if not self.asked[key]]
        if len(keys) > 1 and roll > 0.95:
            return self.ask_both(*self.rng.sample(keys, 2))
        if fresh and self.rng.random() < 0.7:
            return self.ask(self.rng.choice(fresh))
        return self.ask(self.rng.choice(keys))

    def question(self, fact: Fact) -> str:
        style = Style.draw(self.rng)
        if fact.subject != fact.subject.lower():
            style = Style(bare=style.bare)
        text = self.rng.choice(fact.kind.asks)
        return style.apply(spell(self.rng, fact.fill(text)))

    def ask(self, key: Key) -> Round:
        """A round in which the user asks for a told fact, and the reply states it."""
        fact = self.facts[key]
        self.asked[key] += 1
        one, other = make_round(self.question(fact), fact.answer, fact.kind.key)
        return one, replace(other, fact=key)

    def ask_both(self, one: Key, two: Key) -> Round:
        first, second = self.facts[one], self.facts[two]
        user = self.question(first).rstrip("?") + " and " + lower_start(self.question(second))
        self.asked[one] += 1
        self.asked[two] += 1
        return make_round(user, f"{first.answer} {second.answer}", "two")

    def ask_untold(self) -> Round:
        """A round that asks for a fact never told, often of a told fact's kind."""
        kinds = [fact.kind for fact in self.facts.values() if fact.kind.subject]
        same_kind = bool(kinds) and self.rng.random() < 0.6
        for _ in range(8):
            kind = self.rng.choice(kinds) if same_kind else draw_kind(self.rng, self.mix)
            fact = draw_fact(self.rng, kind, Style())
            if (fact.kind.key, fact.subject) not in self.facts:
                return make_round(self.question(fact), UNTOLD, "untold")
        return self.small_talk()

    def ask_bank(self) -> Round:
        return open_quiz(self.rng) if self.rng.random() < 0.12 else quiz(self.rng)

    def joke(self) -> Round:
        left = [joke for joke in TALK["jokes"] if joke not in self.jokes] or TALK["jokes"]
        joke = self.rng.choice(left)
        self.jokes.append(joke)
        user = Style.draw(self.rng).apply(self.rng.choice(TALK["joke_asks"]))
        return make_round(user, joke)

    def small_talk(self) -> Round:
        """A round of small talk, a joke, a question on common knowledge, or a quiz."""
        roll = self.rng.random()
        if roll < 0.08:
            return self.joke()
        if roll < 0.24:
            return knowledge(self.rng)
        if roll < 0.30:
            return quiz(self.rng)
        answer, prompts = self.rng.choice(list(TALK["small_talk"].items()))
        style = Style.draw(self.rng)
        return make_round(style.apply(spell(self.rng, self.rng.choice(prompts))), answer)


def dialogue(rng: Random, rounds: int, mix: Mix) -> Iterator[Message]:
    """Yield the messages of one new synthetic conversation of about `rounds` rounds."""
    return Dialogue(rng, mix).messages(rounds)
