"""The WebGPU backend: arrays as NumPy's, kernels in WGSL as the NumPy bodies, training as on NumPy.

On a machine without a GPU, Debian's mesa-vulkan-drivers bring an adapter in software that has 64-bit floats.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import chat, checkpoint, gradcheck, ops
from tinyforge.backends import Backend, get_backend
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.op import Stash
from tinyforge.optim.adamw import AdamWConfig, adamw_, clip_factor, square_sums, step_rates
from tinyforge.recipes import evaluate, pretrain, sft
from tinyforge.rng import Stream
from tinyforge.train import metrics

pytest.importorskip("wgpu", reason='the package of WebGPU is missing: pip install -e ".[webgpu]"')

from tinyforge.backends import webgpu, webgpu_array
from tinyforge.backends.webgpu_device import Device, pipeline_of, unrolled
from tinyforge.backends.webgpu_gemm import gemm

if not webgpu.adapters():
    pytest.skip("no adapter: apt-get install mesa-vulkan-drivers", allow_module_level=True)

WITH_WGSL = [
    ops.Add, ops.AddLayerNorm, ops.AddRMSNorm, ops.Attention, ops.CappedCrossEntropy, ops.CrossEntropy, ops.Dropout,
    ops.Embedding, ops.Fork, ops.GELU, ops.GELULinear, ops.GeGLU, ops.LayerNorm, ops.LearnedPositions, ops.Linear,
    ops.LinearCrossEntropy, ops.LinearSwiGLU, ops.LoRA, ops.MixtureOfExperts, ops.ReLU, ops.RMSNorm, ops.RoPE,
    ops.RouterLosses, ops.Scale, ops.SiLU, ops.Sigmoid, ops.Softmax, ops.SwiGLU, ops.SwiGLULinear, ops.Tanh,
    ops.TopKRouter,
]  # fmt: skip
HOST = get_backend("numpy", "fp64", workers=1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def exact() -> Backend:
    try:
        return get_backend("webgpu", "fp64")
    except UserError as error:
        pytest.skip(f"no 64-bit floats to check with: {error}")


@pytest.fixture(scope="module")
def single() -> Backend:
    return get_backend("webgpu", "fp32")


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_views_are_numpys(exact: Backend, rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, 7, 6))
    g = exact.asarray(x)
    for view in (
        lambda a: a,
        lambda a: a[1:, ::2, None],
        lambda a: a[2],
        lambda a: a[..., -1],
        lambda a: a[::-1, 3:1:-1],
        lambda a: a.swapaxes(0, 2),
        lambda a: a.T[1],
        lambda a: a.transpose(1, 0, 2).reshape(7, -1),
        lambda a: a[:, 2:4].reshape(-1),
        lambda a: a[5:],
    ):
        np.testing.assert_array_equal(view(g).get(), view(x))
        np.testing.assert_array_equal(view(g).copy().get(), view(x))


def test_a_reshaped_view_is_a_view_where_numpys_is(exact: Backend, rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 6, 8))
    for view, shape in (
        (lambda a: a[:, :3], (4, 24)),
        (lambda a: a[:, 2:4, :], (2, 2, 16)),
        (lambda a: a[1:, :, 2:4], (18, 2)),
        (lambda a: a[1:, :, 2:4], (3, 1, 6, 2, 1)),
        (lambda a: a[::2, 1:4], (2, 3, 2, 4)),
        (lambda a: a[:, :, 1:3], (4, 12)),
        (lambda a: a.swapaxes(0, 1), (24, 8)),
        (lambda a: a.swapaxes(0, 1)[:, :, :4], (6, 4, 2, 2)),
        (lambda a: a[:, 1], (2, 2, 8)),
    ):
        host, g = x.copy(), exact.asarray(x)
        for array in (host, g):
            view(array).reshape(shape)[...] = 7.0
        np.testing.assert_array_equal(g.get(), host)


def test_arithmetic_is_numpys(exact: Backend, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4, 5)) + 3
    g = exact.asarray(x)
    for formula in (
        lambda a: a + a[0],
        lambda a: 2.0 - a[:, :1] * a,
        lambda a: np.float64(3) * a / a[1:2],
        lambda a: -a + 1,
        lambda a: 1.0 / a[:, 2],
    ):
        np.testing.assert_array_equal(formula(g).get(), formula(x))


def test_comparisons_are_numpys(exact: Backend, rng: np.random.Generator) -> None:
    x, y = rng.integers(-2, 3, (2, 5, 4)) + 0.0
    a, b = exact.asarray(x), exact.asarray(y)
    for got, expected in ((a, x), (a[:, 1], x[:, 1])):
        other = b[: got.ndim * 5, 1] if got.ndim == 1 else b
        right = exact.to_numpy(other)
        for one, same in ((got < other, expected < right), (got <= 1, expected <= 1), (got > other, expected > right)):
            np.testing.assert_array_equal(one.get(), same)
        np.testing.assert_array_equal(((got >= 0) & (got != other)).get(), (expected >= 0) & (expected != right))
        np.testing.assert_array_equal(((got == other) | (got == 2)).get(), (expected == right) | (expected == 2))
        np.testing.assert_array_equal((~(got < other)).get(), ~(expected < right))


def test_writes_are_numpys(exact: Backend, rng: np.random.Generator) -> None:
    x = rng.normal(size=(6, 7))
    g = exact.asarray(x)
    for array in (x, g):
        array[:, 2:4] = array[:, 0:2]
        array[1] += array[2]
        array[..., ::3] *= 2.0
        array[4, 1:] = 0.5
        array[5] = np.arange(7.0) if array is x else exact.asarray(np.arange(7.0))
        array[3] = array[3][::-1]
    np.testing.assert_array_equal(g.get(), x)
    assert float(g[0, 0]) == x[0, 0] and g[2].tolist() == x[2].tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("shape", [(5, 2), (3, 3), (1,), (2, 7)])
def test_writes_of_bytes_are_numpys(exact: Backend, shape: tuple[int, ...], dtype: type) -> None:
    """WebGPU writes words of four bytes, and an array may end or be cut within one."""
    x = np.zeros(shape, dtype)
    g = exact.zeros(shape, np.dtype(dtype))
    np.testing.assert_array_equal(g.get(), x)
    for array in (x, g):
        array[0] = 7
        array[..., -1] = 9
        array[::-1][0] = np.arange(math.prod(shape[1:]), dtype=dtype).reshape(shape[1:])
    np.testing.assert_array_equal(g.get(), x)


def test_integers_and_their_copy_on_the_host(exact: Backend) -> None:
    ids = exact.asarray(np.arange(12).reshape(3, 4))
    assert ids.dtype == np.int32 and ids.block.host is not None
    ids[1] = 7
    assert ids.block.host is None and ids[1].tolist() == [7, 7, 7, 7]
    np.testing.assert_array_equal((ids - ids[0]).get(), ids.get() - ids.get()[0])


def test_what_is_called_of_numpy_between_kernels(exact: Any, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 5))
    for xp, z in ((np, x), (exact.xp, exact.asarray(x))):
        found = z - xp.log(xp.exp(z).sum(axis=-1, keepdims=True))
        both = xp.concatenate([found, z])[xp.arange(6), xp.zeros(6, np.int32)]
        np.testing.assert_allclose(
            exact.to_numpy(both), np.concatenate([x - np.log(np.exp(x).sum(1, keepdims=True)), x])[:, 0]
        )
    exact.synchronize()


def test_freed_memory_is_given_out_again(single: Any) -> None:
    held = [single.device.held]
    for _ in range(20):
        x = single.zeros((1000, 100))
        x += 1.0
        assert float(x.sum()) == 100_000
        held.append(single.device.held)
    assert held[-1] == held[2]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (70, 65, 33), (64, 64, 16), (3, 130, 5), (5, 4, 0)])
@pytest.mark.parametrize(("across_a", "across_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_products(
    exact: Backend, rng: np.random.Generator, m: int, n: int, k: int, across_a: bool, across_b: bool
) -> None:
    a, b, c, bias = (
        rng.normal(size=s) for s in ((k, m) if across_a else (m, k), (n, k) if across_b else (k, n), (m, n), (n,))
    )
    out = exact.asarray(c)
    how = {"transpose_a": across_a, "transpose_b": across_b}
    gemm(exact.asarray(a), exact.asarray(b), out, accumulate=True, bias=exact.asarray(bias), **how)
    expected = (a.T if across_a else a) @ (b.T if across_b else b)
    np.testing.assert_allclose(out.get(), expected + c + bias, rtol=0, atol=1e-13)
    plain = gemm(exact.asarray(a), exact.asarray(b), add=exact.asarray(c), **how)
    np.testing.assert_allclose(plain.get(), expected + c, rtol=0, atol=1e-13)


def test_a_product_of_large_tiles(single: Backend, rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(1100, 9)).astype(np.float32), rng.normal(size=(9, 1000)).astype(np.float32)
    np.testing.assert_allclose(gemm(single.asarray(a), single.asarray(b)).get(), a @ b, rtol=0, atol=1e-5)


# --- ops --------------------------------------------------------------------------------------------------------------


def passes(kind: Any, backend: Backend) -> Iterator[tuple[list[np.ndarray], float]]:
    """All results of forward and backward, with dropout, of each of the op's cases."""
    for number, (op, inputs) in enumerate(kind.cases(backend, np.random.default_rng(0))):
        stash = Stash(noise=Stream(7, "test"))
        y = op.forward(*inputs, stash=stash)
        outputs = y if isinstance(y, tuple) else (y,)
        rng = np.random.default_rng(number)
        dy = tuple(backend.asarray(rng.normal(size=part.shape)) for part in outputs)
        dx = op.backward(dy if isinstance(y, tuple) else dy[0], stash)
        gradients = [p.grad for p in op.params() if p.grad is not None]
        found = [*outputs, *(dx if isinstance(dx, tuple) else (dx,)), *gradients]
        yield [backend.to_numpy(x) for x in found if x is not None]


