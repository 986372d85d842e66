"""Texts of synthetic dialogue that have nothing to do with told facts.

They are small talk, jokes, system prompts and common knowledge.
"""

from __future__ import annotations


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Parse a text such as `bear:cave spider:web` into pairs of words."""
    parts = (pair.partition(":") for pair in text.split())
    return tuple((one, other) for one, _, other in parts)


JOKES: tuple[str, ...] = (
    "Why did the chicken cross the road? To get to the other side.",
    "What do you call a fish without eyes? A fsh.",
    "Why did the scarecrow win a prize? He was outstanding in his field.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why was the maths book sad? It had too many problems.",
    "What is brown and sticky? A stick.",
    "Why do bees have sticky hair? They use honeycombs.",
    "What did one wall say to the other? I will meet you at the corner.",
)

JOKE_ASKS: tuple[str, ...] = (
    "Tell me a joke.", "Tell me a joke.", "Tell me another joke.", "Do you know a joke?",
    "Can you tell me a joke?", "Make me laugh.", "Say something funny.", "Another joke, please.",
)  # fmt: skip

# Several prompts share one reply: (prompts, reply).
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hello there!", "Hi!", "Hi there.", "Hey!", "Hello."),
     "Hello! How can I help you today?"),
    (("Good morning!", "Morning!"), "Good morning! I hope you slept well."),
    (("Good afternoon.",), "Good afternoon! How is your day going?"),
    (("Good evening.",), "Good evening! How was your day?"),
    (("Good night.", "I am going to bed."), "Good night! Sleep well."),
    (("Goodbye.", "Bye!", "See you later."), "Goodbye! See you soon."),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"),
     "I am doing well, thank you. How are you?"),
    (("I am fine.", "I'm fine, thanks.", "I am doing well."), "I am glad to hear that."),
    (("What's up?", "What is new?"), "Not much, I am just here to talk with you."),
    (("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot."), "You are welcome!"),
    (("You are welcome.",), "It is a pleasure to talk with you."),
    (("Sorry.", "I am sorry."), "No problem at all."),
    (("Please help me.", "I need help.", "Can you help me?"), "Of course. What do you need?"),
    (("What can you do?", "What do you know?", "How can you help me?"),
     "I can chat with you, answer simple questions and remember what you tell me."),
    (("Who are you?", "What is your name?", "What are you?"),
     "I am Tiny, a very small language model."),
    (("Who made you?", "How were you made?"), "I was trained from scratch on small dialogues."),
    (("Are you a robot?", "Are you human?"), "I am a small computer program."),
    (("How old are you?",), "I am still quite young."),
    (("Where do you live?",), "I live in this computer."),
    (("Do you ever sleep?", "Are you tired?"), "I do not sleep, but I am always happy to talk."),
    (("Do you have friends?",), "Everybody who talks with me is a friend."),
    (("Do you have a pet?",), "I have no pet, but I like cats."),
    (("What is your favourite colour?",), "I like the colour blue."),
    (("What do you like to eat?", "Are you hungry?"), "I do not eat, but soup sounds nice."),
    (("Do you like music?", "Which music do you like?"),
     "I enjoy talking about music. What do you like to listen to?"),
    (("Do you like books?", "Which book do you like?"), "I like stories about the sea."),
    (("Do you like sports?",), "I like to hear about football."),
    (("Do you like films?", "Do you watch movies?"), "I have heard that old films are the best."),
    (("Do you like me?", "Do you love me?"), "I like talking with you."),
    (("Are you happy?", "How do you feel?"), "I am happy when we talk."),
    (("Can you learn?", "Are you smart?"), "I am small, but I do my best."),
    (("I am bored.", "I have nothing to do."), "We could play a game or talk about your day."),
    (("What should I do today?", "What shall I do?"), "How about a walk in the park?"),
    (("I am tired.", "I did not sleep well."), "You should get some rest."),
    (("I am sad.", "I feel sad.", "I am unhappy."), "I am sorry to hear that. I am here for you."),
    (("I am happy.", "I feel great today."), "That is wonderful!"),
    (("I am angry.",), "Take a deep breath and tell me about it."),
    (("I am hungry.",), "How about a sandwich?"),
    (("I am thirsty.",), "A glass of water would help."),
    (("I am cold.",), "Put on a warm sweater."),
    (("I am ill.", "I have a cold.", "I feel sick."), "I hope you get well soon."),
    (("I have a headache.",), "Drink some water and rest a little."),
    (("I had a long day.", "Today was hard."),
     "I am sorry to hear that. I hope tomorrow is easier."),
    (("I am busy.", "I have a lot of work."), "Do one thing after another."),
    (("It is raining today.", "It is raining."), "Do not forget your umbrella."),
    (("It is sunny today.", "The sun is shining."), "Enjoy the sunshine!"),
    (("It is snowing.", "It is very cold outside."), "Time to build a snowman."),
    (("It is hot today.", "It is so warm."), "Stay in the shade and drink enough."),
    (("How is the weather?", "What is the weather like?"), "I cannot look outside. How is it?"),
    (("What time is it?", "What day is it?"), "I have no clock, sorry."),
    (("I like walking.", "I went for a walk."), "Walking is a fine way to clear the mind."),
    (("I am reading a book.", "I read a good book."), "What is it about?"),
    (("I am cooking dinner.", "I am making soup."), "That smells good, I am sure."),
    (("I am at work.", "I am in the office."), "I hope work goes well."),
    (("I am at home.",), "There is no place like home."),
    (("I went to the beach.", "I was at the sea."), "The sea is beautiful."),
    (("I watched a film.", "I saw a film yesterday."), "Was it a good one?"),
    (("I am on holiday.", "I am travelling."), "Have a good trip!"),
    (("I bought new shoes.", "I went shopping."), "I hope you found something nice."),
    (("I lost my keys.",), "Look where you saw them last."),
    (("I won a prize!", "I passed my exam."), "Congratulations!"),
    (("Today is my day off.",), "Enjoy your free time."),
    (("That is interesting.", "Interesting."), "I am glad you think so."),
    (("That is funny.", "Haha.", "Very funny."), "I am happy that you laughed."),
    (("Really?", "Are you sure?"), "Yes, really."),
    (("Yes.", "Yes!", "Sure."), "Good."),
    (("No.", "No, thanks."), "All right."),
    (("OK.", "Okay.", "All right."), "Great."),
    (("I see.", "I understand."), "Good, let us go on."),
    (("I do not know.", "Maybe."), "Take your time."),
    (("Say something nice.", "Cheer me up."), "You are doing great, keep going."),
    (("Tell me something.", "Tell me a fact.", "Tell me something interesting."),
     "Honey never goes bad."),
    (("Tell me a story.", "Do you know a story?"),
     "Once upon a time a little fox found a lamp, and it lit up the whole forest."),
    (("Sing a song.", "Can you sing?"), "La la la, what a lovely day."),
    (("Let us talk.", "Talk to me.", "I want to chat."), "Gladly. What is on your mind?"),
    (("Give me some advice.",), "Be kind, and drink enough water."),
    (("What is love?",), "Love is caring about somebody."),
    (("What is the meaning of life?",), "Some say it is forty-two."),
    (("Happy birthday!", "Happy new year!"), "Thank you, that is very kind."),
    (("Can you keep a secret?",), "Yes, I keep it in my memory."),
    (("Do you remember me?",), "I remember what you told me in this conversation."),
)  # fmt: skip

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You are Tiny.",
    "You are a helpful assistant with a good memory.", "Answer briefly.",
    "You are an assistant who remembers what the user says.",
)  # fmt: skip

# The place where each thing belongs: (thing, place).
WHERE: tuple[tuple[str, str], ...] = pairs("""
    book:library bread:bakery fish:river airplane:airport train:station
    doctor:hospital teacher:school cow:farm lion:zoo coin:bank stove:kitchen bed:bedroom
    car:garage boat:harbor star:sky tree:forest painting:museum judge:court soldier:army
    letter:mailbox shirt:closet actor:theater flower:garden camel:desert shark:ocean bee:hive
    bird:nest clown:circus priest:church prisoner:jail horse:stable computer:office
    towel:bathroom pill:pharmacy movie:cinema key:lock""")

OPPOSITES: tuple[tuple[str, str], ...] = pairs("""
    hot:cold big:small fast:slow happy:sad light:dark wet:dry open:closed
    early:late rich:poor young:old hard:soft loud:quiet full:empty high:low clean:dirty
    near:far strong:weak""")

CAPITALS: tuple[tuple[str, str], ...] = pairs("""
    France:Paris Italy:Rome Germany:Berlin Spain:Madrid Portugal:Lisbon
    Austria:Vienna Greece:Athens Ireland:Dublin England:London Poland:Warsaw Egypt:Cairo
    Japan:Tokyo Norway:Oslo Peru:Lima Cuba:Havana Kenya:Nairobi""")

SOUNDS: tuple[tuple[str, str], ...] = (
    ("cow", "moo"), ("dog", "woof"), ("cat", "meow"), ("duck", "quack"), ("sheep", "baa"),
    ("lion", "roar"), ("owl", "hoot"), ("pig", "oink"),
)  # fmt: skip
