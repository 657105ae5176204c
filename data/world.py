"""The built-in corpus: a small world in plain English, from a seeded generator.

    python -m data.world --n 5                    # five training documents
    python -m data.world --split val --instructions

`documents` yields stories, descriptions, dialogue, facts and arithmetic to pretrain on; `instructions` yields
questions in Alpaca's format, each with exactly one right answer. The two splits are disjoint by construction: the
names and things for which `held_out_word` is true and the number pairs for which `held_out_pair` is true occur in
"val" only, and "val" uses no other names, things or pairs. docs/corpus.md says what that shows and what it does not.

Text is generated from the templates of world.txt. A beat is a tuple of variants, one of which is picked (an empty
variant omits the beat); a family of stories is a tuple of beats; the roles (`{a}`, `{a.his}`, `{x.full}`) are filled
once per story, so a red ball stays red to the end.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tinyforge.errors import Parser, run_command

T = TypeVar("T")


def read_wordings(name: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The sections of a file of this folder: each line's variants, which bars separate."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            lines = found[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            lines.append(tuple(variant.strip() for variant in line.split("|")))
    return {section: tuple(lines) for section, lines in found.items()}


# --- the words of the world ------------------------------------------------------------------------------------------

# Names and things are made of two parts, a few dozen parts in all. The first part says little about the second, so a
# model that repeats a name must have looked it up in the text. The parts are chosen so that a tokenizer that has seen
# only training text cuts a held-out word at the same place: after the consonant, and at the space.
NAME_STARTS = tuple("B D F G H J K L M N P R S T V Z".split())
GIRL_ENDS = tuple("ara ina ola emi usa elia ania ita".split())  # the ending tells girls from boys
BOY_ENDS = tuple("abin oden iro omo evin iko ulan obert".split())
THING_STARTS = tuple("sun moon star rain snow wind sea tea wood hand rose milk".split())
TOY_ENDS = tuple("kite boat drum lamp bell".split())  # what can break and be mended
THING_ENDS = TOY_ENDS + tuple("ball hat cup bag key book".split())


def held_out_word(word: str) -> bool:
    """Whether a name or a thing belongs to "val": about one in eight, by a fixed hash of the word."""
    return zlib.crc32(f"word {word}".encode()) % 8 == 0


def _joined(starts: Sequence[str], ends: Sequence[str], between: str, held_out: bool) -> tuple[str, ...]:
    words = (f"{start}{between}{end}" for start in starts for end in ends)
    return tuple(word for word in words if held_out_word(word) == held_out)


FOODS = tuple("apple pear plum bun cake pie egg nut carrot cookie lemon banana".split())
COLOURS = tuple("red blue green yellow brown black white pink orange".split())
SIZES = ("small", "big", "little", "old", "new")
SPOTS = tuple(
    "under the bed|behind the door|on the table|under the chair|on the shelf|in the box|by the window|behind the tree|"
    "in the grass|near the gate|on the stairs|under the bench|in the basket|by the wall".split("|")
)
PLACES = tuple(
    "in the garden|at the park|at the pond|in the kitchen|at school|in the barn|on the hill|by the river|"
    "at the market|in the yard|in the forest|on the beach".split("|")
)
KIN = ("mother", "father", "sister", "brother", "aunt", "uncle")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _pairs(text: str) -> dict[str, str]:
    """The text "a=b|c=d" as a dictionary."""
    return dict(pair.split("=") for pair in text.split("|"))


SOUNDS = _pairs(
    "cow=moo|dog=woof|cat=meow|duck=quack|sheep=baa|pig=oink|horse=neigh|hen=cluck|frog=croak|bee=buzz|lion=roar|"
    "mouse=squeak|owl=hoot|snake=hiss"
)
FACTS = {
    "sound": SOUNDS,
    "home": _pairs(
        "bird=in a nest|bee=in a hive|fish=in the water|bear=in a cave|horse=in a stable|spider=in a web|"
        "frog=by the pond|owl=in a tree|pig=in a sty|lion=in the wild"
    ),
    "colour": _pairs(
        "grass=green|snow=white|the sky=blue|the sun=yellow|coal=black|milk=white|mud=brown|a lemon=yellow|"
        "a leaf=green|the night=black|a carrot=orange"
    ),
}
OPPOSITES = tuple(
    _pairs(
        "big=small|hot=cold|up=down|day=night|wet=dry|full=empty|fast=slow|happy=sad|old=new|long=short|high=low|"
        "left=right|hard=soft|early=late|near=far|clean=dirty|loud=quiet|in=out"
    ).items()
)

LARGEST = 20  # every number of the world, results included, is in 0..LARGEST
LARGEST_STEP = 6  # the most that is added or subtracted at once
TWO_PEOPLE = 0.15  # share of the scenes in questions that have a second person, with another thing and place
NUMBER_WORDS = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty".split()
)


def held_out_pair(a: int, b: int) -> bool:
    """Whether the unordered pair {a, b} belongs to "val".

    It decides for a + b, for the differences (a + b) - a and (a + b) - b, for word problems with the same numbers and
    for the comparison of a with b. About one pair in eight is held out, by the two numbers alone.
    """
    low, high = sorted((a, b))
    return zlib.crc32(f"{low} {high}".encode()) % 8 == 0


@dataclass(frozen=True)
class Words:
    """The words of one split: the only place where the splits differ."""

    girls: tuple[str, ...]
    boys: tuple[str, ...]
    toys: tuple[str, ...]
    things: tuple[str, ...]
    sums: tuple[tuple[int, int], ...]  # (a, b) with 1 <= b <= LARGEST_STEP and a + b <= LARGEST
    comparisons: tuple[tuple[int, int], ...]  # ordered (a, b) with a != b


def _words(held_out: bool) -> Words:
    numbers = range(LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if held_out_pair(a, b) == held_out]
    return Words(
        girls=_joined(NAME_STARTS, GIRL_ENDS, "", held_out),
        boys=_joined(NAME_STARTS, BOY_ENDS, "", held_out),
        toys=_joined(THING_STARTS, TOY_ENDS, " ", held_out),
        things=_joined(THING_STARTS, THING_ENDS, " ", held_out),
        sums=tuple((a, b) for a, b in pairs if a + b <= LARGEST and 1 <= b <= LARGEST_STEP),
        comparisons=tuple((a, b) for a, b in pairs if a != b),
    )


WORDS = {"train": _words(held_out=False), "val": _words(held_out=True)}


# --- grammar ---------------------------------------------------------------------------------------------------------


def a_or_an(phrase: str) -> str:
    """Put the indefinite article before a phrase: "a kite", "an old kite"."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def sentence(text: str) -> str:
    """Make the first letter a capital."""
    return text[0].upper() + text[1:]


