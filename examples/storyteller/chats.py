"""Chats about stories: instructions for the lines that follow a story, an offer or a greeting.

    python examples/storyteller/chats.py corpus --out chats           chats/alpaca.json, for recipes/sft.py
    python examples/storyteller/chats.py corpus --out chats --others dolly.json --records 20000
    python examples/storyteller/chats.py own.json --out own-chats     of stories from own_pairs.py --stories 1

Another story, with a wish or without; more of it; a longer or a shorter version; in two sentences; yes and no to the
model's own offers; greetings; poems, which it declines. Every story is one of the training split of a corpus that
data.corpus has made of TinyStories, under other names, and has what was asked for: who asks for a dragon gets a story
in which a dragon occurs three times or more. A quarter of the records are those of stories.py, so that nothing is
forgotten.

Rare heroes, trades and places take the place of frequent ones: a story about a man becomes one about a baker. What goes
on with a story is its own second half, or what happens to a hero of the same kind on another day.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from examples.storyteller import stories as told
from examples.storyteller.stories import ANIMALS, HEROES, Hero, hero_of, names_in, rename, with_article
from tinyforge.data.alpaca import Record
from tinyforge.errors import Parser, UserError, run_command

SAY = tomllib.loads(Path(__file__).with_name("chats.toml").read_text(encoding="utf-8"))
CLASSES, PLACES = SAY["classes"], [(f"{way} the {place}", place) for way, of in SAY["places"].items() for place in of]
SUBJECTS = tuple(dict.fromkeys([*HEROES, *(word for words in CLASSES.values() for word in words)]))
SOUNDS = re.compile(r"bark|meow|woof|quack|roar|moo|tweet|chirp|oink|wing|fl[ye]|flew|swim|swam|fur|tail|bone|nest|hop")
LONGEST, SHORTEST = 1200, 300  # characters of a story
STORY = 3  # times that a story names what it is about
_WORD = re.compile(r"[a-z]+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_LATER = re.compile(r"(?:^|(?<=[.!?]\s)|(?<=[.!?]\"\s))(?:One|Today|One sunny|Then one|Then, one)(?: day| morning)?, ")
LATER = ("The next day", "One day", "A few days later", "The next morning", "The week after")
DECLINED = ("poem", "song", "rhyme", "joke", "riddle", "letter", "haiku")


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[\w{}]+", text.lower()))


_HELD_OUT = {text if " " not in text else _plain(text) for texts in SAY["held_out"].values() for text in texts}


def say(name: str, rng: random.Random, **words: str) -> str:
    """A phrase of chats.toml with its alternatives chosen and its {words} replaced."""
    return _ALTERNATIVES.sub(lambda found: rng.choice(found[1].split("|")), rng.choice(SAY[name])).format(**words)


def ask(name: str, rng: random.Random, **words: str) -> str:
    """As `say`, for the user, who at times writes no capital or leaves out the full stop; never what is held out."""
    while True:
        text = say(name, rng, **words)
        text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
        text = text[0].lower() + text[1:] if rng.random() < 0.12 else text
        text = text.rstrip(".!") if rng.random() < 0.12 and len(text) > 6 else text
        if not {text, _plain(text), _plain(text).replace(words.get("x", "{x}").lower(), "{x}")} & _HELD_OUT:
            return text


def sentences_of(text: str) -> list[str]:
    return [part for part in _SENTENCE.split(text.strip()) if part]


def shortened(story: str, count: int) -> str:
    """The story in `count` sentences: the first, the last, and those between that can stand alone. "" if too short."""
    parts = [s for s in sentences_of(story) if '"' not in s and s[-1] in ".!?"]
    if len(parts) < count or sentences_of(story)[0] != parts[0]:
        return ""
    alone = [s for s in parts[1:-1] if not re.match(r"(?:She|He|It|They|This|That|Her|His|I|We|You|But)\b", s)]
    middle = alone if len(alone) >= count - 2 else parts[1:-1]
    if count == 2:
        return " ".join([parts[0], alone[0] if alone else parts[-1]])
    step = len(middle) / (count - 2)
    return " ".join([parts[0], *(middle[int(i * step)] for i in range(count - 2)), parts[-1]])


def swapped(story: str, word: str, other: str) -> str:
    """The story with a word, its plural and its capital replaced by another's."""

    def instead(found: re.Match[str]) -> str:
        article, ending = found[1] or "", found[3]
        if article.strip().lower() in ("a", "an"):
            article = ("A" if article[0] == "A" else "a") + ("n " if other[0] in "aeiou" else " ")
        return article + (other.capitalize() if found[2][0].isupper() else other) + ending

    return re.sub(rf"\b((?:[Aa]n?) )?({word}|{word.capitalize()})(s?)\b", instead, story)


