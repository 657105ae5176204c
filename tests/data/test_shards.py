"""From a corpus folder to token shards: every document once and in order, however the run was cut up."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import contents
from tests.data.conftest import fault_of as fault
from tinyforge.data import shards as command
from tinyforge.data.shards import make_shards, read_corpus, read_texts
from tinyforge.data.world import documents
from tinyforge.shards import SEPARATOR, open_shards
from tinyforge.tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
Texts = dict[str, dict[str, list[list[str]]]]  # by source, split and file


def make_corpus(folder: Path, texts: Texts) -> Path:
    """A corpus folder by hand, laid out as data.corpus lays it out."""
    files, sources = [], []
    for name, splits in texts.items():
        entry: dict[str, Any] = {"name": name, "licence": f"licence of {name}", "source_sha256": "0" * 64}
        for split in ("train", "val"):
            (folder / split).mkdir(parents=True, exist_ok=True)
            content = splits.get(split, [])
            for number, rows in enumerate(content):
                path = folder / split / f"{name}-{number:05d}.parquet"
                with duckdb.connect() as connection:
                    connection.execute("CREATE TABLE rows (id VARCHAR, text VARCHAR)")
                    ids = [f"{name}/{split}/{number}/{i}" for i in range(len(rows))]
                    connection.execute("INSERT INTO rows SELECT unnest($1), unnest($2)", [ids, rows])
                    connection.execute(f"COPY rows TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
                raw = path.read_bytes()
                files.append({"file": f"{split}/{path.name}", "bytes": len(raw), "sha256": sha256(raw)})
            flat = sum(content, [])
            entry[split] = {"documents": len(flat), "bytes": sum(len(text.encode()) for text in flat)}
        sources.append(entry)
    content_json = {"format": "tinyforge-corpus", "version": 1, "sources": sources, "files": files, "settings": {}}
    (folder / "corpus.json").write_text(json.dumps(content_json), encoding="utf-8")
    return folder


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture(scope="module")
def texts() -> Texts:
    world = list(documents("train", 700))
    return {
        "web": {"train": [world[:300], world[300:301], world[301:500]], "val": [["Ein Wört, 漢字 👍\n", "a"]]},
        "web-new": {"train": [["x" * 5000, "", SEPARATOR, *world[500:]]], "val": [list(documents("val", 9))]},
        "empty": {},
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: Texts) -> Path:
    return make_corpus(tmp_path_factory.mktemp("made") / "corpus", texts)


@pytest.mark.parametrize("shard_tokens", [997, 20_000, 10**8])
def test_every_document_once_and_in_order(tmp_path: Path, corpus: Path, texts: Texts, shard_tokens: int) -> None:
    made = make_shards(corpus, tmp_path / "s", vocab_size=400, shard_tokens=shard_tokens)
    shards = open_shards([tmp_path / "s"])
    tokenizer = shards.tokenizer
    assert tokenizer.vocab_size == 400 and list(shards.sources) == ["web", "web-new", "empty"]
    total = 0
    for name, splits in texts.items():
        assert shards.sources[name].licence == f"licence of {name}"
        for split in ("train", "val"):
            flat = sum(splits.get(split, []), [])
            end = tokenizer.specials[SEPARATOR]
            expected = [i for text in flat for i in (*tokenizer.encode(text), end)]
            assert shards.sequence(name, split)[:].tolist() == expected
            part = getattr(shards.sources[name], split)
            size = sum(len(text.encode()) for text in flat)
            assert (part.documents, part.tokens, part.bytes) == (len(flat), len(expected), size)
            assert len(part.files) == -(-len(expected) // shard_tokens)
            total += size
    assert made.bytes == total and made.seconds > 0


def test_a_text_too_small_for_the_vocabulary_gives_what_it_can(tmp_path: Path, corpus: Path) -> None:
    size = make_shards(corpus, tmp_path / "s", 99999, at_most=True).shards.tokenizer.vocab_size
    assert 300 < size < 99999 and size % 64 == 0
    message = fault(lambda: make_shards(corpus, tmp_path / "s", 99999))  # without the flag that is another tokenizer
    assert "has shards with tokenizer" in message


def test_a_run_that_failed_before_its_tokenizer_may_change_its_settings(tmp_path: Path, corpus: Path) -> None:
    message = fault(lambda: make_shards(corpus, tmp_path / "s", 99999))
    assert "too little text for vocab_size 99999" in message
    assert [path.name for path in (tmp_path / "s").iterdir() if path.suffix == ".json"] == [".unfinished.json"]
    assert make_shards(corpus, tmp_path / "s", 300).shards.tokenizer.vocab_size == 300


def test_single_digits_are_another_tokenizer(tmp_path: Path, corpus: Path) -> None:
    made = make_shards(corpus, tmp_path / "s", 300, single_digits=True).shards.tokenizer
    assert made.encode(" 42")[-2:] == [52, 50]
    assert make_shards(corpus, tmp_path / "s", 300, single_digits=True).shards.tokenizer.hash() == made.hash()
    assert "has shards with tokenizer" in fault(lambda: make_shards(corpus, tmp_path / "s", 300))
    flags = ["--corpus", str(corpus), "--out", str(tmp_path / "t"), "--tokenizer", "x.json", "--single-digits"]
    assert fault(lambda: command.main(flags)).startswith("--single-digits is for training a tokenizer")


def test_a_given_tokenizer_is_used(tmp_path: Path, corpus: Path) -> None:
    mine = Tokenizer([(116, 104), (256, 101)], [SEPARATOR])
    mine.save(tmp_path / "mine.json")
    shards = make_shards(corpus, tmp_path / "s", tokenizer=tmp_path / "mine.json").shards
    assert shards.tokenizer.hash() == mine.hash()
    assert (tmp_path / "s" / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()


def test_the_result_does_not_depend_on_workers_or_the_place(tmp_path: Path, corpus: Path) -> None:
    for name, workers in (("one", 1), ("two", 2), ("all", None)):
        make_shards(corpus, tmp_path / name, 400, shard_tokens=9000, workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "all")


def test_the_sample_is_of_whole_documents_and_always_the_same(tmp_path: Path, corpus: Path, texts: Texts) -> None:
    files = read_corpus(corpus).sources[0].files["train"]
    flat = sum(texts["web"]["train"], [])
    half = list(read_texts(files, below="8"))
    assert 180 < len(half) < 320 and half == list(read_texts(files, below="8"))
    assert [text for text in flat if text in set(half)] == half
    assert set(list(read_texts(files, below="4"))) < set(half)
    for skip in (0, 1, 299, 300, 301, 302, 499, 500):
        assert list(read_texts(files, skip)) == flat[skip:]
    small = make_shards(corpus, tmp_path / "small", 300, sample_bytes=40_000).shards.tokenizer
    whole = make_shards(corpus, tmp_path / "whole", 300).shards.tokenizer
    assert small.hash() != whole.hash()


def test_a_rerun_changes_nothing_and_checks_everything(tmp_path: Path, corpus: Path) -> None:
    make_shards(corpus, tmp_path / "s", 400, shard_tokens=9000)
    before = contents(tmp_path / "s")
    assert make_shards(corpus, tmp_path / "s", 400, shard_tokens=9000).bytes == 0
    assert contents(tmp_path / "s") == before
    for other in ({"shard_tokens": 9001}, {"vocab_size": 401}, {"sample_bytes": 9}):
        settings: dict[str, Any] = {"vocab_size": 400, "shard_tokens": 9000} | other
        message = fault(lambda settings=settings: make_shards(corpus, tmp_path / "s", **settings))
        assert "has shards with" in message and "give the same settings, or another --out" in message
    damaged = bytearray(before["web-train-00000.bin"])
    damaged[5000] ^= 1
    (tmp_path / "s" / "web-train-00000.bin").write_bytes(damaged)
    assert "web-train-00000.bin: got SHA-256" in fault(lambda: make_shards(corpus, tmp_path / "s", 400, None, 9000))


# --- interrupted runs -------------------------------------------------------------------------------------------------

SETTINGS = ["--vocab-size", "300", "--shard-tokens", "1500"]


def start(corpus: Path, out: Path, **options: Any) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "data.shards", "--corpus", str(corpus), "--out", str(out), *SETTINGS]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "s"
    make_shards(corpus, out, 300, shard_tokens=1500)
    return contents(out)


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path: Path, corpus: Path, uninterrupted: dict[str, bytes]) -> None:
    out, chance = tmp_path / "s", random.Random(0)
    shards = sum(name.endswith(".bin") for name in uninterrupted)
    for expected in (0, *sorted(chance.sample(range(1, shards - 5), 4))):
        process = start(corpus, out)
        deadline = time.monotonic() + 60
        while len(list(out.glob("*.bin"))) < expected or not out.exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.005))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (out / "manifest.json").exists()
        kept = {name: raw for name, raw in contents(out).items() if not name.startswith(".")}
        assert kept.items() <= uninterrupted.items()  # what has its name is whole
        assert "manifest.json: cannot be read" in fault(lambda: open_shards([out]))
    process = start(corpus, out)
    assert process.wait(60) == 0, process.communicate()
    assert contents(out) == uninterrupted


@pytest.mark.parametrize("cut", range(0, 24, 3))
def test_going_on_after_any_shard(tmp_path: Path, corpus: Path, uninterrupted: dict[str, bytes], cut: int) -> None:
    """As a kill leaves it after `cut` shards, with a half-written next one; the long document spans several."""
    out = tmp_path / "s"
    out.mkdir()
    order = [
        name
        for source in ("web", "web-new")
        for split in ("train", "val")
        for name in sorted(n for n in uninterrupted if n.startswith(f"{source}-{split}-"))
    ]
    settings = {"settings": json.loads(uninterrupted["manifest.json"])["settings"]}
    (out / ".unfinished.json").write_text(json.dumps(settings), encoding="utf-8")
    cut = cut * len(order) // 24
    for name in ("tokenizer.json", *order[:cut]):
        (out / name).write_bytes(uninterrupted[name])
    (out / f".partial-{order[cut]}").write_bytes(uninterrupted[order[cut]][:99])
    (out / order[-1]).write_bytes(uninterrupted[order[-1]][:99])  # no shard at all: its name proves nothing
    made = make_shards(corpus, out, 300, shard_tokens=1500)
    assert contents(out) == uninterrupted
    total = sum(p.bytes for s in made.shards.sources.values() for p in (s.train, s.val))
    assert made.bytes == total if cut == 0 else 0 < made.bytes < total


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, corpus: Path, uninterrupted: dict[str, bytes]) -> None:
    """No file may grow beyond 2,000 bytes: less than a shard, and than the tokenizer."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    def unlimited_tokenizer() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    for limit in (limited, unlimited_tokenizer):
        process = start(corpus, tmp_path / "s", preexec_fn=limit)
        shown = process.communicate(timeout=60)[1].decode()
        assert process.returncode == 2 and shown.startswith("error: cannot write") and shown.count("\n") == 1, shown
        assert "File too large" in shown
    process = start(corpus, tmp_path / "s")
    assert process.wait(60) == 0, process.communicate()
    assert contents(tmp_path / "s") == uninterrupted