@pytest.mark.parametrize("kind", WITH_WGSL)
def test_an_op_computes_what_numpy_computes(kind: Any, exact: Backend) -> None:
    for got, expected in zip(passes(kind, exact), passes(kind, HOST), strict=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", WITH_WGSL)
def test_float32_errs_at_most_twice_as_much_as_numpy(kind: Any, single: Backend) -> None:
    """Against float64, by the root mean square over all arrays of their relative errors, since cancellation makes some
    a matter of luck; some units in the last place are allowed to both."""
    low = get_backend("numpy", "fp32", workers=1)
    squares, count = np.zeros(2), 0
    # Attention's last case is for NumPy alone in float32.
    for got, near, expected in zip(passes(kind, single), passes(kind, low), passes(kind, HOST), strict=False):
        for a, b, c in zip(got, near, expected, strict=True):
            if scale := float(np.linalg.norm(c)):
                squares += [(np.linalg.norm(x - c) / scale) ** 2 for x in (a, b)]
                count += 1
    errors = np.sqrt(squares / count)
    assert errors[0] <= 2 * max(errors[1], 1.2e-7), errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_WGSL)
def test_the_ledger(kind: Any, exact: Backend) -> None:
    ledger = gradcheck.examine(kind, exact, seed=int(np.random.default_rng().integers(1000)), directions=1)
    assert not ledger.refused and max(row.error for row in ledger.rows) < gradcheck.TOLERANCE