@dataclass(frozen=True)
class Tale:
    """A story under other names, and what it can be asked for as."""

    text: str
    wish: str
    hero: Hero | None

    @property
    def name(self) -> str:
        """The hero's name, or the one that occurs most often; "" without any."""
        counts = Counter({name: self.text.count(name) for name in names_in(self.text)})
        return self.hero.name if self.hero else counts.most_common(1)[0][0] if counts else ""


class Library:
    """The stories by what they are about."""

    def __init__(self, stories: Sequence[str], rng: random.Random) -> None:
        self.rng = rng
        self.stories = [s for s in stories if SHORTEST < len(s) < LONGEST and s.rstrip()[-1:] in '.!?"']
        self.about: dict[str, list[str]] = defaultdict(list)
        self.placed: dict[str, list[str]] = defaultdict(list)
        self._quiet: dict[str, list[str]] = {}
        self.days: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by kind: a hero's name, what happens one day
        if not self.stories:
            raise UserError(f"the corpus has too few stories of {SHORTEST} to {LONGEST} characters; make a larger one")
        subjects, places = set(SUBJECTS), {place for _, place in PLACES}
        for story in self.stories:
            counts = Counter(_WORD.findall(story.lower()))
            for word in subjects & set(counts):
                if counts[word] >= STORY and re.search(rf"\b{word}\b", story[:400].lower()):
                    self.about[word].append(story)
            for word in places & set(counts):
                if counts[word] >= 2:
                    self.placed[word].append(story)
            hero, later = hero_of(story), _LATER.search(story)
            if hero and later and told.keeps_name(story, hero.name):
                rest = story[later.end() :]
                begun = sentences_of(rest)[0]
                if SHORTEST < len(rest) < 1000 and hero.name in begun and f"named {hero.name}" not in begun:
                    self.days[hero.kind].append((hero.name, rest))
        self.pairs = [
            (story, sorted(kinds)[:2])
            for story in self.stories
            if len(kinds := {k for k, n in Counter(_WORD.findall(story.lower())).items() if n >= STORY} & set(HEROES))
            > 1
        ]

    def renamed(self, story: str, unlike: str = "") -> str:
        """The story under names that the other does not have."""
        while True:
            found = rename(story, told.other_names(story, self.rng))
            if not set(names_in(found)) & set(names_in(unlike)):
                return found

    def subject(self) -> tuple[str, str]:
        """A word, and a story about it: one of its own, or of another word of its class in its place; "" if neither."""
        rng = self.rng
        word = rng.choice(SUBJECTS if rng.random() < 0.75 else CLASSES["trade"])
        own = self.about[word]
        if rng.random() < len(own) / 40:
            return word, rng.choice(own)
        groups = [ANIMALS, *(CLASSES["trade" if g == "person" else g] for g in CLASSES)]
        others = next((list(group) for group in groups if word in group), [])
        if word in CLASSES["trade"]:
            others += CLASSES["person"]
        if word in CLASSES["creature"]:
            others += ["bear", "lion", "giant"]
        others = [other for other in others if other != word and self.quiet(other)]
        if not others:
            return (word, rng.choice(own)) if own else ("", "")
        other = rng.choices(others, [len(self.quiet(other)) for other in others])[0]
        return word, swapped(rng.choice(self.quiet(other)), other, word)

    def quiet(self, word: str) -> list[str]:
        """The stories about a word in which it makes no sound and does nothing that another would not do."""
        if word not in self._quiet:
            self._quiet[word] = [story for story in self.about[word] if not SOUNDS.search(story)]
        return self._quiet[word]

    def tale(self, unlike: str = "", plain: bool = False, below: int = LONGEST) -> Tale:
        """A story with a wish that it fulfils. plain: the wish is a single word with its article."""
        rng = self.rng
        for attempt in range(1000):
            way, text, wish = rng.random(), "", ""
            if plain or way < 0.5:
                word, text = self.subject()
                wish = with_article(word) if word else ""
            elif way < 0.6 and self.pairs:
                text, kinds = rng.choice(self.pairs)
                a, b = rng.sample(kinds, 2)
                wish = say("two", rng, a=with_article(a), b=with_article(b))
            elif way < 0.7:
                text, wish = self.somewhere()
            else:
                text = rng.choice(self.stories)
            text = self.renamed(text, unlike)
            hero = hero_of(text)
            if text and not plain and (not wish or way < 0.25 and hero and wish == with_article(hero.kind)):
                wish = told._topic(text, hero, rng)
            asked = set(_WORD.findall(wish)) & set(SUBJECTS)  # a name such as Tiger is gone
            most = below if attempt < 100 else LONGEST  # a corpus may have no short ones
            if wish and SHORTEST < len(text) < most and asked <= set(_WORD.findall(text.lower())):
                return Tale(text, wish, hero)
        raise UserError("the corpus has too few stories about people and animals; make a larger one")

    def somewhere(self) -> tuple[str, str]:
        """A story, and a wish for its hero at its place; another place may stand for the park."""
        rng = self.rng
        way, place = rng.choice(PLACES)
        if rng.random() < len(self.placed[place]) / 20 or not self.placed["park"]:
            story = rng.choice(self.placed[place] or self.stories)
        else:
            story = swapped(rng.choice(self.placed["park"]), "park", place)
            story = re.sub(rf"\b(?:in|at) the {place}\b", way, story)
        if place not in story:
            return story, ""
        hero = hero_of(story)
        who = (
            with_article(hero.kind)
            if hero
            else next((with_article(k) for k in ("girl", "boy", "dog", "cat", "bird") if story.count(k) >= STORY), "")
        )
        return story, say("placed", rng, x=who, p=way) if who else ""

    def another_day(self, tale: Tale, below: int = 1000) -> str:
        """What happens to the hero of a story on another day: "" if no other hero is of its kind."""
        hero, rng = tale.hero, self.rng
        found = [(name, rest) for name, rest in self.days[hero.kind] if len(rest) < below] if hero else []
        if not hero or len(found) < 2:
            return ""
        name, rest = rng.choice(found)
        others = {n: o for n, o in told.other_names(rest, rng).items() if o != hero.name}
        rest = re.sub(rf"\b{name}\b", "\0", rest)
        rest = rename(rest, others).replace("\0", hero.name)
        return f"{rng.choice(LATER)}, {rest}"


