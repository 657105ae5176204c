"""Time the tokenizer next to the compiled ones: Hugging Face's tokenizers and OpenAI's tiktoken.

    python bench/tokenizer.py                       on ../shared/data/gutenberg.zip
    python bench/tokenizer.py books/ --json r.json  on other files of Project Gutenberg, everything as one JSON object

The texts are those that data.gutenberg leaves of the files. All contenders train on all of them, and encode all of
them with the merges that ours learned; their ids must be equal. They take turns, those on one core after each text, so
that a machine that gets slower or faster in between does so for all of them; the quickest of the rounds counts, which
other work disturbs least. Seconds of CPU, of all threads and processes, are given too: on a busy machine they say more.

    training          ours on all cores and on one; tokenizers on all cores, as it always is
    encoding          tiktoken's encode_ordinary, one thread; ours in one process, from a fresh tokenizer that has seen
                      no piece yet, and again with the pieces in its memory; both give lists
    on all cores      ours: encode_many from a fresh tokenizer, which gives arrays; tokenizers: encode_batch
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge.backends.workers import cores, cpu_model
from tinyforge.data.gutenberg import clean, find_entries
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.huggingface import to_huggingface
from tinyforge.tokenizers.pieces import GPT2
from tinyforge.tokenizers.tiktoken import to_tiktoken
from tinyforge.train.metrics import peak_memory_mib

Step = Callable[[], object]

BOOKS = Path(__file__).resolve().parents[2] / "shared" / "data" / "gutenberg.zip"
TRAIN, TRAIN_ONE, TRAIN_HF = "train, tinyforge", "train, tinyforge, 1 worker", "train, tokenizers"
TIKTOKEN, ENCODE, AGAIN = "encode, tiktoken", "encode, tinyforge", "encode, tinyforge, again"
MANY, BATCH_HF = "encode_many, tinyforge", "encode_batch, tokenizers"


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The bodies of all books there; a file that data.gutenberg refuses is left out."""
    books = [clean(entry.read()) for path in paths for entry in find_entries(path)]
    texts = [book.body for book in books if book.body]
    if not texts:
        raise UserError(f"{paths[0]}: no book there; name files of Project Gutenberg, a folder or a zip of them")
    return texts


