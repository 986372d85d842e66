"""Generates random synthetic dialogues of any length, message by message.

A dialogue is a stream of rounds; a round is a user message and the reply. The user tells facts,
asks for them later, corrects them, or asks for facts that were never told. Between these rounds are
rounds of small talk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from sirchat.lab.synthetic import smalltalk as talk
from sirchat.lab.synthetic import words as w
from sirchat.lab.synthetic.facts import KINDS, STORY, FactKind, item_list
from sirchat.lab.synthetic.rounds import (
    Key,
    Message,
    Round,
    Style,
    fill,
    game,
    knowledge,
    lower_start,
    open_quiz,
    quiz,
    repeat_after_me,
    reply,
    spell,
)

UNTOLD = "You have not told me."
LONG_VALUES = ("name", "relative", "friend", "code", "secret", "groceries")


@dataclass(frozen=True, slots=True)
class Mix:
    """Says how often each kind of round occurs in a dialogue.

    A share is a number from 0 to 1. Rounds of none of these kinds are small talk.

    Attributes:
        tell: share of rounds in which the user tells a fact.
        ask: share of rounds in which the user asks for a told fact.
        repeat: share of rounds in which the user asks the model to repeat words.
        game: share of rounds that begin a match of rock-paper-scissors.
        story: share of told facts that are stories.
        quiz: share of rounds with a question from the question bank, mostly with options.
        untold: share of rounds in which the user asks for a fact that was never told.
        long_list: share of told shopping lists that have five or six items.
        apart: share of conversations with facts at their start and questions at their end.
        subjects: share of facts that are drawn only from kinds with a subject (a pet, a friend),
            which can be confused with each other. All other facts are drawn from all kinds.
        series: share of conversations, among those that `apart` leaves, that tell several stories
            and ask for some of them.
        long_values: share of facts that are drawn only from kinds with long values (codes, made-up
            words, lists). All other facts are drawn as if this share were 0.
    """

    tell: float
    ask: float
    repeat: float
    game: float = 0.01
    story: float = 0.05
    quiz: float = 0.0
    untold: float = 0.0
    long_list: float = 0.0
    apart: float = 0.0
    subjects: float = 0.0
    series: float = 0.0
    long_values: float = 0.0


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that the user tells: its kind, its subject, and its value as the user writes it.

    `number` is the number of a story; other kinds of fact do not use it.
    """

    kind: FactKind
    subject: str
    value: str
    number: int = 0

    def fill(self, template: str) -> str:
        """Fill the subject, the value and the number of the fact into the text `template`."""
        return fill(template, self.subject, self.value, self.number)

    @property
    def answer(self) -> str:
        """The one right answer to every question about this fact."""
        return self.fill(self.kind.answer)


def draw_fact(rng: Random, kind: FactKind, style: Style) -> Fact:
    """Draw a random fact of the kind `kind`.

    Its subject and its value are in lower case if `style.lower` is true.
    """
    subject = kind.subject(rng) if kind.subject else ""
    value = kind.value(rng)
    if style.lower:
        subject, value = subject.lower(), value.lower()
    return Fact(kind, subject, value, rng.randint(1, 9))


def other_value(rng: Random, fact: Fact, style: Style) -> Fact:
    """Draw another value for a fact; returns the new fact, of the same kind and subject."""
    while True:
        other = replace(draw_fact(rng, fact.kind, style), subject=fact.subject)
        if other.value.lower() != fact.value.lower():
            return other


def draw_kind(rng: Random, mix: Mix) -> FactKind:
    """Draw a random kind of fact, as the shares in `mix` say.

    With the probability `mix.story` it is a story. Otherwise the weights of the kinds decide; the
    shares `subjects` and `long_values` of `mix` may limit the choice to some kinds.
    """
    if rng.random() < mix.story:
        return STORY
    kinds = KINDS
    if mix.subjects and rng.random() < mix.subjects:
        kinds = tuple(kind for kind in KINDS if kind.subject)
    if mix.long_values and rng.random() < mix.long_values:
        kinds = tuple(kind for kind in KINDS if kind.key in LONG_VALUES)
    return rng.choices(kinds, [kind.weight for kind in kinds])[0]