def counted(n: int, noun: str) -> str:
    """A number with its noun: "1 kite", "3 kites"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(items: list[str]) -> str:
    """Join with commas and a last "and": "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


@dataclass(frozen=True)
class Character:
    """A person of a story; prints as the name, and has its pronouns as attributes for the templates, which spell the
    capital as the sentence does."""

    name: str
    he: str
    He: str
    him: str
    his: str
    His: str
    child: str

    def __str__(self) -> str:
        return self.name


GIRL = ("she", "She", "her", "her", "Her", "girl")
BOY = ("he", "He", "him", "his", "His", "boy")


@dataclass(frozen=True)
class Item:
    """A thing with a colour and perhaps a size, fixed for the whole text."""

    noun: str
    colour: str
    size: str = ""

    def __str__(self) -> str:
        return self.noun

    @property
    def full(self) -> str:
        return f"{self.size} {self.colour} {self.noun}".lstrip()

    @property
    def a(self) -> str:
        return a_or_an(self.full)

    @property
    def A(self) -> str:  # noqa: N802
        return sentence(self.a)


class Teller:
    """The random stream of one document, drawing from the words of its split."""

    def __init__(self, split: str, stream: str):
        # Seeding `Random` with a string goes through SHA-512: the same stream in every process and Python version.
        self.rng = random.Random(stream)
        self.words = WORDS[split]
        self.held_out = split == "val"

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def some(self, options: Sequence[str], n: int) -> list[str]:
        """n different options, in random order."""
        return self.rng.sample(options, n)

    def apart(self, words: tuple[str, ...], n: int) -> list[str]:
        """n names or things that share no part, so that one part tells them apart."""
        while True:
            chosen = self.some(words, n)
            parts = [word.split() if " " in word else [word[0], word[1:]] for word in chosen]
            if len({start for start, _ in parts}) == n == len({end for _, end in parts}):
                return chosen

    def people(self, n: int) -> list[Character]:
        """n different characters."""
        girls, boys = self.words.girls, self.words.boys
        return [Character(name, *(GIRL if name in girls else BOY)) for name in self.apart(girls + boys, n)]

    def items(self, n: int) -> list[Item]:
        """n items that differ in noun and in colour."""
        nouns, colours = self.apart(self.words.things, n), self.some(COLOURS, n)
        return [Item(noun, colour, self.pick(("", "") + SIZES)) for noun, colour in zip(nouns, colours, strict=True)]

    def say(self, variants: Sequence[str], **roles: object) -> str:
        """One of the variants, with its roles filled."""
        return self.pick(variants).format(**roles)

    def tell(self, beats: tuple[tuple[str, ...], ...], **roles: object) -> str:
        """One variant of every beat, in order; an empty variant leaves its beat out."""
        return " ".join(text for beat in beats if (text := self.say(beat, **roles)))


