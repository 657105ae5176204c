"""Every reader of the project, as the command that a user meets it by.

A reader names the files that may be wrong, what else the command needs, and the command. READERS is the whole list; a
new format gets a line here, and its good files in seeds.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.seeds import NOWHERE, mend_checkpoint, mend_list, mend_shards, mend_slice
from tinyforge import chat
from tinyforge.board import __main__ as board
from tinyforge.data import alpaca, corpus, fineweb_edu, gutenberg, local, shards, tinystories
from tinyforge.data import hub as data_hub
from tinyforge.data.download import Downloader, Patience
from tinyforge.formats import convert, load
from tinyforge.recipes import classify, evaluate, pretrain, sft
from tinyforge.tokenizers import command
from tinyforge.tokenizers.tiktoken import from_tiktoken

Main = Callable[[list[str]], Any]
QUICK = Patience(timeout=1.0, attempts=1, backoff=0.01, gap=0.0)
STEP = (
    "--steps 2 --batch-size 2 --workers 1 --backend numpy --out out --tokenizer tokenizers/ours.json --set "
    "vocab=300 dim=16 heads=2 kv_heads=1 layers=1 hidden=24 context=96 mtp_heads=1"
)


@dataclass(frozen=True)
class Reader:
    """target: the file to be changed, in the folder of seeds. needs: the files and folders that are copied next to it.
    words: the command's, with {} for the target. mend: makes hashes agree again. statuses: that it may end with. raw:
    it prints bytes as they are. draws: what is in the file gets into a picture; the other readers' are not drawn, since
    that takes ten times as long as the reading."""

    name: str
    target: str
    main: Main
    words: str
    needs: tuple[str, ...] = ()
    mend: Callable[[Path], None] | None = None
    statuses: tuple[int, ...] = (0, 2)
    raw: bool = False
    draws: bool = False

    def arguments(self) -> list[str]:
        return [word.replace("{}", self.target) for word in self.words.split()]


def _conversation(arguments: list[str]) -> None:
    """/load of the chat."""
    loaded = load(Path("sft"), chat.get_backend("numpy", "fp32", workers=1))
    repl = chat.Repl(loaded, chat.Sampling(max_tokens=2))
    repl.obey(f"/load {arguments[0]}")
    repl.obey("/save again.json")
    repl.obey("/show")


def _record(arguments: list[str]) -> None:
    """A file that an earlier run has downloaded; what does not match is asked for again, where nobody answers."""
    Downloader(QUICK).fetch(f"{NOWHERE}/a.txt", Path(arguments[0]))


def _listing(arguments: list[str]) -> None:
    """A list of files as a host sends it, already downloaded: its record is made to match."""
    from tinyforge.files import sha256_of

    raw, url = Path(arguments[0]), f"{NOWHERE}/api/datasets/a/b/tree/main/data"
    path = raw / "files.json"
    record = f'{{"url": "{url}", "bytes": {path.stat().st_size}, "sha256": "{sha256_of(path)}"}}'
    (raw / "files.json.json").write_text(record, encoding="utf-8")
    data_hub.list_files(Downloader(QUICK), NOWHERE, "a/b", "data", raw)


def _slice(arguments: list[str]) -> None:
    """A slice of FineWeb-Edu that an earlier run has taken; what does not match is asked for again."""
    where = {"files": ["sample/10BT/a.parquet"], "base_url": NOWHERE}
    source = fineweb_edu.make_source(Path(arguments[0]), rows=20, patience=QUICK, **where)
    corpus.main([str(source.folder), "--out", "out", "--workers", "1"])


def _tiktoken(arguments: list[str]) -> None:
    from_tiktoken(arguments[0], ["<|endoftext|>"]).encode("It was the best of times.")


def _mend(function: Callable[..., None], *where: str) -> Callable[[Path], None]:
    return lambda case: function(case / where[0], *where[1:])


def _tokenizer(name: str, file: str) -> Reader:
    return Reader(
        name,
        f"tokenizers/{file}",
        command.main,
        "encode inputs/text.txt --workers 1 --tokenizer {}",
        ("inputs/text.txt",),
    )


def _checkpoint(name: str, target: str, main: Main, words: str, *needs: str) -> Reader:
    run = target.partition("/")[0]
    return Reader(name, target, main, words, (run, *needs), _mend(mend_checkpoint, run))


def _corpus(name: str, target: str, main: Main, words: str, needs: tuple[str, ...], *mend: str) -> Reader:
    return Reader(name, target, main, words, needs, _mend(mend_list, *mend) if mend else None)


def _classes(name: str, target: str, images: str = "") -> Reader:
    """What recipes/classify.py learns from; images: the folder or the file that it is given."""
    shape = "dim=16 heads=2 layers=1 hidden=24"
    words = (
        f"--model vit --set {shape} image=8 patch=4"
        if images
        else f"--model bert --set {shape} context=64 --tokenizer tokenizers/words.json"
    )
    return Reader(
        name,
        f"labelled/{target}",
        classify.main,
        f"{words} --data labelled/{images or target} --steps 1 --batch-size 2 --workers 1 --backend numpy --out out",
        (f"labelled/{images}",) if images else ("tokenizers/words.json",),
    )


_CHAT = "--checkpoint {run} --prompt Hello --max-tokens 3"
_CONVERT = "{} out --format tinyforge"
_RESUME = "--resume --out run --keep 0"
_RUN = ("inputs/text.txt", "tokenizers/ours.json")

READERS = [
    # tokenizers, ids, text
    _tokenizer("tokenizer of ours", "ours.json"),
    _tokenizer("tokenizer of characters", "chars.json"),
    _tokenizer("tokenizer of pieces", "pieces.json"),
    _tokenizer("tokenizer, imported", "imported.json"),
    _tokenizer("tokenizer of words", "words.json"),
    _tokenizer("tokenizer.json, words", "huggingface-words.json"),
    _tokenizer("vocab.txt", "vocab.txt"),
    _tokenizer("tokenizer.json", "huggingface.json"),
    _tokenizer("tokenizer.json, other ids", "huggingface-imported.json"),
    _tokenizer("tokenizer.json, pieces", "huggingface-pieces.json"),
    _tokenizer("tokenizer.model", "tokenizer.model"),
    _tokenizer("tokenizer.bin", "tokenizer.bin"),
    Reader("tiktoken", "tokenizers/ranks.tiktoken", _tiktoken, "{}"),
    Reader(
        "ids, .npy",
        "inputs/ids.npy",
        command.main,
        "decode {} --tokenizer tokenizers/ours.json",
        ("tokenizers/ours.json",),
        raw=True,
    ),
    Reader(
        "ids, decimal",
        "inputs/ids.txt",
        command.main,
        "decode {} --tokenizer tokenizers/ours.json",
        ("tokenizers/ours.json",),
        raw=True,
    ),
    Reader(
        "text to learn a tokenizer",
        "inputs/text.txt",
        command.main,
        "train {} --vocab-size 280 --out out.json --workers 1",
    ),
    Reader(
        "text to encode",
        "inputs/text.txt",
        command.main,
        "encode {} --workers 1 --tokenizer tokenizers/tokenizer.bin",
        ("tokenizers/tokenizer.bin",),
    ),
    # runs
    _checkpoint("checkpoint, meta.json", "run/step-00000002/meta.json", chat.main, _CHAT.format(run="run")),
    _checkpoint("checkpoint, weights", "sft/step-00000002/model.safetensors", chat.main, _CHAT.format(run="sft")),
    _checkpoint("checkpoint, tokenizer", "sft/step-00000002/tokenizer.json", chat.main, _CHAT.format(run="sft")),
    Reader("checkpoint, hashes.json", "run/step-00000002/hashes.json", chat.main, _CHAT.format(run="run"), ("run",)),
    _checkpoint("checkpoint, what was saved", "run/step-00000002/meta.json", pretrain.main, f"{_RESUME} --plan", *_RUN),
    _checkpoint("checkpoint, optimizer", "run/step-00000002/optimizer.safetensors", pretrain.main, _RESUME, *_RUN),
    _checkpoint(
        "checkpoint to fine-tune",
        "run/step-00000002/meta.json",
        sft.main,
        "--base run --data inputs/alpaca.json --steps 1 --batch-size 2 --workers 1 --backend numpy --out out",
        "inputs/alpaca.json",
    ),
    _checkpoint("checkpoint to convert", "sft/step-00000002/meta.json", convert.main, "sft out"),
    Reader("metrics.jsonl", "run/metrics.jsonl", pretrain.main, _RESUME, ("run", *_RUN), draws=True),
    Reader("scores.json", "run/scores.json", pretrain.main, f"{_RESUME} --card", ("run", *_RUN)),
    Reader("board, metrics.jsonl", "run/metrics.jsonl", board.main, "run --export report.html", ("run",)),
    Reader("board, samples.jsonl", "run/samples.jsonl", board.main, "run --export report.html", ("run",)),
    Reader("board, run.json", "run/run.json", board.main, "run --export report.html", ("run",)),
    Reader("conversation", "inputs/talk.json", _conversation, "{}", ("sft",)),
    # what training is given
    Reader("config, NanoEuler", "inputs/nanoeuler.json", pretrain.main, "--config {} --batch-size 1 --plan"),
    Reader("config, GPT-2", "inputs/gpt2.json", pretrain.main, "--model gpt2 --config {} --batch-size 1 --plan"),
    Reader("config, Llama", "inputs/llama.json", pretrain.main, "--model llama --config {} --batch-size 1 --plan"),
    Reader("text to train on", "inputs/text.txt", pretrain.main, f"--data {{}} {STEP}", ("tokenizers/ours.json",)),
    Reader(
        "parquet to train on", "inputs/table.parquet", pretrain.main, f"--data {{}} {STEP}", ("tokenizers/ours.json",)
    ),
    Reader(
        "records to train on",
        "inputs/alpaca.json",
        sft.main,
        "--base run --data {} --steps 1 --batch-size 2 --workers 1 --backend numpy --out out",
        ("run",),
    ),
    Reader(
        "records to ask",
        "inputs/alpaca.jsonl",
        evaluate.main,
        "--checkpoint sft --data inputs/text.txt --instructions {} --sentences 2 --prompts 1 --seeds 0 "
        "--max-tokens 2 --backend numpy",
        ("sft", "inputs/text.txt"),
    ),
    _classes("labelled, lines", "texts.jsonl"),
    _classes("labelled, packed lines", "texts.jsonl.gz"),
    _classes("labelled, CSV", "texts.csv"),
    _classes("labelled, parquet", "texts.parquet"),
    _classes("images, parquet", "images.parquet", "images.parquet"),
    _classes("images, PNG", "folders/class0/0.png", "folders"),
    _classes("images, idx", "mnist/train-images-idx3-ubyte.gz", "mnist"),
    _classes("images, labels", "mnist/train-labels-idx1-ubyte", "mnist"),
    # sources
    Reader("records, JSON", "inputs/alpaca.json", alpaca.main, "{} --out out"),
    Reader("records, lines", "inputs/alpaca.jsonl", alpaca.main, "{} --out out"),
    Reader("records, zip", "inputs/alpaca.zip", alpaca.main, "{} --out out"),
    Reader("local, text", "inputs/text.txt", local.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("local, lines", "inputs/lines.jsonl", local.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("local, JSON", "inputs/items.json", local.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("local, parquet", "inputs/table.parquet", local.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("local, zip", "inputs/texts.zip", local.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("stories, text", "inputs/stories.txt", tinystories.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("stories, parquet", "inputs/table.parquet", tinystories.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("books, text", "inputs/book.txt", gutenberg.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("books, zip", "inputs/books.zip", gutenberg.main, "{} --out out", statuses=(0, 1, 2)),
    Reader("download, record", "inputs/raw/a.txt.json", _record, "inputs/raw/a.txt", ("inputs/raw",)),
    Reader("download, listing", "inputs/raw/files.json", _listing, "inputs/raw", ("inputs/raw",)),
    Reader(
        "slice, record",
        "fineweb/raw/slice-00000.json",
        _slice,
        "fineweb",
        ("fineweb",),
        _mend(mend_slice, "fineweb/raw"),
    ),
    Reader(
        "slice, parquet",
        "fineweb/raw/slice-00000.parquet",
        _slice,
        "fineweb",
        ("fineweb",),
        _mend(mend_slice, "fineweb/raw"),
    ),
    # corpora and shards
    _corpus("source.json", "source/source.json", corpus.main, "source --out out --workers 1", ("source",)),
    _corpus(
        "source, parquet",
        "source/documents-00000.parquet",
        corpus.main,
        "source --out out --workers 1",
        ("source",),
        "source/source.json",
        "parquet",
    ),
    Reader(
        "source of instructions",
        "instructions/source.json",
        sft.main,
        "--base run --data instructions/alpaca.json --steps 1 --batch-size 2 --workers 1 --backend numpy --out out",
        ("run", "instructions"),
    ),
    Reader("filters", "inputs/filters.sql", corpus.main, "source --out out --workers 1 --filters {}", ("source",)),
    Reader("corpus, catalogue", "corpus/corpus.duckdb", corpus.main, "report corpus", ("corpus",), draws=True),
    Reader(
        "corpus, there already",
        "corpus/corpus.json",
        corpus.main,
        "source --out corpus --workers 1 --val-share 0.3",
        ("corpus", "source"),
    ),
    _corpus(
        "corpus.json",
        "corpus/corpus.json",
        shards.main,
        "--corpus corpus --out out --workers 1 --vocab-size 280",
        ("corpus",),
    ),
    _corpus(
        "corpus, parquet",
        "corpus/train/mine-00000.parquet",
        shards.main,
        "--corpus corpus --out out --workers 1 --vocab-size 280",
        ("corpus",),
        "corpus/corpus.json",
        "files",
    ),
    Reader(
        "shards, manifest",
        "shards/manifest.json",
        pretrain.main,
        f"--data shards {STEP}",
        ("shards", "tokenizers/ours.json"),
    ),
    Reader(
        "shards, ids",
        "shards/mine-train-00000.bin",
        pretrain.main,
        f"--data shards {STEP}",
        ("shards", "tokenizers/ours.json"),
        _mend(mend_shards, "shards/manifest.json"),
    ),
    Reader(
        "shards, there already",
        "shards/manifest.json",
        shards.main,
        "--corpus corpus --out shards --tokenizer tokenizers/ours.json --workers 1",
        ("corpus", "shards", "tokenizers/ours.json"),
    ),
    # models of others
    Reader("Llama, config.json", "llama/config.json", convert.main, _CONVERT.format("llama"), ("llama",)),
    Reader(
        "Llama, generation_config.json",
        "llama/generation_config.json",
        chat.main,
        _CHAT.format(run="llama"),
        ("llama",),
    ),
    Reader("Llama, safetensors", "llama/model.safetensors", convert.main, _CONVERT.format("llama"), ("llama",)),
    Reader("Llama, tokenizer", "llama/tokenizer.json", convert.main, _CONVERT.format("llama"), ("llama",)),
    Reader(
        "Llama, tokenizer's config", "llama/tokenizer_config.json", convert.main, _CONVERT.format("llama"), ("llama",)
    ),
    Reader(
        "Llama, index of shards",
        "sharded/model.safetensors.index.json",
        convert.main,
        _CONVERT.format("sharded"),
        ("sharded",),
    ),
    Reader("chat template", "sharded/chat_template.jinja", convert.main, _CONVERT.format("sharded"), ("sharded",)),
    Reader("GPT-2, config.json", "gpt2/config.json", convert.main, "gpt2 out --format tinyforge", ("gpt2",)),
    Reader("GPT-2, vocab.json", "gpt2/vocab.json", convert.main, "gpt2 out --format tinyforge", ("gpt2",)),
    Reader("GPT-2, merges.txt", "gpt2/merges.txt", convert.main, "gpt2 out --format tinyforge", ("gpt2",)),
    Reader("mixture of experts, config.json", "moe/config.json", convert.main, _CONVERT.format("moe"), ("moe",)),
    Reader("mixture of experts, safetensors", "moe/model.safetensors", convert.main, _CONVERT.format("moe"), ("moe",)),
    Reader("adapter, config", "peft/adapter_config.json", convert.main, _CONVERT.format("peft"), ("peft", "merged")),
    Reader(
        "adapter, weights", "peft/adapter_model.safetensors", convert.main, _CONVERT.format("peft"), ("peft", "merged")
    ),
    _checkpoint(
        "adapters of ours, meta.json", "lora/step-00000001/meta.json", convert.main, _CONVERT.format("lora"), "sft"
    ),
    _checkpoint(
        "adapters of ours, weights", "lora/step-00000001/model.safetensors", chat.main, _CHAT.format(run="lora"), "sft"
    ),
    Reader("llama2.c, model.bin", "llama2c/model.bin", convert.main, "{} out --format tinyforge", ("llama2c",)),
]
if importlib.util.find_spec("gguf"):  # an extra
    READERS.append(Reader("GGUF, model.gguf", "gguf/model.gguf", convert.main, "{} out --format tinyforge", ("gguf",)))
