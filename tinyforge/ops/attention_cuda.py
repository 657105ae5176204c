"""Attention on a CUDA GPU: chooses a kernel, its grid and its shared memory, and launches it.

float64 and float32 run the plain kernels of attention.cu; float32 in precision tf32 runs those of attention_tf32.cu;
bfloat16 on a Hopper runs those of attention_hopper.cu or attention_tma.cu, elsewhere the tensor-core kernels of
attention.cu; head sizes that these lack run the plain kernels. All of them take rows of several documents. Windows,
bidirectional attention and dropout are in attention.cu only, and dropout together with one of the other two in its
plain kernels only. In rows of several documents a window just moves their bounds, so on a Hopper every causal window
without dropout runs as one in rows of a single document. The heads of these files list the tile sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from heapq import heapreplace
from typing import Any, NamedTuple

import cupy as cp
import ml_dtypes
import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load, variants
from tinyforge.backends.cupy_backend import (
    CupyBackend,
    contiguous,
    free_processors,
    has_wgmma,
    key_arguments,
    or_null,
    processors,
    scalar,
)
from tinyforge.backends.tensor_map import distances, encoded
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops import attention
from tinyforge.ops.rope_cuda import rope, tables

FILE, WGMMA_FILE, TF32_FILE = "ops/attention.cu", "ops/attention_hopper.cu", "ops/attention_tf32.cu"
TMA_FILE = "ops/attention_tma.cu"
INSTRUCTIONS = {FILE: "mma", WGMMA_FILE: "wgmma", TF32_FILE: "tf32"}
ENTRIES = {"FORWARD": "attention_fwd", "BACKWARD_Q": "attention_bwd_q", "BACKWARD_KV": "attention_bwd_kv"}
HEAD_SIZES, WGMMA_HEAD_SIZES, TMA_HEAD_SIZES = (32, 64, 128), (64,), (96, 128)
OPTIONS = ("BAND", "DOCS", "DROP", "TURN")
BOUNDS_FILE, BOUNDS_THREADS = "ops/attention_documents.cu", 256
LINE, BARRIERS = (constant(TMA_FILE, name) for name in ("LINE", "BARRIERS"))
OWN = 64  # rows of a worker of TMA_FILE
CACHED = 24 << 20  # bytes that all blocks stream at a time: half of the L2 cache
START = 2  # the cost of starting and ending a unit of work, in tiles
UNEVEN = 1.04  # how much more work than the average a block may get, for the sake of the cache
PLAIN_LIMIT = 128
PLAIN_THREADS = 256
BF16 = np.dtype(ml_dtypes.bfloat16)


class Launch(NamedTuple):
    """A kernel and what its launches have in common.

    rows: queries or keys per worker. workers: per block; a plain kernel's block is one worker.
    """

    kernel: Callable[..., None]
    rows: int
    workers: int
    threads: int
    shared: int

    def __call__(self, columns: int, rows: int, group: int, *args: Any) -> None:
        """columns: pairs of a sequence and a head; rows: queries or keys of each, in `group` heads."""
        blocks = -(-(-(-rows // self.rows) * group) // self.workers)
        self.kernel((columns, blocks), (self.threads,), args, shared_mem=self.shared)


@cache
def plain(entry: str, dtype: Any, dim: int, tiles: int, options: tuple[str, ...], drop: int = 1) -> Launch:
    """tiles: of rows of q, k, v or dO that a block holds at a time, besides one of scores. options: those of OPTIONS
    that are on. drop: the macro DROP, if it is on."""
    if not 1 <= dim <= PLAIN_LIMIT:
        raise UserError(f"attention on cupy: head size {dim}, wanted 1 to {PLAIN_LIMIT}; use that, or --backend numpy")
    # 64 rows where they fit the 99 KB of shared memory of the smallest GPUs.
    itemsize = wide(dtype).itemsize  # in shared memory
    rows = 64 if itemsize == 4 and dim <= 64 else 32
    vector = 16 // itemsize
    line = -(-dim // 16) * 16 + vector
    shared = (tiles * rows * line + rows * (rows + vector)) * itemsize
    on = {name: drop if name == "DROP" else 1 for name in options}
    kernel = load(FILE, entry, shared, REAL=scalar(dtype), HEAD_DIM=dim, ROWS=rows, **on)
    return Launch(kernel, rows, 1, PLAIN_THREADS, shared)


def tensor_core_file(dtype: Any, dim: int, tf32: bool, options: tuple[str, ...]) -> str | None:
    """The file whose tensor-core kernels run, None for the plain kernels."""
    everywhere = set(options) <= {"DOCS"}
    if dtype == BF16 and everywhere and has_wgmma():
        if dim in TMA_HEAD_SIZES:
            return TMA_FILE
        if dim in WGMMA_HEAD_SIZES:
            return WGMMA_FILE
    if dim not in HEAD_SIZES or {"BAND", "DROP"} <= set(options):
        return None
    if dtype == BF16:
        return FILE
    return TF32_FILE if tf32 and dtype.itemsize == 4 and everywhere else None


@cache
def tensor_core(file: str, part: str, dim: int, options: tuple[str, ...], drop: int = 1) -> Launch:
    """The kernel of a part (a key of ENTRIES) in a file from `tensor_core_file` other than TMA_FILE. drop: see `plain`."""
    macros = listed(file, part, dim, options)
    return tensor_core_launch(file, part, {**macros, "DROP": drop} if "DROP" in macros else macros)


def listed(file: str, part: str, dim: int, options: tuple[str, ...]) -> dict[str, str]:
    """The macros that the head of the file lists for a kernel."""
    found = (v for v in variants(file) if v.get("PART") == part and v["HEAD_DIM"] == str(dim))
    return next(v for v in found if options == tuple(name for name in OPTIONS if name in v))


def tensor_core_launch(file: str, part: str, macros: Mapping[str, int | str]) -> Launch:
    warps = 4 if file == WGMMA_FILE else 1  # of a worker
    itemsize = 4 if file == TF32_FILE else 2
    workers, tile, dim = int(macros["WORKERS"]), int(macros["TILE"]), int(macros["HEAD_DIM"])
    own = 16 * int(macros.get("ROW_TILES", 1)) * warps
    # Each worker's own rows of one or two tensors, and two stages of two streamed tensors; in backward also a pair of
    # statistics for each query that is held or streamed.
    rows = workers * own * (1 if part == "FORWARD" else 2) + 4 * tile
    pairs = {"FORWARD": 0, "BACKWARD_Q": workers * own, "BACKWARD_KV": 2 * tile}[part]
    shared = rows * dim * itemsize + pairs * 8
    kernel = load(file, f"{ENTRIES[part]}_{INSTRUCTIONS[file]}", shared, **macros)
    return Launch(kernel, own, workers, workers * warps * 32, shared)


class TmaKernel(NamedTuple):
    """A kernel of TMA_FILE. workers: per block, each with OWN rows. docs: whether rows hold several documents."""

    kernel: Callable[..., None]
    part: str
    workers: int
    tile: int
    shared: int
    docs: bool

    def __call__(self, k: Array, queries: int, heads: int, before: Sequence[Any], behind: Sequence[Any]) -> None:
        """before, behind: the arguments before `schedule` and behind `rounds`."""
        batch, keys, kv_heads, dim = k.shape
        columns, group = batch * kv_heads, heads // kv_heads
        streamed = 2 * dim * k.itemsize * (group * queries if self.part == "BACKWARD_KV" else keys)
        costs = unit_costs(self.part, queries, keys, group, self.workers, self.tile)
        at_once, units = max(1, CACHED // streamed), columns * len(costs)
        # With documents the cost of a unit is unknown here: each unit is a block, scheduled by the hardware.
        blocks = units if self.docs else min(free_processors(), units)
        if units <= processors() or len(set(costs)) == 1:  # no choice: one schedule for every length of a cache
            costs, at_once = (1,) * len(costs), columns
        table = schedule(costs, columns, at_once, blocks, cp.cuda.Device().id)
        args = (*before, table, len(table), *behind)
        self.kernel((blocks,), ((self.workers + 1) * 128,), args, shared_mem=self.shared)


@cache
def tma_kernel(part: str, dim: int, options: tuple[str, ...]) -> TmaKernel:
    macros = listed(TMA_FILE, part, dim, options)
    workers, tile, stages = (int(macros[name]) for name in ("WORKERS", "TILE", "STAGES"))
    lines = -(-dim // 64) * LINE  # of a row
    pairs = tile * 8 if part == "BACKWARD_KV" else 0
    shared = workers * (1 if part == "FORWARD" else 2) * OWN * lines + stages * (2 * tile * lines + pairs) + BARRIERS
    kernel = load(TMA_FILE, f"{ENTRIES[part]}_tma", shared, **macros)
    return TmaKernel(kernel, part, workers, tile, shared, "DOCS" in options)


@lru_cache(1024)
def unit_costs(part: str, queries: int, keys: int, group: int, workers: int, tile: int) -> tuple[int, ...]:
    """The cost, in tiles, of each unit of work of a sequence and kv head."""
    if part == "BACKWARD_KV":
        firsts = range(0, queries, workers * OWN)
        return tuple(START + group * -(-(queries - first // tile * tile) // tile) for first in firsts)
    items = -(-queries // OWN) * group
    seen = (min(queries, (item + workers - 1) // group * OWN + OWN) for item in range(0, items, workers))
    return tuple(START - (queries - keys - last) // tile for last in seen)


def dealt(costs: Sequence[int], columns: int, at_once: int, blocks: int) -> np.ndarray:
    """The units of each block, (rounds, blocks) int32, -1 for none.

    The units of `at_once` columns at a time are dealt out, the longest first, each to the block that is free first. If
    some blocks would finish late, more columns are dealt out at a time.
    """
    loads: list[tuple[int, int]] = [(0, block) for block in range(blocks)]  # a heap
    mine: list[list[int]] = [[] for _ in range(blocks)]
    longest_first = sorted(range(len(costs)), key=lambda row: -costs[row])
    for start in range(0, columns, at_once):
        for row in longest_first:
            for column in range(start, min(start + at_once, columns)):
                load, block = loads[0]
                heapreplace(loads, (load + costs[row], block))
                mine[block].append(column * len(costs) + row)
    if at_once < columns and max(loads)[0] * blocks > UNEVEN * sum(costs) * columns:
        return dealt(costs, columns, 2 * at_once, blocks)
    table = np.full((max(map(len, mine)), blocks), -1, np.int32)
    for block, units in enumerate(mine):
        table[: len(units), block] = units
    return table


@lru_cache(1024)
def schedule(costs: tuple[int, ...], columns: int, at_once: int, blocks: int, device: int) -> Array:
    """`dealt`, on the device; cached for each shape."""
    return cp.asarray(dealt(costs, columns, at_once, blocks))


def rows_map(x: Array, rows: int) -> Any:
    """The tensor map of (B, T, H, D), heads side by side, for boxes of `rows` rows and 64 numbers of each."""
    batch, tokens, heads, dim = x.shape
    shape = (batch, tokens, heads * dim)
    steps = distances(shape, (*x.strides[:2], x.itemsize), x.itemsize)
    if steps is None:
        raise ValueError(f"attention: rows at strides {x.strides}, wanted some that do not overlap")
    return encoded(x.data.ptr, shape, steps, (1, rows, 64))


def strides(name: str, x: Array) -> tuple[int, int]:
    """Strides in elements between sequences and between tokens. Raises ValueError for layouts that kernels cannot read."""
    batch, tokens, heads, dim = x.shape
    size = x.itemsize
    sequence, token, head, one = x.strides
    if one != size or (heads > 1 and head != dim * size):
        raise ValueError(f"attention: {name} has strides {x.strides}, wanted heads side by side: {dim * size}, {size}")
    if dim * size % 16 == 0 and (x.data.ptr | (token if tokens > 1 else 0) | (sequence if batch > 1 else 0)) % 16:
        raise ValueError(f"attention: {name} at {x.data.ptr:#x} with strides {x.strides}, wanted multiples of 16 bytes")
    if tokens * token >= size << 31:
        raise ValueError(f"attention: {name} spans {tokens * token} bytes a sequence, wanted less than {size << 31}")
    return sequence // size, token // size


def band_of(
    causal: bool, window: int | None, keys: int, lengths: Array | None, starts: Array | None
) -> tuple[Any, ...]:
    """The arguments (back, forth, lengths) of the BAND kernels: a query sees the keys from `back` before its position
    to `forth` after it, but no padding. Empty for the causal kernels, and if the documents' bounds include the window.
    """
    if not causal:
        return keys, keys, or_null(lengths)
    return () if window is None or window >= keys or starts is not None else (window - 1, 0, or_null(None))


def starts_for(
    q: Array, keys: int, causal: bool, window: int | None, starts: Array | None, key: Key | None
) -> Array | None:
    """starts; or starts of a single document per row, if that lets Hopper's kernels compute a window."""
    batch, queries, _, dim = q.shape
    alone = starts is None and causal and key is None and keys == queries and window is not None and window < keys
    if alone and tensor_core_file(q.dtype, dim, False, ("DOCS",)) in (WGMMA_FILE, TMA_FILE):
        return cp.zeros((batch, queries), np.int32)
    return starts