# --- stories ---------------------------------------------------------------------------------------------------------

BEATS = read_wordings("world.txt")
FAMILIES = tuple(BEATS[name] for name in ("lost", "sharing", "fixing", "hunger", "helping", "weather"))
TRAPS = ("in the mud", "in a hole", "under a log", "behind a gate", "in a net", "between two rocks")
STUCK_ANIMALS = ("cow", "dog", "cat", "duck", "sheep", "pig", "hen", "frog", "mouse", "owl")


def story(t: Teller) -> str:
    """A short story, 40 to 110 words: somebody wants something, something happens, and it ends well."""
    beats = t.pick(FAMILIES)
    a, b = t.people(2)
    (x,) = t.items(1)
    if beats is BEATS["fixing"]:
        x = Item(t.pick(t.words.toys), x.colour, x.size)
    kin = t.pick(KIN)
    food, food2 = t.some(FOODS, 2)
    day, day2 = t.some(DAYS, 2)
    animal = t.pick(STUCK_ANIMALS)
    return t.tell(
        beats,
        a=a,
        b=b,
        x=x,
        kin=kin,
        k=f"{a}'s {kin}",
        day=day,
        day2=day2,
        place=t.pick(PLACES),
        spots=t.some(SPOTS, 4),
        food=a_or_an(food),
        food2=a_or_an(food2),
        foodname=food,
        w=t.pick(BEATS["weathers"]),
        animal=animal,
        sound=SOUNDS[animal],
        Sound=sentence(SOUNDS[animal]),
        trap=t.pick(TRAPS),
        colour=t.pick(("brown", "black", "white")),
    )


# --- descriptions and dialogue ---------------------------------------------------------------------------------------


def description(t: Teller) -> str:
    """A room, a person or a pet, with what is where and which colour it has."""
    a, b = t.people(2)
    x, y, z = t.items(3)
    animal = t.pick(("dog", "cat", "duck", "hen", "frog", "mouse"))
    return t.tell(
        t.pick((BEATS["room"], BEATS["person"], BEATS["pet"])),
        a=a,
        b=b,
        x=x,
        y=y,
        z=z,
        size=t.pick(SIZES[:3]),
        spots=t.some(SPOTS, 3),
        kin=t.pick(KIN),
        tall=t.pick(("tall", "small", "happy", "quiet", "kind")),
        place=t.pick(PLACES),
        day=t.pick(DAYS),
        animal=animal,
        sound=SOUNDS[animal],
        Sound=sentence(SOUNDS[animal]),
        colour=t.pick(("brown", "black", "white")),
    )


