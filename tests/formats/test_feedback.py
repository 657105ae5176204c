"""Rounding to four bits by a text: every map is seen, the outputs are closer, and int4 reads what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.formats import convert, feedback, load, save_pretrained
from tinyforge.formats.feedback import round_to_text
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.tokenizers import Tokenizer

FP32 = get_backend("numpy", "fp32", workers=1)
SIZES: dict[str, Any] = {"dim": 64, "heads": 4, "layers": 2, "context": 64, "vocab": 300}
KINDS: dict[str, tuple[type, Any]] = {
    "nanoeuler": (NanoEuler, Config(**SIZES, kv_heads=2, hidden=96)),
    "llama": (Llama, LlamaConfig(**SIZES, kv_heads=2, hidden=96, qkv_bias=True)),
    "gpt2": (GPT2, GPT2Config(**SIZES)),
    "moe": (MoE, MoEConfig(**SIZES, kv_heads=2)),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(documents("train", 50, 0), 300, ["<|endoftext|>", "</s>"])


def make(name: str) -> Any:
    kind, config = KINDS[name]
    model = kind(config, FP32)
    model.initialise(1)
    return model


def text(seed: int) -> str:
    return "\n".join(documents("train", 30, seed))


@pytest.mark.parametrize("name", KINDS)
def test_every_map_is_seen(name: str, tokenizer: Tokenizer) -> None:
    """Routers are not among them, and no op keeps its watch."""
    model = make(name)
    assert {op.name.rpartition(".")[2] for op in feedback._maps(model)} >= {"qkv", "out"}
    assert all(op.weight.shape[0] > 8 for op in feedback._maps(model))
    seen = {op: np.zeros((op.weight.shape[1],) * 2, np.float32) for op in feedback._maps(model)}
    ids = np.array([[tokenizer.encode(text(0))[:64]]])
    before = {op: set(vars(op)) for op in seen}
    feedback._sum_moments(model, ids, seen)
    assert all(moments.diagonal().min() > 0 for moments in seen.values())
    assert all(set(vars(op)) == before[op] for op in seen)


@pytest.mark.parametrize("name", ["nanoeuler", "llama", "gpt2"])
def test_outputs_are_closer_and_int4_keeps_them(
    name: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another text; plain rounding is the control. One matrix at a time is as good, and not the same."""
    pytest.importorskip("gguf", reason="the format that int4 reads")
    expected, plain = make(name), make(name)
    ids = np.array([tokenizer.encode(text(1))[:64]])
    outputs = expected.hidden(ids)

    def distance(model: Any) -> float:
        return float(np.square(model.hidden(ids) - outputs).sum())

    for op in feedback._maps(plain):
        op.weight.value[...] = feedback.round_with_feedback(op.weight.value, np.eye(op.weight.shape[1]))
    given = tokenizer.encode(text(0))
    first, again, by_one = make(name), make(name), make(name)
    assert round_to_text(first, given) == round_to_text(again, given) == min(feedback.TOKENS, len(given)) // 64 * 64
    monkeypatch.setattr(feedback, "MEMORY", 0)
    round_to_text(by_one, given)
    assert np.array_equal(first.buffer.values, again.buffer.values)
    assert not np.array_equal(first.buffer.values, by_one.buffer.values)
    assert max(distance(first), distance(by_one)) < 0.8 * distance(plain)
    save_pretrained(first, tokenizer, tmp_path / "m.gguf", dtype="q4_0")
    kept = {p.name: p for p in load(tmp_path / "m.gguf", FP32, weights="int4").model.params()}
    for op in feedback._maps(first):
        assert kept[op.weight.name].weights == "int4"
        assert np.array_equal(kept[op.weight.name].value, op.weight.value), op.name


def test_the_command(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="it writes the file")
    save_pretrained(make("llama"), tokenizer, tmp_path / "hf")
    (tmp_path / "text.txt").write_text(text(0), encoding="utf-8")
    (tmp_path / "short.txt").write_text("Once.", encoding="utf-8")
    command = [str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--calibrate", str(tmp_path / "text.txt")]
    with pytest.raises(UserError, match="--calibrate is for --type q4_0, got f32; leave out --calibrate"):
        convert.main(command)
    with pytest.raises(UserError, match="--calibrate: the text has 5 tokens, expected at least 64; give more text"):
        convert.main([*command[:-1], str(tmp_path / "short.txt"), "--type", "q4_0"])
    assert not (tmp_path / "m.gguf").exists()
    assert convert.main([*command, "--type", "q4_0"]) == 0
    assert "rounded by " in capsys.readouterr().out
    assert load(tmp_path / "m.gguf", FP32, weights="int4").model.blocks[0].attention.qkv.weight.weights == "int4"
