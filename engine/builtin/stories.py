"""Little English stories from a grammar: the whole corpus of the built-in model.

Every text is made here, from the words below, by a seeded generator; nothing is taken from elsewhere.
Run as a program it prints a few.
"""
import random

PEOPLE = [
    ("Mia", "she"), ("Tom", "he"), ("Lily", "she"), ("Ben", "he"), ("Nora", "she"), ("Sam", "he"), ("Ella", "she"),
    ("Max", "he"), ("Ruby", "she"), ("Leo", "he"), ("Ada", "she"), ("Finn", "he"), ("Ivy", "she"), ("Hugo", "he"),
    ("Zoe", "she"), ("Oscar", "he"), ("Clara", "she"), ("Jack", "he"), ("Rosa", "she"), ("Peter", "he"),
]
ANIMALS = [
    "fox", "rabbit", "bear", "owl", "mouse", "hedgehog", "squirrel", "duck", "turtle", "frog", "cat", "puppy", "crow",
    "badger", "otter", "goat", "pony", "deer",
]
ANIMAL_NAMES = [
    "Pip", "Bramble", "Hazel", "Dot", "Moss", "Biscuit", "Willow", "Button", "Ash", "Clover", "Pepper", "Nutmeg", "Fern",
    "Olive", "Rusty", "Poppy",
]
TRAITS = ["kind", "curious", "shy", "brave", "clever", "gentle", "cheerful", "quiet", "patient", "lively", "careful"]
PLACES = [
    ("by the river", "river"), ("near the old mill", "mill"), ("at the edge of the forest", "forest"),
    ("on a green hill", "hill"), ("in a small village", "village"), ("next to a wide lake", "lake"),
    ("in a house by the sea", "sea"), ("under a tall oak tree", "oak tree"), ("at the foot of the mountain", "mountain"),
    ("behind the garden wall", "garden"),
]
THINGS = [
    ("red ball", "ball"), ("blue kite", "kite"), ("little boat", "boat"), ("shiny key", "key"), ("warm scarf", "scarf"),
    ("wooden flute", "flute"), ("brass bell", "bell"), ("paper lantern", "lantern"), ("green hat", "hat"),
    ("silver whistle", "whistle"), ("old map", "map"), ("woolen blanket", "blanket"), ("tin drum", "drum"),
    ("round mirror", "mirror"),
]
FOODS = [
    "apple pie", "honey cakes", "carrot soup", "berry jam", "nut bread", "plum tarts", "pumpkin soup", "sweet pears",
    "warm rolls", "oat cookies",
]
WEATHER = [
    ("sunny", "The sun was bright and the sky was blue."), ("windy", "The wind was strong and the leaves danced."),
    ("rainy", "Rain tapped softly on the roof."), ("snowy", "Snow lay on the ground like a soft blanket."),
    ("foggy", "A thick fog hid the path."), ("cold", "The air was cold and still."),
    ("warm", "The air was warm and smelled of flowers."),
]
HIDING = [
    "under a bush", "behind a big stone", "in the tall grass", "inside a hollow log", "under the bridge",
    "beside the well", "among the roots of a tree", "behind the barn",
]
FEELINGS = ["happy", "proud", "glad", "full of joy"]
WORRIES = ["sad", "worried", "upset", "lonely"]
LESSONS = [
    "it is good to share", "a friend can make a hard day easy", "it is fine to ask for help",
    "small steps can lead far", "being kind costs nothing", "it is brave to say sorry",
    "patience is a kind of strength", "listening is the first step of helping",
]
OBJECT = {"she": "her", "he": "him", "it": "it"}
POSSESSIVE = {"she": "her", "he": "his", "it": "its"}


class Hero:
    """Someone a story is about: what to call them, and their pronouns."""

    def __init__(self, rng, animal=None):
        self.trait = rng.choice(TRAITS)
        if animal or rng.random() < 0.6:
            self.kind = animal or rng.choice(ANIMALS)
            self.name, self.they = rng.choice(ANIMAL_NAMES), rng.choice(["she", "he"])
        else:
            self.name, self.they = rng.choice(PEOPLE)
            self.kind = "girl" if self.they == "she" else "boy"
        self.They = self.they.capitalize()
        self.them, self.their = OBJECT[self.they], POSSESSIVE[self.they]
        self.Their = self.their.capitalize()

    @property
    def intro(self):
        article = "an" if self.trait[0] in "aeiou" else "a"
        return f"{article} {self.trait} {self.kind} named {self.name}"


def opening(rng, hero, place):
    start = rng.choice(["Once upon a time", "One day", "Long ago", "Once"])
    if start == "One day":
        return rng.choice([
            f"{hero.name} was {article(hero.trait)} {hero.kind} who lived {place[0]}.",
            f"There was {hero.intro}. {hero.They} lived {place[0]}.",
        ])
    return rng.choice([
        f"{start}, there was {hero.intro}. {hero.They} lived {place[0]}.",
        f"{start}, {hero.intro} lived {place[0]}.",
    ])


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def second(rng, hero):
    while True:
        friend = Hero(rng)
        if friend.name != hero.name and (friend.kind != hero.kind or friend.kind in ("girl", "boy")):
            return friend


