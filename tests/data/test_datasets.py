"""Data sets of the hub by name, and corpora and shards pushed there: by huggingface_hub and a local hub."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import duckdb
import pytest

pytest.importorskip("huggingface_hub", reason='names on the hub: pip install -e ".[hub]"')

from tests.data.conftest import fault_of
from tests.data.test_corpus import prose, texts_of, write_source
from tests.formats.hub_server import TOKEN, Hub
from tests.formats.test_hub import server  # noqa: F401
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.local import make_source
from tinyforge.data.shards import make_shards
from tinyforge.zoo import push

LINES = b'{"text": "one", "id": "a"}\n{"text": "two"}\n'


def test_a_data_set_is_read_by_its_name(server: Hub, tmp_path: Path) -> None:  # noqa: F811
    table = tmp_path / "t.parquet"
    duckdb.sql(f"COPY (SELECT 'row' AS text) TO '{table}' (FORMAT parquet)")
    files = {"data/train-0.jsonl.gz": gzip.compress(LINES), "data/test-0.parquet": table.read_bytes()}
    files |= {"README.md": b"# A card", "load.py": b"raise SystemExit", "dataset_infos.json": b"{}"}
    repository = server.add("owner/set", files)
    first = repository.refs["main"]
    repository.commit({"new.txt": b"newer"})
    for name, expected in {
        "hf://datasets/owner/set": {"owner/set/new.txt": "newer"},
        f"hf://datasets/owner/set@{first}": {
            "owner/set/data/test-0.parquet:0": "row",
            "a": "one",
            "owner/set/data/train-0.jsonl.gz:2": "two",
        },
        f"hf://datasets/owner/set@{first}/data/train-*": {"a": "one", "owner/set/data/train-0.jsonl.gz:2": "two"},
        f"hf://datasets/owner/set@{first}/data/test-0.parquet": {"owner/set/data/test-0.parquet:0": "row"},
    }.items():
        source = make_source(tmp_path / "out", [Path(name)])
        found = duckdb.sql(f"SELECT id, text FROM read_parquet({[str(p) for p in source.parquet]})").fetchall()
        assert dict(found) == expected
    fetched = {path for method, path in server.requests if method == "GET" and "/resolve/" in path}
    assert not any(path.endswith((".py", ".md")) for path in fetched)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf://datasets/owner", "expected hf://datasets/OWNER/NAME"),
        ("hf://models/owner/set", "expected hf://datasets/OWNER/NAME"),
        ("hf://datasets/owner/none", "datasets/owner/none"),
        ("hf://datasets/owner/set@v9", "no such revision"),
        ("hf://datasets/owner/set/*.parquet", "no file that is read matches *.parquet among a.py, b.txt"),
    ],
)
def test_a_data_set_that_is_not_there(server: Hub, tmp_path: Path, name: str, reason: str) -> None:  # noqa: F811
    server.add("owner/set", {"a.py": b"", "b.txt": b"text"})
    assert reason in fault_of(make_source, tmp_path / "out", [Path(name)])
    assert not (tmp_path / "out" / "source.json").exists()


def test_a_corpus_and_its_shards_are_pushed_and_read_again(
    server: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(0)
    source, corpus = write_source(tmp_path / "s", [prose(rng, 200) for _ in range(12)]), tmp_path / "corpus"
    build_corpus([source], corpus, Settings(val_share=0.2), workers=1)
    make_shards(corpus, tmp_path / "shards", vocab_size=300, workers=1, at_most=True)
    assert "needs a token" in fault_of(push.main, ["push", str(corpus), "owner/corpus"])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push.main(["push", str(corpus), "owner/corpus", "--private"]) == 0
    assert push.main(["push", str(tmp_path / "shards"), "owner/shards"]) == 0
    repository = server.repositories["owner/corpus"]
    pushed = repository.commits[repository.refs["main"]]
    assert repository.private and {"corpus.json", "filters.sql", "README.md"} <= pushed.keys()
    assert b"path: train/*.parquet" in pushed["README.md"] and not any(".duckdb" in name for name in pushed)
    made = make_source(tmp_path / "again", [Path("hf://datasets/owner/corpus/train")])
    assert made.documents == len(texts_of(corpus, "train"))
    shards = server.repositories["owner/shards"]
    files = shards.commits[shards.refs["main"]]
    listed = json.loads(files["manifest.json"])
    assert {"tokenizer.json", *(name for name in files if name.endswith(".bin"))} <= files.keys() and listed
    (corpus / "train" / "s-00000.parquet").unlink()
    assert "make it again" in fault_of(push.main, ["push", str(corpus), "owner/corpus"])
