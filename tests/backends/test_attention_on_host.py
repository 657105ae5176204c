"""Attention for Hopper by TMA, run on the host from the text that the GPU gets, against NumPy in float64: who copies,
who waits for whom, which rows and tiles. Whether the GPU does what its manual says is seen in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import FILES, HOPPER_BODIES, hopper, run_on_host
from tinyforge.ops import attention as reference

pytest.importorskip("cupy", reason="the launcher needs CuPy, not a GPU")
ml_dtypes = pytest.importorskip("ml_dtypes")

from tinyforge.ops import attention_cuda as launcher  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
GAP = 8  # numbers after the heads of a token
BODIES = {
    **HOPPER_BODIES,
    "__device__ inline float exp2_fast(float x)": "return exp2f(x);",
    "__device__ inline u32 pack(": "return host_bf16(low) | u32(host_bf16(high)) << 16;",
    "__device__ inline void load_four(": "memcpy(x, host_at(from), 16);",
}
MAIN = (
    FILES
    + r"""
int main() {
    const int padded = ceil_div(QUERIES, 64) * 64, pitch = (HEADS + 2 * KV_HEADS) * D + GAP;
    host_jitter = true, host_limit = 150000;
    auto qkv = from_file<bf16>("qkv"), dy = from_file<bf16>("dy");
    auto schedule = from_file<int>("schedule");
    auto bounds = from_file<int>("bounds");
    auto map = [&](const bf16 *x, int heads, int rows, int pitch, int box) {
        TensorMap m{};
        const u64 words[] = {u64(x), u64(heads * D), u64(rows), BATCH, 64, u64(box), u64(pitch)};
        memcpy(m.words, words, sizeof words);
        return m;
    };
    constexpr int of_q = PART == BACKWARD_KV ? TILE : OWN, of_k = PART == BACKWARD_KV ? OWN : TILE;
    const TensorMap q = map(qkv.data(), HEADS, QUERIES, pitch, of_q);
    const TensorMap k = map(qkv.data() + HEADS * D, KV_HEADS, KEYS, pitch, of_k);
    const TensorMap v = map(qkv.data() + (HEADS + KV_HEADS) * D, KV_HEADS, KEYS, pitch, of_k);
    const TensorMap gradient = map(dy.data(), HEADS, QUERIES, HEADS * D, of_q);
    const int blocks = BLOCKS, rounds = schedule.size() / blocks;
    const auto launch = [&](auto kernel) {
        host_launch(blocks, 1, BLOCK_THREADS, kernel);
        if (!host_boxes.empty()) host_fault("a box was never waited for");
    };
#ifdef DOCS
#define BOUNDS , bounds.data() + (PART == BACKWARD_KV ? BATCH * QUERIES : 0)
#else
#define BOUNDS
#endif
#if PART == FORWARD
    std::vector<bf16> out(BATCH * QUERIES * HEADS * D, bf16{0xffff});
    std::vector<float> lse(BATCH * HEADS * QUERIES, 0.0f / 0.0f);
    launch([&] {
        attention_fwd_tma(q, k, v, out.data(), lse.data(), schedule.data(), rounds, QUERIES, KEYS, HEADS,
                          KV_HEADS BOUNDS);
    });
    to_file("out", out), to_file("lse", lse);
#else
    auto out = from_file<bf16>("out");
    auto lse = from_file<float>("lse");
    std::vector<bf16> dqkv = PART == BACKWARD_Q ? std::vector<bf16>(qkv.size(), bf16{0xffff}) : from_file<bf16>("dqkv");
    const i64 plane = i64(QUERIES) * pitch;
#if PART == BACKWARD_Q
    std::vector<float2> stats(BATCH * HEADS * padded, float2{0.0f / 0.0f, 0.0f});
    launch([&] {
        attention_bwd_q_tma(gradient, q, k, v, dy.data(), out.data(), lse.data(), stats.data(), dqkv.data(),
                            schedule.data(), rounds, plane, pitch, QUERIES, padded, HEADS, KV_HEADS BOUNDS);
    });
    to_file("stats", stats);
#else
    auto stats = from_file<float2>("stats");
    launch([&] {
        bf16 *const dk = dqkv.data() + HEADS * D;
        attention_bwd_kv_tma(gradient, q, k, v, stats.data(), dk, dk + KV_HEADS * D, schedule.data(), rounds, plane,
                             pitch, plane, pitch, QUERIES, padded, HEADS, KV_HEADS BOUNDS);
    });
#endif
    to_file("dqkv", dqkv);
#endif
    printf("done\n");
}
"""
)
PARTS = ("FORWARD", "BACKWARD_Q", "BACKWARD_KV")


def attend(
    sizes: tuple[int, int, int, int, int],
    folder: Path,
    *,
    blocks: int = 3,
    keys: int | None = None,
    starts: Any = None,
    window: int | None = None,
    parts: tuple[str, ...] = PARTS,
    fault: tuple[str, str] | None = None,
) -> dict[str, float]:
    """Relative errors of the results. sizes: batch, queries, heads, kv heads, head size."""
    batch, queries, heads, kv_heads, dim = sizes
    keys = queries if keys is None else keys
    rng = np.random.default_rng(sum(sizes) + keys)
    qkv = rng.normal(size=(batch, keys, (heads + 2 * kv_heads) * dim + GAP)).astype(BF16)
    qkv[..., -GAP:] = np.nan
    dy = rng.normal(size=(batch, queries, heads, dim)).astype(BF16)
    packed = qkv[..., :-GAP].astype(np.float64).reshape(batch, keys, -1, dim)
    q, k, v = packed[:, :queries, :heads], packed[:, :, heads : heads + kv_heads], packed[:, :, heads + kv_heads :]
    out, lse = reference.attention_fwd(q, k, v, None, starts, True, window, None, 0.0)
    expected = {"out": out, "lse": lse}
    if keys == queries:
        gradients = np.empty_like(packed)
        views = gradients[:, :, :heads], gradients[:, :, heads : heads + kv_heads], gradients[:, :, heads + kv_heads :]
        upstream = dy.astype(np.float64)
        reference.attention_bwd(*views, upstream, q, k, v, None, starts, out, lse, True, window, None, 0.0)
        expected |= {"dq": views[0], "dk": views[1], "dv": views[2]}
    bounds = np.zeros((2, batch, queries), np.int32)
    if starts is not None:
        row = np.arange(queries)
        bounds[0] = np.maximum(starts, row - (window or queries) + 1)
        seen = (row[:, None] <= row) & (bounds[0][:, None] <= row[:, None])  # (B, key, query)
        bounds[1] = queries - seen[:, :, ::-1].argmax(-1)
    for name, array in (("qkv", qkv), ("dy", dy), ("bounds", bounds)):
        array.tofile(folder / name)
    options = () if starts is None else ("DOCS",)
    text = MAIN.replace("FOLDER", f'"{folder}/"')
    counts = {"BATCH": batch, "QUERIES": queries, "KEYS": keys, "HEADS": heads, "KV_HEADS": kv_heads, "GAP": GAP}
    before = hopper() + "#include <string>\n"
    for part in parts:
        macros = dict(launcher.listed(launcher.TMA_FILE, part, dim, options))
        macros.pop("arch")
        group, workers, tile = heads // kv_heads, int(macros["WORKERS"]), int(macros["TILE"])
        costs = launcher.unit_costs(part, queries, keys, group, workers, tile)
        table = launcher.dealt(costs, batch * kv_heads, 2, min(blocks, batch * kv_heads * len(costs)))
        table.tofile(folder / "schedule")
        defines = "".join(f"#define {name} {value}\n" for name, value in {**counts, "BLOCKS": table.shape[1]}.items())
        run_on_host(launcher.TMA_FILE, macros, BODIES, defines + text, folder, before=before, fault=fault)
    got = {"out": np.fromfile(folder / "out", BF16).reshape(out.shape)}
    got["lse"] = np.fromfile(folder / "lse", np.float32).reshape(lse.shape)
    if len(parts) > 1:
        dqkv = np.fromfile(folder / "dqkv", BF16).reshape(qkv.shape)
        assert (dqkv[..., -GAP:].view(np.uint16) == 0xFFFF).all(), "written next to the gradients"
        inner = dqkv[..., :-GAP].reshape(packed.shape)
        got |= {
            "dq": inner[:, :, :heads],
            "dk": inner[:, :, heads : heads + kv_heads],
            "dv": inner[:, :, heads + kv_heads :],
        }
    return {
        name: float(np.linalg.norm(x.astype(np.float64) - expected[name]) / np.linalg.norm(expected[name]))
        for name, x in got.items()
    }


def check(errors: dict[str, float]) -> None:
    assert all(error <= (1e-5 if name == "lse" else 6e-3) for name, error in errors.items()), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(1, 333, 2, 2, 128), (2, 197, 3, 1, 128), (1, 65, 4, 2, 96), (1, 270, 2, 2, 96), (2, 129, 6, 2, 96)]
)
def test_attention_by_tma_is_attention(sizes: tuple[int, int, int, int, int], tmp_path: Path) -> None:
    """Odd lengths, groups of 1, 2 and 3 heads, more units than blocks, workers without rows, numbers around them."""
    check(attend(sizes, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("sizes", [(2, 300, 3, 1, 128), (1, 300, 2, 2, 96), (1, 200, 6, 2, 96)])
def test_documents_and_windows(sizes: tuple[int, int, int, int, int], window: int | None, tmp_path: Path) -> None:
    """Documents of one token, within a tile, over several tiles; as many blocks as units."""
    begins = np.zeros(sizes[:2], np.int64)
    for row, at in ((0, [0, 1, 60, 64, 190]), (-1, [0, 150, 199])):
        begins[row] = 0
        begins[row, at] = at
    starts = np.maximum.accumulate(begins, 1).astype(np.int32)
    check(attend(sizes, tmp_path, starts=starts, window=window, blocks=1000))


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (70, 333), (130, 131)])
def test_a_cache_longer_than_the_queries(queries: int, keys: int, tmp_path: Path) -> None:
    check(attend((1, queries, 4, 2, 128), tmp_path, keys=keys, parts=("FORWARD",)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (("barrier_wait(ring.barrier(FIRST_EMPTY), ring.phase ^ 1);", ""), "FORWARD"),  # refilled before it was read
        (("barrier_wait(own_empty(), phase ^ 1);", ""), "FORWARD"),  # the next unit's rows too early
        (("copy_rows<OWN>(own_tile(w, 0)", "copy_rows<OWN>(own_tile(0, 0)"), "FORWARD"),  # all into one worker's place
        (("multiply_wait<1>(); // the scores; P V goes on", ""), "FORWARD"),  # exponentials of what is not there yet
        (("key + TILE > seen_by_all", "key > seen_by_all"), "FORWARD"),  # the diagonal is not masked
        (("scale_sums(sums, shrink[0], shrink[1]);", ""), "FORWARD"),  # sums under an old maximum
        (("skip(ring, all.count - part.stop);", ""), "FORWARD"),  # a worker that stops early holds the ring up
        (("step / 4 * TILE * LINE", "0"), "FORWARD"),  # the first half of a row twice
        (("(at.lane / 4 + 8 * half) * 2", "at.lane / 4 * 2"), "BACKWARD_Q"),  # another row's statistics
        (("held(ds);", "held(ds), release(ring.barrier(FIRST_EMPTY));"), "BACKWARD_Q"),  # twice given back
        (("2 * STREAMED + PAIRS);", "2 * STREAMED);"), "BACKWARD_KV"),  # statistics that nobody waits for
        (("head * D + half * 64, row", "D + half * 64, row"), "BACKWARD_KV"),  # always the same head
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_faults_of_attention_show(fault: tuple[str, str], part: str, tmp_path: Path) -> None:
    # With 64 keys before the queries, the first worker of a block has a tile less than the second.
    heads, keys = ((2, 2, 128), 594) if "skip" in fault[0] else ((3, 1, 128), 530)
    try:
        parts = PARTS[: PARTS.index(part) + 1]
        errors = attend((1, 530, *heads), tmp_path, blocks=2, keys=keys, parts=parts, fault=fault)
    except AssertionError:  # it said what was wrong, or waited for ever
        return
    names = {"FORWARD": ("out", "lse"), "BACKWARD_Q": ("dq",), "BACKWARD_KV": ("dk", "dv")}[part]
    assert not all(errors[name] <= (1e-5 if name == "lse" else 6e-3) for name in names), errors


def test_every_unit_is_dealt_out_once_and_evenly() -> None:
    """The longest first: no block is much after the others, but for the last unit that it got."""
    for part, group, columns, queries, blocks, at_once in (
        ("FORWARD", 3, 4, 16384, 132, 4),
        ("BACKWARD_KV", 1, 64, 4096, 132, 12),
        ("BACKWARD_Q", 1, 3, 200, 132, 1),
        ("BACKWARD_KV", 3, 4, 16384, 132, 1),
        ("BACKWARD_KV", 4, 32, 2048, 132, 6),
        ("FORWARD", 1, 1, 1, 132, 7),
    ):
        costs = launcher.unit_costs(part, queries, queries, group, 2, 64)
        table = launcher.dealt(costs, columns, at_once, min(blocks, columns * len(costs)))
        assert sorted(table[table >= 0]) == list(range(columns * len(costs))) and (table[0] >= 0).all()
        loads = np.where(table >= 0, np.array(costs)[table % len(costs)], 0).sum(axis=0)
        assert loads.max() <= max(max(costs), 1.06 * sum(costs) * columns / table.shape[1]), (part, queries)