def dialogue(t: Teller) -> str:
    """Three people talk: a thing is missing, a plan is made, or an animal is guessed."""
    a, b, c = t.people(3)
    x, y = t.items(2)
    animal = t.pick(tuple(SOUNDS))
    wrong = t.pick(tuple(other for other in SOUNDS if other != animal))
    return t.tell(
        t.pick((BEATS["missing"], BEATS["plans"], BEATS["guessing"])),
        a=a,
        b=b,
        c=c,
        x=x,
        y=y,
        spots=t.some(SPOTS, 2),
        day=t.pick(DAYS),
        place=t.pick(PLACES),
        food=a_or_an(t.pick(FOODS)),
        ananimal=a_or_an(animal),
        sound=SOUNDS[animal],
        Sound=sentence(SOUNDS[animal]),
        awrong=a_or_an(wrong),
        Awrong=sentence(a_or_an(wrong)),
        wrongsound=SOUNDS[wrong],
    )


# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One question with its one right answer, in Alpaca's format; `input` is "" if the question needs none."""

    kind: str
    instruction: str
    input: str
    output: str


def steps(start: int, end: int) -> str:
    """Count from start to end, up or down, and say where it stops: "7 8 9 10, so 10"."""
    direction = 1 if end > start else -1
    return f"{' '.join(str(n) for n in range(start, end + direction, direction))}, so {end}"


def ask_add(t: Teller) -> Instruction:
    a, b = t.pick(t.words.sums)
    return Instruction("add", t.tell(BEATS["add"], a=a, b=b), "", steps(a, a + b))


def ask_subtract(t: Teller) -> Instruction:
    a, b = t.pick(t.words.sums)
    return Instruction("subtract", t.tell(BEATS["subtract"], c=a + b, b=b), "", steps(a + b, a))


def ask_word_problem(t: Teller) -> Instruction:
    who, friend = t.people(2)
    noun = t.pick(t.words.things)
    a, b = t.pick(t.words.sums)
    if t.rng.random() < 0.5:
        start, end, (events, questions) = a, a + b, BEATS["gains"]
    else:
        start, end, (events, questions) = a + b, a, BEATS["losses"]
    told = f"{who} has {counted(start, noun)}. {t.say(events, f=friend, w=who, b=b)}"
    return Instruction("word_problem", t.say(questions, n=noun, w=who), told, steps(start, end))


def ask_compare(t: Teller) -> Instruction:
    a, b = t.pick(t.words.comparisons)
    asked, answer = ("larger", max(a, b)) if t.rng.random() < 0.5 else ("smaller", min(a, b))
    return Instruction("compare", t.tell(BEATS[asked], a=a, b=b), "", str(answer))


def ask_count(t: Teller) -> Instruction:
    n = 1 + int(t.rng.random() * 6)
    what, pool = ("things", t.words.things) if t.rng.random() < 0.5 else ("names", t.words.girls + t.words.boys)
    items = ", ".join(t.some(pool, n))
    return Instruction("count", t.tell(BEATS["count"], what=what), items, str(n))


def scene(t: Teller) -> tuple[str, Character, Item, str]:
    """One or two people, each somewhere with something; returns the one to ask about, and the text."""
    n = 2 if t.rng.random() < TWO_PEOPLE else 1
    people, items, places = t.people(n), t.items(n), t.some(PLACES, n)
    told = zip(people, items, places, strict=True)
    text = " ".join(t.tell(BEATS["scene"], p=p, x=x, place=at) for p, x, at in told)
    i = t.pick(range(n))
    return text, people[i], items[i], places[i]


