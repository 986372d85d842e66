"""Lists of words from which the subjects and the values of facts in synthetic dialogue are drawn.

Every list is a plain tuple of strings, so that it can be extended by adding words.
"""

from __future__ import annotations


def pool(text: str) -> tuple[str, ...]:
    """Split a text into its words, and return them as a word list."""
    return tuple(text.split())


NAMES: tuple[str, ...] = pool("""
    Anna Ben Carla David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Paul Quinn
    Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Chris Diana Ethan Fiona George Hannah
    Ivan Julia Kevin Laura Mark Nina Oscar Petra Ralph Sara Tom Vera Walter Zack Alice Bob Clara
    Daniel Eva Frank Gina Hugo Ines James Kate Liam Mia Nora Otto Pia Robert Sophie Theo Ursula
    Vince Will Yusuf Amir Chen Priya Kenji Fatima Omar Lena""")

CITIES: tuple[str, ...] = (
    *pool("""
    Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Athens Dublin London Warsaw Cairo Delhi
    Tokyo Seoul Lima Quito Havana Boston Denver Austin Chicago Seattle Sydney Perth Nairobi Accra
    Geneva Zurich Hamburg Munich Milan Naples Porto Seville Bergen Helsinki Toronto Dallas
    Bristol Leeds"""),
    "New York",
    "Hong Kong",
    "Cape Town",
)

PET_NAMES: tuple[str, ...] = pool("""
    Luna Max Bella Rocky Milo Coco Daisy Buddy Ziggy Pepper Shadow Ginger Oreo Felix Simba Nala
    Bruno Toby Misty Smokey Biscuit Ruby Loki Willow""")

ANIMALS: tuple[str, ...] = pool("cat dog rabbit parrot hamster turtle horse goldfish snake pony")

COLOURS: tuple[str, ...] = pool(
    "red blue green yellow purple orange black white pink brown gray silver"
)

JOBS: tuple[str, ...] = pool("""
    teacher doctor baker farmer pilot nurse lawyer painter driver chef writer singer engineer
    gardener plumber sailor dentist carpenter waiter student librarian scientist""")

FOODS: tuple[str, ...] = pool("""
    pizza pasta soup salad sushi curry rice pancakes dumplings tacos cheese chocolate bread
    noodles steak lasagna strawberries mushrooms""")

DRINKS: tuple[str, ...] = pool("coffee tea water juice lemonade milk cocoa cider soda beer")

HOBBIES: tuple[str, ...] = pool("""
    painting chess swimming hiking cooking dancing fishing reading cycling gardening running
    knitting sailing singing skiing football tennis yoga""")

INSTRUMENTS: tuple[str, ...] = pool(
    "piano guitar violin flute drums cello trumpet harp banjo accordion"
)

RELATIVES: tuple[str, ...] = (
    *pool("""
    sister brother mother father wife husband son daughter uncle aunt neighbour boss teacher
    dentist"""),
    "best friend",
)

THINGS: tuple[str, ...] = pool(
    "wallet passport phone umbrella book camera ring ticket hat bag laptop watch"
)

SPOTS: tuple[str, ...] = (
    "in the drawer", "under the bed", "on the table", "in the kitchen", "behind the door",
    "in the car", "on the shelf", "under the sofa", "in the garage", "next to the lamp",
    "in the blue box", "on the roof", "in the garden", "behind the mirror",
)  # fmt: skip

MONTHS: tuple[str, ...] = pool("""
    January February March April May June July August September October November
    December""")

WEEKDAYS: tuple[str, ...] = pool("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

EVENTS: tuple[str, ...] = pool(
    "exam meeting party flight wedding interview concert holiday appointment race"
)

GROCERIES: tuple[str, ...] = pool("""
    milk bread eggs butter cheese apples bananas oranges grapes lemons tomatoes potatoes onions
    garlic carrots spinach lettuce cabbage beans rice pasta flour sugar salt pepper honey jam coffee
    tea juice water soda yogurt cream chicken beef pork bacon ham salmon tuna shrimp noodles cereal
    oats nuts almonds chocolate cookies cake crackers chips popcorn soap candles mustard ketchup
    vinegar olives pickles mushrooms peas corn peaches pears plums cherries melons berries mangoes
    tofu sausages turkey syrup raisins napkins""")

HEROES: tuple[str, ...] = (
    *pool("""
    Wizard Frog Knight Pirate Robot Dragon Princess Detective Ghost Giant Wolf Fox Queen Sailor
    Baker Scientist Monkey Astronaut Thief Spy Viking Sorcerer Mermaid Vampire Cowboy"""),
    "Time traveler",
)

DEEDS: tuple[str, ...] = (
    "survived a harrowing ordeal", "escaped from a mysterious labyrinth", "found a hidden treasure",
    "won a secret race", "built a flying ship", "lost a golden ring", "met an old friend",
    "solved an ancient riddle", "stole a magic lamp", "opened a forgotten door",
    "planted a silver tree", "heard a strange song", "tamed a wild beast",
    "restored peace to a warring kingdom", "broke a powerful curse", "discovered a lost city",
)  # fmt: skip

PLACES: tuple[str, ...] = (
    "deep in the underwater city", "beneath the starry sky", "in the vast desert",
    "on the frozen mountain", "inside the dark cave", "near the quiet river",
    "above the tall clouds", "behind the ruined castle", "at the edge of the forest",
    "under the old bridge", "across the stormy sea", "within the busy market",
    "in the enchanted forest", "atop the windy mountains", "amidst the bustling cityscape",
)  # fmt: skip

# Common words that also serve as names and secret words: the model must copy more than names.
COMMON: tuple[str, ...] = pool("""
    river stone cloud window garden candle mirror button ladder pocket rocket basket bottle
    hammer needle pillow ribbon saddle tunnel velvet winter yellow anchor blanket copper dragon
    engine feather glacier harbor island jungle kettle lantern meadow nectar ocean pepper quartz
    rabbit shadow thunder umbrella valley whistle zebra""")

ONSETS: tuple[str, ...] = pool("b d f g h j k l m n p r s t v z ch sh br dr kr st tr")
VOWELS: tuple[str, ...] = pool("a e i o u a e i o ai ee oo")
CODAS: tuple[str, ...] = ("", "", "", "", "n", "l", "r", "s", "x", "m", "k")
