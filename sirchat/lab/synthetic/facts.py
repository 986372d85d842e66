"""The kinds of facts that the user of a synthetic dialogue may tell, with texts for each kind.

The texts are templates for messages that tell a fact, ask for it, and answer. In a template, `{v}`
stands for the value of the fact and `{s}` for its subject (a pet's species, a friend's name). A
question about a fact has only one right answer, so that a reply can be checked word for word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from sirchat.lab.synthetic import words as w

Draw = Callable[[Random], str]
"""A function that takes a random number generator and returns a random text, such as a name."""


def pick(pool: tuple[str, ...]) -> Draw:
    """Make a function that draws a random word from the list `pool`."""
    return lambda rng: rng.choice(pool)


def made_up(rng: Random) -> str:
    """Make up a random word of two or three syllables that can be pronounced, in lower case."""
    syllables = rng.choice((2, 2, 3))
    word = "".join(rng.choice(w.ONSETS) + rng.choice(w.VOWELS) for _ in range(syllables))
    return word + rng.choice(w.CODAS)


def open_name(pool: tuple[str, ...], known: float = 0.6) -> Draw:
    """Make a function that draws a random name, which begins with a capital letter.

    With the probability `known`, the name is one from the list `pool`. Otherwise it is a made-up or
    a common word, so that a model that is trained on such names learns to copy any name.
    """

    def draw(rng: Random) -> str:
        roll = rng.random()
        if roll < known:
            return rng.choice(pool)
        return (made_up(rng) if roll < 0.85 else rng.choice(w.COMMON)).capitalize()

    return draw


def secret(rng: Random) -> str:
    """Draw a random secret word for a fact: a common word or a made-up one."""
    return rng.choice(w.COMMON) if rng.random() < 0.6 else made_up(rng)


def digits(count: int) -> Draw:
    """Make a function that draws a text of `count` random decimal digits."""
    return lambda rng: "".join(rng.choice("0123456789") for _ in range(count))


def date(rng: Random) -> str:
    """Draw a random day of the year, as text such as `May 17`."""
    return f"{rng.choice(w.MONTHS)} {rng.randint(1, 28)}"


def age(rng: Random) -> str:
    """Draw a random age in years, from 5 to 99, as text."""
    return str(rng.randint(5, 99))


def item_list(items: list[str]) -> str:
    """Join the items of a list to one text, such as `a`, `a and b`, or `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def groceries(rng: Random) -> str:
    """Draw a random shopping list of one to four items, as text."""
    return item_list(rng.sample(w.GROCERIES, rng.choice((1, 2, 2, 3, 3, 4))))


def story(rng: Random) -> str:
    """Draw the random plot of a story, a deed and a place; the story's hero is drawn elsewhere."""
    return f"{rng.choice(w.DEEDS)} {rng.choice(w.PLACES)}"


@dataclass(frozen=True, slots=True)
class FactKind:
    """A kind of fact, such as the user's name or a pet's name, with templates for its messages.

    Attributes:
        key: name of the kind.
        value: function that draws a random value for a fact.
        tells: templates of user messages that tell a fact.
        asks: templates of user messages that ask for a told fact.
        answer: template of the right answer to each of these questions.
        acks: templates of replies to a told fact; some restate the value.
        updates: templates of user messages that correct the value of a told fact; empty if facts of
            this kind are not corrected.
        subject: function that draws a random subject; None if the kind has no subject.
        weight: how often this kind is drawn, compared with other kinds.
        joins: whether one message may tell a fact of this kind together with another fact.
    """

    key: str
    value: Draw
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    acks: tuple[str, ...]
    updates: tuple[str, ...] = ()
    subject: Draw | None = None
    weight: float = 1.0
    joins: bool = True


KINDS: tuple[FactKind, ...] = (
    FactKind(
        "name",
        open_name(w.NAMES),
        ("My name is {v}.", "My name is {v}.", "I am {v}.", "I'm {v}.", "You can call me {v}.",
         "Call me {v}.", "Hi, I'm {v}.", "Hello, my name is {v}.", "People call me {v}.",
         "The name is {v}.", "{v} is my name.", "Please call me {v}."),
        ("What is my name?", "What is my name?", "What's my name?", "Do you remember my name?",
         "Who am I?", "Tell me my name.", "Can you tell me my name?", "Do you know my name?",
         "What am I called?"),
        "Your name is {v}.",
        ("Nice to meet you, {v}.", "Hello, {v}.", "Nice to meet you, {v}."),
        ("No, my name is {v}.", "Actually, my name is {v}.", "From now on call me {v}."),
        weight=1.6,
    ),
    FactKind(
        "city",
        open_name(w.CITIES, 0.75),
        ("I live in {v}.", "I live in {v}.", "My home is in {v}.", "I am from {v}.",
         "My city is {v}.", "I come from {v}.", "My home town is {v}.", "I'm living in {v}."),
        ("Where do I live?", "Where do I live?", "Which city do I live in?", "Where is my home?",
         "What city am I from?", "Do you remember where I live?", "Where am I from?"),
        "You live in {v}.",
        ("{v} is a nice place.", "I will remember that you live in {v}.", "{v} sounds lovely."),
        ("No, I moved to {v}.", "I moved to {v}.", "Actually, I live in {v} now."),
        weight=1.3,
    ),
    FactKind(
        "job",
        pick(w.JOBS),
        ("I work as a {v}.", "My job is {v}.", "I am a {v}.", "I'm a {v} by profession.",
         "I earn my living as a {v}."),
        ("What is my job?", "What's my job?", "What do I do for a living?", "What do I work as?",
         "Do you remember my job?"),
        "You work as a {v}.",
        ("Being a {v} sounds interesting.", "So you are a {v}.", "That sounds interesting."),
        ("I have a new job, I am a {v} now.", "Actually, I work as a {v} now."),
    ),
    FactKind(
        "pet",
        open_name(w.PET_NAMES),
        ("My {s} is called {v}.", "I have a {s} named {v}.", "My {s}'s name is {v}.",
         "I have a {s} called {v}.", "We named our {s} {v}."),
        ("What is my {s} called?", "What is my {s}'s name?", "What's the name of my {s}?",
         "Do you remember my {s}'s name?", "What is the name of my {s}?"),
        "Your {s} is called {v}.",
        ("{v} is a lovely name for a {s}.", "How lovely! Say hello to {v}.", "How lovely!"),
        ("Actually, my {s} is called {v}.", "We gave our {s} a new name, {v}."),
        subject=pick(w.ANIMALS),
        weight=1.5,
    ),
    FactKind(
        "colour",
        pick(w.COLOURS),
        ("My favourite colour is {v}.", "The colour I like best is {v}.",
         "I like the colour {v} most.", "My best-loved colour is {v}."),
        ("What is my favourite colour?", "What's my favourite colour?",
         "Which colour do I like best?", "Do you remember my favourite colour?"),
        "Your favourite colour is {v}.",
        ("{v:c} is a fine colour.", "I like {v} too.", "Good choice."),
        ("Now my favourite colour is {v}.", "Actually, my favourite colour is {v}."),
    ),
    FactKind(
        "food",
        pick(w.FOODS),
        ("My favourite food is {v}.", "The food I like best is {v}.", "I love eating {v}.",
         "I like {v} more than any other food."),
        ("What is my favourite food?", "What food do I like best?", "What do I love eating?",
         "Do you remember my favourite food?"),
        "Your favourite food is {v}.",
        ("{v:c} sounds delicious.", "I will remember that you like {v}.", "That sounds delicious."),
        ("Actually, my favourite food is {v}.",),
    ),
    FactKind(
        "drink",
        pick(w.DRINKS),
        ("My favourite drink is {v}.", "I like drinking {v}.", "The drink I like best is {v}."),
        ("What is my favourite drink?", "What do I like drinking?", "Which drink do I like best?"),
        "Your favourite drink is {v}.",
        ("A cup of {v} is always good.", "I will remember the {v}.", "Cheers!"),
        ("Actually, my favourite drink is {v}.",),
        weight=0.7,
    ),
    FactKind(
        "hobby",
        pick(w.HOBBIES),
        ("My hobby is {v}.", "In my free time I enjoy {v}.", "My favourite hobby is {v}.",
         "I spend my weekends {v}."),
        ("What is my hobby?", "What do I enjoy in my free time?", "What's my hobby?",
         "Do you remember my hobby?"),
        "Your hobby is {v}.",
        ("{v:c} is a good hobby.", "{v:c} sounds like fun.", "That sounds like fun."),
        ("I have a new hobby now, it is {v}.",),
        weight=0.8,
    ),
    FactKind(
        "instrument",
        pick(w.INSTRUMENTS),
        ("I play the {v}.", "I am learning the {v}.", "My instrument is the {v}."),
        ("Which instrument do I play?", "What instrument do I play?", "What is my instrument?"),
        "You play the {v}.",
        ("The {v} sounds beautiful.", "I like the {v}.", "Music is wonderful."),
        weight=0.6,
    ),
    FactKind(
        "relative",
        open_name(w.NAMES),
        ("My {s} is called {v}.", "My {s}'s name is {v}.", "The name of my {s} is {v}."),
        ("What is my {s} called?", "What is my {s}'s name?", "What's the name of my {s}?",
         "Who is my {s}?"),
        "Your {s} is called {v}.",
        ("Say hello to {v} from me.", "{v} is a nice name.", "I will remember that."),
        ("Actually, my {s} is called {v}.",),
        subject=pick(w.RELATIVES),
        weight=1.2,
    ),
    FactKind(
        "friend",
        open_name(w.CITIES, 0.75),
        ("My friend {s} is from {v}.", "{s} is a friend of mine from {v}.", "{s} lives in {v}.",
         "My friend {s} lives in {v}."),
        ("Where is {s} from?", "Where does {s} live?", "Where is my friend {s} from?"),
        "{s} is from {v}.",
        ("I would like to see {v}.", "I will remember that {s} is from {v}.", "I see."),
        ("{s} moved to {v}.",),
        subject=open_name(w.NAMES),
    ),
    FactKind(
        "birthday",
        date,
        ("My birthday is on {v}.", "I was born on {v}.", "My birthday is {v}."),
        ("When is my birthday?", "When was I born?", "What day is my birthday?"),
        "Your birthday is on {v}.",
        ("I will think of you on {v}.", "{v} is a good day.", "I will remember that."),
        weight=0.8,
    ),
    FactKind(
        "age",
        age,
        ("I am {v} years old.", "I'm {v}.", "My age is {v}."),
        ("How old am I?", "What is my age?", "Do you remember how old I am?"),
        "You are {v} years old.",
        ("{v} is a good age.", "I see, you are {v}.", "I see."),
        ("Actually, I am {v} years old.",),
        weight=0.6,
    ),
    FactKind(
        "code",
        digits(4),
        ("My door code is {v}.", "The door code is {v}.", "The code for my door is {v}.",
         "Remember the code {v}.", "My code is {v}."),
        ("What is my door code?", "What is the door code?", "What's the code?",
         "What is my code?", "Which code did I give you?"),
        "Your door code is {v}.",
        ("I will keep the code {v} safe.", "{v}, I will remember it.", "OK."),
        ("The door code changed, it is {v} now.", "My new door code is {v}."),
    ),
    FactKind(
        "secret",
        secret,
        ("The secret word is {v}.", "My secret word is {v}.", "The magic word is {v}.",
         "Remember the word {v}."),
        ("What is the secret word?", "What's the magic word?", "What is my secret word?",
         "Which word did I ask you to remember?"),
        "The secret word is {v}.",
        ("I will remember the word {v}.", "{v:c}, I will not forget it.", "OK."),
        ("The new secret word is {v}.",),
    ),
    FactKind(
        "thing",
        pick(w.SPOTS),
        ("I put my {s} {v}.", "My {s} is {v}.", "I left my {s} {v}."),
        ("Where is my {s}?", "Where did I put my {s}?", "Do you know where my {s} is?"),
        "Your {s} is {v}.",
        ("OK, your {s} is {v}.", "I will remember that it is {v}.", "I will remember that."),
        ("I moved my {s}, it is {v} now.", "Now my {s} is {v}."),
        subject=pick(w.THINGS),
    ),
    FactKind(
        "event",
        pick(w.WEEKDAYS),
        ("My {s} is on {v}.", "I have a {s} on {v}.", "The {s} is on {v}."),
        ("When is my {s}?", "Which day is my {s}?", "On which day is the {s}?"),
        "Your {s} is on {v}.",
        ("I hope {v} will be a good day.", "OK, the {s} is on {v}.", "I will remember that."),
        ("My {s} was moved to {v}.",),
        subject=pick(w.EVENTS),
        weight=0.8,
    ),
    FactKind(
        "groceries",
        groceries,
        ("I need to buy {v}.", "Please remember my groceries: {v}.", "My shopping list has {v}.",
         "I want to buy {v}.", "Please put {v} on my shopping list.", "Remember to buy {v}."),
        ("What was on my shopping list?", "Which groceries do I need?",
         "What is on my shopping list?", "What do I need to buy?", "What did I want to buy?",
         "What groceries did I mention?"),
        "You need to buy {v}.",
        ("OK, you need {v}.", "I will remember {v}.", "OK.", "Got it."),
        ("I changed my shopping list, it is {v} now.",),
        weight=1.6,
    ),
    FactKind(
        "grocery",
        pick(w.GROCERIES),
        ("I want you to buy the GROCERY: [{v}].", "I want you to buy the GROCERY: [{v}].",
         "Please buy [{v}] for me."),
        ("Which GROCERY did I ask you to buy?", "What did I ask you to buy?",
         "Which grocery did I want you to buy?"),
        "You asked me to buy {v}.",
        ("OK", "OK", "OK, I will buy {v}."),
        weight=1.0,
        joins=False,
    ),
)  # fmt: skip

STORY = FactKind(
    "story",
    story,
    ("Can you repeat this sentence exactly as it is: In story {n}, a {s} {v}.",),
    ("Can you repeat the sentence about the {s}?", "What happened in the story about the {s}?",
     "Repeat the sentence about the {s}."),
    "In story {n}, a {s} {v}.",
    ("In story {n}, a {s} {v}.",),
    subject=pick(w.HEROES),
    joins=False,
)  # fmt: skip
