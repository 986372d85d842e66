"""The question bank: multiple-choice questions about general knowledge, for the model `tiny`.

A topic asks the same question about many things. The wrong options of a question are other answers
of the same topic, so that only knowledge of the thing itself tells which option is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random

from sirchat.lab.synthetic import smalltalk as talk
from sirchat.lab.synthetic.smalltalk import pairs


@dataclass(frozen=True)
class Topic:
    """A kind of question that is asked about many things, such as the capital of a country.

    `questions` has the texts of the question, in which `{x}` stands for the thing. `known` has all
    pairs (thing, right answer).
    """

    key: str
    questions: tuple[str, ...]
    known: tuple[tuple[str, str], ...]

    @cached_property
    def answers(self) -> tuple[str, ...]:
        """The right answers to all questions of the topic, each once, in the order of `known`."""
        return tuple(dict.fromkeys(answer for _, answer in self.known))

    def wrong(self, thing: str, right: str) -> list[str]:
        """Choose up to four wrong options for the question about `thing`.

        They are answers of the topic other than `right`. Every call returns the same options.
        """
        pool = [answer for answer in self.answers if answer not in (right, thing)]
        return Random(f"{self.key}/{thing}").sample(pool, min(4, len(pool)))


def grouped(text: str) -> tuple[tuple[str, str], ...]:
    """Parse lines such as `answer: thing thing ...` into pairs (thing, answer) for a topic.

    In the text, `_` stands for a space.
    """
    return tuple(_grouped(text))


def _grouped(text: str) -> Iterator[tuple[str, str]]:
    for line in text.strip().splitlines():
        answer, _, things = line.partition(":")
        for thing in things.split():
            yield thing.replace("_", " "), answer.strip().replace("_", " ")


def both_ways(known: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The pairs (thing, answer) in `known`, followed by the same pairs as (answer, thing).

    For example, opposites are asked for both ways.
    """
    return known + tuple((other, one) for one, other in known)


