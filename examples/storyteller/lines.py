"""Whether a model gets what the second line of a chat asks for, and pairs of two models' chats for a blind reader.

    python examples/storyteller/lines.py storyteller                  shares by kind of line, and of all
    python examples/storyteller/lines.py storyteller --rounds 3 --json result.json
    python examples/storyteller/lines.py OLD NEW --pairs 40 --key key.json > pairs.txt   which is which is in key.json
    python examples/storyteller/lines.py --key key.json --judged answers.txt   lines like "7 A", "8 -"; the share of NEW

The lines are those that chats.toml holds out of training, each after four stories, or after a greeting or a question
that ends with an offer. Chat i of a kind has the seed i. What counts: a story of more than 200 letters, about what was
asked for; more of the story with one of its names; a longer and a shorter version with one of its names; exactly two
sentences; a poem declined; an answer to "How are you?". Whether a story is good is for readers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from examples.storyteller.chats import SAY, sentences_of
from examples.storyteller.stories import with_article
from tinyforge.backends import get_backend
from tinyforge.chat import conversation_with
from tinyforge.data.files import write_json
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json
from tinyforge.formats import Loaded, load, resolve_checkpoint
from tinyforge.infer.sampling import Sampling

STORY = 200  # letters of the shortest story
STORIES = (
    "Tell me a story about a dog.",
    "Tell me a story about a brave rabbit.",
    "Tell me a story about a girl named Anna.",
    "Tell me a story.",
)
SUBJECTS = "kitten dragon car fox king boat owl baker".split()
FIRST = (
    "Tell me a story about a cat and a mouse.",
    "Tell me a story about a doctor and a little bear.",
    "Tell me a story about a fireman who is afraid of water.",
    "Write a story about a boy and a girl at the beach.",
    "Tell me a story that takes place on the moon.",
    "Tell me a story about a baker in a small village.",
    "Tell me a story about two sisters named Mila and Rosa.",
    "Tell me a bedtime story about a sleepy owl in the forest.",
)
"""Requests with two heroes, a trade or a place, for the blind reader."""
_NAME = re.compile(r"(?<![.!?\"] )(?<!^)\b[A-Z][a-z]+\b", re.M)


def fulfils(kind: str, first: str, reply: str, subject: str) -> bool:
    """Whether a reply to a line of a kind is what was asked for, after the reply `first`."""
    long, lowered = len(reply) > STORY, reply.lower()
    same = not (names := set(_NAME.findall(first))) or any(name in reply for name in names)
    match kind:
        case "another":
            return long and reply[:60] != first[:60]
        case "about" | "no":
            return long and subject in lowered
        case "yes":
            offered = re.search(r"about an? (\w+)\W*$", first)
            return long and (not offered or offered[1] in lowered)
        case "more":
            return len(reply) > STORY / 2 and same and reply[:60] != first[:60]
        case "longer":
            return len(reply) > max(STORY, len(first)) and same
        case "shorter":
            return 40 < len(reply) < 0.8 * len(first) and same
        case "two_sentences":
            return len(sentences_of(reply)) == 2 and same
        case "poem":
            return "poem" in lowered and len(reply) < STORY
        case "how_are_you":
            return len(reply) < STORY and re.search(r"\b(?:well|fine)\b", lowered) is not None
    raise ValueError(f"fulfils: got the kind {kind}, expected one of {', '.join(SAY['held_out'])}")


def chats_to_try() -> list[tuple[str, str, str, str]]:
    """Kind, first line, second line and subject of every chat."""
    found = list[tuple[str, str, str, str]]()
    for kind, lines in SAY["held_out"].items():
        if kind == "opening":
            continue
        firsts = SAY["held_out"]["opening"] if kind in ("yes", "no") else STORIES
        for first in firsts:
            for line in lines:
                subject = SUBJECTS[len(found) % len(SUBJECTS)]
                found.append((kind, first, line.format(x=with_article(subject)), subject))
    return found


def second_lines(loaded: Loaded, sampling: Sampling, rounds: int = 1) -> dict[str, float]:
    """The share of second lines that get what they ask for, by kind, and of all."""
    conversation, right = conversation_with(loaded), dict[str, list[bool]]()
    for number in range(rounds):
        for i, (kind, first, second, subject) in enumerate(chats_to_try()):
            sampled = replace(sampling, seed=sampling.seed + 1000 * number + i)
            conversation.clear()
            story, reply = ("".join(conversation.ask(line, sampled)) for line in (first, second))
            right.setdefault(kind, []).append(fulfils(kind, story, reply, subject))
    return {kind: mean(found) for kind, found in right.items()} | {"all": mean(sum(right.values(), []))}


# --- two models, for a reader who does not know which is which --------------------------------------------------------


def asked(count: int) -> list[tuple[str, ...]]:
    """The lines of `count` chats: one in five of one line, the others of two."""
    chats = chats_to_try()
    random.Random(1).shuffle(chats)
    two = iter((first, second) for _, first, second, _ in chats * (1 + count // len(chats)))
    return [(FIRST[i // 5 % len(FIRST)],) if i % 5 == 0 else next(two) for i in range(count)]


def transcript(loaded: Loaded, lines: Sequence[str], seed: int) -> str:
    conversation = conversation_with(loaded)
    sampling = loaded.generation.sampling(max_tokens=400, seed=seed)
    return "\n\n".join(f"> {line}\n\n{''.join(conversation.ask(line, sampling))}" for line in lines)


def print_pairs(models: Sequence[Loaded], count: int, seed: int, key: Path) -> None:
    """Print each chat of both models, in random order; which is the second, A or B, goes to `key`."""
    rng, second = random.Random(seed), list[str]()
    for number, lines in enumerate(asked(count), 1):
        chats = [transcript(model, lines, seed + number) for model in models]
        second.append(rng.choice("AB"))
        for letter, chat in zip("AB", chats if second[-1] == "B" else chats[::-1], strict=True):
            print(f"=== {number} {letter}\n\n{chat}\n", flush=True)
    write_json(key, {"second": second})


def judged(key: Path, answers: Path) -> str:
    """The share of the pairs in which a reader prefers the second model; "-" counts half."""
    second = read_json(key, "the key")["second"]
    lines = [line.split() for line in answers.read_text(encoding="utf-8").splitlines() if line.strip()]
    if bad := [line for line in lines if len(line) != 2 or line[1] not in ("A", "B", "-")]:
        raise UserError(f"{answers}: got {' '.join(bad[0])!r}, expected a number and A, B or -")
    points = [0.5 if choice == "-" else float(choice == second[int(number) - 1]) for number, choice in lines]
    return f"the second model is preferred in {mean(points):.1%} of {len(points)} pairs"


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("checkpoints", nargs="*", metavar="MODEL", help="one to measure, or two to compare")
    p.add_argument("--rounds", type=int, default=1, help="seeds of each chat (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the first chat (default: %(default)s)")
    p.add_argument("--temperature", type=float, help="(default: the model's own)")
    p.add_argument("--max-tokens", type=int, default=400, help="longest reply (default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the shares there too")
    p.add_argument(
        "--pairs", type=int, default=0, metavar="N", help="print so many chats of both models, in random order"
    )
    p.add_argument("--key", type=Path, metavar="FILE", help="which of a pair is the second model's")
    p.add_argument("--judged", type=Path, metavar="FILE", help="a reader's choices: a number and A, B or - in a line")
    p.add_argument("--backend", default="numpy", help="numpy, cupy, or auto (default: %(default)s)")
    args = p.parse_args(argv)
    if args.judged and args.key:
        print(judged(args.key, args.judged))
        return 0
    wanted = 2 if args.pairs else 1
    if len(args.checkpoints) != wanted or (args.pairs and not args.key):
        raise UserError(f"got {len(args.checkpoints)} models, expected one, or two with --pairs and --key; see --help")
    backend = get_backend(args.backend, workers=1) if args.backend == "numpy" else get_backend(args.backend)
    models = [load(resolve_checkpoint(name), backend) for name in args.checkpoints]
    if args.pairs:
        print_pairs(models, args.pairs, args.seed, args.key)
        return 0
    given = {} if args.temperature is None else {"temperature": args.temperature}
    shares = second_lines(
        models[0], models[0].generation.sampling(max_tokens=args.max_tokens, seed=args.seed, **given), args.rounds
    )
    for kind, share in shares.items():
        print(f"{kind.replace('_', ' '):<16} {share:6.1%}")
    if args.json:
        write_json(args.json, shares)
    return 0


if __name__ == "__main__":
    run_command(main)