def about_scene(t: Teller, kind: str, person: Character, item: Item, place: str) -> tuple[str, str]:
    """A question of this kind about a scene, and its answer."""
    answers = {"who": person.name, "where": place, "colour": item.colour}
    return t.tell(BEATS[kind], p=person, x=item, place=place), answers[kind]


def ask_scene(t: Teller, kind: str) -> Instruction:
    text, person, item, place = scene(t)
    question, answer = about_scene(t, kind, person, item, place)
    return Instruction(kind, question, text, answer)


def ask_who(t: Teller) -> Instruction:
    # "It is Mara", not "Mara": with a space before it, a name is spelled in the tokens of the text it is copied from.
    asked = ask_scene(t, "who")
    return replace(asked, output=f"It is {asked.output}")


def fact(t: Teller) -> tuple[str, str]:
    """A question about a fixed fact of this world, and its answer."""
    topic = t.pick((*FACTS, "opposite", "day", "number"))
    if topic in FACTS:
        key, answer = t.pick(tuple(FACTS[topic].items()))
        key = key if topic == "colour" else a_or_an(key)
    elif topic == "opposite":
        pair, i = t.pick(OPPOSITES), t.pick((0, 1))
        key, answer = pair[i], pair[1 - i]
    elif topic == "day":
        i = t.pick(range(7))
        key, answer = DAYS[i], DAYS[(i + 1) % 7]
    else:
        n = t.pick(range(LARGEST))
        key, answer = str(n), str(n + 1)
    return t.tell(BEATS[f"fact: {topic}"], k=key), answer


def ask_fact(t: Teller) -> Instruction:
    question, answer = fact(t)
    # A fact cannot be held out, since nobody could know it. The asker can, so "val" always names the asker.
    if t.held_out or t.rng.random() < 0.5:
        question = t.tell(BEATS["fact"], p=t.people(1)[0], q=question)
    return Instruction("fact", question, "", answer)


def ask_repeat(t: Teller) -> Instruction:
    word = t.pick(t.words.things + t.words.girls + t.words.boys)
    times, times_word = t.pick(((1, "once"), (2, "twice"), (3, "three times")))
    return Instruction("repeat", t.tell(BEATS["repeat"], n=times_word), word, " ".join([word] * times))


ASK: dict[str, Callable[[Teller], Instruction]] = {
    "add": ask_add,
    "subtract": ask_subtract,
    "word_problem": ask_word_problem,
    "compare": ask_compare,
    "count": ask_count,
    "who": ask_who,
    "where": partial(ask_scene, kind="where"),
    "colour": partial(ask_scene, kind="colour"),
    "fact": ask_fact,
    "repeat": ask_repeat,
}
KINDS = tuple(ASK)


def is_correct(example: Instruction, reply: str) -> bool:
    """Exact match, apart from surrounding spaces; there is one right answer by construction."""
    return reply.strip() == example.output


def wrong_answer(example: Instruction, split: str, seed: int, number: int) -> str:
    """A wrong answer to question `number`, as a hasty reader might give: a count one step off, the other number,
    another person of the scene, another place. It depends only on (seed, split, number) and the question."""
    t = _teller(split, seed, "wrong answer", number)
    kind, right, told = example.kind, example.output, example.input
    if kind in ("add", "subtract", "word_problem"):
        first, *_, last = (int(n) for n in right.replace(", so", "").split())
        return steps(first, t.pick([n for n in (last - 1, last + 1) if 0 <= n <= LARGEST]))
    if kind == "compare":
        return next(n for n in re.findall(r"\d+", example.instruction) if n != right)
    if kind == "count":
        return str(t.pick([n for n in (int(right) - 1, int(right) + 1) if n]))
    if kind == "repeat":
        return " ".join([told] * t.pick([n for n in (1, 2, 3) if " ".join([told] * n) != right]))
    if kind == "fact":
        return next(answer for answer in iter(lambda: fact(t)[1], None) if answer != right)
    pools = {"who": t.words.girls + t.words.boys, "where": PLACES, "colour": COLOURS}
    stated = [word for word in pools[kind] if re.search(rf"\b{word}\b", told) and word not in right]
    other = t.pick(stated or [word for word in pools[kind] if word not in right])
    return f"It is {other}" if kind == "who" else other