# --- the lines of a chat ----------------------------------------------------------------------------------------------

Turns = list[tuple[str, str]]


class Chats:
    """Makes records, each of a chat whose last reply is to be learned."""

    def __init__(self, library: Library) -> None:
        self.library, self.rng = library, library.rng
        # What copies from the story before it is learned last, and more often refused here for want of sentences.
        self.ways: dict[Callable[[], Record | None], float] = {
            self.another: 14, self.another_about: 18, self.same_hero: 3, self.more: 24, self.longer: 18,
            self.shorter: 22, self.in_sentences: 20, self.poem: 8, self.accepted: 20, self.refused: 12, self.small: 12,
            self.first: 12,
        }  # fmt: skip

    def first_line(self, wish: str) -> str:
        """A request for a story, as the first line of a chat."""
        say = told.SAY
        return (
            self.rng.choice(say["tell"]).format(x=wish) if self.rng.random() < 0.8 else self.rng.choice(say["tell_any"])
        )

    def begun(self, below: int = 0) -> tuple[Turns, Tale]:
        """Turns that end with a story, and that story."""
        rng = self.rng
        tale = self.library.tale(below=below or rng.choice((600, 600, 900)))
        turns: Turns = [(self.first_line(tale.wish), tale.text)]
        way = rng.random()
        if way < 0.12:
            turns = [*self.talk()[0], *turns]
        elif way < 0.2:
            before = self.library.tale(tale.text, below=700)
            turns = [(self.first_line(before.wish), before.text), (ask("another_about", rng, x=tale.wish), tale.text)]
        elif way < 0.28:
            turns, tale = self.offer()
            turns = [*turns, (ask("yes", rng), tale.text)]
        return turns, tale

    def talk(self, wish: str = "") -> tuple[Turns, bool]:
        """A remark and a reply; and whether the reply offers a story about {x}, the wish."""
        rng = self.rng
        kinds = "hello greet", "how well", "foreign english", "poem no_poem", "hello greet_any", "cannot"
        kind = rng.choices(kinds, (1, 2, 1, 1, 1, 2))[0]
        words = {"x": wish or with_article(rng.choice(HEROES)), "w": rng.choice(DECLINED)}
        if kind == "cannot":
            a, b, c = rng.randint(0, 99), rng.randint(0, 99), rng.choice(told.COUNTRIES)
            asked = rng.choice(self.others or told.SAY["sums"]) if rng.random() < 0.7 else rng.choice(told.SAY["sums"])
            return [
                (asked.replace("{a}", str(a)).replace("{b}", str(b)).replace("{c}", c), say("cannot", rng, **words))
            ], True
        asked, reply = kind.split()
        return [(ask(asked, rng, **words), say(reply, rng, **words))], reply != "greet_any"

    others: Sequence[str] = ()

    def offer(self, wish: bool = True) -> tuple[Turns, Tale]:
        """Turns that end with an offer of a story, and the story that it offers."""
        rng = self.rng
        tale = self.library.tale(plain=True)
        if rng.random() < 0.25:
            before = self.library.tale(tale.text, below=900)
            reply = say("liked" if rng.random() < 0.7 else "liked_any", rng, x=tale.wish)
            return [(self.first_line(before.wish), before.text), (rng.choice(told.SAY["thanks"]), reply)], tale
        return self.talk(tale.wish)[0], tale

    def another(self) -> Record:
        turns, tale = self.begun()
        if self.rng.random() < 0.12:
            turns.append((self.rng.choice(told.SAY["thanks"]), say("liked_any", self.rng)))
        return Record(ask("another", self.rng), "", self.library.tale(tale.text).text, tuple(turns))

    def another_about(self) -> Record:
        turns, tale = self.begun()
        new, way = self.library.tale(tale.text, plain=self.rng.random() < 0.5), self.rng.random()
        asked = ask("another_about", self.rng, x=new.wish)
        if way < 0.2:
            asked = self.rng.choice(told.SAY["tell"]).format(x=new.wish)
        elif way < 0.3:
            story, wish = self.library.somewhere()
            if wish and (place := next((p for p, _ in PLACES if wish.endswith(p)), "")):
                return Record(
                    ask("set_in", self.rng, p=place), "", self.library.renamed(story, tale.text), tuple(turns)
                )
        return Record(asked, "", new.text, tuple(turns))

    def same_hero(self) -> Record | None:
        turns, tale = self.begun()
        text = self.library.another_day(tale)
        if not text or not tale.hero:
            return None
        text = f"Once upon a time, there was {tale.hero.full} named {tale.name}. One day, {text.partition(', ')[2]}"
        return Record(ask("same_hero", self.rng, n=tale.name, h=tale.hero.kind), "", text, tuple(turns))

    def more(self) -> Record | None:
        turns, tale = self.begun()
        rest = self.library.another_day(tale)
        if self.rng.random() < 0.4 or not rest:
            parts = [found.end() for found in re.finditer(r"[.!?]\"?\s", tale.text)]
            cuts = [cut for cut in parts if cut > 150 and len(tale.text) - cut > 220]
            if not cuts:
                return None
            cut = self.rng.choice(cuts)
            turns[-1] = (turns[-1][0], tale.text[:cut].strip())
            rest = tale.text[cut:].strip()
        name = tale.name if tale.name in turns[-1][1] else ""
        return Record(ask("more", self.rng, n=name or "the hero"), "", rest, tuple(turns))

    def longer(self) -> Record | None:
        rng = self.rng
        turns, tale = self.begun(950 if rng.random() < 0.8 else LONGEST)
        if len(tale.text) < 950:
            rest = self.library.another_day(tale, below=650)
            text = f"{tale.text}\n\n{rest}" if rest else ""
        else:
            text, short = tale.text, shortened(tale.text, rng.randint(4, 6))
            turns[-1] = (turns[-1][0], short)
        if not text or not turns[-1][1] or len(turns[-1][1]) > 0.75 * len(text):
            return None
        return Record(ask("longer", rng), "", text, tuple(turns))

    def shorter(self) -> Record | None:
        turns, tale = self.begun()
        short = shortened(tale.text, self.rng.randint(3, 5))
        fits = short and tale.name in short and len(short) < 0.6 * len(tale.text)
        return Record(ask("shorter", self.rng), "", short, tuple(turns)) if fits else None

    def in_sentences(self) -> Record | None:
        rng = self.rng
        count = rng.choice((2, 2, 2, 3, 4))
        number = {2: "two", 3: "three", 4: "four"}[count] if rng.random() < 0.8 else str(count)
        (turns, tale), again = self.begun(), rng.random() < 0.5
        if again:
            asked, text = ask("sentences_again", rng, k=number), tale.text
        else:
            tale = self.library.tale(plain=rng.random() < 0.7)
            asked, text = ask("sentences", rng, x=tale.wish, k=number), tale.text
            turns = turns if rng.random() < 0.3 else []
        short = shortened(text, count)
        wanted = {word for word in re.findall(r"\w+", tale.wish) if word in SUBJECTS or word == tale.name}
        kept = tale.name in short if again else all(word in short for word in wanted)
        fits = short and len(short) < 110 * count and kept
        return Record(asked, "", short, tuple(turns)) if fits else None

    def poem(self) -> Record:
        rng = self.rng
        turns = self.begun()[0] if rng.random() < 0.5 else []
        words = {"x": with_article(rng.choice(SUBJECTS)), "w": rng.choice(DECLINED)}
        return Record(ask("poem", rng, **words), "", say("no_poem", rng, **words), tuple(turns))

    def accepted(self) -> Record:
        rng = self.rng
        turns, tale = self.offer()
        if rng.random() < 0.2 or tale.wish not in turns[-1][1] and rng.random() < 0.5:
            return Record(ask("wish", rng, x=tale.wish), "", tale.text, tuple(turns))
        return Record(ask("yes", rng), "", tale.text, tuple(turns))

    def refused(self) -> Record:
        rng = self.rng
        turns, offered = self.offer()
        if rng.random() < 0.25:
            return Record(ask("no", rng), "", say("as_you_like", rng), tuple(turns))
        tale = self.library.tale(offered.text)
        if rng.random() < 0.15:
            turns = [*turns, (ask("no", rng), say("as_you_like", rng))]
            return Record(ask("wish", rng, x=tale.wish), "", tale.text, tuple(turns))
        asked = ask("no_about", rng, x=tale.wish) if rng.random() < 0.7 else self.first_line(tale.wish)
        return Record(asked, "", tale.text, tuple(turns))

    def small(self) -> Record:
        rng = self.rng
        turns = self.begun()[0] if rng.random() < 0.4 else []
        said, reply = self.talk()[0][0]
        if rng.random() < 0.4:
            said, reply = told._short(rng)
        return Record(said, "", reply, tuple(turns))

    def first(self) -> Record:
        rng, tale = self.rng, self.library.tale()
        return Record(rng.choice(told.SAY["tell"]).format(x=tale.wish), "", tale.text)