def test_a_kernel_without_wgsl_runs_on_the_host_and_says_so_once(
    exact: Backend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webgpu_array, "_told", set())
    for got, expected in zip(passes(ops.AveragePool2d, exact), passes(ops.AveragePool2d, HOST), strict=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    said = capsys.readouterr().err.splitlines()
    assert "webgpu: average_pool_fwd has no WGSL yet: it runs on the host" in said and len(set(said)) == len(said)


@pytest.mark.parametrize("cautious", [False, True])
def test_adamw_and_the_norm(cautious: bool, exact: Any, rng: np.random.Generator) -> None:
    config, size = AdamWConfig(cautious=cautious), 1000
    start = [rng.normal(size=size) for _ in range(3)] + [rng.random(size)]
    results = []
    for backend in (HOST, exact):
        weights, grads, m, v = (backend.asarray(x.copy()) for x in start)
        sums = backend.zeros((2, 1), np.dtype(np.float64))
        square_sums.bind(backend)(sums, grads, backend.asarray(np.array([[0, 300], [300, size]]), np.dtype(np.int64)))
        norm, factor = clip_factor.bind(backend)(sums.reshape(-1), 1.0, 0.5)
        rates = backend.asarray(step_rates(3, 1e-2, config))
        adamw_.bind(backend)(weights, weights, m, v, grads, rates[0], factor, config)
        results.append([norm, factor, *(backend.to_numpy(x) for x in (weights, m, v))])
    for got, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_marked_loops_are_written_out_and_others_stay() -> None:
    text = """const SIDE = 2;
fn f() {
    for (var i = 0u; i < SIDE; i++) {  // unrolled
        for (var j = 0u; j < 3; j++) {  // unrolled
            sum[i][j] += inner[j];
        }
    }
    for (var i = 0u; i < SIDE; i++) {
        rest += i;
    }
}
"""
    written = unrolled(text)
    assert re.findall(r"sum.*;", written) == [f"sum[{i}u][{j}u] += inner[{j}u];" for i in range(2) for j in range(3)]
    assert written.endswith(text[text.rindex("    for (") :]) and written.count("for (") == 1
    assert written.count("{") == written.count("}")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_without_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webgpu, "adapters", lambda: [])
    with pytest.raises(UserError, match="no adapter is here; install a driver .* or use --backend numpy"):
        webgpu.WebGPUBackend("fp32")