def huggingface_training(texts: list[str], merges: int) -> None:
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models, pre_tokenizers, trainers

    theirs = Theirs(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(texts, trainer)
    assert theirs.get_vocab_size() == 256 + merges


def tiktoken_encoding(tokenizer: Tokenizer) -> Any:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks"
        path.write_text("".join(to_tiktoken(tokenizer)), encoding="ascii")
        return tiktoken.Encoding(
            "ours", pat_str=GPT2.published, mergeable_ranks=load_tiktoken_bpe(str(path)), special_tokens={}
        )


def huggingface_encoding(tokenizer: Tokenizer) -> Any:
    from tokenizers import Tokenizer as Theirs

    return Theirs.from_str(json.dumps(to_huggingface(tokenizer)))


def cpu_seconds() -> float:
    """CPU time so far, of all threads and of the workers that have ended."""
    return sum(os.times()[:4])


def timed(contenders: dict[str, Callable[[], Sequence[Step]]], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each contender in each round: the sum of its steps, in which the contenders take turns."""
    seconds = {name: [0.0] * rounds for name in contenders}
    cpu = {name: [0.0] * rounds for name in contenders}
    for index in range(rounds):
        steps = {name: steps_of() for name, steps_of in contenders.items()}
        for turn in range(max(map(len, steps.values()))):
            for name in contenders:
                if turn < len(steps[name]):
                    gc.collect()
                    before, start = cpu_seconds(), time.perf_counter()
                    steps[name][turn]()
                    seconds[name][index] += time.perf_counter() - start
                    cpu[name][index] += cpu_seconds() - before
    return {
        name: {"seconds": seconds[name], "min_s": min(seconds[name]), "cpu_seconds": cpu[name], "cpu_s": min(cpu[name])}
        for name in contenders
    }


def measure(texts: list[str], vocab_size: int, rounds: int) -> dict[str, Any]:
    """Everything that is printed, as a JSON object."""
    load_average = os.getloadavg()[0]
    tokenizer = Tokenizer.train(texts, vocab_size, progress=False)
    one = Tokenizer.train(texts, vocab_size, progress=False, workers=1)
    if one.hash() != tokenizer.hash():
        raise RuntimeError("parity: one worker learned other merges than all of them")

    size = sum(len(text.encode()) for text in texts)
    tiktoken, huggingface = tiktoken_encoding(tokenizer), huggingface_encoding(tokenizer)
    ids = [tokenizer.encode(text) for text in texts]
    many = [array.tolist() for array in tokenizer.encode_many(texts)]
    back = sum(tokenizer.decode(encoded) == text for encoded, text in zip(ids, texts, strict=True))
    parity = {
        "encode_many": many == ids,
        "tiktoken": [tiktoken.encode_ordinary(text) for text in texts] == ids,
        "tokenizers": [encoding.ids for encoding in huggingface.encode_batch(texts)] == ids,
        "decoded": back == len(texts),
    }
    if not all(parity.values()):
        raise RuntimeError(f"parity: the ids are not equal, so nothing is timed: {parity}")
    tokens = sum(map(len, ids))
    del ids, many

    def fresh() -> Tokenizer:
        return Tokenizer(tokenizer.merges, tokenizer.specials)

    def on_each(encode: Callable[[str], object]) -> list[Step]:
        return [partial(encode, text) for text in texts]

    train = partial(Tokenizer.train, texts, vocab_size, progress=False)
    times = timed(
        {
            TRAIN: lambda: [train],
            TRAIN_ONE: lambda: [partial(train, workers=1)],
            TRAIN_HF: lambda: [partial(huggingface_training, texts, len(tokenizer.merges))],
            MANY: lambda: [lambda: list(fresh().encode_many(texts))],
            BATCH_HF: lambda: [partial(huggingface.encode_batch, texts)],
            TIKTOKEN: lambda: on_each(tiktoken.encode_ordinary),
            ENCODE: lambda: on_each(fresh().encode),
            AGAIN: lambda: on_each(tokenizer.encode),
        },
        rounds,
    )
    for result in times.values():
        result["mb_per_second"] = size / result["min_s"] / 1e6
    best = {name: result["min_s"] for name, result in times.items()}
    return {
        "device": {"cpu": cpu_model(), "cores": cores(), "load_average_before": load_average},
        "versions": {name: version(name) for name in ("numpy", "tokenizers", "tiktoken")}
        | {"python": sys.version.split()[0]},
        "texts": len(texts),
        "bytes": size,
        "vocab_size": vocab_size,
        "tokens": tokens,
        "bytes_per_token": size / tokens,
        "rounds": rounds,
        "parity": parity,
        "results": times,
        "ratios": {
            "training time: tinyforge / tokenizers": best[TRAIN] / best[TRAIN_HF],
            "encoding rate: tinyforge, 1 process / tiktoken": best[TIKTOKEN] / best[ENCODE],
            "encoding rate: tinyforge, 1 process / tokenizers, all cores": best[BATCH_HF] / best[ENCODE],
            "encoding rate: tinyforge, all cores / tiktoken": best[TIKTOKEN] / best[MANY],
        },
        "peak_memory_mib_with_peers": peak_memory_mib(),
    }


def table(found: dict[str, Any]) -> str:
    """The same for reading."""
    device = found["device"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"{device['cpu']}, {device['cores']} cores, load average {device['load_average_before']:.2f} before",
        versions,
        f"{found['texts']} texts, {found['bytes']:,} bytes, {found['vocab_size']} ids, "
        f"{found['bytes_per_token']:.2f} bytes per token; all ids equal",
        "",
        f"{'quickest of ' + str(found['rounds']):<32} {'seconds':>9} {'of CPU':>9} {'MB/s':>8}",
    ]
    for name, result in found["results"].items():
        lines.append(f"{name:<32} {result['min_s']:>9.2f} {result['cpu_s']:>9.2f} {result['mb_per_second']:>8.1f}")
    lines += ["", *(f"{name:<62} {ratio:>6.2f}" for name, ratio in found["ratios"].items())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[BOOKS],
        metavar="FILE_OR_FOLDER_OR_ZIP",
        help="files of Project Gutenberg (default: ../shared/data/gutenberg.zip)",
    )
    p.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="default: 4096")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each contender (default: 3)")
    add_json_flag(p)
    args = p.parse_args(argv)
    check_before(args.json)
    for peer in ("tokenizers", "tiktoken"):
        if importlib.util.find_spec(peer) is None:
            raise UserError(f"the peer {peer} is not installed; pip install {peer}")
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: wanted 1 or more")
    found = measure(read_texts(args.paths), args.vocab_size, args.rounds)
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