TOPICS: tuple[Topic, ...] = (
    Topic("where", ("Where would you find a {x}?", "Where does a {x} belong?"), talk.WHERE),
    Topic("opposite", ("What is the opposite of {x}?",), both_ways(talk.OPPOSITES)),
    Topic(
        "capital",
        ("What is the capital of {x}?", "Which city is the capital of {x}?"),
        talk.CAPITALS
        + pairs("""
        Turkey:Ankara Finland:Helsinki Sweden:Stockholm Hungary:Budapest Russia:Moscow China:Beijing
        India:Delhi Belgium:Brussels Denmark:Copenhagen Canada:Ottawa Chile:Santiago Iran:Tehran
        Iraq:Baghdad Lebanon:Beirut Ghana:Accra Ecuador:Quito Korea:Seoul"""),
    ),
    Topic(
        "group",
        ("What is a {x}?", "What kind of thing is a {x}?"),
        grouped("""
        fruit: apple pear banana lemon cherry grape melon plum peach mango
        vegetable: carrot onion cabbage potato spinach leek pumpkin radish turnip
        bird: eagle robin sparrow penguin swan crow pigeon parrot owl
        fish: salmon trout tuna shark herring carp cod eel
        insect: ant bee wasp beetle moth mosquito cricket ladybird
        flower: rose tulip daisy lily violet orchid sunflower daffodil
        tree: oak pine birch willow maple elm fir beech
        tool: hammer saw drill wrench chisel pliers axe rake
        metal: iron gold silver copper tin lead zinc
        instrument: piano guitar violin flute drum cello trumpet harp
        garment: shirt coat sock skirt scarf glove sweater jacket
        vehicle: car bus truck tram bicycle lorry van scooter
        planet: Mars Venus Jupiter Saturn Mercury Neptune"""),
    ),
    Topic(
        "colour",
        ("What colour is {x}?", "Which colour has {x}?"),
        grouped("""
        white: snow milk chalk
        green: grass a_leaf a_frog
        blue: the_sky the_sea
        yellow: a_lemon a_banana the_sun
        red: blood a_tomato a_strawberry
        black: coal the_night tar
        orange: a_carrot a_pumpkin
        gray: an_elephant ash
        brown: chocolate mud"""),
    ),
    Topic(
        "tool",
        ("What do you use to {x}?", "With what would you {x}?"),
        grouped("""
        scissors: cut_paper cut_hair
        broom: sweep_the_floor
        needle: sew_a_button
        spoon: eat_soup stir_tea
        umbrella: stay_dry
        lamp: light_a_room
        ladder: climb_a_wall
        pen: write_a_letter sign_your_name
        brush: paint_a_wall
        clock: tell_the_time
        oven: bake_a_cake
        fridge: keep_milk_cold
        shovel: dig_a_hole
        phone: call_a_friend
        towel: dry_your_hands
        soap: wash_your_hands
        map: find_the_way
        camera: take_a_picture
        scale: weigh_flour"""),
    ),
    Topic(
        "young",
        ("What is a young {x} called?",),
        pairs("""
        dog:puppy cat:kitten cow:calf sheep:lamb horse:foal hen:chick duck:duckling bear:cub
        pig:piglet goose:gosling frog:tadpole goat:kid kangaroo:joey swan:cygnet
        butterfly:caterpillar"""),
    ),
    Topic(
        "worker",
        ("Who {x}?", "Which person {x}?"),
        grouped("""
        baker: bakes_bread makes_rolls
        pilot: flies_a_plane
        doctor: cures_the_sick
        teacher: gives_lessons
        farmer: grows_wheat milks_cows
        tailor: sews_suits
        plumber: repairs_pipes
        judge: decides_in_court
        fireman: puts_out_fires
        barber: cuts_hair
        butcher: sells_meat
        miner: digs_for_coal
        sailor: works_on_a_ship
        waiter: serves_in_a_restaurant
        dentist: looks_after_teeth
        painter: paints_pictures
        gardener: looks_after_gardens
        postman: brings_letters
        librarian: lends_books
        author: writes_novels"""),
    ),
    Topic(
        "material",
        ("What is a {x} made of?",),
        grouped("""
        glass: window bottle
        wood: table log
        wool: sweater blanket
        paper: book newspaper
        rubber: tyre balloon
        leather: boot belt
        metal: nail key coin
        brick: chimney
        wax: candle
        clay: pot"""),
    ),
    Topic(
        "month",
        ("Which month comes after {x}?",),
        pairs("""
        January:February February:March March:April April:May May:June June:July July:August
        August:September September:October October:November November:December December:January"""),
    ),
    Topic(
        "day",
        ("Which day comes after {x}?",),
        pairs("""
        Monday:Tuesday Tuesday:Wednesday Wednesday:Thursday Thursday:Friday Friday:Saturday
        Saturday:Sunday Sunday:Monday"""),
    ),
    Topic(
        "body",
        ("Which part of the body do you {x} with?",),
        pairs("""
        see:eyes hear:ears smell:nose taste:tongue bite:teeth walk:legs think:brain breathe:lungs
        point:finger kneel:knees"""),
    ),
    Topic(
        "sound",
        ("What does a {x} say?",),
        (*talk.SOUNDS, ("frog", "croak")),
    ),
    Topic(
        "wear",
        ("What do you wear on your {x}?",),
        pairs("head:hat feet:shoes hands:gloves neck:scarf finger:ring eyes:glasses legs:trousers"),
    ),
    Topic(
        "food",
        ("What does a {x} like to eat?",),
        pairs("""
        rabbit:carrots monkey:bananas mouse:cheese cow:grass cat:mice bear:honey squirrel:nuts
        panda:bamboo"""),
    ),
    Topic(
        "legs",
        ("How many legs has a {x}?",),
        grouped("""
        two: chicken human pigeon
        four: dog horse table
        six: beetle wasp
        eight: spider
        none: snake worm eel"""),
    ),
    Topic(
        "home",
        ("Where does a {x} live?",),
        pairs("""
        bear:cave spider:web ant:anthill king:castle monk:monastery fox:den hen:coop dog:kennel
        pig:sty whale:sea"""),
    ),
)  # fmt: skip


def facts() -> int:
    """The number of pairs (thing, right answer) in all topics of the question bank together."""
    return sum(len(topic.known) for topic in TOPICS)
