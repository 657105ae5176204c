"""A model with more ids than its tokenizer knows: those stand for no text. And a checkpoint is hashed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import chat, checkpoint, inspect
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import load, newest_run
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.tokenizers import Tokenizer

TOKENIZER = Tokenizer([], ["<|endoftext|>", "</s>"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run under runs/ whose model has 300 ids, of which it likes the last, and a tokenizer of 258."""
    monkeypatch.chdir(tmp_path)
    backend, spec = get_backend("numpy", "fp32", workers=1), find_model("nanoeuler")
    shape = {"dim": 32, "heads": 4, "kv_heads": 2, "layers": 1, "hidden": 48, "context": 64, "vocab": 300}
    config = spec.config.from_dict(shape)
    model: Any = spec.build(config, backend)
    model.initialise(0)
    weights = named(model.buffer, model.buffer.masters, backend)
    for name, value in weights.items():
        if value.shape[:1] == (300,) and "embed" not in name:
            value[299] = 100 * np.sign(value[5])
    meta = {
        "kind": "pretrain",
        "model": spec.name,
        "config": config.to_dict(),
        "tokenizer_hash": TOKENIZER.hash(),
        "settings": {},
        "elapsed": 1.0,
    }
    checkpoint.save(Path("runs/a"), 1, weights, {}, TOKENIZER, meta, 1)
    return Path("runs/a")


def test_such_ids_are_read_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(run, get_backend("numpy", "fp32", workers=1))
    assert loaded.tokenizer.vocab_size == 258 and loaded.tokenizer.decode([72, 299, 105]) == "Hi"
    assert loaded.tokenizer.byte_lengths[299] == 0
    with pytest.raises(UserError, match="token id 300 is not in the vocabulary"):
        loaded.tokenizer.decode([300])
    for drafts in ("0", "3"):
        flags = ["--prompt", "hello", "--temperature", "5", "--max-tokens", "60", "--drafts", drafts]
        assert chat.main(["--checkpoint", str(run), *flags]) == 0
    assert inspect.main(["hello", "--checkpoint", str(run), "--top", "300"]) == 0


def test_a_newest_run_is_hashed_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    sha256_of = checkpoint.sha256_of
    monkeypatch.setattr(checkpoint, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    assert chat.main(["--prompt", "hello", "--max-tokens", "1"]) == 0
    assert sorted(hashed) == sorted({*hashed}) and "model.safetensors" in hashed
    # What is touched afterwards is looked at again.
    found = newest_run(("pretrain",))
    assert found is not None
    weights = found / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"model.safetensors has SHA-256"):
        checkpoint.load(found)
