"""Token shards: the bytes are as documented, what was written comes back, and a folder that is not whole is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.shards import Part, ShardWriter, Source, TokenSequence, open_shards, read_header, write_manifest
from tinyforge.tokenizers import SentencePiece, TextTokenizer, Tokenizer
from tinyforge.tokenizers.sentencepiece import BYTES as BYTE_PIECES

ROOT = Path(__file__).resolve().parents[2]
BYTES = Tokenizer([], ["<|endoftext|>", "</s>"])
OTHER = Tokenizer([(116, 104)], ["<|endoftext|>", "</s>"])


def make(
    folder: Path,
    ids: np.ndarray,
    shard_tokens: int = 100,
    tokenizer: TextTokenizer = BYTES,
    names: tuple[str, ...] = ("books",),
) -> Path:
    """A folder of shards in which each source has `ids` to train on, and their first ten held out."""
    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    sources = []
    for name in names:
        parts = {}
        for split, content in (("train", ids), ("val", ids[:10])):
            writer = ShardWriter(folder, name, split, tokenizer, shard_tokens)
            for start in range(0, len(content), 37):
                writer.append(content[start : start + 37])
            parts[split] = Part(1, len(content), 3 * len(content), writer.close())
        sources.append(Source(name, "public domain", **parts))
    write_manifest(folder, tokenizer, sources, {"shard_tokens": shard_tokens})
    return folder


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 258, 1050)


def fault(*folders: Path) -> str:
    """The one line with which opening the folders ends."""
    with pytest.raises(UserError) as caught:
        open_shards(folders)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def test_the_bytes_are_as_documented(tmp_path: Path) -> None:
    make(tmp_path / "s", np.arange(150) % 258, shard_tokens=100)
    raw = (tmp_path / "s" / "books-train-00001.bin").read_bytes()
    assert raw[:8] == b"TFTOKENS"
    assert [int.from_bytes(raw[i : i + n], "little") for i, n in ((8, 4), (12, 4), (16, 8), (24, 8))] == [1, 2, 50, 100]
    assert raw[32:64].hex() == BYTES.hash()
    assert np.frombuffer(raw, "<u2", offset=64).tolist() == list(range(100, 150))


def test_the_manifest(tmp_path: Path, ids: np.ndarray) -> None:
    folder = make(tmp_path / "s", ids, shard_tokens=400)
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert (content["tokenizer_hash"], content["vocab_size"], content["bytes_per_id"]) == (BYTES.hash(), 258, 2)
    (source,) = content["sources"]
    assert (source["name"], source["licence"]) == ("books", "public domain")
    train = source["train"]
    assert (train["documents"], train["tokens"], train["bytes"], train["bytes_per_token"]) == (1, 1050, 3150, 3.0)
    assert [f["file"] for f in train["files"]] == [f"books-train-0000{i}.bin" for i in range(3)]
    for entry in train["files"]:
        raw = (folder / entry["file"]).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry["bytes"], entry["sha256"])
    assert sorted(p.name for p in folder.iterdir()) == [
        *(f"books-train-0000{i}.bin" for i in range(3)),
        "books-val-00000.bin",
        "manifest.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("shard_tokens", [36, 37, 38, 100, 1049, 1050, 1051, 5000])
def test_round_trip_over_many_files(tmp_path: Path, ids: np.ndarray, shard_tokens: int) -> None:
    shards = open_shards([make(tmp_path / "s", ids, shard_tokens)])
    sequence = shards.sequence("books", "train")
    assert len(sequence) == 1050 and np.array_equal(sequence[:], ids)
    assert np.array_equal(shards.sequence("books", "val")[:], ids[:10])
    files = shards.sources["books"].train.files
    assert len(files) == -(-1050 // shard_tokens) and {f.tokens for f in files[:-1]} <= {shard_tokens}
    for start in (0, 1, 35, 36, 37, 38, 99, 100, 101, 1049, 1050, 2000):
        for length in (0, 1, 2, 7, 64, 200, 1050):
            assert np.array_equal(sequence[start : start + length], ids[start : start + length])
    assert np.array_equal(sequence[-5:-2], ids[-5:-2])
    with pytest.raises(ValueError, match="steps of 1"):
        sequence[::2]


def test_files_of_one_id(tmp_path: Path) -> None:
    sequence = open_shards([make(tmp_path / "s", np.arange(12), shard_tokens=1)]).sequence("books", "train")
    assert sequence[:].tolist() == list(range(12)) and sequence[5:8].tolist() == [5, 6, 7]


def test_a_slice_within_a_file_is_no_copy(tmp_path: Path, ids: np.ndarray) -> None:
    sequence = open_shards([make(tmp_path / "s", ids)]).sequence("books", "train")
    inside = sequence[210:290]
    assert not inside.flags.owndata and not inside.flags.writeable
    assert np.shares_memory(inside, sequence[250:299])


def test_ids_beyond_uint16_take_four_bytes(tmp_path: Path) -> None:
    big = Tokenizer([(a, b) for a in range(256) for b in range(256)], ["<|endoftext|>"])
    ids = np.array([0, 65535, 65536, big.vocab_size - 1, 7])
    folder = make(tmp_path / "s", ids, shard_tokens=3, tokenizer=big)
    assert read_header(folder / "books-train-00000.bin").bytes_per_id == 4
    sequence = open_shards([folder]).sequence("books", "train")
    assert sequence[:].dtype == np.uint32 and np.array_equal(sequence[:], ids)


def test_the_same_ids_give_the_same_bytes(tmp_path: Path, ids: np.ndarray) -> None:
    one, two = make(tmp_path / "one", ids), make(tmp_path / "two", ids)
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_a_source_in_several_folders_is_one_sequence(tmp_path: Path, ids: np.ndarray) -> None:
    folders = [make(tmp_path / "one", ids, 400), make(tmp_path / "two", ids[::-1], 300, names=("books", "web"))]
    shards = open_shards(folders)
    assert list(shards.sources) == ["books", "web"]
    assert np.array_equal(shards.sequence("books", "train")[:], np.concatenate([ids, ids[::-1]]))
    assert np.array_equal(shards.sequence("web", "train")[:], ids[::-1])
    part = shards.sources["books"].train
    assert (part.documents, part.tokens, part.bytes) == (2, 2100, 6300)
    assert shards.hash not in {open_shards([f]).hash for f in folders}
    assert shards.hash != open_shards(folders[::-1]).hash


def test_a_source_without_a_split_is_empty(tmp_path: Path, ids: np.ndarray) -> None:
    folder = make(tmp_path / "s", ids)
    edit_manifest(folder, lambda m: m["sources"][0].update(val={"documents": 0, "tokens": 0, "bytes": 0, "files": []}))
    sequence = open_shards([folder]).sequence("books", "val")
    assert len(sequence) == 0 and len(sequence[0:5]) == 0


def test_a_writer_refuses_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    for bad in ([258], [-1]):
        writer = ShardWriter(tmp_path, "books", "train", BYTES)
        with pytest.raises(ValueError, match="outside the vocabulary of 258"):
            writer.append(np.array([1, *bad]))


def test_no_file_has_its_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "books", "train", BYTES, shard_tokens=10)
    writer.append(np.zeros(25, np.uint16))
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["books-train-00000.bin", "books-train-00001.bin"]
    assert len(writer.close()) == 3 and len(TokenSequence(sorted(tmp_path.iterdir()))) == 25


WRITE_MUCH = """
import sys, tracemalloc
from pathlib import Path
import numpy as np
from tinyforge.tokenizers import Tokenizer
from tinyforge.shards import ShardWriter
document = np.zeros(10_000, np.uint16)
writer = ShardWriter(Path(sys.argv[1]), "books", "train", Tokenizer([], ["<|endoftext|>"]), shard_tokens=2_000_000)
tracemalloc.start()
for _ in range(800):
    writer.append(document)
