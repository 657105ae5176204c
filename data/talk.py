"""Small talk for a model of the built-in world, from a seeded generator: it greets, says who it is and what it can be
asked, and says so when it cannot.

    python -m data.talk --n 20                    # twenty training questions
    python -m data.talk --split val

`talk` yields what `data.world.instructions` leaves out: greetings, questions about the model, and requests that the
world has no answer to, all with the same few replies. No sum is declined: recipes/grpo.py teaches harder ones to a
model that tries them. Among the lines are the world's own questions as people type them, without capitals or a question
mark and with the scene on the same line, so that only what has no answer is declined. Every fifth wording and every
fifth word is held out: they occur in "val" only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinyforge.data.world import ASK, COLOURS, KINDS, Instruction, Teller
from tinyforge.errors import Parser, UserError, run_command

GREETED = "Hello! I am a small model. Ask me what I can do."
NAMED = "I am NanoEuler, a small language model."
ABLE = "Ask me: How much is 7 plus 2? Which is larger, 3 or 9? What sound does a cow make? What is the opposite of hot?"
WELL = "I am well. Ask me what I can do."
THANKED = "I am happy to help."
PARTED = "Come again!"
UNKNOWN = "I do not know that. Ask me what I can do."

# The wordings that get each reply, without capitals and punctuation, which vary (`typed`). {hi} is one of `OPENINGS`,
# {you} of `ADDRESSED`.
SAID = {
    GREETED: "{hi}|{hi} there|{hi} {you}|{hi}, {hi}|{hi} to you|{hi}, my {you}|a {hi} to you|{hi} again|oh, {hi}|"
    "well, {hi}|{hi}, dear {you}|{hi} {you}, good to see you|nice to meet you|{hi}, nice to meet you|can we talk|"
    "is anyone here|{hi}, can we talk|I want to talk to you|are you there|{hi}, are you there|let us talk|"
    "I came to say {hi}|just {hi}|I am here|{hi}, I am here|{hi}, it is me",
    NAMED: "who are you|what are you|what is your name|tell me who you are|tell me about you|are you a model|"
    "are you a human|are you a person|are you a robot|say who you are|introduce yourself|who is this|"
    "what model are you|do you have a name|tell me your name|who am I talking to|tell me about yourself|"
    "which model are you|your name|are you an ai|who made you|what should I call you|what kind of model are you|"
    "may I ask your name|who is there|say your name|are you a computer|are you real|who am I speaking to|"
    "what do they call you|are you nanoeuler|how are you called|what is your full name|I want to know who you are|"
    "can you tell me who you are|can you tell me your name|who do I talk to|please say who you are|are you a man|"
    "are you alive|what exactly are you|and who are you|what sort of thing are you|what were you made for|"
    "is this a person|is this a robot|am I talking to a human|am I talking to a model|give me your name",
    ABLE: "what can you do|what can I ask|help|what do you know|what can I ask you|help me|what are you able to do|"
    "what can you help me with|what should I ask|what may I ask you|tell me what you can do|"
    "what questions can I ask|what do you do|how can you help me|what can I do here|what is this|"
    "show me what you can do|can you help me|say what you can do|what could I ask you|give me an example|"
    "what else can you do|what are you good at|how do I use you|what now|which questions can you answer|"
    "what can you tell me|what things can you do|what should I ask you|what do you know about|I need help|"
    "how does this work|what can you answer|which questions do you know|tell me what I can ask|what can be asked|"
    "give me some examples|show me an example|what is there to ask|do you know anything|can you do anything|"
    "can you do something|what are your skills|how can I use you|tell me what you know|what do I do now|"
    "what would you like me to ask|which things do you know|what may I ask|ask me something|where do I start|"
    "what are you for|list what you can do|what do you understand|which questions may I ask",
    WELL: "how are you|how are you today|how do you do|how is it going|are you well|how is your day|how was your day|"
    "how do you feel|how are things|are you happy|how are you doing|how have you been|are you fine|is all well|"
    "how are you now|do you feel well|how is life|are you doing well|how is everything|are you all right|"
    "and how are you|tell me how you are|is everything well|how are you feeling|I hope you are well|and you",
    THANKED: "thank you|thanks|thank you very much|thanks a lot|many thanks|thank you so much|good|well done|great|"
    "that is right|very good|nice|good job|ok thanks|thank you {you}|thanks {you}|that was right|that is good|"
    "good answer|you are right|you are good|very nice|thank you for this|thanks for the help|wonderful|perfect|"
    "right|this is good|I thank you|that helped|that helps|ok, good|good work|nice work|great, thank you|"
    "well done, {you}|you are very good|correct|that is correct|yes, thank you",
    PARTED: "bye|goodbye|good night|see you|bye bye|see you later|good bye|see you soon|until tomorrow|I must go|"
    "farewell|bye {you}|goodbye {you}|good night {you}|I have to go|see you tomorrow|I am leaving|ok, bye|"
    "I am going now|until next time|time to go|thanks, bye|thank you and goodbye|have a good day|I will go now|"
    "so long|good night and thank you|I go home now|that is all, bye|bye for now|take care",
}
OPENINGS = "hello|hi|hey|good morning|greetings|good evening|good day|hi hi|good afternoon|yo|hey hey|hiya".split("|")
ADDRESSED = "model|nanoeuler|friend|robot|computer|small model|you|ai|little one|machine|buddy|my friend".split("|")
BEFORE = "so|please|ok|well|and|now".split("|")  # what people put before a question, and after it
AFTER = "please|then|now|today|again".split("|")
# Requests without an answer in this world; {x} is a word of `TOPICS`, {n} a name of `STRANGERS`.
ASKED = (
    "what is {x}|what is the capital of {n}|who is {n}|who wrote {n}|write a poem|write a poem about {x}|"
    "tell me a story|tell me a story about {x}|tell me a joke|tell me about {x}|how do I make {x}|how does {x} work|"
    "why is {x} so good|why do people like {x}|explain {x}|do you like {x}|what do you think of {x}|"
    "translate {x} into French|give me a recipe for {x}|when was {n} born|where does {n} live|how old is {n}|"
    "how old are you|what is the weather today|what time is it|where is {n}|where can I find {n}|where is {x}|"
    "what colour is {x}|who has {x}|what sound does {x} make|what is the best {x}|I like {x}|I am sad|my name is {n}|"
    "write code for {x}|what does {x} mean|how much does {x} cost|how many people live in {n}|what day is it today|"
    "can you sing|sing a song about {x}|who invented {x}|is {x} good for me|what happened in {n}|play {x} with me|"
    "what is the meaning of life|where do you live|can you write {x}|tell me something about {n}|buy {x}|"
    "how far is {n}|say something|who is the king of {n}|what is the largest {x}|how do you spell {x}|{x}|{n}|"
    "I do not understand|do you love {n}|give me {x}|where was {n} born|make a list of {x}|what should I eat|"
    "is {n} a good place|tell me more|another one|yes|no|why|write a letter to {n}|describe {x}|who won {x}|"
    "which {x} should I buy|"
    "what is the name of {x}|is it true that {x} is {y}|how is {x} made|what is {n}"
).split("|")
TOPICS = (
    "love|music|water|the moon|a computer|bread|football|the internet|physics|a phone|chess|money|soup|art|a car|"
    "the war|python|history|coffee|mathematics|gravity|a house|science|the ocean|a plane|rice|poetry|tennis|a doctor|"
    "energy|a dragon|a poem|language|paper|cheese|the law|a movie|painting|a robot|dance|electricity|sleep|a planet|"
    "the brain|a camera|wood|gold|sugar|religion|a letter|fire|a train|the earth|happiness|a bridge|fishing|"
    "the heart|tea|a whale|medicine|atoms|a dream|politics|pizza|a wolf|a ship|salt|iron|time|a virus|a dinosaur|"
    "glass|a city|friendship"
).split("|")
STRANGERS = (
    "France|Anna|London|Einstein|Mary|Germany|Tom|Paris|Peter|China|Shakespeare|Alice|Italy|Bob|America|Newton|Japan|"
    "Sarah|Africa|Mozart|India|Napoleon|John|Berlin|Emma|Spain|Darwin|Rome|Lucy|Brazil|Plato|David|Egypt|Hamlet|Kate|"
    "Canada|Max|Russia|Jack|Greece|Julia|Europe|Paul|Norway|Homer|Sam|New York|Galileo|Lisa|Kenya"
).split("|")
# The replies by kind of request, and the kinds' shares; the rest are the world's questions.
REPLIES = {
    "greeting": GREETED,
    "name": NAMED,
    "help": ABLE,
    "well": WELL,
    "thanks": THANKED,
    "parting": PARTED,
    "unknown": UNKNOWN,
}
SHARES = (5, 6, 8, 3, 3, 3, 37)
QUESTIONS = 35


def of_split(words: Sequence[str], split: str) -> list[str]:
    """The wordings, topics or names of a split: every fifth belongs to "val"."""
    return [word for i, word in enumerate(words) if (i % 5 == 4) == (split == "val")]


def typed(rng: random.Random, text: str) -> str:
    """The text as people type it: with a capital or without, with a mark at its end or without."""
    first = text[0].upper() if rng.random() < 0.6 else text[0].lower()
    text = first + text[1:]
    asks = text.lower().startswith(("wh", "how", "are ", "do ", "can ", "is "))
    return text if text.endswith("=") or rng.random() < 0.35 else text + ("?" if asks else rng.choice(".!"))


def request(rng: random.Random, kind: str, split: str) -> str:
    """One request of this kind, without capitals and punctuation."""

    def pick(words: Sequence[str]) -> str:
        return rng.choice(of_split(words, split))

    wording = pick(ASKED if kind == "unknown" else SAID[REPLIES[kind]].split("|"))
    words = {"x": TOPICS, "n": STRANGERS, "hi": OPENINGS, "you": ADDRESSED}
    line = wording.format(y=rng.choice(COLOURS), **{name: pick(choices) for name, choices in words.items()})
    if kind in ("name", "help", "well"):
        if (where := rng.random()) < 0.15:
            return f"{pick(OPENINGS)}{rng.choice((',', '.', '!', ''))} {line}"
        if where < 0.3:
            return f"{rng.choice(BEFORE)}{rng.choice((',', ''))} {line}"
        if where < 0.4:
            return f"{line} {rng.choice(AFTER)}"
    return line


def question(rng: random.Random, split: str, key: str) -> Instruction:
    """A question of the world: one about a scene on the scene's line, another as people type it."""
    asked = ASK[rng.choice(KINDS)](Teller(split, key))
    if asked.input.endswith("."):
        return replace(asked, instruction=f"{asked.input} {asked.instruction}", input="")
    line = asked.instruction.rstrip("?.= ")
    if line[0].isdigit():  # a sum in digits
        return replace(asked, instruction=line.replace(" ", rng.choice((" ", ""))) + rng.choice(("", "?")))
    return replace(asked, instruction=typed(rng, line))


def talk(split: str, n: int, seed: int = 0) -> Iterator[Instruction]:
    """n requests with their replies; request i depends only on (seed, split, i)."""
    if split not in ("train", "val"):
        raise ValueError(f'split is {split!r}; expected "train" or "val"')
    for i in range(n):
        key = f"{seed} {split} talk {i}"
        rng = random.Random(key)
        (kind,) = rng.choices((*REPLIES, ""), (*SHARES, QUESTIONS))
        if kind:
            yield Instruction(kind, typed(rng, request(rng, kind, split)), "", REPLIES[kind])
        else:
            yield question(rng, split, key)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m data.talk", description="Print samples of the small talk.")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="(default train)")
    parser.add_argument("--n", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default 0)")
    args = parser.parse_args(arguments)
    if args.n < 1:
        raise UserError(f"--n is {args.n}; expected 1 or more. Try --n 20")
    for example in talk(args.split, args.n, args.seed):
        asked = " | ".join(filter(None, (example.instruction, example.input)))
        print(f"[{example.kind}] {asked} -> {example.output}")


if __name__ == "__main__":
    run_command(main)