# --- harder sums, and what a reply to one is worth -------------------------------------------------------------------

# Other sums of this world add LARGEST_STEP at most. A harder sum adds more, with the small number first: counting on
# from the first number takes more steps than any training example, but counting on from the second number works too.


def held_out_harder(a: int, b: int) -> bool:
    """Whether a harder sum belongs to "val": if its pair does, and for about a quarter of the others, so that there are
    enough."""
    return held_out_pair(a, b) or zlib.crc32(f"harder {a} {b}".encode()) % 4 == 0


def harder_sums(split: str) -> list[Instruction]:
    """Every harder sum of a split, in every wording."""
    pairs = ((a, b) for a in range(1, LARGEST_STEP + 1) for b in range(LARGEST_STEP + 1, LARGEST - a + 1))
    return [
        Instruction("harder_sum", wording.format(a=a, b=b), "", steps(b, a + b))
        for a, b in pairs
        if held_out_harder(a, b) == (split == "val")
        for wording in BEATS["add"][0]
    ]


def sum_rewards(example: Instruction, reply: str) -> dict[str, float]:
    """The rewards of a reply to a harder sum, each 0 or 1.

    correct: it counts on by ones from either number to the sum, and states the sum. format: it has this form with any
    numbers: a count by ones, and where it stops.
    """
    reply = reply.strip()
    first, *_, last = (int(n) for n in example.output.replace(", so", "").split())
    found = re.fullmatch(r"(\d{1,3})(?: \d{1,3})*, so (\d{1,3})", reply)
    in_form = found is not None and reply == steps(int(found[1]), int(found[2]))
    return {"correct": float(reply in (example.output, steps(last - first, last))), "format": float(in_form)}


# --- games, facts, arithmetic and questions as text ------------------------------------------------------------------


def game(t: Teller) -> str:
    """An echo game, a cumulative song, or a message that is passed on: text repeated word for word."""
    a, b, c, d = t.people(4)
    form = t.pick(("echo", "echo", "news", "news", "song"))
    if form == "echo":
        lines = [t.tell(BEATS["game"], a=a, b=b)]
        for _ in range(4):
            pool = t.some(t.words.things, 3) + t.some(t.words.girls + t.words.boys, 4)
            pool += t.some(FOODS + COLOURS + tuple(SOUNDS), 4)
            words = " ".join(t.some(pool, 1 + t.pick(range(5))))
            lines.append(t.tell(BEATS["echo"], a=a, b=b, words=words))
        return " ".join(lines)
    if form == "news":
        items = t.items(2)
        about = zip((c, d), (d, c), items, strict=True)
        news = [t.tell(BEATS["news"], p=p, q=q, x=x, place=t.pick(PLACES)) for p, q, x in about]
        told = zip((a, b), (b, a), news, strict=True)
        return " ".join(t.tell(BEATS["passing on"], a=p, b=q, s=s) for p, q, s in told)
    things, place = [a_or_an(thing) for thing in t.some(t.words.things, 4)], t.pick(PLACES)
    return "\n".join(f"{a} and {b} sing: {listed(things[:n])} {place}." for n in range(1, 5))


def quiz(t: Teller) -> str:
    """Questions of several kinds, each answered on the next line."""
    a, b = t.people(2)
    lines = [t.tell(BEATS["quiz"], a=a, b=b)]
    if t.rng.random() < 0.5:
        text, person, item, place = scene(t)
        lines.append(text)
        for kind in t.some(("who", "where", "colour"), 3):
            lines += about_scene(t, kind, person, item, place)
        return "\n".join(lines)
    for kind in t.rng.choices(KINDS, k=5):
        example = ASK[kind](t)
        lines += filter(None, (example.instruction, example.input, example.output))
    return "\n".join(lines)


