"""Stories retold with other names, and instructions made from them: training data of `storyteller`, besides plain text.

    python examples/storyteller/stories.py retell corpus --out sources/retold  other names in every story
    python examples/storyteller/stories.py instruct corpus --out stories  stories/alpaca.json, for recipes/sft.py
    python examples/storyteller/stories.py instruct corpus --out stories --others dolly.json  and some to decline

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
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge.data.alpaca import Record, read_records, write_instructions
from tinyforge.data.files import locked
from tinyforge.data.shards import read_corpus, read_texts
from tinyforge.data.source import Document, InputFile, Source, SourceWriter, read_source
from tinyforge.errors import Parser, UserError, run_command

STORIES = "tinystories"  # the source that is read
LICENCE = "CDLA-Sharing-1.0"
SAY = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text(encoding="utf-8"))
DID = SAY["did"]  # past tense to base form

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
PEOPLE = tuple(
    "girl boy man woman lady child princess prince king queen farmer fairy pirate baker knight giant robot doctor "
    "teacher clown baby fireman sailor".split()
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


_HERO = re.compile(
    rf"\b[Aa]n? ((?:(?!an? |time\b)[a-z]+,? ){{0,3}}?)({'|'.join(HEROES)}) (?:named|called) ([A-Z][a-z]+)\b"
)
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
    words = {"n": name, "S": he, "h": his, "f": friend, "g": giver, "p": place, "o": spot}
    words |= {"C": his.capitalize(), "c": colour, "t": thing, "m": full, "a": with_article(full)}
    opening = rng.choice(
        (
            f"Once upon a time, there was {hero.full} named {name}.",
            f"Once there was {hero.full} named {name}.",
            f"There once was {hero.full} called {name}.",
            f"One day, {hero.full} named {name} went out to play.",
        )
    )
    got = rng.choice(("{n} had {a}.", "{C} {g} gave {n} {a}.", "{n} loved {h} {m}.")).format(**words)
    plot = rng.choice(SAY["plots"])
    sentences = [text.format(got=got, **words) for text in plot["says"]]
    asked = [Fact(*(text.format(**words) for text in pair)) for pair in plot["asks"]]
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
BEGINNINGS = (
    "Once upon a time there was",
    "Once upon a time, there was",
    "Once there was",
    "There once was",
    "There was",
)
TOWARDS = "market,forest,garden,farm,pond,library,park,lake,zoo,hill,playground".split(",")
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
    words = {"n": name, "S": hero.they, "s": hero.they.lower(), "h": his, "C": his.capitalize()}
    words |= {"f": friend, "g": giver, "t": thing, "m": full, "a": with_article(full)}
    words |= {"k": animal, "l": with_article(animal), "L": with_article(animal).capitalize()}
    lists = {"p": PLACES, "o": SPOTS, "d": TOWARDS, "e": FOODS, "r": FRIGHTS, "i": FURNITURE}
    words |= {letter: rng.choice(of) for letter, of in lists.items()}
    known = [
        Fact("Who is the story about?", f"The story is about {hero.full} named {name}."),
        Fact(f"What is the name of the {kind}?", f"The {kind} is named {name}."),
    ]
    way, place, home = rng.random(), rng.choice(TOWARDS), with_article(rng.choice(HOMES))
    if way < 0.45:
        begin = rng.choice(BEGINNINGS)
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
    sentences, chosen = [opening], rng.sample(SAY["happenings"], rng.choice((1, 1, 2)))
    used = [{_SAME.get(key, key) for key in re.findall(r"{(\w)}", told["says"])} & set("tkfegpod") for told in chosen]
    if set.intersection(*used) and len(chosen) > 1:  # with one thing twice, a question would have two answers
        del chosen[1]
    for happening in chosen:
        told = happening["says"].format(W=rng.choice((name, hero.they)) if way < 0.7 else name, **words)
        if rng.random() < 0.4:
            told = told[0].lower() + told[1:] if told.startswith(("She ", "He ", "Her ", "His ")) else told
            told = f"{rng.choice(('One day', 'One day,', 'One morning', 'Then', 'In the evening'))} {told}"
        sentences.append(told)
        if rng.random() < 0.5:
            sentences.append(rng.choice(SAY["fillers"]).format(**words))
        known += [Fact(*(text.format(**words) for text in pair)) for pair in happening["asks"]] * 2
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

_REQUEST = re.compile(
    "|".join(re.escape(text).replace(r"\{x\}", r"[^.?!\n]{1,80}") for text in (*SAY["tell"], *SAY["tell_any"]))
)
IN_STORY = ("in the story", "in this story")
COUNTRIES = "France Germany Spain Italy China Japan India Kenya Egypt Brazil Canada Mexico Norway Poland Peru".split()


def asks_for_a_story(record: Record) -> bool:
    """Whether a record is a request to tell a story, from its beginning, and opens a chat."""
    return not record.history and not record.input and _REQUEST.fullmatch(record.instruction) is not None


def _short(rng: random.Random) -> tuple[str, str]:
    """Small talk: a remark and its reply."""
    kinds = "who self|who self|can able|hello greet|thanks welcome|bye farewell".split("|")
    said, replies = (SAY[name] for name in rng.choice(kinds).split())
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
    asked = rng.choice(SAY["tell"]).format(x=topic) if topic and rng.random() < 0.9 else rng.choice(SAY["tell_any"])
    return Record(asked, "", story)


def _continue(story: str, rng: random.Random) -> Record | None:
    ends = [found.end() for found in re.finditer(r"[.!?]\"?(?=\s)", story)]
    if len(ends) < 6:
        return None
    cut = rng.choice(ends[: len(ends) // 2])
    if rng.random() < 0.25:  # in the middle of the first sentence
        words = story[: ends[0]].split(" ")
        cut = len(" ".join(words[: rng.randint(3, max(3, len(words) - 1))]))
    return Record(rng.choice(SAY["continue"]).format(x=story[:cut].strip()), "", story[cut:].strip())


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
                rng.choice(SAY["describe"]).format(x=hero.name),
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
            yield Record(question, "", rng.choice(SAY["no_story"]).format(a=with_article(rng.choice(HEROES))))
        if rng.random() < 0.12:
            a, b, c = rng.randint(0, 99), rng.randint(0, 99), rng.choice(COUNTRIES)
            asked = (
                rng.choice(others) if others and rng.random() < 0.7 else rng.choice(SAY["sums"]).format(a=a, b=b, c=c)
            )
            told, typed = _tell(renamed, rng), _ask(*typed_story(rng), rng, typed=True)
            reply = rng.choice(SAY["unknown"]).format(a=with_article(rng.choice(HEROES)))
            turns = [*typed.history, (typed.instruction, typed.output)] if typed and not typed.input else []
            earlier = rng.choice(([], [], [(told.instruction, told.output)], turns))
            yield Record(asked, "", reply, tuple(earlier))


# --- the commands -----------------------------------------------------------------------------------------------------


def stories_of(corpus: Path) -> list[str]:
    """The training stories of a corpus folder, or the replies of a file of records. Raises UserError if it has none."""
    if corpus.suffix == ".json":
        return [record.output for record in read_records([corpus])]
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


def questions_in(others: Path | None) -> list[str]:
    """The short questions without input of a file of records, which the model should decline."""
    found = read_records([others]) if others else []
    return [r.instruction for r in found if not r.input and len(r.instruction) < 150]


def write(out: Path, name: str, made: list[Record], corpus: Path, others: Path | None) -> None:
    """Write alpaca.json, and source.json with its origin."""
    read = [corpus if corpus.suffix == ".json" else corpus / "corpus.json", *([others] if others else [])]
    inputs = [InputFile.of(path.name, path) for path in read]
    licence = f"{LICENCE}; questions without an answer CC BY-SA 3.0" if others else LICENCE
    with locked(out):
        write_instructions(out, made, name, licence, inputs)


def instruct(corpus: Path, out: Path, others: Path | None, seed: int) -> int:
    """Write the instructions of all stories. Returns the number of records."""
    made = list(records([story.strip() for story in stories_of(corpus)], questions_in(others), seed))
    random.Random(seed).shuffle(made)
    write(out, "stories", made, corpus, others)
    return len(made)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
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
