"""What a model that tells stories is worth: bits per byte of held-out stories, and what its own stories are like.

    python examples/storyteller/evaluate.py corpus  the model that comes with the repository
    python examples/storyteller/evaluate.py corpus corpus-retold stories/alpaca.json --peer stories260K.bin --json result.json
    python examples/storyteller/evaluate.py corpus --checkpoint runs/sft --show 20  and prints the first twenty stories

Bits per byte: each held-out story alone, from its first token on, without its end. A story that is longer than the
context is read in windows that overlap by half. The peer, llama2.c's stories260K, reads the same text.

Stories: one to each of `--prompts` requests, as the chat would answer it, request i with the seed `--seed` + i. It
is sampled as the flags say, else as the model's generation_config.json says, else by the chat's defaults.
`ended`: shares that end by themselves. `name kept`: of the requests that name a hero, the share whose story has that
name as often as any other known name, and again in its last half. `subject kept`: of the requests for a dog, a girl or
another such hero, the share whose story has that word. `eight-grams`: the share of the stories' runs of eight words
that stand in the training text, that of all corpora and records given; of the held-out stories, the same.
`who it is`: of twenty chats, those in which "Who are you?" after a story is answered with the model's own name.
`answers`: twelve stories typed by hand, each asked about at five seeds; the share of the replies that are short and
name what was asked for, with the question on the story's line, and with an empty line between.

Speed: the seconds from the command `python -m tinyforge.chat --prompt ...` to its first letter, and tokens a
second of a whole story; both on the CPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from examples.storyteller.grams import grams_of
from examples.storyteller.stories import NAMES, STORIES, keeps_name, with_article
from tinyforge.backends.workers import cpu_model
from tinyforge.chat import conversation_with
from tinyforge.data.alpaca import read_records
from tinyforge.data.shards import read_corpus, read_texts
from tinyforge.errors import UserError, run_command
from tinyforge.formats import Loaded, load, resolve_checkpoint
from tinyforge.infer.sampling import Sampling
from tinyforge.terminal import printable
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.vocabulary import start_ids

GRAM = 8
LN2 = np.log(2)
LONGEST = 500  # tokens of a story
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # flags: how it samples
KINDS = ("dog", "girl", "cat", "boy", "bear", "princess", "bird", "rabbit", "boy", "girl", "frog", "mouse", "lion")
OTHERS = ("Zelda", "Boris", "Quincy", "Marlo", "Petra", "Gus", "Wilma", "Otto", "Ingrid", "Basil")
"""Names that stories.py gives nobody."""
TYPED = [
    tuple(line.split(" | "))
    for line in """\
