"""Good files of every format that the project reads, small, and the same on every machine.

make_seeds(Path("seeds"))
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imsave

from tinyforge import checkpoint
from tinyforge.adapters import Adapters
from tinyforge.backends import get_backend
from tinyforge.data import alpaca, corpus, fineweb_edu, gutenberg, local, shards, tinystories
from tinyforge.data.hub import file_url
from tinyforge.data.local import read_rows
from tinyforge.data.source import Document, SourceWriter, write_documents
from tinyforge.data.world import documents
from tinyforge.formats import convert, lora, open_model, save_pretrained
from tinyforge.infer.conversation import FORMAT as CONVERSATION
from tinyforge.params import named
from tinyforge.recipes import pretrain
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.tokenizers import CharTokenizer, SentencePiece, Tokenizer, WordPiece
from tinyforge.tokenizers.huggingface import from_huggingface, to_huggingface
from tinyforge.tokenizers.sentencepiece import BYTES, SPACE, write_llama2c
from tinyforge.tokenizers.tiktoken import to_tiktoken
from tinyforge.train.settings import PretrainSettings

NOWHERE = "http://127.0.0.1:9"  # a host that does not answer
SPECIALS = ("<|endoftext|>", "</s>")
TINY = "dim=16 heads=2 kv_heads=1 layers=1 hidden=24 context=96 mtp_heads=1".split()
# What a run writes about its time and its machine: the same everywhere here.
FIXED = {"elapsed": 1.0, "tokens_per_second": 1000, "machine": "a machine"}
METRICS = [
    {
        "step": step,
        "tokens": 64 * step,
        "loss": 5.5 - step / 10,
        "bits_per_byte": 3.25,
        "lr": 0.004,
        "grad_norm": 1.5,
        "tokens_per_second": 1000,
        "seconds": 0.25 * step,
    }
    for step in (1, 2)
]
METRICS.insert(1, {"step": 1, "tokens": 64, "seconds": 0.25, "val_bits_per_byte": 3.5})
RECORDS = [{"instruction": f"Add {a}.", "input": "and 2" * (a % 2), "output": f"It is {a + 2}."} for a in range(12)]

BOOK = """The Project Gutenberg EBook of A Small Tale, by Nobody

Title: A Small Tale
Author: Nobody
Release Date: January 1, 2001 [EBook #{number}]
Language: English

*** START OF THIS PROJECT GUTENBERG EBOOK A SMALL TALE ***

CHAPTER I

{text}

*** END OF THIS PROJECT GUTENBERG EBOOK A SMALL TALE ***
"""


def make_seeds(folder: Path) -> None:
    """Fill a folder that is empty. Nothing is printed."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        texts = list(documents("train", 60))
        tokenizer = Tokenizer.train(texts, 300, SPECIALS, progress=False, workers=1)
        _tokenizers(folder / "tokenizers", tokenizer, texts)
        _inputs(folder / "inputs", tokenizer, texts)
        _runs(folder, tokenizer)
        _foreign(folder, tokenizer)
        _adapters(folder, tokenizer)
        _labelled(folder / "labelled", texts)
        _fineweb(folder / "fineweb", texts)
        _corpora(folder, tokenizer)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- tokenizers -------------------------------------------------------------------------------------------------------


def sentencepiece() -> SentencePiece:
    """A small vocabulary with scores, as Llama 2's."""
    after_space = [SPACE + word for word in ("", "t", "a", "th", "the", "and")]
    words = [*"etaohnsd", "th", "he", "an", "the", "and", *after_space]
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *words]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)]
    return SentencePiece(pieces, {"<unk>": 0, "<s>": 1, "</s>": 2}, 1, scores)


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _field(number: int, value: int | bytes | float) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def sentencepiece_model(tokenizer: SentencePiece) -> bytes:
    """SentencePiece's own file: pieces with score and type, trainer (BPE), normalizer (spaces stay)."""
    assert tokenizer.scores is not None
    parts = []
    for id, (piece, score) in enumerate(zip(tokenizer.pieces, tokenizer.scores, strict=True)):
        kind = 2 if id == 0 else 3 if id < 3 else 6 if id < 259 else 1
        parts.append(_field(1, _field(1, piece.encode()) + _field(2, score) + _field(3, kind)))
    return b"".join([*parts, _field(2, _field(3, 2) + _field(41, 1)), _field(3, _field(3, 1) + _field(4, 0))])