print(*[file.tokens for file in writer.close()], tracemalloc.get_traced_memory()[1])
"""


def test_the_writer_holds_no_more_than_a_document(tmp_path: Path) -> None:
    """16 MB of ids in shards of 4 MB: less than 2 MB at any time, of which 1 MB waits to be written.

    In a process of its own: the peak counts what every thread allocates, those that other tests have left too.
    """
    done = subprocess.run([sys.executable, "-c", WRITE_MUCH, tmp_path], capture_output=True, text=True, check=True)
    *tokens, peak = map(int, done.stdout.split())
    assert tokens == [2_000_000] * 4 and peak < 2_000_000


# --- what is refused --------------------------------------------------------------------------------------------------

SHARD = "books-train-00001.bin"


def patch(path: Path, offset: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


def swap(folder: Path) -> None:
    one, two = folder / "books-train-00001.bin", folder / "books-train-00002.bin"
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-2]),
            "got 262 bytes, expected 264 for its 100 ids",
        ),
        (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"\0\0"), "got 266 bytes, expected 264"),
        (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:30]), f"{SHARD}: got b'TFTOKENS' at its start"),
        (lambda f: (f / SHARD).write_bytes(b""), f"{SHARD}: got b'' at its start, expected b'TFTOKENS'"),
        (lambda f: (f / SHARD).unlink(), f"{SHARD}: the shard is missing; copy it here again, or make"),
        (lambda f: patch(f / SHARD, 0, b"NOTOKENS"), "got b'NOTOKENS' at its start"),
        (lambda f: patch(f / SHARD, 8, b"\2"), "got version 2 with 2 bytes per id, expected version 1 with 2 or 4"),
        (lambda f: patch(f / SHARD, 12, b"\3"), "got version 1 with 3 bytes per id"),
        (lambda f: patch(f / SHARD, 32, bytes(32)), f"{SHARD}: made with the tokenizer 000000000000..., the folder's"),
        (lambda f: patch(f / SHARD, 100, b"\1\0"), f"{SHARD}: got SHA-256 "),
        (swap, "got 100 ids from position 200, the manifest says 100 from 100"),
        (lambda f: OTHER.save(f / "tokenizer.json"), "tokenizer.json: got the tokenizer "),
        (lambda f: (f / "tokenizer.json").unlink(), "cannot read the tokenizer"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json: cannot be read (No such file or directory)"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: it is not JSON"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json: got a list, expected an object"),
        (lambda f: edit_manifest(f, lambda m: m.update(version=2)), "got version 2, this program reads 1; make the"),
        (lambda f: edit_manifest(f, lambda m: m.update(format="x")), "got format 'x', this program reads 'tinyforge-"),
        (lambda f: edit_manifest(f, lambda m: m.pop("sources")), "has no tokenizer_hash or no list of sources"),
        (lambda f: edit_manifest(f, lambda m: m["sources"][0].pop("val")), "a source's entry is damaged ('val')"),
        (lambda f: edit_manifest(f, lambda m: m["sources"][0]["train"].update(tokens=9)), "do not add up"),
        (lambda f: edit_manifest(f, lambda m: m["sources"][0]["train"]["files"][0].update(file="../x")), "outside the"),
        (lambda f: edit_manifest(f, lambda m: m["sources"].clear()), "no ids to train on"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    tmp_path: Path, ids: np.ndarray, damage: Callable[[Path], None], message: str
) -> None:
    folder = make(tmp_path / "s", ids)
    open_shards([folder])
    damage(folder)
    assert message in fault(folder)
    assert str(folder) in fault(folder)


def test_shards_of_another_kind_of_tokenizer(tmp_path: Path, ids: np.ndarray) -> None:
    words = SentencePiece(["<|endoftext|>", *BYTE_PIECES, "a"], {"<|endoftext|>": 0}, None, scores=[0.0] * 258)
    shards = open_shards([make(tmp_path / "s", ids, tokenizer=words)])
    assert isinstance(shards.tokenizer, SentencePiece) and shards.tokenizer.hash() == words.hash()


def test_an_id_outside_the_vocabulary_with_the_right_hash(tmp_path: Path, ids: np.ndarray) -> None:
    folder = make(tmp_path / "s", ids)
    patch(folder / SHARD, 80, (300).to_bytes(2, "little"))
    digest = hashlib.sha256((folder / SHARD).read_bytes()).hexdigest()
    edit_manifest(folder, lambda m: m["sources"][0]["train"]["files"][1].update(sha256=digest))
    assert f"{SHARD}: got the id 300, expected ids below 258" in fault(folder)


def test_folders_that_do_not_go_together(tmp_path: Path, ids: np.ndarray) -> None:
    one, two = make(tmp_path / "one", ids), make(tmp_path / "two", ids % 200, tokenizer=OTHER)
    assert f"{two}: its shards were made with another tokenizer than those of {one}" in fault(one, two)
    assert "name each folder once" in fault(one, one)


def test_reading_shards_does_not_import_duckdb() -> None:
    code = "import sys, tinyforge.shards, tinyforge.train.corpus; sys.exit('duckdb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
