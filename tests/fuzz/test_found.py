"""What `make fuzz` and `make chaos` have found, one test each."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.fuzz.seeds import mend_checkpoint, sentencepiece, small_model
from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.data import corpus_report
from tinyforge.data.corpus import build_corpus
from tinyforge.data.download import Downloader, Patience
from tinyforge.data.files import zip_members
from tinyforge.data.labelled import read_texts as read_labelled
from tinyforge.data.shards import read_corpus
from tinyforge.data.source import Document, SourceWriter, read_source
from tinyforge.errors import UserError
from tinyforge.formats import load, load_pretrained, lora, pretrained, save_pretrained
from tinyforge.params import named
from tinyforge.recipes import pretrain, sft
from tinyforge.tokenizers.command import read_ids
from tinyforge.train.run import claimed
from tinyforge.train.settings import PretrainSettings, parse


def fault_of(call: object, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_member_without_a_name(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a", "text")
    data = bytearray(packed.getvalue())
    # The length of the name, and the name itself, in the archive's directory.
    at = data.index(b"PK\x01\x02")
    data[at + 28 : at + 30] = struct.pack("<H", 0)
    del data[at + 46]
    end = data.index(b"PK\x05\x06")
    data[end + 12 : end + 16] = struct.pack("<I", end - at)
    (tmp_path / "a.zip").write_bytes(data)
    assert [member.name for member in zip_members(tmp_path / "a.zip")] == [""]


def test_a_member_that_lzma_cannot_unpack(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a", "text " * 100)
    data = bytearray(packed.getvalue())
    at = data.index(b"a", 30) + 1 + 9  # after the member's header and LZMA's properties
    data[at : at + 8] = b"\xff" * 8
    (tmp_path / "a.zip").write_bytes(data)
    (member,) = zip_members(tmp_path / "a.zip")
    assert "member 'a' is damaged" in fault_of(member.read)


def test_a_source_name_too_long_for_a_file(tmp_path: Path) -> None:
    with SourceWriter(tmp_path / "source", "m" * 300, "MIT") as writer:
        writer.add(Document("1", "some text"))
    assert "expected at most 100 letters" in fault_of(build_corpus, [tmp_path / "source"], tmp_path / "corpus")


def test_half_a_character_in_a_corpus(tmp_path: Path) -> None:
    content = {"format": "tinyforge-corpus", "version": 1, "files": [], "sources": [], "note": "\udcff"}
    (tmp_path / "corpus.json").write_text(json.dumps(content), encoding="utf-8")
    assert "it holds half a character, '\\udcff'; make the corpus again" in fault_of(read_corpus, tmp_path)


def test_a_catalogue_that_was_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB refuses a file that a kill has left before its first pages were written."""
    from tinyforge.data import passes

    class Killed(BaseException):
        pass

    def connect(path: str, **how: object) -> None:
        Path(path).write_bytes(bytes(4096))
        raise Killed

    path = tmp_path / "corpus.duckdb"
    with monkeypatch.context() as patch:
        patch.setattr(duckdb, "connect", connect)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a kill cleans nothing up
        with pytest.raises(Killed):
            passes.connect(1 << 28, tmp_path, path)
    assert [left.name for left in tmp_path.iterdir()] == [".partial-corpus.duckdb"]
    with passes.connect(1 << 28, tmp_path, path) as catalogue:
        catalogue.execute("CREATE TABLE a (b INTEGER)")
    with passes.connect(1 << 28, tmp_path, path) as catalogue:  # what is there stays
        assert catalogue.execute("SELECT count(*) FROM a").fetchall() == [(0,)]
    assert [left.name for left in tmp_path.iterdir()] == ["corpus.duckdb"]


@pytest.mark.parametrize("about", [{}, [], {"base": "sft", "base_sha256": "", "rank": 0, "alpha": 1, "dropout": 0}])
def test_adapters_that_name_no_base(about: object, tmp_path: Path) -> None:
    assert "does not say which adapters it holds" in fault_of(lora.noted, tmp_path, {"lora": about})


