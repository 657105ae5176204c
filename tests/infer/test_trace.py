"""What `inspect` shows is what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint, inspect
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.infer.trace import trace, weights_of
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Param
from tinyforge.ops import Attention, SinkAttention
from tinyforge.params import named, with_buffer
from tinyforge.tokenizers import Tokenizer

TOKENIZER = Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"])
CONFIG = Config(
    dim=16,
    heads=4,
    kv_heads=2,
    layers=2,
    context=30,
    vocab=TOKENIZER.vocab_size,
    mtp_heads=2,
    hidden=10,
    mtp_weights=(1, 0.5),
)
IDS = [5, 200, 256, 7, 7, 90]


@pytest.fixture
def model() -> NanoEuler:
    model = NanoEuler(CONFIG, get_backend("numpy", "fp64", workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 8
    return model


def test_the_probabilities_are_the_models(model: NanoEuler) -> None:
    h = model.hidden(np.array([IDS]))
    for k in range(CONFIG.mtp_heads):
        logits = model.heads.logits(h, k)[0]
        p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
        np.testing.assert_allclose(trace(model, IDS).probabilities[:, k], p, rtol=1e-10)


def test_a_sink_takes_its_share_of_the_weights() -> None:
    backend, rng = get_backend("numpy", "fp64", workers=1), np.random.default_rng(0)
    op = with_buffer(SinkAttention(Param("sinks", (4,)), 2, backend, window=3), backend, rng)
    op.sinks.value[...] = [3, 0, -2, 9]
    qkv = rng.normal(size=(7, 8, 6))
    mixed = np.einsum("hts,shd->thd", weights_of(op, qkv), qkv[:, 6:].repeat(2, axis=1))
    np.testing.assert_allclose(mixed, op.forward(qkv[None])[0], rtol=1e-10, atol=1e-12)


def test_the_attention_is_what_mixes_the_values(model: NanoEuler, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    attention = type(model.blocks[0].attention.attention)
    real = attention.forward

    def listen(self: object, qkv: np.ndarray, *rest: object, **options: object) -> np.ndarray:
        out = real(self, qkv, *rest, **options)
        seen.append((qkv[0, :, CONFIG.heads + CONFIG.kv_heads :].copy(), out[0]))
        return out

    monkeypatch.setattr(attention, "forward", listen)
    found = np.stack(trace(model, IDS).attention)
    assert found.shape == (CONFIG.layers, CONFIG.heads, len(IDS), len(IDS))
    assert not np.triu(found, 1).any()
    for weights, (values, out) in zip(found, seen, strict=True):
        mixed = np.einsum("hts,shd->thd", weights, values.repeat(CONFIG.heads // CONFIG.kv_heads, axis=1))
        np.testing.assert_allclose(mixed, out.reshape(mixed.shape), rtol=1e-10)


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 3}, {"causal": False}])
def test_what_a_query_does_not_see_gets_no_weight(options: dict[str, Any]) -> None:
    backend = get_backend("numpy", "fp64", workers=1)
    op, qkv = Attention(4, 2, backend, **options), np.random.default_rng(0).normal(size=(1, 7, 8, 4))
    mixed = np.einsum("hts,shd->thd", weights_of(op, qkv[0]), qkv[0, :, 6:].repeat(2, axis=1))
    np.testing.assert_allclose(mixed, op.forward(qkv)[0], rtol=1e-10)


def test_the_command(tmp_path: Path, model: NanoEuler, capsys: pytest.CaptureFixture[str]) -> None:
    weights = named(model.buffer, model.buffer.values, model.backend)
    meta = {"kind": "pretrain", "config": CONFIG.to_dict(), "tokenizer_hash": TOKENIZER.hash()}
    path = str(checkpoint.save(tmp_path, 1, weights, {"m": np.zeros(1)}, TOKENIZER, meta, keep=0))
    picture = tmp_path / "a.png"
    text = ["$hi\x1b", "--checkpoint", path, "--top", "2"]
    assert inspect.main([*text, "--out", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "   1  'hi'\n" in shown and "   2  '\\x1b'\n" in shown and "*'hi' " in shown
    assert shown.count("head 1 (+2):") == 3 and "\x1b" not in shown
    for name in ("absent/a.png", "a.nothing"):
        with pytest.raises(UserError, match="cannot write .*; choose another --out, a .png file"):
            inspect.main([*text, "--out", str(tmp_path / name)])
    for wrong in ("", "x" * 31):
        with pytest.raises(UserError, match=r"tokens, expected 1 to 30"):
            inspect.main([wrong, *text[1:]])
    with pytest.raises(UserError, match="--top is 0"):
        inspect.main([*text[:3], "--top", "0"])


def test_a_chat_model_reads_a_question_in_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's line: each head of the shipped model is sure of its part of the answer, "in the yard"."""
    monkeypatch.setattr(inspect, "plot_attention", lambda *how: None)  # a label for each token takes seconds
    asked = ["Zobert is in the yard. Where is Zobert?", "--checkpoint", "small", "--out", str(tmp_path / "a.png")]
    assert inspect.main([*asked, "--top", "1"]) == 0
    templated = capsys.readouterr().out
    last = templated.splitlines()[-5:-1]
    assert [line.split("'")[1] for line in last] == ["in", " the", " y", "ar"]
    assert inspect.main([*asked, "--top", "1", "--template", "plain"]) == 0
    assert len(capsys.readouterr().out) < 0.5 * len(templated)