# --- what is refused --------------------------------------------------------------------------------------------------


def edit(corpus: Path, change: Callable[[Any], None]) -> None:
    content = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))
    change(content)
    (corpus / "corpus.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c / "corpus.json").unlink(), "corpus.json: cannot be read (No such file or directory)"),
        (lambda c: (c / "corpus.json").write_text("{"), "corpus.json: it is not JSON"),
        (lambda c: (c / "corpus.json").write_text("[1]"), "corpus.json: got a list, expected an object"),
        (lambda c: edit(c, lambda m: m.update(version=2)), "got format 'tinyforge-corpus' version 2, expected"),
        (lambda c: edit(c, lambda m: m.pop("files")), "not as data.corpus writes it (KeyError: 'files')"),
        (lambda c: edit(c, lambda m: m["sources"][0].update(name="../x")), "source name '../x' expects letters"),
        (lambda c: edit(c, lambda m: m["sources"].append(m["sources"][0])), "two sources with one name"),
        (
            lambda c: edit(c, lambda m: m["sources"][0]["train"].update(documents=3)),
            "a: got 2 documents of train, corpus.json says 3",
        ),
        (lambda c: edit(c, lambda m: m["sources"].clear()), "no documents to train on"),
        (lambda c: (c / "train" / "a-00000.parquet").unlink(), "a-00000.parquet: is missing, but corpus.json lists it"),
        (lambda c: (c / "train" / "a-00000.parquet").write_bytes(b"x"), "a-00000.parquet: 1 bytes, but corpus.json"),
        (
            lambda c: (c / "val" / "a-00000.parquet").write_bytes((c / "val" / "a-00000.parquet").read_bytes()[::-1]),
            "val/a-00000.parquet: its SHA-256 is not the one",
        ),
    ],
)
def test_a_corpus_that_is_not_whole(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    corpus = make_corpus(tmp_path / "c", {"a": {"train": [["one and one", "two"]], "val": [["three"]]}})
    Tokenizer([], [SEPARATOR]).save(tmp_path / "t.json")
    damage(corpus)
    assert message in fault(lambda: make_shards(corpus, tmp_path / "s", tokenizer=tmp_path / "t.json"))
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_a_parquet_without_the_columns(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", {"a": {"train": [["one"]]}})
    path = corpus / "train" / "a-00000.parquet"
    duckdb.sql(f"COPY (SELECT 'one' AS body) TO '{path}' (FORMAT parquet)")
    raw = path.read_bytes()
    edit(corpus, lambda m: m["files"][0].update(bytes=len(raw), sha256=sha256(raw)))
    Tokenizer([], [SEPARATOR]).save(tmp_path / "t.json")
    message = fault(lambda: make_shards(corpus, tmp_path / "s", tokenizer=tmp_path / "t.json"))
    assert message.startswith(f"{path}: not a readable parquet file (Binder Error")


def test_a_folder_with_other_files(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine", encoding="utf-8")
    assert "has other files and no unfinished shards" in fault(lambda: make_shards(corpus, tmp_path / "s"))
    message = fault(lambda: make_shards(corpus, tmp_path / "s" / "thesis.txt"))
    assert "thesis.txt: is a file, or in one; choose another folder" in message
    assert contents(tmp_path / "s") == {"thesis.txt": b"mine"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shard-tokens 0", "--shard-tokens is 0, expected 1 or more"),
        ("--workers -1", "--workers is -1, expected 1 or more"),
        ("--sample-bytes 0", "--sample-bytes is 0, expected"),
        ("--sample-bytes 1", "--sample-bytes: 1 of "),
        ("--vocab-size 100", "vocabulary too small for the bytes: got vocab_size 100"),
        ("--vocab-size 99999", "; give more text, or pass --at-most, or --vocab-size "),
        ("--vocab-size 300 --tokenizer t.json", "give one or the other"),
        ("--tokenizer absent.json", "cannot read the tokenizer absent.json"),
        ("--tokenizer bare.json", "bare.json: the tokenizer has no special token <|endoftext|>"),
    ],
)
def test_bad_flags(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, flags: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Tokenizer([], ["<x>"]).save(tmp_path / "bare.json")
    assert message in fault(lambda: command.main(["--corpus", str(corpus), "--out", "s", *flags.split()]))


def test_the_table(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--corpus", str(corpus), "--out", str(tmp_path / "s"), "--vocab-size", "400"]
    assert command.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    shards = open_shards([tmp_path / "s"])
    part = shards.sources["web"].train
    assert lines[1].split() == [
        "web",
        "train",
        "500",
        f"{part.tokens:,}",
        f"{part.bytes:,}",
        f"{part.bytes / part.tokens:.3f}",
    ]
    assert len(lines) == 9 and lines[5].split() == ["empty", "train", "0", "0", "0", "-"]
    assert lines[7].startswith("encoded ") and "MB/s with" in lines[7]
    assert command.main(flags) == 0
    assert "these shards were already complete" in capsys.readouterr().out