Once upon a time there was a girl named Lily. She had a red ball. One day she lost her ball in the park. Tom found it under a bench. | What did the girl in the story lose? | ball
Once upon a time, there was a little boy named Ben. He had a blue kite. One day, he lost his kite in the forest. He was sad. | What did Ben lose? | kite
There was a dog named Max. He wanted a big bone. He looked in the garden all day. Then a girl gave him one. | What did Max want? | bone
Anna went to the beach with her dad. She found a white shell in the sand. She took it home and put it on the table. | What did Anna find? | shell
A cat named Coco lived in a big house. One day she broke a green cup. Her friend Sam helped her to clean up. | What did Coco break? | cup
Once there was a bear named Boris. He liked honey. One morning he climbed a tall tree and saw a bee. | What did Boris see? | bee
Mia and her mom went to the shop. Mia bought a yellow hat. She wore it all day and was happy. | What did Mia buy? | hat
One day, Jack made a boat out of paper. He took it to the river. The boat went fast. Jack laughed. | Where did Jack take the boat? | river
Once upon a time there was a princess named Ida. Her grandma gave her a doll. Ida lost the doll in the snow. A fox found it. | Who found the doll? | fox
Tim was a little boy. He was afraid of the dark. His mom gave him a lamp. Now he sleeps well. | Who gave Tim a lamp? | mom
There once was a frog called Hop. He ate a big fly and was happy. Then he went to sleep. | What did the frog eat? | fly
Sue and Leo played in the park. Leo fell and began to cry. Sue gave him a hug. Then they went home. | Who fell? | Leo""".splitlines()
]
"""Stories that were typed by hand, a question about each, and the word that an answer has, with " | " between."""


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


@dataclass(frozen=True)
class Request:
    text: str
    name: str = ""

    @property
    def subjects(self) -> set[str]:
        """The kinds of hero that it asks for."""
        return set(KINDS) & words_of(self.text)


def requests(count: int) -> list[Request]:
    """The first ten are fixed; then heroes in turn, two of three with a name, at times one that it was not taught."""
    found = [
        Request("Tell me a story about a dog."),
        Request("Tell me a story about a dog named Max.", "Max"),
        Request("Tell me a story."),
        Request("Write a short story about a girl named Lily and a red ball.", "Lily"),
        Request("Tell me a story about two friends."),
        Request("Tell me a story about a boy who is afraid of the dark."),
        Request("Once upon a time, there was a little rabbit"),
        Request("Tell me a story about a princess named Ida.", "Ida"),
        Request("Tell me a bedtime story about the moon."),
        Request("Tell me a story about a robot named Otto.", "Otto"),
    ]
    for number in range(max(0, count - len(found))):
        kind = KINDS[number % len(KINDS)]
        taught = NAMES[{"princess": "girl"}.get(kind, kind if kind in NAMES else "animal")]
        name = OTHERS[number // 4 % len(OTHERS)] if number % 4 == 0 else taught[number % len(taught)]
        if number % 3 == 2:
            found.append(Request(f"Tell me a story about {with_article(kind)}."))
        else:
            found.append(Request(f"Tell me a story about {with_article(kind)} named {name}.", name))
    return found[:count]


# --- held-out text ----------------------------------------------------------------------------------------------------


def bits_per_byte(loaded: Loaded, stories: Sequence[str]) -> float:
    """Of the stories' text, each alone."""
    begin = beginning(loaded.tokenizer)
    texts = [story.strip() for story in stories]
    nats = sum(story_nats(loaded.model, [*begin, *loaded.tokenizer.encode(text)], len(begin)) for text in texts)
    return float(nats / LN2 / sum(len(text.encode()) for text in texts))


def beginning(tokenizer: TextTokenizer) -> list[int]:
    """What stood before a story in training: the start token of a published vocabulary, the document's end in ours."""
    return start_ids(tokenizer) or [tokenizer.specials["<|endoftext|>"]]