def _tokenizers(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    folder.mkdir(parents=True)
    pieces = sentencepiece()
    tokenizer.save(folder / "ours.json")
    words = WordPiece.train(texts, 200)
    words.save(folder / "words.json")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in words.tokens), encoding="utf-8")
    _write_json(folder / "huggingface-words.json", to_huggingface(words))
    CharTokenizer.of(texts, SPECIALS).save(folder / "chars.json")
    pieces.save(folder / "pieces.json")
    _write_json(folder / "huggingface.json", to_huggingface(tokenizer, recognise_specials=True))
    _write_json(folder / "huggingface-pieces.json", to_huggingface(pieces))
    # With Llama 3's pattern it is none of ours, and is kept as it is.
    content = json.loads((folder / "huggingface.json").read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {word: id ^ 1 if id < 256 else id for word, id in words.items()}
    _write_json(folder / "huggingface-imported.json", content)
    from_huggingface(folder / "huggingface-imported.json").save(folder / "imported.json")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(pieces))
    write_llama2c(pieces, folder / "tokenizer.bin")
    (folder / "ranks.tiktoken").write_text("".join(to_tiktoken(tokenizer)), encoding="ascii")


# --- what a user gives ------------------------------------------------------------------------------------------------


def _inputs(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    folder.mkdir()
    long = "\n\n".join(texts)
    (folder / "text.txt").write_text(long[:6000], encoding="utf-8")
    lines = [json.dumps({"text": t, "title": f"n{i}", "language_score": 0.5}) for i, t in enumerate(texts[:20])]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_json(folder / "items.json", [{"text": text, "url": "https://host/a"} for text in texts[:20]])
    write_documents(folder / "table.parquet", [Document(str(i), text, "A title") for i, text in enumerate(texts[:20])])
    _zip(folder / "texts.zip", {"a.txt": texts[0], "b/c.jsonl": lines[0] + "\n", "b/d.txt": texts[2]})
    _write_json(folder / "alpaca.json", RECORDS)
    (folder / "alpaca.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    _zip(folder / "alpaca.zip", {"alpaca.json": json.dumps(RECORDS)})
    (folder / "stories.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts[:20]), encoding="utf-8")
    (folder / "book.txt").write_text(BOOK.format(number=84, text=long), encoding="utf-8")
    _zip(folder / "books.zip", {f"{n}.txt": BOOK.format(number=n, text=long[n : n + 4000]) for n in (84, 85)})
    (folder / "filters.sql").write_bytes(Path(corpus.DEFAULT_FILTERS).read_bytes())
    np.save(folder / "ids.npy", np.array(tokenizer.encode(texts[0]), np.uint16))
    (folder / "ids.txt").write_text(" ".join(map(str, tokenizer.encode(texts[0]))), encoding="ascii")
    turns = [{"user": "Who?", "reply": texts[0][:40]}, {"user": "Where?", "reply": "é\n"}]
    _write_json(folder / "talk.json", {"format": CONVERSATION, "version": 1, "turns": turns})
    for name in ("nanoeuler", "gpt2", "llama"):
        spec = find_model(name)
        _write_json(folder / f"{name}.json", next(iter(spec.presets.values())).to_dict())
    raw = b"once upon a time"
    (folder / "raw").mkdir()
    (folder / "raw" / "a.txt").write_bytes(raw)
    record = {"url": "http://127.0.0.1:9/a.txt", "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    _write_json(folder / "raw" / "a.txt.json", record)
    listing = [
        {"type": "file", "path": "data/a.parquet", "size": 10, "lfs": {"oid": "0" * 64}},
        {"type": "directory", "path": "data/b", "size": 0},
    ]
    _write_json(folder / "raw" / "files.json", listing)


def _zip(path: Path, members: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)


# --- runs, and models of others ---------------------------------------------------------------------------------------


def small_model(name: str, vocab: int, **fields: Any) -> Any:
    spec = find_model(name)
    usual = next(iter(spec.presets.values())).to_dict()
    small = {
        "dim": 16,
        "heads": 2,
        "kv_heads": 1,
        "layers": 1,
        "hidden": 24,
        "context": 96,
        "head_dim": 8,
        "mtp_heads": 1,
        "mtp_weights": [1.0],
        "vocab": vocab,
    }
    config = spec.config.from_dict({**usual, **{k: v for k, v in small.items() if k in usual}, **fields})
    model = spec.build(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(0)
    return model


def _runs(folder: Path, tokenizer: Tokenizer) -> None:
    """run: of recipes/pretrain.py, with two of two steps taken. sft: only its checkpoint."""
    model = small_model("nanoeuler", tokenizer.vocab_size)
    weights = named(model.buffer, model.buffer.masters, model.backend)
    moments = {f"{m}.{name}": np.zeros_like(value) for m in "mv" for name, value in weights.items()}
    settings = PretrainSettings(
        backend="numpy",
        data=("inputs/text.txt",),
        tokenizer="tokenizers/ours.json",
        steps=2,
        batch_size=2,
        workers=1,
        set=(*TINY, "vocab=300"),
        eval_every=1,
        out="run",
        save_every=1,
    )
    for kind, folder_name in (("pretrain", "run"), ("sft", "sft")):
        meta = {
            "kind": kind,
            "model": "nanoeuler",
            "config": model.config.to_dict(),
            "tokenizer_hash": tokenizer.hash(),
            "data_hash": "",
            "corpus": [],
            "settings": asdict(settings),
            "tokens": 128,
            **FIXED,
        }
        checkpoint.save(folder / folder_name, 2, weights, moments, tokenizer, meta, keep=0)
    # The hash of the data is what the recipe finds.
    _pretrain_once(folder)
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS), encoding="utf-8")
    sample = json.dumps({"step": 2, "tokens": 128, "text": "  Once|upon a time"})
    (folder / "run" / "samples.jsonl").write_text(f"{sample}\n", encoding="utf-8")
    _write_json(
        folder / "run" / "run.json",
        {
            "kind": "pretrain",
            "config": model.config.to_dict(),
            "settings": asdict(settings),
            "flop_per_token": 6e6,
            "plan": {"weights": 4, "moments": 2, "saved": 1, "peak": 9},
        },
    )
    _write_json(folder / "run" / "scores.json", {"step": 2, "held-out text, bits per byte": 3.5})
    (folder / "sft" / "README.md").write_text("A card.\n", encoding="utf-8")


def _pretrain_once(folder: Path) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        flags = (
            "--data inputs/text.txt --tokenizer tokenizers/ours.json --steps 1 --batch-size 2 --workers 1 "
            "--backend numpy --out first --set vocab=300"
        )
        pretrain.main(flags.split() + TINY)
    finally:
        os.chdir(before)
    found = checkpoint.read_meta(checkpoint.latest(folder / "first"))
    meta = checkpoint.latest(folder / "run") / "meta.json"
    _write_json(meta, json.loads(meta.read_text(encoding="utf-8")) | {"data_hash": found["data_hash"]})
    mend_checkpoint(folder / "run")


def _foreign(folder: Path, tokenizer: Tokenizer) -> None:
    pieces = sentencepiece()
    own = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_new_tokens": 4,
    }
    save_pretrained(small_model("llama", pieces.vocab_size), pieces, folder / "llama", generation=own)
    save_pretrained(small_model("gpt2", tokenizer.vocab_size), tokenizer, folder / "gpt2")
    save_pretrained(small_model("moe", tokenizer.vocab_size, experts=4), tokenizer, folder / "moe")
    (folder / "gpt2" / "tokenizer.json").unlink()
    _gpt2_files(folder / "gpt2", tokenizer)
    if importlib.util.find_spec("gguf"):
        (folder / "gguf").mkdir()
        save_pretrained(small_model("llama", pieces.vocab_size), pieces, folder / "gguf" / "model.gguf", dtype="f16")
    (folder / "llama2c").mkdir()
    save_pretrained(small_model("llama", pieces.vocab_size), pieces, folder / "llama2c" / "model.bin")
    # In shards, with an index.
    sharded, shard = folder / "sharded", "model-00001.safetensors"
    shutil.copytree(folder / "llama", sharded)
    (sharded / "model.safetensors").rename(sharded / shard)
    raw = (folder / "llama" / "model.safetensors").read_bytes()
    names = [n for n in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) if n != "__metadata__"]
    _write_json(sharded / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, shard)})
    template = "{{ '### Instruction:' }}{{ '### Response:' }}"
    (sharded / "chat_template.jinja").write_text(template, encoding="utf-8")


