"""Kinds of facts that a user may tell in a chat: how each is told, asked for and answered.

In the sentences, `{v}` stands for the value that is asked for, and `{who}` for the person or thing
that the fact is about. The wordings vary: first or third person, long or short, with or without
lists and numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Values = Callable[[Random], str]
"""A function that draws a random value of a fact, for the fact itself and for wrong options."""


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


@dataclass(frozen=True)
class Kind:
    """One kind of fact.

    Attributes:
        name: the kind's name in results.
        told: sentences to choose from, each of which tells the fact.
        asked: questions to choose from, each of which asks for the fact.
        answer: the reply that states the value.
        values: a function that draws a random value.
        who: possible values of `{who}`; only '' if no sentence contains `{who}`.
        corrected: a sentence that corrects an earlier value; empty if the kind is never corrected.
    """

    name: str
    told: tuple[str, ...]
    asked: tuple[str, ...]
    answer: str
    values: Values
    who: tuple[str, ...] = ("",)
    corrected: str = ""


_GROUP = ("my sister", "my brother", "my cousin", "my neighbour", "my boss", "my roommate")

KINDS: tuple[Kind, ...] = (
    Kind(
        "name of a person",
        ("{who}'s name is {v}, by the way.", "{who} is called {v}.", "You know {who}? {v}."),
        ("What is {who}'s name?", "What is {who} called?"),
        "The name is {v}.",
        NAME,
        who=_GROUP,
    ),
    Kind(
        "name of a pet",
        (
            "We got a dog last week and named him {v}.",
            "Our new dog is called {v}, the kids love it.",
        ),
        ("What is our dog called?", "What did we name our dog?"),
        "The dog is called {v}.",
        PET,
    ),
    Kind(
        "where somebody moved",
        ("{who} has just moved to {v}.", "Guess what, {who} lives in {v} now."),
        ("Which city did {who} move to?", "Where does {who} live now?"),
        "They live in {v} now.",
        CITY,
        who=_GROUP,
        corrected="I mixed that up: {who} moved to {v}, not there.",
    ),
    Kind(
        "where I was born",
        ("I was born in {v}, even if I don't sound like it.", "I grew up in {v}."),
        ("Where did I grow up?", "Which city am I from?"),
        "You are from {v}.",
        CITY,
    ),
    Kind(
        "job",
        ("{who} works as {v}.", "{who} is {v}, you know, and always tired."),
        ("What does {who} do for a living?", "What is {who}'s job?"),
        "The job: {v}.",
        JOB,
        who=_GROUP,
    ),
    Kind(
        "train",
        ("My train leaves at {v}.", "I have to catch the train at {v} tomorrow."),
        ("When does my train leave?", "What time is my train?"),
        "Your train leaves at {v}.",
        time,
        corrected="Sorry, I looked at the wrong timetable. The train goes at {v}.",
    ),
    Kind(
        "appointment",
        (
            "The dentist can see me on {v}.",
            "I finally have an appointment with the dentist, on {v}.",
        ),
        ("When do I see the dentist?", "On which day is my appointment with the dentist?"),
        "The appointment is on {v}.",
        DAY,
        corrected="The dentist called and moved me to {v}.",
    ),
    Kind(
        "wedding",
        ("{who} gets married on {v}.", "Save the date: {v}, that's when {who} gets married."),
        ("When does {who} get married?", "What is the date of {who}'s wedding?"),
        "The wedding is on {v}.",
        date,
        who=_GROUP,
    ),
    Kind(
        "birthday",
        ("My birthday is {v}.", "I'll turn thirty on {v}."),
        ("When is my birthday?", "What date is my birthday?"),
        "Your birthday is {v}.",
        date,
    ),
    Kind(
        "room",
        ("They put us in room {v}.", "Our hotel room is number {v}, on the quiet side."),
        ("What is our room number?", "Which room are we in?"),
        "The room is number {v}.",
        number(102, 989),
        corrected="They changed our room, it is {v} now.",
    ),
    Kind(
        "wifi",
        ("The wifi password here is {v}.", "If you need the wifi: {v}."),
        ("What is the wifi password?", "How do I get into the wifi? I need the password."),
        "The wifi password is {v}.",
        code,
    ),
    Kind(
        "locker",
        ("My locker code is {v}.", "I set the code of my locker to {v} so I would not forget it."),
        ("What is the code of my locker?", "I forgot my locker code. What was it?"),
        "The locker code is {v}.",
        number(1000, 9999),
    ),
    Kind(
        "phone",
        ("Call the office at {v}.", "The new number of the office is {v}."),
        ("What is the office's phone number?", "Which number do I call for the office?"),
        "The number is {v}.",
        phone,
    ),
    Kind(
        "address",
        ("{who} lives at {v}.", "The party is at {who}'s place, {v}."),
        ("What is {who}'s address?", "At which address does {who} live?"),
        "The address is {v}.",
        street,
        who=_GROUP,
    ),
    Kind(
        "doctor",
        ("My doctor is called {v}.", "I go to a new doctor now, {v}, and she is lovely."),
        ("What is the name of my doctor?", "Who is my doctor?"),
        "Your doctor is {v}.",
        full_name,
    ),
    Kind(
        "teacher",
        ("Our piano teacher, {v}, is on holiday.", "The kids have piano lessons with {v}."),
        ("Who teaches the piano?", "What is the piano teacher's name?"),
        "The piano teacher is {v}.",
        full_name,
    ),
    Kind(
        "allergy",
        ("I can't eat {v}, I'm allergic.", "Remember that I'm allergic to {v}."),
        ("What am I allergic to?", "Which food can't I eat?"),
        "You are allergic to {v}.",
        FOOD,
    ),
    Kind(
        "shopping list",
        ("We still need {v}.", "Could you note down what to buy? {v}.", "Shopping: {v}."),
        ("What do we still need to buy?", "What is on the shopping list?"),
        "The list: {v}.",
        three_of(
            "milk,rice,candles,onions,soap,butter,lemons,flour,batteries,honey,carrots,tea,salt"
        ),
    ),
    Kind(
        "guests",
        ("{v} are coming on Saturday.", "For dinner on Saturday I have invited {v}."),
        ("Who is coming on Saturday?", "Whom did I invite for dinner on Saturday?"),
        "The guests are {v}.",
        three_of("Marta,Hugo,Priya,Owen,Greta,Malik,Zoe,Anton,Lucia,Kofi,Ingrid,Stefan"),
    ),
    Kind(
        "packing",
        ("I must not forget to pack {v}.", "Things I always forget to pack: {v}."),
        ("What must I not forget to pack?", "Which things do I have to pack?"),
        "You must pack {v}.",
        three_of("socks,sunscreen,a towel,my passport,a charger,gloves,a map,slippers,a torch"),
    ),
    Kind(
        "car",
        ("My car is {v}, you can't miss it.", "I'll be in the {v} car in front of the station."),
        ("What colour is my car?", "Which colour is the car?"),
        "The car is {v}.",
        COLOUR,
        corrected="I sold the old car, the new one is {v}.",
    ),
    Kind(
        "door",
        ("We painted the front door {v}.", "Look for the house with the {v} door."),
        ("What colour is our front door?", "Which colour did we paint the door?"),
        "The door is {v}.",
        COLOUR,
    ),
    Kind(
        "parking",
        ("I parked on level {v}.", "The car is on level {v} of the car park, near the lift."),
        ("On which level did I park?", "Where is the car? Which level?"),
        "The car is on level {v}.",
        number(2, 9),
    ),
    Kind(
        "seat",
        ("My seat is {v}.", "I'm in seat {v}, by the window."),
        ("Which seat do I have?", "What is my seat?"),
        "Your seat is {v}.",
        lambda rng: f"{rng.randint(11, 48)}{rng.choice('ABCDEF')}",
    ),
    Kind(
        "order",
        ("The order number is {v}.", "They told me to quote {v} when I ask about the order."),
        ("What is the order number?", "Which number do I quote for the order?"),
        "The order number is {v}.",
        lambda rng: f"{rng.choice('BDKRTX')}{rng.randint(1000, 9999)}",
    ),
    Kind(
        "price",
        ("The repair will cost {v} dollars.", "They want {v} dollars to repair the roof."),
        ("How much will the repair cost?", "What do they want for the repair?"),
        "The repair costs {v} dollars.",
        number(120, 990),
        corrected="The bill has come, the repair was {v} dollars after all.",
    ),
    Kind(
        "age",
        ("{who} is {v} now, can you believe it?", "{who} has just turned {v}."),
        ("How old is {who}?", "What is {who}'s age?"),
        "The age is {v}.",
        number(21, 89),
        who=("my uncle", "my aunt", "my landlord", "my coach"),
    ),
    Kind(
        "instrument",
        ("I'm learning to play the {v}.", "In my free time I play the {v}, rather badly."),
        ("Which instrument do I play?", "What instrument am I learning?"),
        "You play the {v}.",
        one_of("cello,flute,accordion,harp,banjo,trumpet,clarinet,ukulele,oboe,drums"),
    ),
    Kind(
        "sport",
        ("{who} is crazy about {v}.", "{who} spends every weekend on {v}."),
        ("Which sport does {who} love?", "What is {who}'s favourite sport?"),
        "It is {v}.",
        one_of("rowing,fencing,badminton,climbing,archery,rugby,judo,sailing,curling,squash"),
        who=_GROUP,
    ),
    Kind(
        "language",
        ("I have started to learn {v}.", "My evening class is {v}, twice a week."),
        ("Which language am I learning?", "What language is my evening class?"),
        "You are learning {v}.",
        one_of("Turkish,Greek,Korean,Swedish,Arabic,Polish,Dutch,Hindi,Finnish,Welsh"),
    ),
    Kind(
        "where the keys are",
        ("The spare keys are {v}.", "If you lock yourself out, the spare keys are {v}."),
        ("Where are the spare keys?", "Where do we keep the spare keys?"),
        "The spare keys are {v}.",
        one_of(
            "under the blue pot,in the tool box,behind the mirror,in the tea tin,on the top shelf,"
            "inside the old boot,next to the boiler,in the glove compartment"
        ),
    ),
    Kind(
        "film",
        ("We are going to see {v} tonight.", "I bought tickets for {v}, the film everyone likes."),
        ("Which film are we going to see?", "For which film did I buy tickets?"),
        "The film is {v}.",
        one_of(
            "The Silent Harbour,Northern Lights,A Winter in Rome,The Last Orchard,Paper Boats,"
            "Midnight Ferry,The Clockmaker,Seven Bridges"
        ),
    ),
    Kind(
        "gift",
        ("I bought {v} for {who}, but it is a surprise.", "{who} will get {v} for Christmas."),
        ("What is the present for {who}?", "What did I buy for {who}?"),
        "The present is {v}.",
        one_of(
            "a kite,a telescope,a chess set,a scarf,a teapot,a bicycle,a cookbook,a puzzle,a lamp"
        ),
        who=("my niece", "my nephew", "my grandfather", "my best friend"),
    ),
    Kind(
        "company",
        ("I have an interview at {v}.", "{v} has invited me for an interview!"),
        ("Which company invited me?", "At which company do I have an interview?"),
        "The company is {v}.",
        one_of(
            "Northwind,Bluepeak,Hartley and Sons,Solaris Foods,Quantum Bikes,Redwood Media,"
            "Granite Bank,Lumen Labs"
        ),
    ),
    Kind(
        "meeting place",
        ("Let's meet {v}.", "We said we would all meet {v}, at noon."),
        ("Where do we meet?", "Where did we say we would meet?"),
        "You meet {v}.",
        one_of(
            "at the fountain,in front of the museum,by the ferry,at the bakery,on the old bridge,"
            "at the tram stop,behind the theatre,in the library"
        ),
        corrected="Change of plan, we meet {v} instead.",
    ),
    Kind(
        "bus",
        ("Take bus number {v} from the station.", "It's bus {v} that stops right at our door."),
        ("Which bus stops at our door?", "What number is the bus that I take?"),
        "It is bus {v}.",
        number(11, 98),
    ),
    Kind(
        "drink",
        ("{who} only ever drinks {v}.", "For {who} please order {v}."),
        ("What does {who} drink?", "What do I order for {who}?"),
        "The drink is {v}.",
        one_of(
            "ginger ale,black coffee,tomato juice,green tea,lemonade,hot chocolate,apple juice,"
            "sparkling water"
        ),
        who=_GROUP,
    ),
    Kind(
        "medicine",
        ("I have to take the pills {v}.", "The doctor said to take these pills {v}."),
        ("How often do I take the pills?", "When do I have to take my pills?"),
        "You take them {v}.",
        one_of(
            "twice a day,every six hours,before breakfast,on an empty stomach,once a week,"
            "after lunch,every other day,before bed"
        ),
        corrected="I misread the label, the pills are to be taken {v}.",
    ),
)