def chats(stories: Sequence[str], others: Sequence[str], count: int, seed: int) -> Iterator[Record]:
    """`count` records: three of four are chats, and the fourth one of stories.py."""
    rng = random.Random(seed)
    made = Chats(Library(stories, rng))
    made.others = others
    own = list(told.records(rng.sample(stories, min(len(stories), 1 + count // 8)), others, seed))
    rng.shuffle(own)
    ways, weights = list(made.ways), list(made.ways.values())
    while count:
        record = own.pop() if count % 4 == 0 and own else rng.choices(ways, weights)[0]()
        if record:
            count -= 1
            yield record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "corpus", type=Path, metavar="CORPUS", help="made of TinyStories by data.corpus; or records of own_pairs.py"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the result")
    parser.add_argument("--others", type=Path, metavar="FILE", help="Alpaca records whose questions it should decline")
    parser.add_argument("--records", type=int, default=30000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default 0)")
    args = parser.parse_args(arguments)
    if args.records < 1:
        raise UserError(f"--records is {args.records}, expected 1 or more")
    stories = [story.strip() for story in told.stories_of(args.corpus)]
    asked = told.questions_in(args.others)
    made = list(chats(stories, asked, args.records, args.seed))
    told.write(args.out, "chats", made, args.corpus, args.others)
    print(f"{len(made):,} records in {args.out / 'alpaca.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