def _adapters(folder: Path, tokenizer: Tokenizer) -> None:
    """lora: a run of adapters on `sft`, as recipes/sft.py leaves it; peft: on `merged`, sft's Llama, as PEFT does."""
    settings, base = Adapters(2, 4.0, 0.0, ()), open_model(folder / "sft")
    model = base.build(get_backend("numpy", "fp32", workers=1), adapters=settings).model
    buffer = model.buffer
    buffer.initialise(Stream(0, "adapters"))
    meta = {
        "kind": "sft",
        "model": "nanoeuler",
        "config": base.config.to_dict(),
        "tokenizer_hash": tokenizer.hash(),
        "settings": {},
        "tokens": 128,
        **FIXED,
        "lora": lora.describe(settings, base, buffer.count, folder / "lora"),
    }
    weights = named(buffer, buffer.masters, model.backend)
    checkpoint.save(folder / "lora", 1, weights, {"m": np.zeros(1, np.float32)}, tokenizer, meta, keep=0)
    assert convert.main([str(folder / "sft"), str(folder / "merged")]) == 0
    assert convert.main([str(folder / "lora"), str(folder / "peft"), "--adapter"]) == 0
    # The directory goes elsewhere, and its base is what another program has made of the model's.
    (folder / "peft" / lora.BASE).unlink()
    config = json.loads((folder / "peft" / lora.CONFIG).read_text(encoding="utf-8"))
    _write_json(folder / "peft" / lora.CONFIG, config | {"base_model_name_or_path": "merged"})


