"""JSON that is a bomb, in every place where a file of others is read: one line, or one record refused, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyforge import checkpoint
from tinyforge.data.alpaca import make_instructions, read_records
from tinyforge.data.download import Downloader
from tinyforge.data.hub import list_files
from tinyforge.data.local import make_source
from tinyforge.data.shards import read_corpus
from tinyforge.data.source import read_source
from tinyforge.errors import UserError
from tinyforge.formats.generation import read_generation
from tinyforge.formats.huggingface import open_directory
from tinyforge.infer.conversation import _read as read_chat
from tinyforge.shards import Shards
from tinyforge.tensors import read_header
from tinyforge.tokenizers import load_tokenizer
from tinyforge.train.metrics import read as read_metrics
from tinyforge.train.metrics import read_scores
from tinyforge.train.settings import PretrainSettings, parse

BUNDLED = Path(__file__).resolve().parents[1] / "models" / "nanoeuler" / "small"
BOMBS = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and whole": b'{"a": ' + b"[" * 800 + b"]" * 800 + b"}",
    "digits": b'{"a": ' + b"7" * 100_000 + b"}",
    "a list": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "no UTF-8": b'{"a": "\xff"}',
    "half a surrogate pair": b'{"a": "\xed\xa0\x80"}',
}


def checkpoint_with(name: str) -> Callable[[Path], Any]:
    def read(file: Path) -> Any:
        shutil.copytree(BUNDLED, file.parent / "copy")
        shutil.copy(file, file.parent / "copy" / name)
        return checkpoint.load(file.parent / "copy")

    return read


def placed(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def reader(file: Path) -> Any:
        return read(file.rename(file.with_name(name)).parent)

    return reader


def safetensors(file: Path) -> Any:
    header = file.read_bytes()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return read_header(file)


def listing(file: Path) -> Any:
    class Local(Downloader):
        def fetch(self, *_: Any, **__: Any) -> Any:
            return type("Fetched", (), {"path": file})

    return list_files(Local(), "http://localhost", "a/b", "", file.parent)


READERS: dict[str, Callable[[Path], Any]] = {
    "tokenizer": load_tokenizer,
    "hashes.json": checkpoint_with("hashes.json"),
    "meta.json": checkpoint_with("meta.json"),
    "config": lambda file: parse(PretrainSettings, "", ["--config", str(file)]),
    "config.json": placed("config.json", open_directory),
    "generation_config.json": placed("generation_config.json", read_generation),
    "safetensors": safetensors,
    "chat": read_chat,
    "Alpaca": lambda file: read_records([file]),
    "Alpaca, cleaned": lambda file: make_instructions(file.parent / "out", file),
    "data.local": lambda file: make_source(file.parent / "out", [file], "x"),
    "source.json": placed("source.json", read_source),
    "corpus.json": placed("corpus.json", read_corpus),
    "manifest.json": placed("manifest.json", lambda folder: Shards([folder])),
    "listing": listing,
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_in_one_line(tmp_path: Path, reader: str, bomb: str) -> None:
    file = tmp_path / "bomb.json"
    file.write_bytes(BOMBS[bomb])
    with pytest.raises(UserError) as caught:
        READERS[reader](file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("bomb", BOMBS)
def test_one_bad_line_is_one_refused_record(tmp_path: Path, bomb: str) -> None:
    good = json.dumps({"text": "A cat sat.", "instruction": "Add.", "input": "", "output": "3"}).encode()
    other = good.replace(b"cat", b"dog").replace(b"Add", b"Sum")
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b"\n".join([good, BOMBS[bomb], other]))
    source = make_source(tmp_path / "source", [lines], "x")
    assert source.documents == 2 and [r.record for r in source.refused] == ["lines.jsonl:2"]
    if bomb not in ("no UTF-8", "half a surrogate pair"):  # a file of instructions is decoded as a whole
        made = make_instructions(tmp_path / "made", lines)
        assert made.records == 2 and [r.record for r in made.refused] == ["lines.jsonl:1"]


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_a_run_wrote_and_something_damaged(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + BOMBS[bomb] + b'\n{"step": 2}\n')
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    (tmp_path / "scores.json").write_bytes(BOMBS[bomb])
    assert read_scores(tmp_path, 1) == {}


def test_hashes_that_name_less_than_a_checkpoint_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(BUNDLED, path)
    hashes = json.loads((path / "hashes.json").read_text(encoding="utf-8"))
    for changed in ({}, hashes | {"meta.json": 5}, hashes | {"../copy/meta.json": hashes["meta.json"]}):
        (path / "hashes.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(UserError, match="hashes.json has no hash of a file"):
            checkpoint.load(path)


@pytest.mark.parametrize("field", ["base", "config", "settings", "step", "elapsed", "machine", "template"])
def test_a_field_of_another_type_in_the_meta_data_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "copy"
    shutil.copytree(BUNDLED, path)
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    (path / "meta.json").write_text(json.dumps(meta | {field: [1]}), encoding="utf-8")
    with pytest.raises(UserError, match=f"got {field} .1., expected"):
        checkpoint.read_meta(path)