def checked_starts(starts: Array, batch: int, queries: int, keys: int) -> Array:
    """starts of documents, checked and contiguous."""
    if starts.dtype != np.int32 or starts.shape != (batch, queries) or keys != queries:
        raise ValueError(
            f"attention: starts are {starts.dtype} of shape {starts.shape}, {keys} keys; wanted int32 of "
            f"shape {(batch, queries)}, and as many keys as queries"
        )
    return contiguous(starts)


def document_bounds(starts: Array, window: int | None) -> Array:
    """(2, B, T) int32: the first key that each query sees, and one past the last query that sees each key."""
    length = starts.shape[1]
    bounds = cp.empty((2, *starts.shape), starts.dtype)
    sizes = (starts.size, length, length if window is None else min(window, length))
    launch = load(BOUNDS_FILE, "document_bounds", THREADS=BOUNDS_THREADS)
    launch((-(-starts.size // BOUNDS_THREADS),), (BOUNDS_THREADS,), (bounds, starts, *map(np.int32, sizes)))
    return bounds


def drop_of(key: Key | None, rate: float, dtype: Any) -> tuple[Any, ...]:
    """The arguments (words, key0, key1, threshold, scale) of the DROP kernels; none without a key."""
    if key is None:
        return ()
    return (*key_arguments(key), np.uint32(int(rate * 2**32)), wide(dtype).type(1.0 / (1.0 - rate)))


def drop_macro(key: Key | None) -> int:
    """The macro DROP: 2 for kernels that read the key from memory, which takes more registers."""
    return 1 if key is None or isinstance(key, tuple) else 2


def options_of(band: tuple[Any, ...], docs: bool, drop: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(name for name, on in zip(OPTIONS, (band, docs, drop), strict=False) if on)


@attention.attention_fwd.on("cupy")
def attention_fwd(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    *,
    backend: CupyBackend,
) -> tuple[Array, Array]:
    """q: (B, T, Hq, D); k, v: (B, S, Hkv, D), S >= T; starts: (B, T); returns o: (B, T, Hq, D), lse: (B, Hq, T)."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    out = cp.empty(q.shape, q.dtype)
    lse = cp.empty((batch, heads, queries), wide(q.dtype))
    if not out.size:
        return out, lse
    docs: tuple[Array, ...] = ()
    starts = starts_for(q, keys, causal, window, starts, key)
    if starts is not None:
        starts = checked_starts(starts, batch, queries, keys)
        docs = (starts if window is None else document_bounds(starts, window)[0],)
    lengths = lengths if lengths is None else contiguous(lengths)
    band, drop = band_of(causal, window, keys, lengths, starts), drop_of(key, rate, q.dtype)
    options, macro = options_of(band, bool(docs), drop), drop_macro(key)
    sizes = (queries, keys, heads, kv_heads, *band, *docs, *drop)
    args = (q, k, v, out, lse, *strides("q", q), *strides("k", k), *strides("v", v), *sizes)
    file = tensor_core_file(q.dtype, dim, backend.tf32, options)
    if file == TMA_FILE:
        fwd = tma_kernel("FORWARD", dim, options)
        maps = rows_map(q, OWN), rows_map(k, fwd.tile), rows_map(v, fwd.tile)
        fwd(k, queries, heads, (*maps, out, lse), sizes)
    elif file:
        tensor_core(file, "FORWARD", dim, options, macro)(batch * kv_heads, queries, heads // kv_heads, *args)
    else:
        plain("attention_fwd_plain", q.dtype, dim, 3, options, macro)(batch * heads, queries, 1, *args)
    return out, lse


@attention.attention_bwd.on("cupy")
def attention_bwd(
    dq: Array,
    dk: Array,
    dv: Array,
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    *,
    backend: CupyBackend,
) -> None:
    """Writes dq, dk, dv (views of a packed dqkv, shapes of q, k, v)."""
    backward(dq, dk, dv, dy, q, k, v, lengths, starts, out, lse, causal, window, key, rate, (), backend)


def backward(
    dq: Array,
    dk: Array,
    dv: Array,
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    turn: tuple[Array, ...],
    backend: CupyBackend,
) -> bool:
    """As attention_bwd. turn: the cosines and sines of RoPE's backward, for dq and dk; returns whether the kernels have
    applied it."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if keys != queries:
        raise ValueError(f"attention_bwd: {queries} queries and {keys} keys, wanted as many: decoding has no backward")
    if not out.size:
        return True
    dy = cp.ascontiguousarray(dy)
    inputs = (*strides("q", q), *strides("k", k), *strides("v", v))
    of_queries: tuple[Array, ...] = ()
    of_keys: tuple[Array, ...] = ()
    starts = starts_for(q, keys, causal, window, starts, key)
    if starts is not None:
        bounds = document_bounds(checked_starts(starts, batch, queries, keys), window)
        of_queries, of_keys = (bounds[0],), (bounds[1],)
    lengths = lengths if lengths is None else contiguous(lengths)
    band, drop = band_of(causal, window, keys, lengths, starts), drop_of(key, rate, q.dtype)
    options, macro = options_of(band, starts is not None, drop), drop_macro(key)
    file = tensor_core_file(q.dtype, dim, backend.tf32, options)
    padded = -(-queries // OWN) * OWN if file == TMA_FILE else queries
    stats = cp.empty((batch, heads, padded, 2), lse.dtype)
    outputs = strides("dq", dq), strides("dk", dk), strides("dv", dv)
    if file == TMA_FILE:
        strides("dy", dy)
        sizes = (queries, padded, heads, kv_heads)
        of_q, of_kv = tma_kernel("BACKWARD_Q", dim, options), tma_kernel("BACKWARD_KV", dim, options)
        maps = [rows_map(x, rows) for x, rows in ((dy, OWN), (q, OWN), (k, of_q.tile), (v, of_q.tile))]
        of_q(k, queries, heads, (*maps, dy, out, lse, stats, dq), (*outputs[0], *sizes, *of_queries))
        maps = [rows_map(x, rows) for x, rows in ((dy, of_kv.tile), (q, of_kv.tile), (k, OWN), (v, OWN))]
        of_kv(k, queries, heads, (*maps, stats, dk, dv), (*outputs[1], *outputs[2], *sizes, *of_keys))
        return False
    turn = turn if file == WGMMA_FILE else ()
    sizes = (queries, heads, kv_heads, *band)
    q_args = (dy, q, k, v, out, lse, stats, dq, *inputs, *outputs[0], *sizes, *of_queries, *drop, *turn)
    kv_args = (dy, q, k, v, stats, dk, dv, *inputs, *outputs[1], *outputs[2], *sizes, *of_keys, *drop, *turn)
    # The order matters: the first kernel writes the statistics that the second reads.
    if file:
        group, options = heads // kv_heads, (*options, "TURN") if turn else options
        tensor_core(file, "BACKWARD_Q", dim, options, macro)(batch * kv_heads, queries, group, *q_args)
        tensor_core(file, "BACKWARD_KV", dim, options, macro)(batch * kv_heads, queries, 1, *kv_args)
    else:
        plain("attention_bwd_q_plain", q.dtype, dim, 4, options, macro)(batch * heads, queries, 1, *q_args)
        plain("attention_bwd_kv_plain", q.dtype, dim, 4, options, macro)(batch * kv_heads, queries, 1, *kv_args)
    return bool(turn)


@attention.attention_rope_bwd.on("cupy")
def attention_rope_bwd(
    dqkv: Array,
    dy: Array,
    qkv: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    cos: Array,
    sin: Array,
    rotated: int,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    *,
    backend: CupyBackend,
) -> None:
    heads = dy.shape[2]
    q, k, v = attention.split(qkv, heads)
    turn = tables(cos, sin, qkv) if rotated == heads + k.shape[2] else ()
    gradients = attention.split(dqkv, heads)
    if not backward(*gradients, dy, q, k, v, lengths, starts, out, lse, causal, window, key, rate, turn, backend):
        rope(dqkv, dqkv, cos, sin, rotated)