def closing(rng, hero, friend):
    lesson = rng.choice(LESSONS)
    return rng.choice([
        f"From that day on, {hero.name} and {friend.name} were the best of friends.",
        f"{hero.name} was {rng.choice(FEELINGS)}. {hero.They} had learned that {lesson}.",
        f"That night {hero.name} fell asleep with a smile. {hero.They} knew that {lesson}.",
        f"And whenever they met, {hero.name} and {friend.name} laughed about that day.",
        f"\"Thank you, {friend.name},\" said {hero.name}. Then they walked home together.",
    ])


def lost(rng, hero, place, thing):
    friend, where = second(rng, hero), rng.choice(HIDING)
    return [
        f"{hero.They} had {article(thing[0])}, and {hero.they} took it everywhere.",
        f"One morning the {thing[1]} was gone. {hero.name} looked in the house and in the garden, but {hero.they} could "
        f"not find it. {hero.They} felt {rng.choice(WORRIES)}.",
        f"Then {hero.they} met {friend.name} the {friend.kind}. \"Why do you look so {rng.choice(WORRIES)}?\" asked "
        f"{friend.name}. \"I lost my {thing[1]},\" said {hero.name}. \"Let us look for it together,\" said {friend.name}.",
        f"They looked for a long time. At last {friend.name} saw something {where}. It was the {thing[0]}!",
        closing(rng, hero, friend),
    ]


def baking(rng, hero, place, thing):
    friend, food, weather = second(rng, hero), rng.choice(FOODS), rng.choice(WEATHER)
    return [
        f"It was a {weather[0]} day. {weather[1]} {hero.name} wanted to make {food} for {hero.their} friend {friend.name} "
        f"the {friend.kind}.",
        f"{hero.They} washed {hero.their} hands and took out a big bowl. But there was no flour in the kitchen. "
        f"\"What shall I do?\" said {hero.name}.",
        f"{hero.They} went to {friend.name} and told {friend.them} about it. {friend.name} smiled. \"I have some flour,\" "
        f"said {friend.they}. \"We can make it together.\"",
        f"Soon the whole house smelled of {food}. They sat at the table and ate until they were full.",
        closing(rng, hero, friend),
    ]


def storm(rng, hero, place, thing):
    friend = second(rng, hero)
    return [
        f"One evening a storm came. The wind was loud, and {hero.name} was a little afraid.",
        f"Then {hero.they} heard a knock at the door. It was {friend.name} the {friend.kind}, and {friend.they} was wet "
        f"and cold. \"May I come in?\" asked {friend.name}.",
        f"\"Of course,\" said {hero.name}. {hero.They} gave {friend.name} {article(rng.choice(['warm cup of tea', 'dry blanket', 'seat by the fire', 'bowl of soup']))}. "
        f"They told each other stories, and {hero.name} was not afraid any more.",
        f"In the morning the storm was over. The sun shone on the {place[1]}, and everything looked new.",
        closing(rng, hero, friend),
    ]


def learning(rng, hero, place, thing):
    friend = second(rng, hero)
    skill, fails, works = rng.choice([
        ("swim", "swallowed some water", "swam all the way across the pond"),
        ("whistle", "made no sound at all", "whistled a whole song"),
        ("climb the tall tree", "slid down again", "sat on the highest branch"),
        ("skate on the ice", "fell on the ice", "glided over the ice like a bird"),
        ("read", "mixed up the letters", "read a whole page aloud"),
        ("paint", "made a big blot", "painted a picture of the sky"),
    ])
    return [
        f"{hero.name} wanted to learn to {skill}. {hero.They} tried once, but {hero.they} {fails}. {hero.They} tried again, "
        f"and again {hero.they} {fails}.",
        f"\"I will never learn it,\" said {hero.name}. {hero.They} felt {rng.choice(WORRIES)}.",
        f"{friend.name} the {friend.kind} came by. \"I could not do it at first either,\" said {friend.name}. \"Try it "
        f"slowly, and try it every day.\"",
        f"So {hero.name} tried every day. After a week, {hero.they} {works}. {friend.name} clapped and cheered.",
        closing(rng, hero, friend),
    ]


def gift(rng, hero, place, thing):
    friend = second(rng, hero)
    return [
        f"Tomorrow was the birthday of {friend.name} the {friend.kind}, and {hero.name} had no gift yet.",
        f"{hero.They} thought for a long time. {hero.They} had {article(thing[0])} that {hero.they} liked very much. "
        f"\"{friend.name} would like it too,\" {hero.they} thought.",
        f"So {hero.name} put the {thing[1]} in a box and tied a ribbon around it. The next day {hero.they} gave it to "
        f"{friend.name}.",
        f"\"What a lovely {thing[1]}!\" said {friend.name}. \"Will you play with me?\" They played until the stars came "
        f"out.",
        closing(rng, hero, friend),
    ]