def story_nats(model: Any, ids: Sequence[int], known: int) -> float:
    """-ln p of ids[known:], each token after at least half a context of those before it, if there are so many."""
    context, total, scored = model.config.context, 0.0, known
    while scored < len(ids):
        start = 0 if scored == known and len(ids) <= context + 1 else max(0, scored - context // 2)
        window = np.asarray(ids[start : start + context + 1], np.int32)
        targets = np.full((1, len(window) - 1, model.prediction_heads), -1, np.int32)
        targets[0, scored - start - 1 :, 0] = window[scored - start :]
        nll = model.forward(model.backend.asarray(window[None, :-1]), model.backend.asarray(targets))
        total += float(model.backend.to_numpy(nll)[0, :, 0].astype(np.float64).sum())
        scored = start + len(window)
    return total


# --- its own stories --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    request: Request
    text: str
    ended: bool


def tell(loaded: Loaded, asked: Sequence[Request], sampling: Sampling) -> tuple[list[Told], float]:
    """The story to each request in a conversation of its own, and tokens a second over all."""
    conversation, told = conversation_with(loaded), []
    for number, request in enumerate(asked):
        conversation.clear()
        text = "".join(conversation.ask(request.text, replace(sampling, seed=sampling.seed + number)))
        tokens = conversation.turns[-1].tokens or ()
        told.append(Told(request, text, len(tokens) < sampling.max_tokens and not conversation.notice))
    return told, conversation.stats.tokens_per_second


def says_who_it_is(loaded: Loaded, sampling: Sampling, chats: int = 20) -> float:
    """Share of the chats in which it says its own name after a story: not the hero's, whom it was just asked about."""
    conversation, found = conversation_with(loaded), 0
    for number in range(chats):
        conversation.clear()
        for turn, text in enumerate(("Tell me a story about a dog.", "Who are you?")):
            reply = "".join(conversation.ask(text, replace(sampling, seed=sampling.seed + 2 * number + turn)))
        found += "I am Storyteller" in reply or "My name is Storyteller" in reply
    return found / chats


def answers(loaded: Loaded, between: str, sampling: Sampling, rounds: int = 5) -> float:
    """Share of short replies that name what is asked for, to the TYPED stories with their question after `between`."""
    conversation, found = conversation_with(loaded), 0
    for story, question, expected in TYPED:
        for number in range(rounds):
            conversation.clear()
            short = replace(sampling, max_tokens=40, seed=sampling.seed + number)
            reply = "".join(conversation.ask(f"{story}{between}{question}", short))
            found += expected in reply and len(reply) < 70  # a longer one goes on with the story
    return found / rounds / len(TYPED)


def known_shares(texts: Sequence[Sequence[str]], training: Iterable[str]) -> list[float]:
    """Of each list of texts the share of its runs of eight words that stand in the training text."""
    of_texts = [np.concatenate(list(grams_of(group, GRAM))) for group in texts]
    known = [np.zeros(len(grams), bool) for grams in of_texts]
    for grams in grams_of(training, GRAM):
        unique = np.unique(grams)
        for own, found in zip(of_texts, known, strict=True):
            found |= np.isin(own, unique)
    return [float(found.mean()) for found in known]


def training_text(corpora: Sequence[Path]) -> Iterator[str]:
    """Everything that the model has read: the training part of corpora, and the replies of files of records."""
    for path in corpora:
        if path.suffix == ".json":
            yield from (record.output for record in read_records([path]))
            continue
        for source in read_corpus(path).sources:
            yield from read_texts(source.files["train"])


# --- speed ------------------------------------------------------------------------------------------------------------


def first_letter_seconds(path: Path, prompt: str, rounds: int = 5) -> float:
    """From starting the chat's command to its first letter, the median."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        command = [sys.executable, "-m", "tinyforge.chat", "--checkpoint", str(path), "--prompt", prompt]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2]) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds.append(time.perf_counter() - start)
            process.stdout.read()
    return median(seconds)


# --- the command ------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Told]]:
    source = next((s for s in read_corpus(args.trained_on[0]).sources if s.name == STORIES), None)
    if source is None or not source.documents["val"]:
        raise UserError(f"{args.trained_on[0]}: holds no story out; make it with --val-share {STORIES}=0.04")
    held_out = list(read_texts(source.files["val"]))
    path = resolve_checkpoint(args.checkpoint, for_chat=True)
    backend = harness.backend_of(args, 1)
    loaded = load(path, backend)
    found: dict[str, Any] = {
        "model": loaded.meta["config"],
        "machine": cpu_model() if backend.name == "numpy" else backend.describe(),
        "held_out_stories": len(held_out),
        "held_out_bytes": sum(len(story.strip().encode()) for story in held_out),
        "bits_per_byte": bits_per_byte(loaded, held_out),
    }
    if args.peer:
        found["peer_bits_per_byte"] = bits_per_byte(load(args.peer, backend), held_out)
    if loaded.template.name == "plain":
        raise UserError(f"{path} is a base model, it takes no requests; fine-tune it with recipes/sft.py")
    given = {name: value for name in SAMPLED if (value := getattr(args, name)) is not None}
    sampling = loaded.generation.sampling(max_tokens=LONGEST, seed=args.seed, **given)
    told, rate = tell(loaded, requests(args.prompts), sampling)
    named = [story for story in told if story.request.name]
    asked = [story for story in told if story.request.subjects]
    shares = known_shares([[story.text for story in told], held_out], training_text(args.trained_on))
    found |= {
        "sampling": {name: getattr(sampling, name) for name in (*SAMPLED, "seed")},
        "stories": len(told),
        "ended": float(np.mean([story.ended for story in told])),
        "words_a_story": median(len(story.text.split()) for story in told),
        "named": len(named),
        "name_kept": float(np.mean([keeps_name(s.text, s.request.name) for s in named])),
        "with_subject": len(asked),
        "subject_kept": float(np.mean([not s.request.subjects.isdisjoint(words_of(s.text)) for s in asked])),
        "says_who_it_is": says_who_it_is(loaded, sampling),
        "answers_on_its_line": answers(loaded, " ", sampling),
        "answers_below": answers(loaded, "\n\n", sampling),
        "eight_grams_known": shares[0],
        "eight_grams_known_of_held_out_stories": shares[1],
        "tokens_per_second": rate,
    }
    if backend.name == "numpy":
        found["first_letter_seconds"] = first_letter_seconds(loaded.path, "Tell me a story about a dog.")
    return found, told


def table(found: dict[str, Any], told: Sequence[Told]) -> list[str]:
    peer, first = found.get("peer_bits_per_byte"), found.get("first_letter_seconds")
    below = f"below {found['answers_below']:.1%}; of {5 * len(TYPED)}"
    held_out = f"of held-out stories {found['eight_grams_known_of_held_out_stories']:.1%}"
    lines = {
        "machine": found["machine"],
        "held-out stories": f"{found['held_out_stories']:,}, {found['held_out_bytes']:,} bytes",
        "bits per byte": f"{found['bits_per_byte']:.4f}",
        "bits per byte of the peer": None if peer is None else f"{peer:.4f}",
        "stories told": f"{found['stories']:,}, of {found['words_a_story']:.0f} words (median)",
        "ended by themselves": f"{found['ended']:.1%}",
        "name kept": f"{found['name_kept']:.1%} of {found['named']}",
        "subject kept": f"{found['subject_kept']:.1%} of {found['with_subject']}",
        "says who it is, after a story": f"{found['says_who_it_is']:.0%} of 20 chats",
        "answers, asked on its line": f"{found['answers_on_its_line']:.1%}; {below}",
        "eight-grams of training text": f"{found['eight_grams_known']:.1%}; {held_out}",
        "tokens a second": f"{found['tokens_per_second']:,.0f}",
        "first letter of the chat": None if first is None else f"{first:.2f} s",
    }
    text = [f"{name:<30} {value}" for name, value in lines.items() if value is not None]
    for number, story in enumerate(told):
        text += ["", f"**{number + 1}. {story.request.text}**", "", printable(story.text)]
    return text


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, "")
    read = "what it has read: corpus folders, the first of which holds stories out, and .json files of records"
    p.add_argument("trained_on", nargs="+", type=Path, metavar="CORPUS", help=read)
    p.text("--checkpoint", metavar="DIR", help="default: the model that chat takes")
    p.text("--peer", type=Path, metavar="FILE", help="a model to read the same stories: stories260K.bin")
    p.number("--prompts", 200, "stories told", 2)
    for name in SAMPLED:
        kind = type(getattr(Sampling(), name))
        p.text(f"--{name.replace('_', '-')}", type=kind, help="(default: the chat's, for this model)")
    p.number("--show", 0, "print the first N stories", 0, metavar="N")
    p.number("--seed", 0, "of the first story", 0)
    p.shared("precision", backend={"default": "numpy", "help": "numpy, cupy, webgpu, or auto"})
    args = p.parse(argv)
    found, told = measure(args)
    return harness.publish(found, table(found, told[: args.show]), args)


if __name__ == "__main__":
    run_command(main)
