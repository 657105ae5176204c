"""safetensors files: what is written others read, what others write is read, and damage is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinyforge import tensors
from tinyforge.errors import UserError


def test_every_type_that_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = {
        "f64": rng.normal(size=(3, 5)),
        "f32": rng.normal(size=7).astype(np.float32),
        "f16": rng.normal(size=(2, 1, 3)).astype(np.float16),
        "none": np.zeros((0, 4), np.float32),
    }
    save_file(stored, tmp_path / "x.safetensors")
    found = tensors.read_header(tmp_path / "x.safetensors")
    assert found.keys() == stored.keys()
    for name, expected in stored.items():
        got = found[name].read()
        assert got.dtype == (np.float64 if name == "f64" else np.float32)
        assert got.shape == found[name].shape == expected.shape and np.array_equal(got, expected)


def test_bfloat16_both_ways(tmp_path: Path) -> None:
    """Rounded to nearest, ties to even; checked against ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the peer for bfloat16")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7F8000, 0, 1 << 31], np.uint32)
    x = np.concatenate([bits, ties]).view(np.float32)
    tensors.write(tmp_path / "x.safetensors", {"x": (x.shape, lambda: x)}, "bf16")
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the bits
        expected = x.astype(ml_dtypes.bfloat16)
    got = tensors.read_header(tmp_path / "x.safetensors")["x"].read()
    assert np.array_equal(got, expected.astype(np.float32), equal_nan=True)
    assert load_file(tmp_path / "x.safetensors")["x"].dtype == ml_dtypes.bfloat16


def test_what_is_written_the_package_reads(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(3, 4), np.ones(5, np.float32)
    tensors.write(tmp_path / "x.safetensors", {"x": (x.T.shape, lambda: x.T), "y": (y.shape, lambda: y)}, "f32")
    found = load_file(tmp_path / "x.safetensors")
    assert list(found) == ["x", "y"] and found["x"].dtype == np.float32
    assert np.array_equal(found["x"], x.T) and np.array_equal(found["y"], y)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A tensor of a gigabyte that lies in a hole of the file is listed, and the small one next to it read."""
    header = json.dumps(
        {
            "big": {"dtype": "F32", "shape": [1 << 28], "data_offsets": [0, 1 << 30]},
            "small": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 30, (1 << 30) + 4]},
        }
    )
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (1 << 30) + 4)
    assert tensors.read_header(tmp_path / "x.safetensors")["small"].read().tolist() == [0]


def test_a_file_that_is_cut_short_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(one())
    found = tensors.read_header(path)["x"]
    path.write_bytes(one()[:-1])
    with pytest.raises(UserError, match=r"x\.safetensors: it ends within x; it was whole a moment ago"):
        found.read()


def with_header(header: object, data: bytes = b"\0" * 16) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> bytes:
    return with_header({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of 0 bytes in a file of 0"),
        (b"\xff" * 64, "a header of 18446744073709551615 bytes in a file of 64"),
        (b"\x80\x02" + b"pickle" * 9, "a header of"),
        ((20).to_bytes(8, "little") + b"no JSON at all, but.", "is damaged, or not a safetensors file"),
        (with_header([1, 2]), "is damaged, or not a safetensors file"),
        (with_header({"x": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
        (one(offsets=(0, 12)), "x has shape .2, 2. of F32 in 12 bytes"),
        (one(offsets=(8, 24)), "x ends at byte"),
        (one(shape=(-2, -2)), "x has shape"),
        (one(shape=(2.0, 2)), "x has shape"),
        (one(shape=(1 << 62, 4)), "of F32 in 16 bytes"),
        (one(offsets=(16, 0)), "of F32 in -16 bytes"),
        (one(dtype=["F32"]), "is damaged"),
    ],
)
def test_a_damaged_file_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        tensors.read_header(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value) and str(tmp_path / "x.safetensors") in str(caught.value)


def test_a_type_that_is_no_float_is_refused_when_it_is_read(tmp_path: Path) -> None:
    save_file({"mask": np.ones(3, np.int64)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="mask is of type I64; supported: F64, F32, F16, BF16"):
        tensors.read_header(tmp_path / "x.safetensors")["mask"].read()
    with pytest.raises(UserError, match="cannot read .*absent.* No such file"):
        tensors.read_header(tmp_path / "absent.safetensors")


def test_codes_and_their_scales_are_one_tensor(tmp_path: Path) -> None:
    """Next to them a tensor that is only named like a scale."""
    codes, scales = np.arange(-6, 6, dtype=np.int8).reshape(2, 2, 3), np.array([1, 0.1, 3, 0], np.float32)
    stored = {
        "a": codes,
        "a_scale": scales.reshape(2, 2, 1),
        "b": np.ones(3, np.float32),
        "b_scale": np.ones(1, np.float32),
    }
    save_file(stored, tmp_path / "x.safetensors")
    found = tensors.Tensors([tmp_path / "x.safetensors"])
    assert set(found) == {"a", "b", "b_scale"} and len(found) == 3 and "a_scale" not in found
    assert found.shape("a") == (2, 2, 3) and found.shape("a_scale") is None
    assert found["a"].dtype == np.float32 and np.array_equal(found["a"], codes * scales.reshape(2, 2, 1))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "missing"),
        (np.ones(2, np.float32), r"of F32 and shape \(2,\)"),
        (np.ones((2, 3), np.float32), r"of F32 and shape \(2, 3\)"),
        (np.ones((2, 1)), r"of F64 and shape \(2, 1\)"),
        (np.ones((2, 1), np.int8), r"of I8 and shape \(2, 1\)"),
        (np.array([[1], [np.nan]], np.float32), "not finite"),
        (np.array([[-np.inf], [1]], np.float32), "not finite"),
    ],
)
def test_codes_without_good_scales_are_refused(scales: np.ndarray | None, message: str, tmp_path: Path) -> None:
    stored = {"w": np.ones((2, 3), np.int8)} | ({} if scales is None else {"w_scale": scales})
    save_file(stored, tmp_path / "x.safetensors")
    found = tensors.read_header(tmp_path / "x.safetensors")
    assert list(found) == ["w"]
    expected = rf"x\.safetensors: w is of type I8, and its scales, w_scale, are {message}; expected finite F32 of"
    with pytest.raises(UserError, match=expected) as caught:
        found["w"].read()
    assert "\n" not in str(caught.value)