def lesson(t: Teller) -> str:
    """Facts in dialogue between two people."""
    a, b = t.people(2)
    turns = []
    for _ in range(4):
        question, answer = fact(t)
        forms = ('"{q}" asked {a}. "{S}," said {b}.', '{a} asked, "{q}" {b} said, "{S}."', '"{q}"\n"{S}!"')
        turns.append(t.say(forms, a=a, b=b, q=question, S=sentence(answer)))
    return f"{a} and {b} {t.say(('talk', 'sit', 'play', 'meet'))} {t.pick(PLACES)}. {' '.join(turns)}"


def equation(t: Teller, a: int, b: int) -> str:
    """A sum, a difference or both, in digits or in words."""
    c = a + b
    A, B, C = (NUMBER_WORDS[n] for n in (a, b, c))
    roles = {"a": a, "b": b, "c": c, "A": A, "B": B, "C": C, "up": steps(a, c), "down": steps(c, a)}
    return sentence(t.tell(BEATS["equation"], **roles))


def arithmetic(t: Teller) -> str:
    """One person's sums: equations, counting, comparing, and problems in words with their answers."""
    a, b = t.people(2)
    parts = [t.tell(BEATS["arithmetic"], a=a, b=b)]
    for _ in range(9):
        form = t.rng.random()
        if form < 0.6:
            parts.append(equation(t, *t.pick(t.words.sums)))
        elif form < 0.75:
            p, q = t.pick(t.words.comparisons)
            parts.append(t.tell(BEATS["comparison"], m=max(p, q), n=min(p, q)))
        elif form < 0.85:
            start = t.pick(range(LARGEST - 5))
            parts.append(f"Count on from {start}: {', '.join(str(n) for n in range(start, start + 6))}.")
        else:
            problem = ask_word_problem(t)
            parts.append(f"{problem.input} {problem.instruction} {problem.output}.")
    return t.pick((" ", "\n")).join(parts)


# The kinds of document and their weights. The last three practise what the instructions ask, in other words.
FORMS = (story, description, dialogue, game, quiz, lesson, arithmetic)
FORM_WEIGHTS = (16, 5, 5, 40, 20, 3, 11)


# --- what callers use ------------------------------------------------------------------------------------------------


def _teller(split: str, seed: int, what: str, i: int) -> Teller:
    if split not in WORDS:
        raise ValueError(f'split is {split!r}; expected "train" or "val"')
    return Teller(split, f"{seed} {split} {what} {i}")


def documents(split: str, n: int, seed: int = 0) -> Iterator[str]:
    """n texts to pretrain on; text i depends only on (seed, split, i)."""
    for i in range(n):
        t = _teller(split, seed, "document", i)
        (form,) = t.rng.choices(FORMS, FORM_WEIGHTS)
        yield form(t)


def instructions(split: str, n: int, seed: int = 0) -> Iterator[Instruction]:
    """n questions, the kinds of `KINDS` in turn; question i depends only on (seed, split, i)."""
    for i in range(n):
        yield ASK[KINDS[i % len(KINDS)]](_teller(split, seed, "instruction", i))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m data.world", description="Print samples of the built-in corpus.")
    parser.flag("--split", "train", "", choices=tuple(WORDS))
    parser.flag("--n", 5, "how many", 1)
    parser.flag("--seed", 0, "of the random choices")
    parser.flag("--instructions", False, "questions and answers instead of documents")
    args = parser.parse_args(arguments)
    if args.instructions:
        for example in instructions(args.split, args.n, args.seed):
            question = " | ".join(filter(None, (example.instruction, example.input)))
            print(f"[{example.kind}] {question} -> {example.output}")
    else:
        print("\n\n".join(documents(args.split, args.n, args.seed)))


if __name__ == "__main__":
    run_command(main)