LABELS = {
    "large.jsonl": (
        b'{"text": "a", "label": 99999999999999999999}',
        "label 99999999999999999999 of example 0, expected",
    ),
    "far.jsonl": (b'{"text": "a", "label": 9000000000000}', "label 9000000000000 of example 0, expected 0 to 99"),
    "below.jsonl": (b'{"text": "a", "label": -1}', "label -1 of example 0, expected 0 to 0"),
    "bomb.jsonl.gz": (gzip.compress(bytes(30 << 20)), "unpack to more than"),
    "odd.jsonl.gz": (gzip.compress(b"text")[:10] + b"\xff" * 20, "it is damaged, get it again"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_no_classifier_has(name: str, tmp_path: Path) -> None:
    content, words = LABELS[name]
    (tmp_path / name).write_bytes(content)
    assert words in fault_of(read_labelled, tmp_path / name)


def test_a_digit_that_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\none,\u00b2\ntwo,{'9' * 5000}\n", encoding="utf-8")
    assert read_labelled(tmp_path / "a.csv").names == ("9" * 5000, "\u00b2")


def test_a_file_name_that_no_system_takes(tmp_path: Path) -> None:
    with SourceWriter(tmp_path / "source", "mine", "MIT") as writer:
        writer.add(Document("1", "some text"))
    path = tmp_path / "source" / "source.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["parquet"][0]["file"] = "x" * 5000
    path.write_text(json.dumps(content), encoding="utf-8")
    assert "is missing, but source.json lists it" in fault_of(read_source, tmp_path / "source")


@pytest.mark.parametrize("header", [b"{'descr': '<u2', (", b"\xff", b"'" * 3, b"9" * 5000])
def test_a_header_of_npy_that_python_cannot_parse(header: bytes) -> None:
    good = io.BytesIO()
    np.save(good, np.arange(3, dtype=np.uint16))
    data = good.getvalue()[:8] + struct.pack("<H", len(header)) + header
    assert "a damaged .npy file" in fault_of(read_ids, data, "ids.npy")


def test_a_report_of_no_documents() -> None:
    assert "All sources" in corpus_report.render(lambda sql: [], [])


def test_a_config_that_is_not_that_of_the_weights_takes_no_memory(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    model = small_model("llama", tokenizer.vocab_size)
    weights = named(model.buffer, model.buffer.masters, model.backend)
    config = model.config.to_dict() | {"vocab": 1 << 24, "dim": 1 << 16, "head_dim": 1 << 16}
    meta = {"kind": "pretrain", "model": "llama", "config": config, "tokenizer_hash": tokenizer.hash()}
    checkpoint.save(tmp_path, 1, weights, {"m": np.zeros(1)}, tokenizer, meta, keep=0)
    # Built for real this takes 2 ** 40 numbers.
    assert "the model expects" in fault_of(load, tmp_path, get_backend("numpy", "fp32", workers=1))


@pytest.mark.parametrize(
    ("lost", "call"),
    [
        ("kind", lambda run: checkpoint.load(run)),
        ("step", lambda run: checkpoint.load(run)),
        ("config", lambda run: checkpoint.load(run)),
        ("settings", lambda run: parse(PretrainSettings, "", ["--resume", "--out", str(run)])),
        ("elapsed", lambda run: parse(PretrainSettings, "", ["--resume", "--out", str(run)])),
        ("base", lambda run: sft.main(["--resume", "--out", str(run)])),
    ],
)
def test_meta_data_that_lack_something(tmp_path: Path, lost: str, call: Callable[[Path], object]) -> None:
    tokenizer = sentencepiece()
    model = small_model("llama", tokenizer.vocab_size)
    weights = named(model.buffer, model.buffer.masters, model.backend)
    meta = {
        "kind": "sft",
        "model": "llama",
        "config": model.config.to_dict(),
        "tokenizer_hash": tokenizer.hash(),
        "elapsed": 1.0,
        "settings": PretrainSettings().to_dict(),
        "base": {},
    }
    path = checkpoint.save(tmp_path / "run", 1, weights, {"m": np.zeros(1)}, tokenizer, meta, keep=0) / "meta.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content[lost]
    path.write_text(json.dumps(content), encoding="utf-8")
    mend_checkpoint(tmp_path)
    assert f"meta.json has no '{lost}'; use another checkpoint" in fault_of(call, tmp_path / "run")


def test_a_context_that_no_model_has() -> None:
    config = small_model("llama", 300).config
    assert "context is 16,777,216, expected at most 1,048,576" in fault_of(config.override, {"context": 1 << 24})


# --- by chaos ---------------------------------------------------------------------------------------------------------


def test_a_kill_between_the_files_of_a_download(tmp_path: Path) -> None:
    """After the renaming, before its state is removed: the next run finds the file, and must clear the rest."""
    (tmp_path / "a.txt").write_bytes(b"text")
    digest = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1"
    record = {"url": "http://127.0.0.1:9/a.txt", "bytes": 4, "sha256": digest}
    (tmp_path / "a.txt.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "a.txt.part.json").write_text("{}", encoding="utf-8")
    downloader = Downloader(Patience(attempts=1, timeout=0.1))
    assert downloader.fetch("http://127.0.0.1:9/a.txt", tmp_path / "a.txt").sha256 == digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "a.txt.json"]


def test_a_kill_while_the_last_old_checkpoint_is_removed(tmp_path: Path) -> None:
    """No save follows that would remove it."""
    doomed = tmp_path / "run" / ".partial-step-00000001"
    doomed.mkdir(parents=True)
    (doomed / "meta.json").write_text("{}", encoding="utf-8")
    with claimed(PretrainSettings(out=str(tmp_path / "run")), resume=True):
        assert not doomed.exists()


def test_a_kill_between_the_last_save_and_the_removal_of_older_ones(tmp_path: Path) -> None:
    """The run has taken all its steps: resumed, it saves nothing more."""
    (tmp_path / "text.txt").write_text("It was the best of times. " * 200, encoding="utf-8")
    out = tmp_path / "run"
    flags = (
        "--steps 2 --save-every 1 --batch-size 2 --workers 1 --backend numpy --set dim=16 heads=2 kv_heads=1 "
        "layers=1 hidden=24 context=16 mtp_heads=1 vocab=260".split()
    )
    pretrain.main(["--data", str(tmp_path / "text.txt"), "--out", str(out), "--keep", "1", *flags])
    shutil.copytree(out / "step-00000002", out / "step-00000001")
    pretrain.main(["--resume", "--out", str(out)])
    assert [path.name for path in checkpoint.steps(out)] == ["step-00000002"]


def test_a_kill_between_a_model_and_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of llama2.c: what is there already is refused, so the model must be the last that is written."""
    tokenizer, target = sentencepiece(), tmp_path / "model.bin"
    model = small_model("llama", tokenizer.vocab_size)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for function in (pretrained.llama2c, pretrained.tokenizers):
        name = next(n for n in ("write_file", "write_for_llama2c") if hasattr(function, n))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(function, name, killed)
            save_pretrained(model, tokenizer, target)
    save_pretrained(model, tokenizer, target)
    assert load_pretrained(target, model.backend)[1].hash() == tokenizer.hash()


def test_a_model_that_the_format_cannot_hold_leaves_no_tokenizer(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    model = small_model("llama", tokenizer.vocab_size, norm_eps=1e-3)
    assert "llama2.c's format has rms_norm_eps" in fault_of(save_pretrained, model, tokenizer, tmp_path / "model.bin")
    assert list(tmp_path.iterdir()) == []
