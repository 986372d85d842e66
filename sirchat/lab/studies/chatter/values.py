"""Draws values for the facts: names, times, codes, lists and the like."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Values = Callable[[Random], str]
"""Draws a value; other draws are the wrong options."""


def one_of(text: str) -> Values:
    words = tuple(text.split(","))
    return lambda rng: rng.choice(words)


def three_of(text: str) -> Values:
    words = tuple(text.split(","))

    def draw(rng: Random) -> str:
        first, second, third = rng.sample(words, 3)
        return f"{first}, {second} and {third}"

    return draw


def number(low: int, high: int, form: str = "{}") -> Values:
    return lambda rng: form.format(rng.randint(low, high))


def time(rng: Random) -> str:
    return f"{rng.randint(1, 12)}:{rng.choice(('05', '10', '20', '25', '35', '40', '50', '55'))}"


def code(rng: Random) -> str:
    return f"{WORD(rng)}{rng.randint(10, 99)}"


def street(rng: Random) -> str:
    return f"{rng.randint(2, 98)} {STREET(rng)}"


def phone(rng: Random) -> str:
    return f"{rng.randint(200, 989)}-{rng.randint(1000, 9999)}"


def date(rng: Random) -> str:
    return f"{MONTH(rng)} {rng.randint(2, 28)}"


def full_name(rng: Random) -> str:
    return f"{NAME(rng)} {SURNAME(rng)}"


NAME = one_of(
    "Marta,Olga,Priya,Hannah,Zoe,Ingrid,Fatima,Noriko,Beatrice,Lucia,Tobias,Rafael,Hugo,Dmitri,"
    "Kofi,Anton,Malik,Stefan,Owen,Elias,Greta,Camille,Yusuf,Leonard"
)
SURNAME = one_of(
    "Halvorsen,Okafor,Brandt,Castellano,Whitlock,Moreau,Lindqvist,Petrov,Tanaka,Delgado,Ashworth,"
    "Kowalski,Ferreira,Nakamura,Sinclair,Rosenberg"
)
CITY = one_of(
    "Lisbon,Oslo,Denver,Kyoto,Prague,Dublin,Nairobi,Lima,Athens,Montreal,Helsinki,Seville,Krakow,"
    "Perth,Geneva,Cairo"
)
STREET = one_of(
    "Maple Street,Harbour Road,Mill Lane,Station Road,Orchard Avenue,King Street,Bridge Road,"
    "Chapel Lane,Garden Street,Park Avenue"
)
MONTH = one_of("January,March,April,May,June,August,September,October,November,December")
DAY = one_of("Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday")
COLOUR = one_of("green,orange,purple,yellow,silver,brown,pink,turquoise,white,red")
WORD = one_of("walnut,falcon,copper,meadow,anchor,lantern,pepper,thunder,velvet,granite,cactus")
FOOD = one_of("peanuts,shellfish,eggs,strawberries,soy,sesame,mustard,celery,walnuts,kiwi")
JOB = one_of(
    "a nurse,a plumber,a translator,an architect,a baker,a pilot,a librarian,a dentist,a carpenter,"
    "a chemist,a lawyer,a florist"
)
PET = one_of("Biscuit,Pepper,Shadow,Mango,Waffles,Ziggy,Clover,Pickles,Bandit,Nutmeg")
