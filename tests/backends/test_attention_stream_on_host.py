"""The kernels of attention_stream.cuh, run on the host from the text that the GPU gets, against NumPy in float64: which
rows, tiles and masks, with all three kinds of products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import FILES, HOPPER_BODIES, INLINE, hopper, run_on_host
from tests.backends.test_decode_single_on_host import BEFORE as PRODUCTS
from tinyforge.ops import attention as reference

pytest.importorskip("cupy", reason="the launcher needs CuPy, not a GPU")
ml_dtypes = pytest.importorskip("ml_dtypes")

from tinyforge.ops import attention_cuda as launcher  # noqa: E402

pytestmark = pytest.mark.slow

PARTS = ("FORWARD", "BACKWARD_Q", "BACKWARD_KV")
BODIES = {
    **HOPPER_BODIES,
    f"{INLINE}void copy_async_8(": "host_copy(to, from, valid, 8);",
    f"{INLINE}void load_matrix(": "host_load_matrix(x, from);",
    f"{INLINE}void load_matrix_transposed(": "host_load_matrix_transposed(x, from);",
    f"{INLINE}void multiply_add(": "host_multiply_add(sum, a0, a1, a2, a3, b0, b1);",
    "__device__ inline float exp2_fast(float x)": "return exp2f(x);",
    "__device__ inline void load_four(": "memcpy(x, host_at(from), 16);",
    "__device__ inline uint4 load_chunk(": "uint4 x; memcpy(&x, host_at(from), 16); return x;",
    "__device__ inline void store_word(": "memcpy(host_at(to), &x, 4);",
}
COPIES = ("copy_async", "copy_commit", "copy_wait", "narrow")
WGMMA_BODIES = {head for head in HOPPER_BODIES if not any(f" {name}(" in head for name in COPIES)}
BF16_BODIES = {"__device__ inline u32 pack(": "return host_bf16(low) | u32(host_bf16(high)) << 16;"}
TF32_BODIES = {
    "__device__ inline u32 rounded(float x)": "return host_tf32(x);",
    "__device__ inline void load_two(": "memcpy(&x, host_at(from), 4), memcpy(&y, host_at(from + 4), 4);",
    "__device__ inline void store_rounded(": "for (int i = 0; i < 4; i++) { const u32 y = host_tf32(x[i]); "
    "memcpy(host_at(to + 4 * i), &y, 4); }",
    "__device__ inline void multiply_add(float (&c)[4]": "host_multiply_tf32(c, a, b0, b1);",
}
BEFORE = r"""
#include <string>
static u32 host_tf32(float x) {  // to nearest, ties to even: 10 bits of mantissa
    const u32 bits = __float_as_uint(x);
    return bits + 0xfff + (bits >> 13 & 1) & ~0x1fffu;
}
static void host_multiply_tf32(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto &all = operands[current / 32];
    const int lane = threadIdx.x % 32;
    const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(all[lane], own, sizeof own);
    warps[current / 32].wait(32);
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 8; k++)
            sum[e] += __uint_as_float(all[row * 4 + k % 4][e / 2 + k / 4 * 2]) *
                      __uint_as_float(all[column * 4 + k % 4][4 + k / 4]);
    }
    warps[current / 32].wait(32);
}
"""
MAIN = (
    FILES
    + r"""