@dataclass
class Dialogue:
    """Generates one synthetic conversation, message by message.

    Attributes:
        rng: source of the random numbers.
        mix: how often each kind of round occurs.
        facts: the facts that the user has told, by kind and subject.
        asked: for each told fact, how often the user has asked for it since it was told.
        jokes: the jokes that the model has told.
    """

    rng: Random
    mix: Mix
    facts: dict[Key, Fact] = field(default_factory=dict)
    asked: dict[Key, int] = field(default_factory=dict)
    jokes: list[str] = field(default_factory=list)

    def messages(self, rounds: int) -> Iterator[Message]:
        """Yield the messages of a conversation of about `rounds` rounds.

        At the end of the conversation, the user asks for up to six facts for which no earlier round
        has asked. In the share `apart` of all conversations, `far_apart` generates the messages
        instead, and in the share `series` of those that are left, `several_stories`.
        """
        if self.rng.random() < 0.12:
            yield Message("system", self.rng.choice(talk.SYSTEM_PROMPTS))
        if self.mix.apart and self.rng.random() < self.mix.apart:
            yield from self.far_apart(rounds)
            return
        if self.mix.series and self.rng.random() < self.mix.series:
            yield from self.several_stories(rounds)
            return
        done = 0
        while done < rounds:
            for pair in self.some_rounds():
                done += 1
                yield from pair
        for key in [key for key in self.facts if not self.asked.get(key)][:6]:
            yield from self.ask(key)

    def far_apart(self, rounds: int) -> Iterator[Message]:
        """Yield the messages of a conversation that asks at its end for facts told at its start.

        One to three rounds tell facts, many unrelated rounds follow, and the last rounds ask for
        each told fact and for a fact that was never told. In a third of these conversations, one of
        the rounds in the middle corrects a told fact.
        """
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            yield from self.tell()
        between = max(1, round(0.85 * rounds) - 4)  # short, since a training row is cut at its end
        turn = self.rng.randrange(3 * between)
        for number in range(between):
            yield from self.correct() if number == turn else self.unrelated_round()
        last = [*map(self.ask, self.facts), self.ask_untold()]
        self.rng.shuffle(last)
        for pair in last:
            yield from pair

    def several_stories(self, rounds: int) -> Iterator[Message]:
        """Yield the messages of a conversation that tells numbered stories, then asks for some.

        At the end of some of these conversations, the user also asks for a fact that was never
        told.
        """
        count = min(self.rng.choice((3, 3, 4, 5, 6, 8, 10)), max(2, rounds))
        first = self.rng.choice((1, 1, 1, self.rng.randint(1, 12)))
        while len(self.facts) < count:
            fact = draw_fact(self.rng, STORY, Style())
            if (STORY.key, fact.subject) not in self.facts:
                yield from self.tell_one(replace(fact, number=first + len(self.facts)), Style())
            if self.rng.random() < 0.1:
                yield from self.small_talk()
        last = [self.ask(key) for key in self.rng.sample(list(self.facts), min(count, 4))]
        if self.rng.random() < 0.3:
            last.append(self.ask_untold())
        self.rng.shuffle(last)
        for pair in last:
            yield from pair

    def unrelated_round(self) -> Round:
        """Generate a round that neither tells a fact nor asks for one: a quiz or small talk."""
        return self.ask_bank() if self.rng.random() < self.mix.quiz else self.small_talk()

    def some_rounds(self) -> Iterator[Round]:
        """Yield one round of a random kind or, if the kind is a game, all rounds of the game.

        The shares in `mix` say how likely each kind is.
        """
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
        """Generate a round in which the user tells one or two facts, or corrects a told fact.

        If no new fact is found, it is a round of small talk.
        """
        style = Style.draw(self.rng)
        old = [fact for fact in self.facts.values() if fact.kind.updates]
        if old and self.rng.random() < 0.18:
            return self.correct(style)
        fact = self.new_fact(style)
        if fact is None:
            return self.small_talk()
        if fact.kind.joins and self.rng.random() < 0.12:
            second = self.new_fact(style, joined=fact)
            if second is not None:
                return self.tell_both(fact, second, style)
        return self.tell_one(fact, style)

    def correct(self, style: Style | None = None) -> Round:
        """Generate a round in which the user corrects a told fact: gives it a new value.

        If no told fact can be corrected, it is a round unrelated to facts.
        """
        style = style or Style.draw(self.rng)
        old = [fact for fact in self.facts.values() if fact.kind.updates]
        if not old:
            return self.unrelated_round()
        return self.tell_one(other_value(self.rng, self.rng.choice(old), style), style)

    def new_fact(self, style: Style, joined: Fact | None = None) -> Fact | None:
        """Draw a fact that the user can tell: a new fact, or sometimes a new value of a told fact.

        If the fact `joined` is given, the result is a new fact of another kind, which the user can
        tell in the same message. Returns None if eight draws give no such fact.
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
        """Draw a random fact, whether it was told before or not.

        If it is a shopping list, the list sometimes has five or six items.
        """
        fact = draw_fact(self.rng, draw_kind(self.rng, self.mix), style)
        may_be_long = fact.kind.key == "groceries" and self.mix.long_list > 0
        if may_be_long and self.rng.random() < self.mix.long_list:
            items = item_list(self.rng.sample(w.GROCERIES, self.rng.choice((5, 6))))
            return Fact(fact.kind, "", items, fact.number)
        return fact

    def remember(self, fact: Fact) -> bool:
        """Add a fact to the told facts; returns whether it replaced an older value of the fact."""
        key = (fact.kind.key, fact.subject)
        known = key in self.facts
        self.facts[key] = fact
        self.asked[key] = 0
        return known

    def tell_one(self, fact: Fact, style: Style) -> Round:
        """Generate a round in which the user tells `fact`, and record it as told.

        If a fact of the same kind and subject was told before, the user corrects it.
        """
        known = self.remember(fact)
        template = self.rng.choice(fact.kind.updates if known else fact.kind.tells)
        user = style.apply(spell(self.rng, fact.fill(template)))
        recall = "repeat" if fact.kind is STORY else None
        one, other = reply(user, fact.fill(self.rng.choice(fact.kind.acks)), recall)
        return replace(one, fact=(fact.kind.key, fact.subject), value=fact.value), other

    def tell_both(self, fact: Fact, second: Fact, style: Style) -> Round:
        """Generate a round in which the user tells two facts in one message."""
        self.remember(fact)
        self.remember(second)
        one = fact.fill(self.rng.choice(fact.kind.tells)).rstrip(".")
        two = second.fill(lower_start(self.rng.choice(second.kind.tells)))
        acks = " ".join(x.fill(self.rng.choice(x.kind.acks[:2])) for x in (fact, second))
        return reply(style.apply(spell(self.rng, f"{one} and {two}")), acks)

    def ask_any(self) -> Round:
        """Generate a round that asks for a told fact, sometimes for two.

        Rarely, it asks for a fact that was never told, or is small talk. If no fact has been told,
        it is mostly small talk.
        """
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
        """Generate the text of a user's question for a told fact.

        A subject that has capital letters, such as a friend's name, keeps them.
        """
        style = Style.draw(self.rng)
        if fact.subject != fact.subject.lower():
            style = Style(bare=style.bare)
        text = self.rng.choice(fact.kind.asks)
        return style.apply(spell(self.rng, fact.fill(text)))

    def ask(self, key: Key) -> Round:
        """Generate a round in which the user asks for a told fact, and the reply states the fact.

        `key` is the kind and the subject of the fact.
        """
        fact = self.facts[key]
        self.asked[key] += 1
        one, other = reply(self.question(fact), fact.answer, fact.kind.key)
        return one, replace(other, fact=key)

    def ask_both(self, one: Key, two: Key) -> Round:
        """Generate a round in which the user asks for two told facts in one message.

        Each key is the kind and the subject of a fact.
        """
        first, second = self.facts[one], self.facts[two]
        user = self.question(first).rstrip("?") + " and " + lower_start(self.question(second))
        self.asked[one] += 1
        self.asked[two] += 1
        return reply(user, f"{first.answer} {second.answer}", "two")

    def ask_untold(self) -> Round:
        """Generate a round that asks for a fact never told; the reply says that it was not told.

        The kind of the fact is often that of a told fact. If eight draws give only told facts, it
        is a round of small talk.
        """
        kinds = [fact.kind for fact in self.facts.values() if fact.kind.subject]
        same_kind = bool(kinds) and self.rng.random() < 0.6
        for _ in range(8):
            kind = self.rng.choice(kinds) if same_kind else draw_kind(self.rng, self.mix)
            fact = draw_fact(self.rng, kind, Style())
            if (fact.kind.key, fact.subject) not in self.facts:
                return reply(self.question(fact), UNTOLD, "untold")
        return self.small_talk()

    def ask_bank(self) -> Round:
        """Generate a round with a question from the question bank, sometimes without options."""
        return open_quiz(self.rng) if self.rng.random() < 0.12 else quiz(self.rng)

    def joke(self) -> Round:
        """Generate a round in which the model tells a joke.

        A joke is repeated only after all jokes have been told.
        """
        left = [joke for joke in talk.JOKES if joke not in self.jokes] or list(talk.JOKES)
        joke = self.rng.choice(left)
        self.jokes.append(joke)
        user = Style.draw(self.rng).apply(self.rng.choice(talk.JOKE_ASKS))
        return reply(user, joke)

    def small_talk(self) -> Round:
        """Generate a round unrelated to told facts.

        It is small talk, a joke, a question on common knowledge, or a quiz.
        """
        roll = self.rng.random()
        if roll < 0.08:
            return self.joke()
        if roll < 0.24:
            return knowledge(self.rng)
        if roll < 0.30:
            return quiz(self.rng)
        prompts, answer = self.rng.choice(talk.SMALL_TALK)
        style = Style.draw(self.rng)
        return reply(style.apply(spell(self.rng, self.rng.choice(prompts))), answer)


def dialogue(rng: Random, rounds: int, mix: Mix) -> Iterator[Message]:
    """Yield the messages of one new synthetic conversation of about `rounds` rounds.

    `mix` says how often each kind of round occurs.
    """
    return Dialogue(rng, mix).messages(rounds)
