"""Time the tokenizer next to the compiled ones: Hugging Face's tokenizers and OpenAI's tiktoken.

    python bench/tokenizer.py                       on ../shared/data/gutenberg.zip
    python bench/tokenizer.py books/ --json r.json  on other files of Project Gutenberg, everything as one JSON object

The texts are those that data.gutenberg leaves of the files. All contenders train on all of them, and encode all of
them with the merges that ours learned; their ids must be equal. They take turns, those on one core after each text, so
that a change of the machine's speed affects all of them; the quickest of the rounds counts, which other work disturbs
least. Seconds of CPU, of all threads and processes, are printed too: on a busy machine they say more.

    training          ours on all cores and on one; tokenizers on all cores, as it always is
    encoding          tiktoken's encode_ordinary, one thread; ours in one process, from a fresh tokenizer that has seen
                      no piece yet, and again with the pieces in its memory; both return lists
    on all cores      ours: encode_many from a fresh tokenizer, which returns arrays; tokenizers: encode_batch
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

import numpy as np

from bench import harness
from tinyforge.data.gutenberg import clean, find_entries
from tinyforge.errors import UserError, run_command
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.huggingface import to_huggingface
from tinyforge.tokenizers.pieces import GPT2
from tinyforge.tokenizers.tiktoken import to_tiktoken
from tinyforge.train.metrics import peak_memory_mib

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


def clock_and_cpu() -> np.ndarray:
    """Seconds so far, and CPU seconds of all threads and of the workers that have ended."""
    return np.array([time.perf_counter(), sum(os.times()[:4])])


def timed(
    once: dict[str, Callable[[int], Any]], each: dict[str, Callable[[], Any]], texts: list[str], rounds: int
) -> Any:
    """Seconds of each contender in each round. once: do all their work in one turn. each: make a function of a text,
    and take turns after each text; a round is the sum of its texts."""
    found: dict[str, list[Any]] = {name: [] for name in (*once, *each)}
    how: dict[str, Any] = {"warm_up": 0, "between": lambda _: gc.collect(), "clock": clock_and_cpu}

    def of_text(encode: Callable[[str], Any], i: int) -> None:
        encode(texts[i])

    for _ in range(rounds):
        runs = {name: partial(of_text, make()) for name, make in each.items()}
        times = harness.take_turns(once, 1, **how)
        for name, seconds in (times | harness.take_turns(runs, len(texts), **how)).items():
            found[name].append(sum(seconds))
    results = {}
    for name, pairs in found.items():
        clock, cpu = np.array(pairs).T.tolist()
        results[name] = {"seconds": clock, "min_s": min(clock), "cpu_seconds": cpu, "cpu_s": min(cpu)}
    return results


def agreement(texts: list[str], tokenizer: Tokenizer, tiktoken: Any, huggingface: Any) -> tuple[dict[str, bool], int]:
    """Check that all ids are equal, and decode to the texts; what was checked, and the number of ids."""
    ids = [tokenizer.encode(text) for text in texts]
    parity = {
        "encode_many": [array.tolist() for array in tokenizer.encode_many(texts)] == ids,
        "tiktoken": [tiktoken.encode_ordinary(text) for text in texts] == ids,
        "tokenizers": [encoding.ids for encoding in huggingface.encode_batch(texts)] == ids,
        "decoded": [tokenizer.decode(encoded) for encoded in ids] == texts,
    }
    if not all(parity.values()):
        raise RuntimeError(f"parity: the ids are not equal, so nothing is timed: {parity}")
    return parity, sum(map(len, ids))


def measure(texts: list[str], vocab_size: int, rounds: int) -> dict[str, Any]:
    """Everything that is printed, as a JSON object."""
    before = harness.machine()
    tokenizer = Tokenizer.train(texts, vocab_size, progress=False)
    one = Tokenizer.train(texts, vocab_size, progress=False, workers=1)
    if one.hash() != tokenizer.hash():
        raise RuntimeError("parity: one worker learned other merges than all of them")
    size = sum(len(text.encode()) for text in texts)
    tiktoken, huggingface = tiktoken_encoding(tokenizer), huggingface_encoding(tokenizer)
    parity, tokens = agreement(texts, tokenizer, tiktoken, huggingface)

    def fresh() -> Tokenizer:
        return Tokenizer(tokenizer.merges, tokenizer.specials)

    train = partial(Tokenizer.train, texts, vocab_size, progress=False)
    once: dict[str, Callable[[int], Any]] = {
        TRAIN: lambda _: train(),
        TRAIN_ONE: lambda _: train(workers=1),
        TRAIN_HF: lambda _: huggingface_training(texts, len(tokenizer.merges)),
        MANY: lambda _: list(fresh().encode_many(texts)),
        BATCH_HF: lambda _: huggingface.encode_batch(texts),
    }
    each = {TIKTOKEN: lambda: tiktoken.encode_ordinary, ENCODE: lambda: fresh().encode, AGAIN: lambda: tokenizer.encode}
    times = timed(once, each, texts, rounds)
    for result in times.values():
        result["mb_per_second"] = size / result["min_s"] / 1e6
    best = {name: result["min_s"] for name, result in times.items()}
    ratios = {
        "training time: tinyforge / tokenizers": best[TRAIN] / best[TRAIN_HF],
        "encoding rate: tinyforge, 1 process / tiktoken": best[TIKTOKEN] / best[ENCODE],
        "encoding rate: tinyforge, 1 process / tokenizers, all cores": best[BATCH_HF] / best[ENCODE],
        "encoding rate: tinyforge, all cores / tiktoken": best[TIKTOKEN] / best[MANY],
    }
    versions = {name: version(name) for name in ("numpy", "tokenizers", "tiktoken")}
    found = {"device": before, "versions": versions | {"python": sys.version.split()[0]}, "texts": len(texts)}
    found |= {"bytes": size, "vocab_size": vocab_size, "tokens": tokens, "bytes_per_token": size / tokens}
    found |= {"rounds": rounds, "parity": parity, "results": times, "ratios": ratios}
    return found | {"peak_memory_mib_with_peers": peak_memory_mib()}


def table(found: dict[str, Any]) -> list[str]:
    """The same for reading."""
    device, title = found["device"], f"quickest of {found['rounds']}"
    return [
        f"{device['cpu']}, {device['cores']} cores, load average {device['load_average_before']:.2f} before",
        ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        f"{found['texts']} texts, {found['bytes']:,} bytes, {found['vocab_size']} ids, "
        f"{found['bytes_per_token']:.2f} bytes per token; all ids equal",
        "",
        *harness.rows("min_s=seconds:.2f | cpu_s=of CPU:.2f | mb_per_second=MB/s:.1f", found["results"], title),
        "",
        *(f"{name:<62} {ratio:>6.2f}" for name, ratio in found["ratios"].items()),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, "")
    files = "files of Project Gutenberg (default: ../shared/data/gutenberg.zip)"
    p.add_argument("paths", nargs="*", type=Path, default=[BOOKS], metavar="FILE_OR_FOLDER_OR_ZIP", help=files)
    p.number("--vocab-size", 4096, "ids of the vocabulary", 257, metavar="N")
    p.number("--rounds", 3, "turns of each contender", metavar="N")
    args = p.parse(argv)
    for peer in ("tokenizers", "tiktoken"):
        if importlib.util.find_spec(peer) is None:
            raise UserError(f"the peer {peer} is not installed; pip install {peer}")
    found = measure(read_texts(args.paths), args.vocab_size, args.rounds)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