def _labelled(folder: Path, texts: list[str]) -> None:
    """What recipes/classify.py learns from, in every form."""
    (folder / "mnist").mkdir(parents=True)
    rows = [{"text": text[:200], "label": number % 2, "text2": text[:40]} for number, text in enumerate(texts[:12])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "texts.jsonl").write_text(lines, encoding="utf-8")
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    with open(folder / "texts.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["text", "label", "text2"])
        table.writeheader()
        table.writerows(rows)
    values = [tuple(row.values()) for row in rows]
    _parquet(folder / "texts.parquet", "text VARCHAR, label BIGINT, text2 VARCHAR", values)
    pictures = [np.full((8, 8), 20 * number, np.uint8) for number in range(12)]
    packed = []
    for number, picture in enumerate(pictures):
        made = BytesIO()
        imsave(made, picture, format="png", cmap="gray", metadata={"Software": None})
        packed.append(made.getvalue())
        target = folder / "folders" / f"class{number % 2}" / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made.getvalue())
    _parquet(folder / "images.parquet", "image BLOB, label BIGINT", [(p, n % 2) for n, p in enumerate(packed)])
    labels = bytes(number % 2 for number in range(12))
    images = struct.pack(">4B3I", 0, 0, 8, 3, 12, 8, 8) + b"".join(picture.tobytes() for picture in pictures)
    (folder / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images, mtime=0))
    (folder / "mnist" / "train-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 12) + labels)


def _parquet(path: Path, columns: str, rows: list[tuple[Any, ...]]) -> None:
    import duckdb

    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE found ({columns})")
        connection.executemany(f"INSERT INTO found VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.execute(f"COPY found TO '{path}' (FORMAT parquet)")


def _fineweb(folder: Path, texts: list[str]) -> None:
    """What data.fineweb_edu keeps of a slice that it has taken: the slice, its record, the list of the files."""
    raw, url = folder / "raw", file_url(NOWHERE, fineweb_edu.REPOSITORY, "sample/10BT/a.parquet")
    raw.mkdir(parents=True)
    path = raw / "slice-00000.parquet"
    write_documents(path, [Document(str(i), text, "", "https://host/a", 0.9) for i, text in enumerate(texts[:20])])
    wanted = asdict(fineweb_edu.Filter()) | {"unit": "rows", "budget": 20}
    size = sum(len(text.encode()) for text in texts[:20])
    _write_json(
        path.with_suffix(".json"),
        {
            "url": url,
            "bytes": 10_000,
            "sha256": None,
            "wanted": wanted,
            "documents": 20,
            "text_bytes": size,
            "slice_sha256": _sha256(path),
            "refused": [],
        },
    )


def mend_slice(raw: Path) -> None:
    """The SHA-256 of the slice in its record."""
    record = raw / "slice-00000.json"
    if isinstance(content := _as_object(record), dict):
        _rewrite_json(record, content | {"slice_sha256": _sha256(record.with_suffix(".parquet"))})


def _gpt2_files(folder: Path, tokenizer: Tokenizer) -> None:
    """vocab.json and merges.txt, as GPT-2's vocabulary was first published: bytes in its order, one special token."""
    from tinyforge.tokenizers.bpe import BYTE_ORDERS, GPT2_PRINTABLE

    order = BYTE_ORDERS["gpt2"]
    spelt = [*map(chr, GPT2_PRINTABLE), *(chr(256 + n) for n in range(256 - len(GPT2_PRINTABLE)))]
    letters = {byte: spelt[index] for index, byte in enumerate(order)}

    def word(id: int) -> str:
        return "".join(letters[byte] for byte in tokenizer.token_bytes(id))

    words = [word(256 + number) for number in range(len(tokenizer.merges))]
    lines = ["#version: 0.2", *(f"{word(left)} {word(right)}" for left, right in tokenizer.merges)]
    vocabulary = {text: id for id, text in enumerate([*spelt, *words, "<|endoftext|>"])}
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- sources, corpora, shards -----------------------------------------------------------------------------------------


def _corpora(folder: Path, tokenizer: Tokenizer) -> None:
    with SourceWriter(folder / "source", "mine", "MIT") as writer:
        for number, row in read_rows(folder / "inputs" / "table.parquet", "text"):
            writer.add(Document(str(number), row["text"], "A title", "https://host/a", 0.9))
    local.make_source(folder / "second", [folder / "inputs" / "stories.txt"])
    assert alpaca.main([str(folder / "inputs" / "alpaca.json"), "--out", str(folder / "instructions")]) == 0
    assert tinystories.make_source and gutenberg.make_source  # read as commands, from inputs
    settings = corpus.Settings(val_share=0.3)
    corpus.build_corpus([folder / "source"], folder / "corpus", settings, workers=1)
    shards.make_shards(folder / "corpus", folder / "shards", tokenizer=folder / "tokenizers" / "ours.json", workers=1)


# --- hashes that agree with the files again, so that what is in a file is looked at ----------------------------------


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _as_object(path: Path) -> Any:
    """A file's JSON; {} where there is none: a file that is no JSON is as good as mended."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}


def _rewrite_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")  # in ASCII: what was read may have half a surrogate pair


def mend_checkpoint(run: Path) -> None:
    """hashes.json as the files are, and the hash of the tokenizer in meta.json."""
    for hashes in run.glob("**/hashes.json"):
        folder = hashes.parent
        if isinstance(content := _as_object(hashes), dict):
            _rewrite_json(
                hashes,
                {
                    name: _sha256(folder / name) if (folder / name).is_file() else value
                    for name, value in content.items()
                },
            )


def mend_list(path: Path, key: str) -> None:
    """Size and SHA-256 of the files that `key` lists in a manifest."""
    content = _as_object(path)
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        return
    for entry in content[key]:
        if isinstance(entry, dict) and isinstance(entry.get("file"), str) and "\0" not in entry["file"]:
            file = path.parent / entry["file"]
            if file.is_file():
                entry |= {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    _rewrite_json(path, content)


def mend_shards(path: Path) -> None:
    """Size and SHA-256 of every file of token shards in manifest.json."""
    content = _as_object(path)
    for source in content.get("sources", []):
        for split in ("train", "val"):
            for entry in source[split]["files"]:
                file = path.parent / entry["file"]
                entry |= {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    _write_json(path, content)
