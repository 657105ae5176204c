"""Stories retold with other names, and instructions made from them: training data of `storyteller`, besides plain text.

    python -m data.stories retell corpus --out sources/retold                     other names in every story
    python -m data.stories instruct corpus --out stories                         stories/alpaca.json, for recipes/sft.py
    python -m data.stories instruct corpus --out stories --others dolly.json      and questions it should decline

Both read the training split of a corpus that data.corpus has made of TinyStories; its val split is never opened.

Retold: each known name of a story is replaced throughout by another of its kind, sampled by frequency in the corpus.
The events stay the same, but not that it is Tim who finds the ball. A model that must expect any name learns to look
it up.

Instructions: tell a story about somebody; continue one; describe its hero; answer a question about it; greet; say who
you are. Questions are about facts that simple patterns find in a story, only if the answer is unambiguous, and about
small stories that are generated with their questions. Some ask for what a story does not say.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyforge.data.alpaca import Record, read_records, write_instructions
from tinyforge.data.files import locked
from tinyforge.data.shards import read_corpus, read_texts
from tinyforge.data.source import Document, InputFile, Source, SourceWriter, read_source
from tinyforge.errors import Parser, UserError, run_command

STORIES = "tinystories"  # the source that is read
LICENCE = "CDLA-Sharing-1.0"

# Names that are not also ordinary words: Rose, Joy, Mark and Sunny are left out.
NAMES = {
    "girl": tuple(
        "Lily Sue Mia Lucy Amy Anna Sara Sally Jane Sarah Lila Molly Jill Mary Emma Bella Mimi Luna Ann Lisa Jenny "
        "Ella Jen Lulu Betty Tina Emily Lola Alice Susie Annie Polly Claire Kim Mandy Sophie Kate Elly Milly Julie "
        "Lizzie Maria Cindy Rosie Lilly Sandy Abigail Penny Clara Tilly Ellie Abby Maya Ruby Chloe Zoe Hannah Maggie "
        "Zara Beth Rachel Emmy Samantha Elsie Fiona Nora Ava Olivia Isla Nina Eva Julia Laura Helen Ivy Stella "
        "Nancy Wendy Tara Katie Leah Amelia Sofia Freya Greta Ida Martha Paula Rita".split()
    ),
    "boy": tuple(
        "Tim Tom Sam Ben Max Bob Jack Timmy John Billy Joe Tommy Jimmy Leo Benny Jerry Jim Andy Fred Jake Bobby Sammy "
        "Danny Peter Pete Toby Ollie Bill Henry George Charlie Dave Tony Freddy Mike James David Alex Joey Finn Ted "
        "Frank Harry Adam Paul Oliver Gary Carl Dan Matt Luke Ricky Noah Liam Ethan Oscar Theo Hugo Felix Simon Eric "
        "Kevin Steve Nick Ryan Kyle Lucas Daniel Thomas Arthur Edward Walter Ralph Owen Ivan Jonas Karl Martin Nathan "
        "Robin Scott Victor William".split()
    ),
    "animal": tuple(
        "Spot Kitty Fluffy Bobo Daisy Buddy Whiskers Ducky Chirpy Momo Remy Spike Teddy Rex Froggy Binky Mittens Coco "
        "Toto Pinky Birdie Tweety Bubbles Poppy Pippin Squeaky Rover Patch Biscuit Nibbles Snowball Muffin Ginger Fido "
        "Bandit Cocoa Pebbles Waffles Scout Ziggy Pumpkin Socks Tiger Peanut".split()
    ),
}
KIND_OF = {name: kind for kind, names in NAMES.items() for name in names}
_WORD = re.compile(r"[a-z]+")
_NAME = re.compile(rf"\b(?:{'|'.join(KIND_OF)})\b")
ANIMALS = tuple(
    "dog cat bird bunny fish bear frog rabbit duck monkey bee mouse bug horse elephant lion squirrel puppy ant penguin "
    "panda cow zebra turtle snake dolphin crab pig kitten swan goat otter mule hippo sheep deer caterpillar parrot fox "
    "giraffe pony tiger chicken kangaroo dragon dinosaur seal worm whale camel hen hedgehog snail owl butterfly".split()
)
PEOPLE = (
    "girl",
    "boy",
    "man",
    "woman",
    "lady",
    "child",
    "princess",
    "prince",
    "king",
    "queen",
    "farmer",
    "fairy",
    "pirate",
    "baker",
    "knight",
    "giant",
    "robot",
    "doctor",
    "teacher",
    "clown",
    "baby",
    "fireman",
    "sailor",
)
HEROES = ANIMALS + PEOPLE
HERS = {"girl", "woman", "lady", "princess", "queen", "fairy", "hen", "cow"}


def names_in(story: str) -> list[str]:
    """The known names in a story, in order of appearance."""
    return list(dict.fromkeys(_NAME.findall(story)))


def keeps_name(story: str, name: str) -> bool:
    """Whether the hero's name is the story's most frequent one, and occurs in its second half."""
    counts = Counter(found for other in {*names_in(story), name} for found in re.findall(rf"\b{other}\b", story))
    return bool(counts) and counts[name] == max(counts.values()) and name in story[len(story) // 2 :]


def asked_for(request: str) -> tuple[str, set[str]]:
    """The hero's name in a request for a story about somebody, or "", and the kinds of hero that it mentions."""
    name = re.search(r"\b(?:named|called|about) ([A-Z]\w+)", request)
    return name[1] if name else "", set(HEROES) & set(_WORD.findall(request.partition(" about ")[2]))