int main() {
    const i64 pitch = (HEADS + 2 * KV_HEADS) * D, plane = KEYS * pitch;
    host_jitter = true, host_limit = 400000;
    auto qkv = from_file<Number>("qkv"), dy = from_file<Number>("dy"), out = from_file<Number>("out");
    auto dqkv = from_file<Number>("dqkv");
    auto lse = from_file<float>("lse");
    auto stats = from_file<float2>("stats");
    auto bounds = from_file<int>("bounds"), lengths = from_file<int>("lengths");
    auto angles = from_file<float>("angles");
    const Number *const q = qkv.data(), *const k = q + HEADS * D, *const v = k + KV_HEADS * D;
    Number *const dq = dqkv.data(), *const dk = dq + HEADS * D, *const dv = dk + KV_HEADS * D;
    const int *const own_bounds = bounds.data() + (PART == BACKWARD_KV ? BATCH * QUERIES : 0);
    const int rows = ceil_div(QUERIES, OWN) * (PART == BACKWARD_KV ? 1 : HEADS / KV_HEADS);
    host_launch(BATCH * KV_HEADS, ceil_div(rows, WORKERS), THREADS, [&] {
#if PART == FORWARD
        ENTRY(attention_fwd)(q, k, v, out.data(), lse.data(), plane, pitch, plane, pitch, plane, pitch, QUERIES, KEYS,
                             HEADS, KV_HEADS MORE);
#elif PART == BACKWARD_Q
        ENTRY(attention_bwd_q)(dy.data(), q, k, v, out.data(), lse.data(), stats.data(), dq, plane, pitch, plane,
                               pitch, plane, pitch, plane, pitch, QUERIES, HEADS, KV_HEADS MORE);
#else
        ENTRY(attention_bwd_kv)(dy.data(), q, k, v, stats.data(), dk, dv, plane, pitch, plane, pitch, plane, pitch,
                                plane, pitch, plane, pitch, QUERIES, HEADS, KV_HEADS MORE);
#endif
    });
    to_file("out", out), to_file("dqkv", dqkv), to_file("lse", lse), to_file("stats", stats);
}
"""
)


def attend(
    file: str,
    sizes: tuple[int, int, int, int, int],
    folder: Path,
    *,
    keys: int | None = None,
    starts: Any = None,
    band: tuple[int, int, list[int]] | None = None,
    turn: bool = False,
    drop: bool = False,
    fault: tuple[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """The results of all kernels. sizes: batch, queries, heads, kv heads, head size. band: back, forth, lengths."""
    batch, queries, heads, kv_heads, dim = sizes
    keys = queries if keys is None else keys
    tf32 = file == launcher.TF32_FILE
    number = np.dtype(np.float32 if tf32 else ml_dtypes.bfloat16)
    rng = np.random.default_rng(sum(sizes) + keys)
    qkv = rng.normal(size=(batch, keys, heads + 2 * kv_heads, dim)).astype(number)
    bounds = np.zeros((2, batch, queries), np.int32)
    if starts is not None:
        row = np.arange(queries)
        bounds[0] = starts
        seen = (row[:, None] <= row) & (bounds[0][:, None] <= row[:, None])  # (B, key, query)
        bounds[1] = queries - seen[:, :, ::-1].argmax(-1)
    nothing = np.full(batch * heads * queries, np.nan, np.float32)
    files = {
        "qkv": qkv,
        "dy": rng.normal(size=(batch, queries, heads, dim)).astype(number),
        "out": np.full((batch, queries, heads, dim), np.nan, number),
        "dqkv": np.full(qkv.shape, np.nan, number),
        "lse": nothing,
        "stats": np.stack([nothing, nothing], -1),
        "bounds": bounds,
        "lengths": np.array(band[2] if band else [], np.int32),
        "angles": rng.uniform(-1, 1, (2, queries, dim // 2)).astype(np.float32),
    }
    for name, array in files.items():
        array.tofile(folder / name)
    more = [f", {band[0]}, {band[1]}, lengths.data()"] if band else []
    more += [", own_bounds"] if starts is not None else []
    more += [", nullptr, 123, 456, 858993459, 1.25f"] if drop else []
    options = tuple(n for n, on in (("BAND", band), ("DOCS", starts is not None), ("DROP", drop)) if on)
    for part in PARTS if keys == queries else PARTS[:1]:
        turned = turn and part != "FORWARD"
        macros = dict(launcher.listed(file, part, dim, (*options, "TURN") if turned else options))
        macros.pop("arch", None)
        rope = [f", angles.data(), angles.data() + {queries * dim // 2}"] if turned else []
        counts = {"BATCH": batch, "QUERIES": queries, "KEYS": keys, "HEADS": heads, "KV_HEADS": kv_heads}
        counts |= {"MORE": "".join(more + rope), "FOLDER": f'"{folder}/"'}
        defines = "".join(f"#define {name} {value}\n" for name, value in counts.items())
        bodies = {**BODIES, **(TF32_BODIES if tf32 else BF16_BODIES)}
        if file != launcher.WGMMA_FILE:
            bodies = {head: body for head, body in bodies.items() if head not in WGMMA_BODIES}
        before = hopper() + PRODUCTS + BEFORE
        run_on_host(file, macros, bodies, defines + MAIN, folder, before=before, fault=fault)
    return {name: np.fromfile(folder / name, array.dtype).reshape(array.shape) for name, array in files.items()}


FILES = [
    (launcher.FILE, 32),
    (launcher.FILE, 64),
    (launcher.FILE, 128),
    (launcher.TF32_FILE, 32),
    (launcher.TF32_FILE, 128),
    (launcher.WGMMA_FILE, 64),
]


def errors(
    got: dict[str, np.ndarray],
    heads: int,
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: Any = None,
    starts: Any = None,
    turn: bool = False,
) -> dict[str, float]:
    """Relative errors of what `attend` returns."""
    qkv, dy = got["qkv"].astype(np.float64), got["dy"].astype(np.float64)
    kv_heads, queries = (qkv.shape[2] - heads) // 2, dy.shape[1]
    q, k, v = (part.copy() for part in np.split(qkv, (heads, heads + kv_heads), axis=2))
    q = q[:, :queries]
    out, lse = reference.attention_fwd(q, k, v, lengths, starts, causal, window, None, 0.0)
    pairs = [("out", got["out"], out), ("lse", got["lse"].reshape(lse.shape), lse)]
    if k.shape[1] == queries:
        gradients = [np.empty_like(x) for x in (q, k, v)]
        reference.attention_bwd(*gradients, dy, q, k, v, lengths, starts, out, lse, causal, window, None, 0.0)
        if turn:
            cosines, sines = got["angles"][:, None, :, None].astype(np.float64)
            for x in gradients[:2]:
                left, right = np.split(x.copy(), 2, axis=-1)
                x[...] = np.concatenate([left * cosines - right * sines, right * cosines + left * sines], -1)
        parts = np.split(got["dqkv"], (heads, heads + kv_heads), axis=2)
        pairs += zip(("dq", "dk", "dv"), parts, gradients, strict=True)
    return {
        name: float(np.linalg.norm(x.astype(np.float64) - expected) / np.linalg.norm(expected))
        for name, x, expected in pairs
    }


def check(found: dict[str, float]) -> None:
    assert all(error <= (2e-4 if name == "lse" else 6e-3) for name, error in found.items()), found


def some_starts(batch: int, queries: int) -> np.ndarray:
    """Documents of one token, within a tile, and over several tiles."""
    begins = np.zeros((batch, queries), np.int64)
    for row, at in ((0, [0, 1, 60, 64, 130]), (-1, [0, 100, queries - 1])):
        begins[row] = 0
        begins[row, at] = at
    return np.maximum.accumulate(begins, 1).astype(np.int32)


@pytest.mark.parametrize(("file", "dim"), FILES)
def test_causal_attention_and_documents(file: str, dim: int, tmp_path: Path) -> None:
    """Odd lengths, groups of heads, and rows that no worker has."""
    check(errors(attend(file, (2, 150, 3, 1, dim), tmp_path), 3))
    starts = some_starts(2, 170)
    check(errors(attend(file, (2, 170, 2, 1, dim), tmp_path, starts=starts), 2, starts=starts))


@pytest.mark.parametrize(("file", "dim"), [(launcher.FILE, 64), (launcher.TF32_FILE, 64), (launcher.WGMMA_FILE, 64)])
def test_a_cache_longer_than_the_queries(file: str, dim: int, tmp_path: Path) -> None:
    check(errors(attend(file, (1, 70, 4, 2, dim), tmp_path, keys=133), 4))


@pytest.mark.parametrize("dim", [64, 128])
def test_windows_and_padding(dim: int, tmp_path: Path) -> None:
    check(errors(attend(launcher.FILE, (1, 150, 2, 1, dim), tmp_path, band=(29, 0, [150])), 2, window=30))
    lengths = np.array([150, 77], np.int32)
    got = attend(launcher.FILE, (2, 150, 2, 1, dim), tmp_path, band=(150, 150, lengths.tolist()))
    check(errors(got, 2, causal=False, lengths=lengths))


def test_gradients_before_rope(tmp_path: Path) -> None:
    check(errors(attend(launcher.WGMMA_FILE, (1, 150, 2, 1, 64), tmp_path, turn=True), 2, turn=True))


@pytest.mark.parametrize("file", [launcher.FILE, launcher.TF32_FILE, launcher.WGMMA_FILE])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("key + PIECE > stop_of_first", "key > stop_of_first"),  # the diagonal is not masked
        ("scale_row(sums, m, half, shrink, at.lane);", ""),  # sums under an old maximum
        ("(stage ^ 1) * 2 * TILE_BYTES, k,", "stage * 2 * TILE_BYTES, k,"),  # a tile is overwritten
        ("query < first + OWN - 1", "false"),  # the diagonal of P^T is not masked
        ("load_next(stage ^ 1)", "load_next(stage)"),
    ],
)
def test_faults_show(file: str, right: str, wrong: str, tmp_path: Path) -> None:
    found = errors(attend(file, (1, 200, 2, 1, 64), tmp_path, fault=(right, wrong)), 2)
    assert not all(error <= 2e-2 for error in found.values()), found