def sorry(rng, hero, place, thing):
    friend = second(rng, hero)
    return [
        f"{hero.name} liked to play with {hero.their} friend {friend.name} the {friend.kind}. {friend.name} had "
        f"{article(thing[0])}.",
        f"One day {hero.name} dropped the {thing[1]}, and it broke. {hero.name} was afraid and hid it {rng.choice(HIDING)}.",
        f"{friend.name} looked for the {thing[1]} all day. {hero.name} felt bad. At last {hero.they} went to {friend.name} "
        f"and said, \"I broke your {thing[1]}. I am sorry.\"",
        f"{friend.name} was quiet for a moment. Then {friend.they} said, \"Thank you for telling me. We can mend it "
        f"together.\" They worked all afternoon, and the {thing[1]} was as good as new.",
        closing(rng, hero, friend),
    ]


def journey(rng, hero, place, thing):
    friend, weather = second(rng, hero), rng.choice(WEATHER)
    goal, sight = rng.choice([
        ("see what was behind the mountain", "a valley full of flowers"),
        ("find the place where the river begins", "a clear little spring"),
        ("see the sea", "the wide blue water"),
        ("find the tallest tree in the forest", "a tree as tall as a tower"),
        ("see the stars from the top of the hill", "a sky full of stars"),
    ])
    return [
        f"{hero.name} wanted to {goal}. So one {weather[0]} morning {hero.they} packed some bread and set out. {weather[1]}",
        f"After a while the path split in two. {hero.name} did not know which way to go. There sat {friend.name}, "
        f"{article(friend.trait)} {friend.kind}. \"Where are you going?\" asked {friend.name}.",
        f"\"I want to {goal},\" said {hero.name}. \"Then take the left path,\" said {friend.name}, \"and let me come with "
        f"you.\" They walked side by side and shared the bread.",
        f"When they came to the end of the path, they saw {sight}. They sat down and looked at it for a long time.",
        closing(rng, hero, friend),
    ]


def helping(rng, hero, place, thing):
    friend = second(rng, hero)
    trouble, fix, after = rng.choice([
        ("could not reach the apples on the tree", "brought a ladder", "picked a whole basket of apples"),
        ("had a heavy cart that was stuck in the mud", "pushed from behind", "rolled the cart back onto the road"),
        ("had a hole in the roof", "carried some boards up", "made the roof tight again"),
        ("could not find the way home", "lit a lamp", "followed the path home"),
        ("had too many seeds to plant alone", "took a little spade", "planted every single seed"),
    ])
    return [
        f"One day {hero.name} went for a walk. {hero.They} saw {friend.name} the {friend.kind}, who {trouble}.",
        f"\"Can I help you?\" asked {hero.name}. \"Yes, please,\" said {friend.name}.",
        f"So {hero.name} {fix}. It was hard work, but they did it together. Soon they {after}.",
        f"\"You are a good friend,\" said {friend.name}, and gave {hero.name} some {rng.choice(FOODS)}.",
        closing(rng, hero, friend),
    ]


PLOTS = [lost, baking, storm, learning, gift, sorry, journey, helping]


def story(rng, animal=None, thing=None):
    """A story of some 100 words; about a given animal or thing if wanted."""
    hero, place, thing = Hero(rng, animal), rng.choice(PLACES), thing or rng.choice(THINGS)
    plot = rng.choice([lost, gift, sorry] if thing and rng.random() < 0.3 else PLOTS)
    sentences = [opening(rng, hero, place)] + plot(rng, hero, place, thing)
    if rng.random() < 0.5:
        return sentences[0] + " " + sentences[1] + "\n\n" + " ".join(sentences[2:4]) + "\n\n" + " ".join(sentences[4:])
    return " ".join(sentences)


def conversation(rng):
    """A request and a story that answers it, as (role, text) pairs."""
    if rng.random() < 0.7:
        animal = rng.choice(ANIMALS)
        request = rng.choice([
            f"Tell me a story about {article(animal)}.", f"Please tell me a story about {article(animal)}.",
            f"Can you tell me a story about {article(animal)}?", f"Write a short story about {article(animal)}.",
        ])
        return [("user", request), ("assistant", story(rng, animal=animal))]
    request = rng.choice(["Tell me a story.", "Please tell me a story.", "Can you tell me a story?", "Hello!", "Hi!"])
    greeting = "Hello! Here is a story for you.\n\n" if request in ("Hello!", "Hi!") else ""
    return [("user", request), ("assistant", greeting + story(rng))]


if __name__ == "__main__":
    generator = random.Random(1)
    for _ in range(3):
        print(story(generator), end="\n\n---\n\n")
    print(conversation(generator))