def misses(request: str, story: str) -> int:
    """How many things that were asked for a story lacks, of two: the hero's name, kept to the end, and a kind."""
    name, kinds = asked_for(request)
    return bool(name and not keeps_name(story, name)) + bool(kinds and not kinds & set(_WORD.findall(story.lower())))


def rename(story: str, others: dict[str, str]) -> str:
    """The story with its names replaced simultaneously: A may become B while B becomes A."""
    return _NAME.sub(lambda found: others.get(found[0], found[0]), story)


ONSETS = "B Br C D F Fl G Gr H J K L M N P Pr Qu R S St T Tr V W Y Z".split()
VOWELS = "a e i o u a e i o ie ee".split()
MIDDLES = "b d f g l ll lm ld m mm n nn nd r rr rt s ss t tt v x z nk rl".split()
ENDINGS = "a o y ie in on er us el is ert a".split()


def invented_name(rng: random.Random) -> str:
    """A name that a reply can only copy from the story: random syllables, or the parts of two names."""
    if rng.random() < 0.5:
        return "".join(rng.choice(part) for part in (ONSETS, VOWELS, MIDDLES, ENDINGS))
    while True:
        first, last = rng.choices(list(KIND_OF), k=2)
        found = first[: len(first) // 2 + rng.randint(0, 1)] + last[len(last) // 2 :]
        if len(found) > 2 and found not in KIND_OF:
            return found


def other_names(story: str, rng: random.Random, counts: dict[str, Counter[str]] | None = None) -> dict[str, str]:
    """Another name for each name in the story, all different. counts: the weight of each name, by kind; without them,
    names are equally likely, and one in three is invented."""
    chosen: dict[str, str] = {}
    for name in names_in(story):
        kind = KIND_OF[name]
        while True:
            if counts is not None:
                found = rng.choices(list(counts[kind]), list(counts[kind].values()))[0]
            else:
                found = rng.choice(NAMES[kind]) if rng.random() < 0.67 else invented_name(rng)
            if found not in chosen.values():
                break
        chosen[name] = found
    return chosen


def name_counts(stories: Sequence[str]) -> dict[str, Counter[str]]:
    """The number of stories that each name occurs in, by kind, plus one, so that every name can be sampled."""
    counts = {kind: Counter(names) for kind, names in NAMES.items()}
    for story in stories:
        for name in names_in(story):
            counts[KIND_OF[name]][name] += 1
    return counts


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


# --- what a story says ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hero:
    """Of "a kind little girl named Lily": kind "girl", adjectives "kind little ", name "Lily"."""

    name: str
    kind: str
    adjectives: str

    @property
    def full(self) -> str:
        return with_article(f"{self.adjectives}{self.kind}")

    @property
    def they(self) -> str:
        return "She" if KIND_OF.get(self.name) == "girl" or self.kind in HERS else "He"


@dataclass(frozen=True)
class Fact:
    """A question about a story, and the sentence that answers it."""

    question: str
    answer: str


_HERO = re.compile(rf"\b[Aa]n? ((?:[a-z]+,? ){{0,3}}?)({'|'.join(HEROES)}) (?:named|called) ([A-Z][a-z]+)\b")
# Past tense to base form.
DID = {
    "found": "find",
    "lost": "lose",
    "made": "make",
    "bought": "buy",
    "got": "get",
    "met": "meet",
    "ate": "eat",
    "broke": "break",
    "dropped": "drop",
    "built": "build",
    "drew": "draw",
    "caught": "catch",
    "heard": "hear",
    "brought": "bring",
    "picked up": "pick up",
    "saw": "see",
}
_END = r"(?=[.,!]| (?:in|on|at|under|with|and|to|that|near|from|by|for|but|who|because|when|so|which|inside|behind)\b)"
_WHO = r"(?:(?<=^)|(?<=[.!?] )|(?<=\n)|(?<=, and )|(?<=day, ))"
_DID = re.compile(
    rf"{_WHO}([A-Z][a-z]+|[Tt]he (?:{'|'.join(HEROES)})) ({'|'.join(DID)}) "
    rf"((?:a|an|the|her|his|some|two|three) (?:[a-z]+ ){{0,2}}[a-z]+){_END}",
    re.M,
)
_WENT = re.compile(
    rf"{_WHO}([A-Z][a-z]+) (went|ran|walked|hurried|flew|drove) (to (?:the|a|his|her) (?:[a-z]+ )?[a-z]+){_END}", re.M
)
_WANTED = re.compile(rf"{_WHO}([A-Z][a-z]+) (wanted|loved|liked) to ((?:[a-z]+ ){{0,6}}[a-z]+)(?=[.!])", re.M)
_LIVED = re.compile(rf"{_WHO}([A-Z][a-z]+) lived (in (?:a|an|the) (?:[a-z]+ ){{0,3}}[a-z]+)(?=[.,]| with\b)", re.M)
_GO = {"went": "go", "ran": "run", "walked": "walk", "hurried": "hurry", "flew": "fly", "drove": "drive"}
_VERB = {"wanted": "want", "loved": "love", "liked": "like"}


def hero_of(story: str) -> Hero | None:
    """The first character in the opening sentences that has a kind and a name; None if there is none."""
    found = _HERO.search(story[:300])
    return Hero(found[3], found[2], found[1]) if found else None


def facts(story: str) -> list[Fact]:
    """Questions about a story that exactly one place in it answers.

    She and He stand for the hero if no other known name precedes them. A question with two different answers is left
    out.
    """
    hero = hero_of(story)
    found: list[Fact] = []
    if hero:
        found += [
            Fact("Who is the story about?", f"The story is about {hero.full} named {hero.name}."),
            Fact(f"What is the name of the {hero.kind}?", f"The {hero.kind} is named {hero.name}."),
            Fact(f"Who is {hero.name}?", f"{hero.name} is {hero.full}."),
        ]

    def who(subject: str, place: int) -> str:
        """The name that a subject stands for, or ""."""
        if hero and subject in ("She", "He"):
            return hero.name if subject == hero.they and names_in(story[:place]) in ([hero.name], []) else ""
        if hero and subject.lower() == f"the {hero.kind}":
            return hero.name
        return subject if subject in KIND_OF or (hero and subject == hero.name) else ""

    asked: dict[str, set[str]] = {}

    def ask(question: str, answer: str) -> None:
        asked.setdefault(question, set()).add(answer)

    for match in _DID.finditer(story):
        if name := who(match[1], match.start()):
            ask(f"What did {name} {DID[match[2]]}?", f"{name} {match[2]} {match[3]}.")
    for match in _WENT.finditer(story):
        if name := who(match[1], match.start()):
            ask(f"Where did {name} {_GO[match[2]]}?", f"{name} {match[2]} {match[3]}.")
    for match in _WANTED.finditer(story):
        if name := who(match[1], match.start()):
            ask(f"What did {name} {_VERB[match[2]]} to do?", f"{name} {match[2]} to {match[3]}.")
    for match in _LIVED.finditer(story):
        if name := who(match[1], match.start()):
            ask(f"Where did {name} live?", f"{name} lived {match[2]}.")
    return found + [Fact(q, next(iter(answers))) for q, answers in asked.items() if len(answers) == 1]


def by_kind(fact: Fact, hero: Hero | None, rng: random.Random) -> Fact:
    """In half of the cases, replace the hero's name in the question by the kind: "What did the girl find?"."""
    if hero is None or hero.name not in fact.question or fact.question.startswith("Who is") or rng.random() < 0.5:
        return fact
    return Fact(fact.question.replace(hero.name, f"the {hero.kind}", 1), fact.answer)


def description(story: str, hero: Hero) -> str:
    """Up to three sentences about the hero, from the story's facts."""
    told = [f"{hero.name} is {hero.full}."]
    for pattern in (_LIVED, _WANTED):
        for match in pattern.finditer(story):
            if match[1] in (hero.name, hero.they) and len(told) < 3:
                told.append(f"{hero.they}{match[0][len(match[1]) :]}.")
    return " ".join(told)


# --- small stories with questions ----------------------------------------------------------------------------------

COLOURS = "red blue green yellow pink brown white black orange purple".split()
THINGS = (
    "ball hat key book kite doll ring shoe cup coin bell flute drum boat car toy scarf bag hammer lamp bone spoon "
    "ribbon basket ticket whistle necklace mitten bucket map feather button blanket umbrella balloon"
).split()
PLACES = tuple(
    "in the park|at the beach|in the garden|by the river|in the forest|at school|in the yard|at the zoo|"
    "on the farm|at the market|in the snow|on the hill|near the pond|in the kitchen".split("|")
)
SPOTS = tuple(
    "under the bed|behind a tree|in the grass|under a bench|in a box|behind the door|on the stairs|"
    "in the sand|under the table|in a bush|next to a rock|in the mud".split("|")
)
TRAITS = "little kind brave shy happy clever small funny quiet big young".split()
GIVERS = "mom dad grandma grandpa friend brother sister teacher uncle aunt".split()


def small_story(rng: random.Random) -> tuple[str, Hero, list[Fact]]:
    """A few sentences, their hero, and what can be asked about them."""
    kind = rng.choice(("girl", "boy", "girl", "boy", rng.choice(ANIMALS)))
    name = rng.choice(NAMES[kind if kind in NAMES else "animal"])
    hero = Hero(name, kind, f"{rng.choice(TRAITS)} ")
    he, his = ("She", "her") if hero.they == "She" else ("He", "his")
    colour, thing, place, spot = (rng.choice(words) for words in (COLOURS, THINGS, PLACES, SPOTS))
    giver, friend = rng.choice(GIVERS), rng.choice([n for n in NAMES[rng.choice(("girl", "boy"))] if n != name])
    full = f"{colour} {thing}"
    a_full = with_article(full)
    opening = rng.choice(
        (
            f"Once upon a time, there was {hero.full} named {name}.",
            f"Once there was {hero.full} named {name}.",
            f"There once was {hero.full} called {name}.",
            f"One day, {hero.full} named {name} went out to play.",
        )
    )
    got = rng.choice(
        (f"{name} had {a_full}.", f"{his.capitalize()} {giver} gave {name} {a_full}.", f"{name} loved {his} {full}.")
    )
    plots = {
        "lost": (
            [
                got,
                f"One day, {name} lost {his} {full} {place}.",
                f"{he} was very sad and looked everywhere.",
                f"Then {friend} came to help. They found the {thing} {spot}.",
                f"{name} was happy and thanked {friend}.",
            ],
            [
                Fact(f"What did {name} lose?", f"{name} lost {his} {full}."),
                Fact(f"Where did {name} lose the {thing}?", f"{name} lost the {thing} {place}."),
                Fact(f"Who helped {name}?", f"{friend} helped {name}."),
                Fact(f"Where was the {thing}?", f"The {thing} was {spot}."),
            ],
        ),
        "found": (
            [
                f"{name} liked to play {place}.",
                f"One day, {name} found {a_full} {spot}.",
                f'"What a nice {thing}!" said {name}.',
                f"{he} showed it to {friend}.",
                f"They played with the {thing} all day.",
            ],
            [
                Fact(f"What did {name} find?", f"{name} found {a_full}."),
                Fact(f"Where did {name} find the {thing}?", f"{name} found the {thing} {spot}."),
                Fact(f"Where did {name} like to play?", f"{name} liked to play {place}."),
                Fact(f"What colour was the {thing}?", f"The {thing} was {colour}."),
            ],
        ),
        "broke": (
            [
                got,
                f"{name} played with {friend} {place}.",
                f"{he} fell down and broke {his} {full}.",
                f"{name} began to cry.",
                f'"Do not cry," said {friend}. "We can fix it." And they did.',
            ],
            [
                Fact(f"What did {name} break?", f"{name} broke {his} {full}."),
                Fact(f"Who did {name} play with?", f"{name} played with {friend}."),
                Fact(f"Where did {name} play?", f"{name} played {place}."),
                Fact(f"Why did {name} cry?", f"{name} cried because the {thing} was broken."),
            ],
        ),
        "bought": (
            [
                f"{name} wanted {a_full}.",
                f"{he} went to the shop with {his} {giver} and bought the {full}.",
                f"{name} took it to play {place}.",
                f"{friend} liked it too, so {name} shared it.",
            ],
            [
                Fact(f"What did {name} want?", f"{name} wanted {a_full}."),
                Fact(f"What did {name} buy?", f"{name} bought {a_full}."),
                Fact(f"Who went to the shop with {name}?", f"{name} went to the shop with {his} {giver}."),
                Fact(f"Who did {name} share it with?", f"{name} shared it with {friend}."),
            ],
        ),
    }
    sentences, asked = plots[rng.choice(list(plots))]
    about = [
        Fact("Who is the story about?", f"The story is about {hero.full} named {name}."),
        Fact(f"What is the name of the {kind}?", f"The {kind} is named {name}."),
    ]
    return " ".join([opening, *sentences]), hero, asked * 2 + about


# --- small stories as people type them --------------------------------------------------------------------------------

FOODS = "cake cookie sandwich banana carrot pie pear muffin plum sausage pancake bun".split()
FRIGHTS = "thunder,spiders,the wind,big dogs,deep water,ghosts,loud noises,the cellar,snakes,the storm".split(",")
HOMES = ("small house", "big house", "cave", "castle", "hut", "village", "tall tower", "farm", "tent", "old barn")
FURNITURE = ("shelf", "chair", "bed", "window sill", "stove", "piano")
TOWARDS = "market,forest,garden,farm,pond,library,park,lake,zoo,hill,playground".split(",")
FILLERS = (
    "{S} was very happy.",
    "{S} was sad.",
    "Then {s} went home.",
    "It was a good day.",
    "The sun was warm.",
    "{S} smiled.",
    "{S} was tired and went to bed.",
    "{S} laughed.",
    "Everyone was glad.",
    "{S} cried.",
    "It was fun.",
    "That night {s} slept well.",
    "{S} looked everywhere.",
    "It was cold outside.",
    "{S} told {h} {g}.",
)
# What may happen: a sentence, and questions with answers. n: the hero's name; S, s, h, C: She, she, her, Her; W: the
# name or She; t: a thing, a: "a red kite" or the like, m: the same without its article; k: an animal, l, L: with one;
# f: a friend; g: who gives; p: where; o: where things are found; d: to where; e: food; r: a fright; i: furniture.
HAPPENINGS = (
    (
        "{W} lost {h} {m} {p}.",
        "What did {n} lose?",
        "{n} lost {h} {m}.",
        "Where did {n} lose the {t}?",
        "{n} lost the {t} {p}.",
    ),
    (
        "{W} lost {h} {t}. {f} found it {o}.",
        "Who found the {t}?",
        "{f} found the {t}.",
        "Where did {f} find the {t}?",
        "{f} found the {t} {o}.",
        "What did {n} lose?",
        "{n} lost {h} {t}.",
    ),
    (
        "{W} left {h} {t} {p}, and {l} took it.",
        "Who took the {t}?",
        "{L} took the {t}.",
        "What did the {k} take?",
        "The {k} took the {t}.",
    ),
    (
        "{W} found {a} {o}.",
        "What did {n} find?",
        "{n} found {a}.",
        "Where did {n} find the {t}?",
        "{n} found the {t} {o}.",
    ),
    (
        "{W} found {a}. {S} put it on the {i}.",
        "Where did {n} put the {t}?",
        "{n} put the {t} on the {i}.",
        "What did {n} find?",
        "{n} found {a}.",
    ),
    ("{W} bought {a}.", "What did {n} buy?", "{n} bought {a}."),
    (
        "{W} went to the shop with {h} {g} and got {a}.",
        "Who went to the shop with {n}?",
        "{n} went to the shop with {h} {g}.",
        "What did {n} get?",
        "{n} got {a}.",
    ),
    ("{W} saw {l} {p}.", "What did {n} see?", "{n} saw {l}.", "Where did {n} see the {k}?", "{n} saw the {k} {p}."),
    ("{W} heard {l} in the night.", "What did {n} hear?", "{n} heard {l}."),
    ("{W} ate a big {e}.", "What did {n} eat?", "{n} ate a big {e}."),
    ("{W} was hungry and ate two {e}s.", "What did {n} eat?", "{n} ate two {e}s."),
    (
        "{W} made {a} for {f}.",
        "What did {n} make?",
        "{n} made {a}.",
        "Who did {n} make the {t} for?",
        "{n} made the {t} for {f}.",
    ),
    ("{W} drew {l}.", "What did {n} draw?", "{n} drew {l}."),
    ("{W} wanted {a}.", "What did {n} want?", "{n} wanted {a}."),
    ("{W} broke {h} {g}'s {m}.", "What did {n} break?", "{n} broke {h} {g}'s {m}."),
    ("{W} fell, and {f} helped {n} to get up.", "Who fell?", "{n} fell.", "Who helped {n}?", "{f} helped {n}."),
    (
        "{f} fell into the mud. {W} helped.",
        "Who fell into the mud?",
        "{f} fell into the mud.",
        "Who helped {f}?",
        "{n} helped {f}.",
    ),
    (
        "{C} {g} gave {n} {a}.",
        "Who gave {n} the {t}?",
        "{C} {g} gave {n} the {t}.",
        "What did {n} get?",
        "{n} got {a}.",
    ),
    (
        "{f} gave {n} a {e}.",
        "Who gave {n} a {e}?",
        "{f} gave {n} a {e}.",
        "What did {f} give {n}?",
        "{f} gave {n} a {e}.",
    ),
    (
        "{W} took {h} {t} to the {d}.",
        "Where did {n} take the {t}?",
        "{n} took the {t} to the {d}.",
        "What did {n} take to the {d}?",
        "{n} took {h} {t} to the {d}.",
    ),
    ("{W} was afraid of {r}.", "What was {n} afraid of?", "{n} was afraid of {r}."),
    ("{W} met {l} {p}.", "Who did {n} meet?", "{n} met {l}.", "Where did {n} meet the {k}?", "{n} met the {k} {p}."),
    ("{W} washed {h} {m}.", "What did {n} wash?", "{n} washed {h} {m}."),
    ("{W} hid {o}, but {f} was quick.", "Where did {n} hide?", "{n} hid {o}.", "Who was quick?", "{f} was quick."),
    (
        "{W} ran to the {d} because {s} was late.",
        "Where did {n} run?",
        "{n} ran to the {d}.",
        "Why did {n} run?",
        "{n} ran because {s} was late.",
    ),
)
_SAME = {"a": "t", "m": "t", "l": "k", "L": "k"}


def typed_story(rng: random.Random) -> tuple[str, Hero | None, list[Fact]]:
    """Two to five plain sentences, as users type them; their hero, if they state its kind; and what can be asked."""
    kind = rng.choice(("girl", "boy", "girl", "boy", rng.choice(ANIMALS), rng.choice(HEROES)))
    pool = kind if kind in NAMES else "animal" if kind in ANIMALS else "girl" if kind in HERS else "boy"
    name = rng.choice(NAMES[pool]) if rng.random() < 0.67 else invented_name(rng)
    hero = Hero(name, kind, rng.choice(("", "", f"{rng.choice(TRAITS)} ")))
    friend = rng.choice([n for n in NAMES[rng.choice(("girl", "boy"))] if n != name])
    his, giver, thing = "her" if hero.they == "She" else "his", rng.choice(GIVERS), rng.choice(THINGS)
    animal = rng.choice([a for a in ANIMALS if a != kind])
    full = rng.choice((thing, f"{rng.choice(COLOURS)} {thing}"))
    words = {
        "n": name,
        "S": hero.they,
        "s": hero.they.lower(),
        "h": his,
        "C": his.capitalize(),
        "t": thing,
        "m": full,
        "a": with_article(full),
        "f": friend,
        "g": giver,
        "k": animal,
        "l": with_article(animal),
        "L": with_article(animal).capitalize(),
        "p": rng.choice(PLACES),
        "o": rng.choice(SPOTS),
        "d": rng.choice(TOWARDS),
        "e": rng.choice(FOODS),
        "r": rng.choice(FRIGHTS),
        "i": rng.choice(FURNITURE),
    }
    known = [
        Fact("Who is the story about?", f"The story is about {hero.full} named {name}."),
        Fact(f"What is the name of the {kind}?", f"The {kind} is named {name}."),
    ]
    way, place, home = rng.random(), rng.choice(TOWARDS), with_article(rng.choice(HOMES))
    if way < 0.45:
        begin = rng.choice(
            (
                "Once upon a time there was",
                "Once upon a time, there was",
                "Once there was",
                "There once was",
                "There was",
            )
        )
        opening = f"{begin} {hero.full} {rng.choice(('named', 'called'))} {name}."
    elif way < 0.6:
        opening = f"{hero.full[0].upper()}{hero.full[1:]} named {name} lived in {home}."
        known.append(Fact(f"Where did {name} live?", f"{name} lived in {home}."))
    elif way < 0.7:
        opening = f"{name} was {hero.full}."
    else:
        with_whom = f"{name} went to the {place} with {his} {giver}"
        opening = f"{with_whom if way < 0.85 else f'{name} and {friend} went to the {place}'}."
        opening = rng.choice(("One day, ", "One day ", "", "", "Yesterday ")) + opening
        known = [Fact(f"Where did {name} go?", f"{name} went to the {place}.")]
    sentences, chosen = [opening], rng.sample(HAPPENINGS, rng.choice((1, 1, 2)))
    used = [{_SAME.get(key, key) for key in re.findall(r"{(\w)}", told[0])} & set("tkfegpod") for told in chosen]
    if set.intersection(*used) and len(chosen) > 1:  # with one thing twice, a question would have two answers
        del chosen[1]
    for sentence, *answers in chosen:
        told = sentence.format(W=rng.choice((name, hero.they)) if way < 0.7 else name, **words)
        if rng.random() < 0.4:
            told = told[0].lower() + told[1:] if told.startswith(("She ", "He ", "Her ", "His ")) else told
            told = f"{rng.choice(('One day', 'One day,', 'One morning', 'Then', 'In the evening'))} {told}"
        sentences.append(told)
        if rng.random() < 0.5:
            sentences.append(rng.choice(FILLERS).format(**words))
        asked = [text.format(**words) for text in answers]
        known += [Fact(*pair) for pair in zip(asked[::2], asked[1::2], strict=True)] * 2
    return " ".join(sentences), hero if way < 0.7 else None, known


def beginning_of(story: str, rng: random.Random) -> str:
    """The first two to five sentences of a story, on one line."""
    ends = [found.end() for found in re.finditer(r"[.!?]\"?(?=\s)", story)]
    return " ".join(story[: ends[min(rng.randint(1, 4), len(ends) - 1)]].split()) if ends else story


def unanswered(story: str, hero: Hero, rng: random.Random) -> Fact | None:
    """A question that the story does not answer, with a reply that says so."""
    lowered = story.lower()
    if rng.random() < 0.4:
        kind = rng.choice(("girl", "boy", "dog", "cat", "bear", "king"))
        if re.search(rf"\b{kind}", lowered):
            return None
        verb = rng.choice(("lose", "find", "want", "eat", "see"))
        return Fact(f"What did the {kind} {verb}?", f"There is no {kind} in the story. It is about {hero.name}.")
    past, base = rng.choice([(p, b) for p, b in DID.items() if b in ("lose", "find", "buy", "break", "eat", "build")])
    if past in lowered or base in lowered:
        return None
    who = rng.choice((hero.name, f"the {hero.kind}"))
    return Fact(f"What did {who} {base}?", f"The story does not say that {hero.name} {past} anything.")


# --- instructions -----------------------------------------------------------------------------------------------------

TELL = (
    "Tell me a story about {x}.",
    "Tell me a story about {x}",
    "Tell a story about {x}.",
    "Tell me a short story about {x}.",
    "Write a story about {x}.",
    "Write a short story about {x}.",
    "Can you tell me a story about {x}?",
    "Please tell me a story about {x}.",
    "I want a story about {x}.",
    "Make up a story about {x}.",
    "I would like to hear a story about {x}.",
    "A story about {x}, please.",
    "tell me a story about {x}",
    "Could you write a story about {x}?",
    "Tell my child a story about {x}.",
    "Give me a story about {x}.",
)
TELL_ANY = (
    "Tell me a story.",
    "Tell me a bedtime story.",
    "Write a short story.",
    "Can you tell me a story?",
    "Another story, please.",
    "Tell me another story.",
    "tell me a story",
    "Please tell me a story for children.",
    "I am bored. Tell me a story.",
    "Tell me something nice.",
    "Make up a story.",
    "A story, please.",
    "Tell me a new story.",
    "Write a story for a child.",
)
_REQUEST = re.compile("|".join(re.escape(text).replace(r"\{x\}", r"[^.?!\n]{1,80}") for text in (*TELL, *TELL_ANY)))
CONTINUE = (
    "Continue the story: {x}",
    "Continue this story: {x}",
    "Finish the story: {x}",
    "{x}",
    "{x}",
    "{x}",
    "How does this story go on? {x}",
    "Go on with this story: {x}",
    "What happens next? {x}",
)
DESCRIBE = ("Describe {x}.", "Tell me about {x}.", "What is {x} like?", "Who is {x}? Tell me more.")
IN_STORY = ("in the story", "in this story")
SELF = (
    "I am Storyteller, a small language model. I tell stories for children.",
    "My name is Storyteller. I am a small language model that tells children's stories.",
    "I am Storyteller, a small computer program that has read many children's stories and likes to tell new ones.",
)
WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "who are you",
    "Tell me about yourself.",
    "Are you a person?",
    "Are you a robot?",
    "Are you human?",
    "What's your name?",
    "Who made you?",
    "Introduce yourself.",
    "Do you have a name?",
    "Who am I talking to?",
    "Are you ChatGPT?",
)
CAN = (
    "What can you do?",
    "How can you help me?",
    "What do you know?",
    "Help",
    "What should I ask you?",
    "help me",
    "How does this work?",
    "What can I ask you?",
)
ABLE = (
    "I can tell you a story, go on with a story that you begin, and answer a question about a story. Ask me: "
    "Tell me a story about {a}.",
    "I tell stories. Say who the story is to be about, or give me the first sentence, and I will do the rest.",
)
HELLO = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "hi",
    "hello",
    "Hey",
    "Good morning",
    "Good evening",
    "Good morning!",
    "Hi there!",
    "Hello there.",
    "How are you?",
    "Hello, how are you?",
    "hey there",
    "Good day",
    "Nice to meet you.",
)
GREET = (
    "Hello! Shall I tell you a story about {a}?",
    "Hello! I am Storyteller. What story would you like to hear?",
    "Hi! It is nice to meet you. Would you like a story about {a}?",
    "Hello! I am well, and I would like to tell you a story. Who is it to be about?",
)
THANKS = (
    "Thank you!",
    "Thanks",
    "Thank you.",
    "thanks!",
    "That was nice.",
    "I liked that story.",
    "Great story!",
    "Nice!",
    "Good story.",
    "Very good",
    "I love it.",
    "Well done!",
)
WELCOME = (
    "You are welcome! Would you like to hear another story?",
    "I am glad that you liked it. Shall I tell you one about {a}?",
    "Thank you! Ask me for another story when you like.",
)
BYE = ("Bye", "Goodbye", "Good night", "Bye!", "See you later.", "Good night!", "See you.", "I have to go.")
FAREWELL = (
    "Goodbye! Come back when you want a story.",
    "Good night, and sweet dreams!",
    "Bye! It was nice to talk to you.",
)
NO_STORY = (
    "I have not told you a story yet. Ask me for one, and then ask me about it.",
    "Which story? Ask me to tell you one first, for example about {a}.",
    "There is no story yet. Tell me one, or ask me for a story about {a}.",
)
UNKNOWN = (
    "I do not know that. I am a small model, and I only know stories. Ask me for a story about {a}.",
    "That is too hard for me. I know stories for children: shall I tell you one about {a}?",
    "I cannot help with that. I tell stories. Would you like one about {a}?",
)
SUMS = (
    "How much is {a} plus {b}?",
    "What is {a} + {b}?",
    "What is {a} times {b}?",
    "What is the capital of {c}?",
    "Who is the president of {c}?",
    "Where is {c}?",
    "Translate this into French: {c} is nice.",
    "Write a program that adds {a} and {b}.",
    "What is the weather in {c}?",
    "Who won the world cup in {c}?",
)
COUNTRIES = "France Germany Spain Italy China Japan India Kenya Egypt Brazil Canada Mexico Norway Poland Peru".split()