def test_an_adapter_that_is_not_there() -> None:
    with pytest.raises(UserError, match="--device is 9, adapters are 0 to"):
        webgpu.WebGPUBackend("fp32", device=9)


def test_a_precision_that_it_has_not() -> None:
    with pytest.raises(UserError, match="precision 'bf16' is not available on backend webgpu; use one of: fp64, fp32"):
        webgpu.WebGPUBackend("bf16")


def test_an_array_beyond_the_adapters_limits(single: Any) -> None:
    with pytest.raises(UserError, match="MiB, and the adapter binds at most .* use a smaller batch or model"):
        single.empty((single.device.most // 4 + 1,))


def test_a_device_that_is_lost_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and what was saved before goes on on another backend."""
    flush, count = Device.flush, iter(range(1000))

    def lost(device: Device) -> None:
        if next(count) == 150:
            device.handle.destroy()
        flush(device)

    monkeypatch.setattr(Device, "flush", lost)
    for made in (webgpu._device, pipeline_of):
        made.cache_clear()
    try:
        with pytest.raises(UserError, match="the adapter was lost, .* training with --resume, or use --backend numpy"):
            run(tmp_path / "run", "webgpu", "--save-every", "5")
    finally:
        monkeypatch.undo()
        webgpu._device.cache_clear()
    assert next(count) > 150 and checkpoint.latest(tmp_path / "run") is not None
    assert len(run(tmp_path / "run", "numpy", "--resume")) == 20


def test_a_launch_with_other_arrays_or_sizes(exact: Any) -> None:
    x = exact.zeros((4, 4))
    with pytest.raises(KeyError, match="add_columns takes no array called z; it declares out, x"):
        webgpu_array.launch("ops/columns.wgsl", "add_columns", (1,), {"out": x[0], "z": x}, (4, 4))
    with pytest.raises(ValueError, match="expected rows: u32, width: u32"):
        webgpu_array.launch("ops/columns.wgsl", "add_columns", (1,), {"out": x[0], "x": x}, (4,))
    with pytest.raises(ValueError, match="x is a strided view"):
        webgpu_array.launch("ops/columns.wgsl", "add_columns", (1,), {"out": x[0], "x": x.T}, (4, 4))


# --- training ---------------------------------------------------------------------------------------------------------

TINY = "--set dim=32 heads=2 kv_heads=1 layers=2 hidden=48 context=32 --batch-size 4 --seq-len 32 --seed 3 --workers 1"


def run(out: Path, backend: str, *more: str) -> list[float]:
    """The losses of a run of 20 steps, or of one that is resumed. All held-out text is evaluated: it is little."""
    text = out.parent / "text.txt"
    text.write_text("\n\n".join(documents("train", 100, 0)), encoding="utf-8")
    given = [*TINY.split(), "--data", str(text), "--tokenizer", "chars", "--steps", "20", "--save-every", "10"]
    new = [] if "--resume" in more else given
    assert pretrain.main([*new, "--backend", backend, "--out", str(out), *more]) == 0
    return [row["loss"] for row in metrics.read(out / "metrics.jsonl") if "loss" in row]


def weights(out: Path) -> bytes:
    return (checkpoint.latest(out) / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_has_numpys_losses_repeats_to_the_bit_and_goes_on_elsewhere(tmp_path: Path) -> None:
    on_host = run(tmp_path / "numpy", "numpy")
    here = [run(tmp_path / name, "webgpu") for name in ("one", "two")]
    assert np.abs(np.subtract(here[0], on_host)).max() < 1e-4 and here[0] == here[1]
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    for name, backend in (("two", "numpy"), ("numpy", "webgpu")):
        shutil.rmtree(checkpoint.latest(tmp_path / name))
        assert np.abs(np.subtract(run(tmp_path / name, backend, "--resume"), on_host)).max() < 1e-4


@pytest.mark.slow
def test_chat_tuning_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = ["--checkpoint", "small", "--prompt", "How much is 13 plus 2?", "--temperature", "0"]
    assert chat.main([*question, "--backend", "webgpu"]) == 0
    assert capsys.readouterr().out.strip() == "13 14 15, so 15"
    records = [{"instruction": f"How much is 1{i} plus 2?", "input": "", "output": f"1{i + 2}"} for i in range(40)]
    (tmp_path / "records.json").write_text(json.dumps(records))
    tuned = ["--base", "small", "--data", str(tmp_path / "records.json"), "--out", str(tmp_path / "sft")]
    assert sft.main([*tuned, "--steps", "2", "--batch-size", "2", "--backend", "webgpu"]) == 0
    text = tmp_path / "text.txt"
    text.write_text("Lena is in the yard with a red cup. Lena has a big dog.\n\n" * 20)
    sizes = "--prompts 1 --seeds 1 --max-tokens 4 --sentences 2 --seq-len 64".split()
    figures = []
    for backend in ("numpy", "webgpu"):
        given = [
            "--checkpoint",
            str(tmp_path / "sft"),
            "--data",
            str(text),
            "--instructions",
            tuned[3],
            *sizes,
            "--backend",
            backend,
        ]
        assert evaluate.main([*given, "--json", str(tmp_path / f"{backend}.json")]) == 0
        figures.append(json.loads((tmp_path / f"{backend}.json").read_text())["text"]["bits_per_byte"])
    np.testing.assert_allclose(*figures, rtol=1e-4)


# --- decoding, as the browser's page launches it ----------------------------------------------------------------------


def test_the_kernels_of_a_decoder(exact: Any, rng: np.random.Generator) -> None:
    """Odd counts of rows, two positions, a cache of more positions than a group has threads."""
    dim, hidden, heads, kv_heads, size, context, start, rows = 24, 10, 6, 2, 10, 300, 280, 2
    wide = (heads + 2 * kv_heads) * size
    sizes = (1e-5, start, 0)

    def matrix(outer: int, inner: int) -> tuple[Any, Any, np.ndarray]:
        codes, scales = rng.integers(-127, 128, (outer, inner), np.int8), rng.uniform(0.002, 0.01, outer)
        return (
            exact.asarray(codes.view(np.uint32), np.dtype(np.uint32)),
            exact.asarray(scales),
            codes * scales[:, None],
        )

    def launch(
        entry: str, outputs: int, grid: tuple[int, int], arrays: dict[str, Any], *widths: int, **flags: Any
    ) -> Any:
        y = exact.asarray(arrays.pop("y", np.zeros(outputs)))
        numbers = (*sizes[:2], flags.pop("skip", 0), *widths, heads, kv_heads, size, context)
        given, of_codes = {"y": y, **arrays}, {"word": "u32"}
        webgpu_array.launch("infer/decode.wgsl", entry, grid, given, numbers, flags, aliases=of_codes)
        return exact.to_numpy(y)

    x, gain = rng.normal(size=(rows, dim)), rng.normal(size=dim)
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain
    given = {"x": exact.asarray(x), "gain": exact.asarray(gain)}

    words, scales, w = matrix(2 * hidden, dim)
    got = launch(
        "gate_up", rows * hidden, (2, rows), {**given, "words": words, "scales": scales}, dim, hidden, NORM=True
    )
    gate, up = np.split(h @ w.T, 2, axis=-1)
    np.testing.assert_allclose(got.reshape(rows, -1), gate / (1 + np.exp(-gate)) * up, rtol=1e-8)

    words, scales, w = matrix(wide - 1, dim)
    known = {**given, "words": words, "scales": scales}
    before, count = rng.normal(size=(rows, wide - 1)), (-(-wide // 16), rows)
    got = launch("project", 0, count, {**known, "y": before.reshape(-1)}, dim, wide - 1, ADD=True)
    np.testing.assert_allclose(got.reshape(rows, -1), before + x @ w.T, rtol=1e-8)
    got = launch("project", wide - 1, (count[0], 1), dict(known), dim, wide - 1, NORM=True, skip=1)
    np.testing.assert_allclose(got, h[1] @ w.T, rtol=1e-8)

    words, scales, w = matrix(wide, dim)
    keys, values = rng.normal(size=(2, kv_heads, context, size))
    angles = rng.normal(size=(context, size // 2))
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    cache = {"keys": exact.asarray(keys), "values": exact.asarray(values)}
    known = {**given, "words": words, "scales": scales, "turns": exact.asarray(turns)}
    got = launch("qkv", rows * heads * size, (-(-wide // 16), rows), {**known, **cache}, dim, 0, NORM=True)
    made = (h @ w.T).reshape(rows, heads + 2 * kv_heads, size)
    first, second = np.split(made[:, : heads + kv_heads], 2, axis=-1)
    cos, sin = (f(angles[start : start + rows])[:, None] for f in (np.cos, np.sin))
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    q = turned[:, :heads] / np.sqrt(size)
    keys[:, start : start + rows] = turned[:, heads:].swapaxes(0, 1)
    values[:, start : start + rows] = made[:, heads + kv_heads :].swapaxes(0, 1)
    np.testing.assert_allclose(got.reshape(q.shape), q, rtol=1e-8, atol=1e-10)
    for name, expected in (("keys", keys), ("values", values)):
        np.testing.assert_allclose(exact.to_numpy(cache[name]), expected, rtol=1e-8, atol=1e-10)

    got = launch("attend", rows * heads * size, (heads, rows), {**cache, "q": exact.asarray(q)}, 0, 0)
    scores = np.einsum("rkgd,ksd->rkgs", q.reshape(rows, kv_heads, -1, size), keys)
    scores[np.broadcast_to(np.arange(context) > start + np.arange(rows)[:, None, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("rkgs,ksd->rkgd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(got, expected.reshape(-1), rtol=1e-8)


def objectives() -> list[Any]:
    from tests.train import test_alignment as alignment

    batch = alignment.pairs(4, 3, alignment.model(2)).of(range(4))
    found: list[Any] = [(objective, batch) for objective in alignment.PREFERENCES]
    return found + [(objective, alignment.replies(3, 4, 5)) for objective in alignment.POLICIES]


def test_objectives_weigh_as_on_numpy(exact: Backend, rng: np.random.Generator) -> None:
    for objective, batch in objectives():
        nll = rng.random(batch.targets.shape) * (batch.targets >= 0)
        expected = objective.weigh(nll, batch, objective.count(batch), HOST)
        found = objective.weigh(exact.asarray(nll), batch, objective.count(batch), exact)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(exact.to_numpy(a), b, rtol=1e-12, atol=1e-12, err_msg=str(objective))
