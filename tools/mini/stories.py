"""Small stories from a grammar: who is who, who has what and where it lies stays true from the first sentence to the last."""

from random import Random
from typing import NamedTuple

_GIRLS = [
    "Mia", "Anna", "Lena", "Nora", "Ida", "Clara", "Ella", "Rosa", "Vera", "Zoe", "Lucy", "Emma", "Tilda", "Greta", "Maya", "Ruth"
]  # fmt: skip
_BOYS = [
    "Tom", "Ben", "Max", "Leo", "Finn", "Paul", "Otto", "Sam", "Hugo", "Karl", "Nico", "Jan", "Emil", "Oscar", "Theo", "Adam"
]  # fmt: skip
_ANIMALS = [
    "fox", "owl", "rabbit", "bear", "mouse", "hedgehog", "frog", "crow", "cat", "dog", "duck", "squirrel", "badger", "goat"
]  # fmt: skip
_FRIEND_NAMES = [
    "Pip", "Momo", "Kiki", "Bibo", "Tiko", "Lulu", "Rufus", "Berta", "Fips", "Nelly", "Dodo", "Wanda", "Piko", "Suri"
]  # fmt: skip
_ADJECTIVES = ["red", "blue", "green", "yellow", "small", "old", "shiny", "round", "golden", "wooden", "silver", "little"]
OBJECTS = [
    "ball", "kite", "key", "hat", "lamp", "boat", "drum", "book", "coin", "bell", "cup", "ring", "box", "stone", "flute", "map"
]  # fmt: skip
_HOMES = [
    "in a small village", "near a big forest", "by the sea", "on a green hill", "at the edge of a town", "beside a quiet river"
]  # fmt: skip
_MOODS = ["kind", "brave", "quiet", "curious", "cheerful", "clever"]
_TIMES = ["One morning", "One day", "One evening", "On a sunny day", "On a rainy day", "One winter day"]
_PLACES = [
    "under the bed", "behind the house", "in the garden", "near the old tree", "beside the well", "in the tall grass", "under the bridge",
    "on the roof",
]  # fmt: skip
_WEATHER = ["The sun was shining", "A soft wind was blowing", "It was raining a little", "The sky was grey", "Snow lay on the ground"]
_ENDINGS = [
    "From that day on, {name} and {friend} were good friends.", "And so the day ended well for {name} and {friend}.",
    "That night {name} slept well and dreamed of {friend}.",
]  # fmt: skip
NAMES = [*_GIRLS, *_BOYS]


class Story(NamedTuple):
    """A story and what it is about."""

    name: str
    thing: str
    animal: str
    text: str


def make_story(rng: Random, name: str, thing: str) -> Story:
    """Return a story about a child of this name and a thing, both from the lists here."""
    child = "she" if name in _GIRLS else "he"
    her = {"she": "her", "he": "him"}[child]
    where = rng.sample(_PLACES, 3)
    words = {
        "name": name, "She": child.capitalize(), "she": child, "Her": {"she": "Her", "he": "His"}[child], "her": her,
        "hers": {"she": "her", "he": "his"}[child], "girl": {"she": "girl", "he": "boy"}[child], "thing": thing, "adj": rng.choice(_ADJECTIVES),
        "home": rng.choice(_HOMES), "mood": rng.choice(_MOODS), "time": rng.choice(_TIMES), "weather": rng.choice(_WEATHER),
        "friend": rng.choice(_FRIEND_NAMES), "animal": rng.choice(_ANIMALS), "here": where[0], "there": where[1], "found": where[2],
    }  # fmt: skip
    text = " ".join([rng.choice(_OPENINGS), rng.choice(_PLOTS), rng.choice(_ENDINGS)]).format(**words)
    return Story(name, thing, words["animal"], text)


_OPENINGS = [
    "Once upon a time there was a {mood} {girl} called {name}. {She} lived {home} and had a {adj} {thing}.",
    "There once was a {girl} whose name was {name}. {She} was {mood} and lived {home}. {Her} best thing was a {adj} {thing}.",
    "{name} was a {mood} {girl} who lived {home}. {She} loved {hers} {adj} {thing} more than anything.",
]
_PLOTS = [
    "{time}, the {thing} was gone. {name} looked {here}, but it was not there. {She} looked {there}, but it was not there. "
    'Then {friend} the {animal} came by. "Why are you so sad?" asked {friend}. "I have lost my {thing}," said {name}. '
    "They looked together, and {friend} found the {adj} {thing} {found}. {name} was very happy and thanked {friend}.",
    '{time}, {name} met {friend} the {animal} {here}. {weather}. "What a fine {thing}," said {friend}. "May I play with it?" '
    'asked the {animal}. "Yes," said {name}, "let us play together." They played with the {thing} {there} until it was dark. '
    "Then {friend} gave the {thing} back, and {name} went home.",
    "{time}, {name} went for a walk. {weather}. Not far from there, {she} saw {friend} the {animal}. {friend} was crying. "
    '"I have nothing to play with," said the {animal}. So {name} gave {friend} the {adj} {thing}. '
    'The {animal} smiled at {her}. "Thank you, {name}," said {friend}, and put the {thing} {found}.',
    '{time}, {friend} the {animal} hid the {thing} {found}. "Can you find it?" asked {friend}. {name} looked {here}. "No," said the {animal}. '
    '{name} looked {there}. "No," said the {animal}. At last {name} looked {found}, and there was the {adj} {thing}. They both laughed.',
]
