"""llama2.c's .bin: read, written, and refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.foreign import load_weights
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import llama2c
from tinyforge.formats.foreign import weights_of
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config, Llama
from tinyforge.models.nanoeuler import PRESETS, NanoEuler

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(dim=12, heads=3, kv_heads=3, layers=2, context=9, vocab=11, hidden=5)


def saved(config: Any, path: Path, kind: Any = Llama) -> Any:
    """A random model, in numbers that float32 holds, written to `path`."""
    model = kind(config, FP64)
    model.initialise(seed=1)
    model.buffer.values[...] = model.buffer.values.astype(np.float32)
    llama2c.write_file(path, weights_of(model))
    return model


@pytest.mark.parametrize("values", [{}, {"kv_heads": 1}, {"tied": False}], ids=str)
def test_a_model_survives_its_file(values: dict[str, Any], tmp_path: Path) -> None:
    model = saved(TINY.override(values), tmp_path / "model.bin")
    again = load_weights(llama2c.open_file(tmp_path / "model.bin"), FP64)
    assert again.config == model.config
    for before, after in zip(model.buffer.params, again.buffer.params, strict=True):
        assert np.array_equal(before.value, after.value), before.name


def test_the_file_is_laid_out_as_run_c_reads_it(tmp_path: Path) -> None:
    """Read by another route: every tensor at the offset that run.c computes, pairs turned as neighbours there."""
    model = saved(TINY, tmp_path / "model.bin")
    data = (tmp_path / "model.bin").read_bytes()
    assert struct.unpack("<7i", data[:28]) == (12, 5, 2, 3, 3, 11, 9)
    numbers = iter(np.frombuffer(data, "<f4", offset=28))

    def take(*shape: int) -> np.ndarray:
        return np.array([next(numbers) for _ in range(int(np.prod(shape)))]).reshape(shape)

    embedding, norm1 = take(11, 12), take(2, 12)
    wq, wk, wv, wo = (take(2, 12, 12) for _ in range(4))
    norm2, w1, w2, w3, norm = take(2, 12), take(2, 5, 12), take(2, 12, 5), take(2, 5, 12), take(12)
    cos, sin = take(9, 2), take(9, 2)
    assert next(numbers, None) is None

    def rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * gain

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(9, 3, 2, 2)
        even, odd, c, s = pairs[..., 0], pairs[..., 1], cos[:, None], sin[:, None]
        return np.stack([even * c - odd * s, even * s + odd * c], axis=-1).reshape(9, 3, 4)

    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5])
    x = embedding[ids]
    for layer in range(2):
        h = rms(x, norm1[layer])
        q, k = turned(h @ wq[layer].T), turned(h @ wk[layer].T)
        scores = np.einsum("thd,shd->hts", q, k) / 2 + np.where(np.arange(9) > np.arange(9)[:, None], -np.inf, 0)
        p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", p, (h @ wv[layer].T).reshape(9, 3, 4)).reshape(9, 12) @ wo[layer].T
        h = rms(x, norm2[layer])
        gate = h @ w1[layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w3[layer].T)) @ w2[layer].T
    expected = rms(x, norm) @ embedding.T
    # cos and sin are float32 in the file.
    np.testing.assert_allclose(model.logits(model.hidden(ids[None]))[0], expected, rtol=1e-5, atol=1e-7)


def test_nanoeuler_fits_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(PRESETS["small"], tmp_path / "small.bin", NanoEuler)
    assert "left out: the 3 later output heads" in capsys.readouterr().err
    again = load_weights(llama2c.open_file(tmp_path / "small.bin"), FP64)
    ids = np.arange(20)[None]
    np.testing.assert_allclose(again.logits(again.hidden(ids)), model.logits(model.hidden(ids)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Llama(TINY.override({"qkv_bias": True}), FP64), "has architectures .*Llama.*, the model .*Qwen2"),
        (Llama(TINY.override({"window": 3}), FP64), "has architectures .*Llama.*, the model .*Mistral"),
        (Llama(TINY.override({"norm_eps": 1e-6}), FP64), "has rms_norm_eps 1e-05, the model has 1e-06"),
        (Llama(TINY.override({"rope_theta": 500.0}), FP64), "has rope_theta 10000.0, the model has 500.0"),
        (Llama(TINY.override({"rope_scaling": "linear"}), FP64), "has rope_scaling None, the model .*linear"),
        (Llama(TINY.override({"head_dim": 6}), FP64), "has head_dim 4, the model has 6"),
        (GPT2(GPT2Config(dim=4, heads=1, layers=1, context=2, vocab=3), FP64), "has architectures"),
    ],
)
def test_a_model_that_it_cannot_hold_is_refused(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        llama2c.write_file(tmp_path / "model.bin", weights_of(model))
    assert list(tmp_path.iterdir()) == []


HEADER = (12, 5, 2, 3, 3, 11, 9)
SIZE = 28 + 4 * (11 * 12 + 2 * (12 + 4 * 144 + 12 + 3 * 60) + 12 + 2 * 9 * 2)


def changed(place: int, value: int) -> bytes:
    return struct.pack("<7i", *HEADER[:place], value, *HEADER[place + 1 :]).ljust(SIZE, b"\0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, llama2.c's header alone 28"),
        (b"\x80\x02}q\x00." * 9, "is a pickle, which can run code when it is read; supported: llama2.c's .bin"),
        (b"PK\x03\x04" * 9, "is a pickle"),
        (b"24ka" + b"\x01\0\0\0" * 7, "is of llama2.c's version 1 or 2; supported: version 0"),
        (changed(0, -12), "its header says dim -12, expected 1 to 65536"),
        (changed(1, 0), "its header says hidden 0"),
        (changed(2, 1 << 30), "its header says layers 1073741824"),
        (changed(5, -(1 << 31)), "its header says vocab 2147483648"),
        (changed(3, 5), "dim 12, 5 heads, 3 key/value heads, which do not divide"),
        (changed(4, 2), "dim 12, 3 heads, 2 key/value heads, which do not divide"),
        (changed(3, 12), "dim 12, 12 heads"),
        (changed(6, 10), rf"has {SIZE:,} bytes, its header expects {SIZE + 16:,}"),
        (changed(0, 12)[:-1], rf"has {SIZE - 1:,} bytes, its header expects {SIZE:,}"),
        (changed(0, 12) + b"\0", rf"has {SIZE + 1:,} bytes"),
    ],
)
def test_a_faulty_file_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        llama2c.open_file(tmp_path / "model.bin")
    assert "\n" not in str(caught.value) and str(tmp_path / "model.bin") in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*absent.bin: No such file"):
        llama2c.open_file(tmp_path / "absent.bin")
    with pytest.raises(UserError, match="cannot write .*model.bin: No such file"):
        llama2c.write_file(tmp_path / "absent" / "model.bin", weights_of(Llama(TINY, FP64)))
