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

from tinyforge.data.world import ASK, COLOURS, KINDS, Instruction, Teller, read_wordings
from tinyforge.errors import Parser, run_command

WORDINGS = {name: sum(lines, ()) for name, lines in read_wordings("talk.txt").items()}
# The replies by kind of request, and the kinds' shares; the rest are the world's questions.
REPLIES = {
    "greeting": "Hello! I am a small model. Ask me what I can do.",
    "name": "I am NanoEuler, a small language model.",
    "help": "Ask me: How much is 7 plus 2? Which is larger, 3 or 9? What sound does a cow make? "
    "What is the opposite of hot?",
    "well": "I am well. Ask me what I can do.",
    "thanks": "I am happy to help.",
    "parting": "Come again!",
    "unknown": "I do not know that. Ask me what I can do.",
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

    def pick(name: str) -> str:
        return rng.choice(of_split(WORDINGS[name], split))

    wording, words = pick(kind), {"x": "topics", "n": "strangers", "hi": "openings", "you": "addressed"}
    line = wording.format(y=rng.choice(COLOURS), **{role: pick(name) for role, name in words.items()})
    if kind in ("name", "help", "well"):
        if (where := rng.random()) < 0.15:
            return f"{pick('openings')}{rng.choice((',', '.', '!', ''))} {line}"
        if where < 0.3:
            return f"{rng.choice(WORDINGS['before'])}{rng.choice((',', ''))} {line}"
        if where < 0.4:
            return f"{line} {rng.choice(WORDINGS['after'])}"
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
    parser.flag("--split", "train", "", choices=("train", "val"))
    parser.flag("--n", 20, "how many", 1)
    parser.flag("--seed", 0, "of the random choices")
    args = parser.parse_args(arguments)
    for example in talk(args.split, args.n, args.seed):
        asked = " | ".join(filter(None, (example.instruction, example.input)))
        print(f"[{example.kind}] {asked} -> {example.output}")


if __name__ == "__main__":
    run_command(main)