def asks_for_a_story(record: Record) -> bool:
    """Whether a record is a request to tell a story, from its beginning, and opens a chat."""
    return not record.history and not record.input and _REQUEST.fullmatch(record.instruction) is not None


def _short(rng: random.Random) -> tuple[str, str]:
    """Small talk: a remark and its reply."""
    pairs = (WHO, SELF), (WHO, SELF), (CAN, ABLE), (HELLO, GREET), (THANKS, WELCOME), (BYE, FAREWELL)
    said, replies = rng.choice(pairs)
    return rng.choice(said), rng.choice(replies).format(a=with_article(rng.choice(HEROES)))


def _topic(story: str, hero: Hero | None, rng: random.Random) -> str:
    """Who the story is about; "" if unknown."""
    if hero is None:
        for kind in rng.sample(HEROES, len(HEROES)):
            if len(re.findall(rf"\b{kind}\b", story)) > 2:
                return with_article(kind)
        return ""
    plain = with_article(hero.kind)
    if not keeps_name(story, hero.name):  # another character takes over: do not ask for this name
        return plain
    topic = rng.choice(
        (
            f"{plain} named {hero.name}",
            f"{plain} named {hero.name}",
            f"{plain} called {hero.name}",
            plain,
            f"{hero.full} named {hero.name}",
            f"{hero.full}",
            hero.name,
        )
    )
    thing = next((t for t in rng.sample(THINGS, len(THINGS)) if len(re.findall(rf"\b{t}\b", story)) > 1), "")
    return f"{topic} and {with_article(thing)}" if thing and rng.random() < 0.3 else topic


def _tell(story: str, rng: random.Random) -> Record:
    topic = _topic(story, hero_of(story), rng)
    asked = rng.choice(TELL).format(x=topic) if topic and rng.random() < 0.9 else rng.choice(TELL_ANY)
    return Record(asked, "", story)


def _continue(story: str, rng: random.Random) -> Record | None:
    ends = [found.end() for found in re.finditer(r"[.!?]\"?(?=\s)", story)]
    if len(ends) < 6:
        return None
    cut = rng.choice(ends[: len(ends) // 2])
    if rng.random() < 0.25:  # in the middle of the first sentence
        words = story[: ends[0]].split(" ")
        cut = len(" ".join(words[: rng.randint(3, max(3, len(words) - 1))]))
    return Record(rng.choice(CONTINUE).format(x=story[:cut].strip()), "", story[cut:].strip())


def _question(story: str, hero: Hero | None, known: Sequence[Fact], rng: random.Random) -> Fact | None:
    """A question about a story, and its answer."""
    fact = None if hero is None or rng.random() < 0.9 else unanswered(story, hero, rng)
    if fact is None and known:
        fact = by_kind(rng.choice(known), hero, rng)
    if fact is None:
        return None
    question = fact.question
    if "story" not in question and rng.random() < 0.4:
        about = re.match(r"(What did the [a-z]+)( .*)", question)
        within = rng.choice(IN_STORY)
        question = f"{about[1]} {within}{about[2]}" if about and rng.random() < 0.7 else f"{question[:-1]} {within}?"
    return Fact(question, fact.answer)


def _ask(
    story: str, hero: Hero | None, known: Sequence[Fact], rng: random.Random, typed: bool = False
) -> Record | None:
    """A question about a story. The story comes before it, after it, as the input, or in an earlier turn, sometimes
    with other questions or small talk in between. typed: the user supplies the story rather than asking for it."""
    fact = _question(story, hero, known, rng)
    if fact is None:
        return None
    question, way = fact.question, rng.random()
    between = rng.choice(("\n\n", "\n", " ", " "))
    if way < (0.3 if typed else 0.5):
        first = _question(story, hero, known, rng) if typed else None
        told = Record(f"{story}{between}{first.question}", "", first.answer) if first else _tell(story, rng)
        history = [(told.instruction, told.output)]
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            other = _question(story, hero, known, rng)
            history.append(_short(rng) if other is None or rng.random() < 0.3 else (other.question, other.answer))
        return Record(question, "", fact.answer, tuple(history))
    if way < 0.8:
        return Record(f"{story}{between}{question}", "", fact.answer)
    if way < 0.9:
        return Record(f"{question}{between}{story}", "", fact.answer)
    return Record(question, story, fact.answer)


def records(stories: Sequence[str], others: Sequence[str], seed: int) -> Iterator[Record]:
    """Instructions for each story: tell it twice, with other names; continue it; answer questions about it, about its
    beginning and about small stories; small talk.

    others: questions that the model should decline.
    """
    rng = random.Random(seed)
    for story in stories:
        for _ in range(2):
            told = _tell(rename(story, other_names(story, rng)), rng)
            if rng.random() < 0.25:
                told = Record(told.instruction, "", told.output, (_short(rng),))
            yield told
        renamed = rename(story, other_names(story, rng))
        hero = hero_of(renamed)
        if rng.random() < 0.5 and (found := _continue(renamed, rng)):
            yield found
        if rng.random() < 0.6 and (found := _ask(renamed, hero, facts(renamed), rng)):
            yield found
        begun = beginning_of(renamed, rng)
        if rng.random() < 0.5 and (found := _ask(begun, hero_of(begun), facts(begun), rng, typed=True)):
            yield found
        if rng.random() < 0.4 and (found := _ask(*small_story(rng), rng, typed=rng.random() < 0.5)):
            yield found
        if rng.random() < 0.8 and (found := _ask(*typed_story(rng), rng, typed=True)):
            yield found
        if hero and rng.random() < 0.15:
            yield Record(
                rng.choice(DESCRIBE).format(x=hero.name),
                "",
                description(renamed, hero),
                ((_tell(renamed, rng).instruction, renamed),),
            )
        if rng.random() < 0.3:
            said, reply = _short(rng)
            small, about, known = small_story(rng)
            told = _tell(small if rng.random() < 0.5 else renamed, rng)
            fact = rng.choice(known)
            talk = (f"Tell me a story about {about.name}.", small), (fact.question, fact.answer)
            before = rng.choice(((), (), (_short(rng),), ((told.instruction, told.output),), talk))
            yield Record(said, "", reply, before)
        if rng.random() < 0.06:
            _, _, known = small_story(rng)
            name = re.compile(r"\b[A-Z][a-z]+\b(?<!What)(?<!Where)(?<!Who)(?<!Why)")
            question = name.sub(lambda _: f"the {rng.choice(HEROES)} in the story", rng.choice(known).question)
            yield Record(question, "", rng.choice(NO_STORY).format(a=with_article(rng.choice(HEROES))))
        if rng.random() < 0.12:
            a, b, c = rng.randint(0, 99), rng.randint(0, 99), rng.choice(COUNTRIES)
            asked = rng.choice(others) if others and rng.random() < 0.7 else rng.choice(SUMS).format(a=a, b=b, c=c)
            told, typed = _tell(renamed, rng), _ask(*typed_story(rng), rng, typed=True)
            reply = rng.choice(UNKNOWN).format(a=with_article(rng.choice(HEROES)))
            turns = [*typed.history, (typed.instruction, typed.output)] if typed and not typed.input else []
            earlier = rng.choice(([], [], [(told.instruction, told.output)], turns))
            yield Record(asked, "", reply, tuple(earlier))


# --- the commands -----------------------------------------------------------------------------------------------------


def stories_of(corpus: Path) -> list[str]:
    """The training stories of a corpus folder. Raises UserError if it has none."""
    found = next((source for source in read_corpus(corpus).sources if source.name == STORIES), None)
    if found is None:
        raise UserError(f"{corpus}: has no source {STORIES}; make it with python -m data.tinystories and data.corpus")
    return list(read_texts(found.files["train"]))


def retell(corpus: Path, out: Path, copies: int, seed: int) -> Source:
    """Write the source `retold`: each story with a known name, `copies` times, each time with other names."""
    stories = stories_of(corpus)
    counts, rng = name_counts(stories), random.Random(seed)
    with locked(out), SourceWriter(out, "retold", LICENCE) as writer:
        for copy in range(copies):
            for number, story in enumerate(stories):
                if names_in(story):
                    writer.add(Document(f"{copy}:{number}", rename(story, other_names(story, rng, counts))))
        writer.add_file("corpus.json", corpus / "corpus.json")
    return read_source(out)


def instruct(corpus: Path, out: Path, others: Path | None, seed: int) -> int:
    """Write alpaca.json, and source.json with its origin. Returns the number of records."""
    stories = [story.strip() for story in stories_of(corpus)]
    found = read_records([others]) if others else []
    asked = [r.instruction for r in found if not r.input and len(r.instruction) < 150]
    made = list(records(stories, asked, seed))
    random.Random(seed).shuffle(made)
    with locked(out):
        read = [corpus / "corpus.json", *([others] if others else [])]
        inputs = [InputFile.of(path.name, path) for path in read]
        licence = f"{LICENCE}; questions without an answer CC BY-SA 3.0" if others else LICENCE
        write_instructions(out, made, "stories", licence, inputs)
    return len(made)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.stories", description=__doc__)
    parser.add_argument("what", choices=("retell", "instruct"), help="stories with other names, or instructions")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="made of TinyStories by data.corpus")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the result")
    parser.add_argument("--copies", type=int, default=2, metavar="N", help="retell: versions of each story (default 2)")
    parser.add_argument(
        "--others",
        type=Path,
        metavar="FILE",
        help="instruct: Alpaca records, such as Dolly's, whose questions without input it should decline",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default 0)")
    args = parser.parse_args(arguments)
    if args.copies < 1:
        raise UserError(f"--copies is {args.copies}, wants a number above 0")
    if args.what == "retell":
        source = retell(args.corpus, args.out, args.copies, args.seed)
        print(f"{source.documents:,} stories retold, {source.bytes:,} bytes in {args.out}")
    else:
        print(f"{instruct(args.corpus, args.out, args.others, args.seed):,} records in {args.out / 'alpaca.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
