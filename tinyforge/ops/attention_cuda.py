"""Attention on a CUDA GPU: chooses a kernel, its grid and its shared memory, and launches it.

float64 and float32 run the plain kernels of attention.cu; float32 in precision tf32 runs those of attention_tf32.cu;
bfloat16 on a Hopper runs those of attention_hopper.cu or attention_tma.cu, elsewhere the tensor-core kernels of
attention.cu; head sizes that these lack run the plain kernels. All of them take rows of several documents. Windows,
bidirectional attention and dropout are in attention.cu only, and dropout together with one of the other two in its
plain kernels only. In rows of several documents a window just moves their bounds, so on a Hopper every causal window
without dropout runs as one in rows of a single document. The tile sizes are in backends/variants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heapreplace
from typing import Any, NamedTuple

import cupy as cp
import ml_dtypes
import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
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
from tinyforge.backends.variants import VARIANTS, Macros
from tinyforge.errors import UserError
from tinyforge.kernel import Array, pointer
from tinyforge.op import Key
from tinyforge.ops import attention
from tinyforge.ops.rope_cuda import rope, tables

FILE, WGMMA_FILE, TF32_FILE = "ops/attention.cu", "ops/attention_hopper.cu", "ops/attention_tf32.cu"
TMA_FILE = "ops/attention_tma.cu"
INSTRUCTIONS = {FILE: "mma", WGMMA_FILE: "wgmma", TF32_FILE: "tf32"}
ENTRIES = {"FORWARD": "attention_fwd", "BACKWARD_Q": "attention_bwd_q", "BACKWARD_KV": "attention_bwd_kv"}
HEAD_SIZES, WGMMA_HEAD_SIZES, TMA_HEAD_SIZES = (32, 64, 128), (64,), (96, 128)
OPTIONS = ("BAND", "DOCS", "DROP", "TURN", "CAP")
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
        raise UserError(
            f"attention on cupy: head size {dim}, expected 1 to {PLAIN_LIMIT}; use that, or --backend numpy"
        )
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
    if dim not in HEAD_SIZES or {"BAND", "DROP"} <= set(options) or "CAP" in options:
        return None
    if dtype == BF16:
        return FILE
    return TF32_FILE if tf32 and dtype.itemsize == 4 and everywhere else None


@cache
def tensor_core(file: str, part: str, dim: int, options: tuple[str, ...], drop: int = 1) -> Launch:
    """The kernel of a part (key of ENTRIES) in a file of `tensor_core_file` other than TMA_FILE. drop: see `plain`."""
    macros = listed(file, part, dim, options)
    return tensor_core_launch(file, part, {**macros, "DROP": drop} if "DROP" in macros else macros)


def listed(file: str, part: str, dim: int, options: tuple[str, ...]) -> Macros:
    """The macros of a kernel's variant."""
    found = (v for v in VARIANTS[file] if v.get("PART") == part and v["HEAD_DIM"] == dim)
    return next(v for v in found if options == tuple(name for name in OPTIONS if name in v))


def tensor_core_launch(file: str, part: str, macros: Macros) -> Launch:
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

    def __call__(self, k: Array, queries: int, heads: int, before: Sequence[Any], after: Sequence[Any]) -> None:
        """before, after: the arguments before `schedule` and after `rounds`."""
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
        args = (*before, table, len(table), *after)
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
        raise ValueError(f"attention: rows at strides {x.strides}, expected some that do not overlap")
    return encoded(pointer(x), shape, steps, (1, rows, 64))


def is_packed(x: Array) -> bool:
    """Whether the heads of x, (B, T, H, D), lie side by side, as the kernels read them."""
    return bool(x.strides[3] == x.itemsize and (x.shape[2] == 1 or x.strides[2] == x.shape[3] * x.itemsize))


def strides(name: str, x: Array) -> tuple[int, int]:
    """Strides between sequences and tokens, in elements. Raises ValueError for layouts that kernels cannot read."""
    batch, tokens, heads, dim = x.shape
    size = x.itemsize
    sequence, token, *_ = x.strides
    if not is_packed(x):
        raise ValueError(
            f"attention: {name} has strides {x.strides}, expected heads side by side: {dim * size}, {size}"
        )
    if dim * size % 16 == 0 and (pointer(x) | (token if tokens > 1 else 0) | (sequence if batch > 1 else 0)) % 16:
        raise ValueError(
            f"attention: {name} at {pointer(x):#x} with strides {x.strides}, expected multiples of 16 bytes"
        )
    if tokens * token >= size << 31:
        raise ValueError(f"attention: {name} spans {tokens * token} bytes a sequence, expected less than {size << 31}")
    return sequence // size, token // size


@dataclass(frozen=True)
class Mask:
    """Which keys a query does not see, dropout, and what happens to scores: as in attention.attention_fwd."""

    lengths: Array | None
    starts: Array | None
    causal: bool
    window: int | None
    key: Key | None
    rate: float
    scale: float | None = None
    softcap: float = 0.0

    def starts_for(self, q: Array, keys: int) -> Array | None:
        """starts, checked; or starts of a single document per row, if that lets Hopper's kernels compute a window."""
        batch, queries, _, dim = q.shape
        if self.starts is not None:
            return checked_starts(self.starts, batch, queries, keys)
        alone = (
            self.causal
            and self.key is None
            and self.scale is None
            and not self.softcap
            and keys == queries
            and self.window is not None
            and self.window < keys
        )
        if alone and tensor_core_file(q.dtype, dim, False, ("DOCS",)) in (WGMMA_FILE, TMA_FILE):
            return cp.zeros((batch, queries), np.int32)
        return None

    def band(self, keys: int, documents: bool) -> tuple[Any, ...]:
        """The arguments (back, forth, lengths) of the BAND kernels: a query sees the keys from `back` before its
        position to `forth` after it, but no padding. Empty for the causal kernels, and if the documents' bounds include
        the window."""
        if not self.causal:
            return keys, keys, or_null(None if self.lengths is None else contiguous(self.lengths))
        return () if self.window is None or self.window >= keys or documents else (self.window - 1, 0, or_null(None))

    def drop(self, dtype: Any) -> tuple[Any, ...]:
        """The arguments (words, key0, key1, threshold, scale) of the DROP kernels; none without a key."""
        if self.key is None:
            return ()
        return (*key_arguments(self.key), np.uint32(int(self.rate * 2**32)), wide(dtype).type(1.0 / (1.0 - self.rate)))

    def cap(self, dtype: Any, dim: int) -> tuple[Any, ...]:
        """The arguments (scale, cap) of the CAP kernels; none where scores are as usual."""
        if self.scale is None and not self.softcap:
            return ()
        return tuple(map(wide(dtype).type, (attention.scaling(dim, self.scale), self.softcap)))

    @property
    def drop_macro(self) -> int:
        """The macro DROP: 2 for kernels that read the key from memory, which takes more registers."""
        return 1 if self.key is None or isinstance(self.key, tuple) else 2


class Problem:
    """q, k, v and their mask: what both directions need to choose a kernel and to launch it.

    starts: (B, T), where rows have several documents. band, drop, cap: arguments of the kernels with these options.
    file: as `tensor_core_file`.
    """

    def __init__(self, q: Array, k: Array, v: Array, mask: Mask, backend: CupyBackend) -> None:
        q, k, v = (x if is_packed(x) else cp.ascontiguousarray(x) for x in (q, k, v))
        self.q, self.k, self.v, self.mask = q, k, v, mask
        self.batch, self.queries, self.heads, self.dim = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.strides = (*strides("q", q), *strides("k", k), *strides("v", v))
        self.starts = mask.starts_for(q, self.keys)
        documents = self.starts is not None
        self.band, self.drop = mask.band(self.keys, documents), mask.drop(q.dtype)
        self.cap = mask.cap(q.dtype, self.dim)
        on = zip(OPTIONS, (self.band, documents, self.drop, (), self.cap), strict=True)
        self.options = tuple(name for name, used in on if used)
        self.file = tensor_core_file(q.dtype, self.dim, backend.tf32, self.options)

    def launch(self, part: str, tiles: int, rows: int, args: tuple[Any, ...], more: tuple[str, ...] = ()) -> None:
        """Launch the kernel of a part by a file other than TMA_FILE. tiles: see `plain`. rows: queries or keys. more:
        further options of the tensor-core kernels."""
        macro, owns_queries = self.mask.drop_macro, part != "BACKWARD_KV"
        if self.file:
            kernel = tensor_core(self.file, part, self.dim, (*self.options, *more), macro)
            kernel(self.batch * self.kv_heads, rows, self.heads // self.kv_heads if owns_queries else 1, *args)
        else:
            kernel = plain(f"{ENTRIES[part]}_plain", self.q.dtype, self.dim, tiles, self.options, macro)
            kernel(self.batch * (self.heads if owns_queries else self.kv_heads), rows, 1, *args)


def checked_starts(starts: Array, batch: int, queries: int, keys: int) -> Array:
    """starts of documents, checked and contiguous."""
    if starts.dtype != np.int32 or starts.shape != (batch, queries) or keys != queries:
        raise ValueError(
            f"attention: starts are {starts.dtype} of shape {starts.shape}, {keys} keys; expected int32 of "
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
    scale: float | None = None,
    softcap: float = 0.0,
    *,
    backend: CupyBackend,
) -> tuple[Array, Array]:
    """q: (B, T, Hq, D); k, v: (B, S, Hkv, D), S >= T; starts: (B, T); returns o: (B, T, Hq, D), lse: (B, Hq, T)."""
    batch, queries, heads, dim = q.shape
    out = cp.empty(q.shape, q.dtype)
    lse = cp.empty((batch, heads, queries), wide(q.dtype))
    if not out.size:
        return out, lse
    problem = Problem(q, k, v, Mask(lengths, starts, causal, window, key, rate, scale, softcap), backend)
    q, k, v = problem.q, problem.k, problem.v
    docs: tuple[Array, ...] = ()
    if problem.starts is not None:
        docs = (problem.starts if window is None else document_bounds(problem.starts, window)[0],)
    sizes = (queries, problem.keys, heads, problem.kv_heads, *problem.band, *docs, *problem.drop, *problem.cap)
    if problem.file == TMA_FILE:
        fwd = tma_kernel("FORWARD", dim, problem.options)
        maps = rows_map(q, OWN), rows_map(k, fwd.tile), rows_map(v, fwd.tile)
        fwd(k, queries, heads, (*maps, out, lse), sizes)
    else:
        problem.launch("FORWARD", 3, queries, (q, k, v, out, lse, *problem.strides, *sizes))
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
    scale: float | None = None,
    softcap: float = 0.0,
    *,
    backend: CupyBackend,
) -> None:
    """Writes dq, dk, dv (views of a packed dqkv, shapes of q, k, v)."""
    check_lengths(q, k)
    if out.size:
        problem = Problem(q, k, v, Mask(lengths, starts, causal, window, key, rate, scale, softcap), backend)
        backward(problem, (dq, dk, dv), cp.ascontiguousarray(dy), out, lse, ())


def check_lengths(q: Array, k: Array) -> None:
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"attention_bwd: {q.shape[1]} queries and {k.shape[1]} keys, expected as many: decoding has no backward"
        )


def backward(
    problem: Problem, gradients: tuple[Array, ...], dy: Array, out: Array, lse: Array, turn: tuple[Array, ...]
) -> bool:
    """Write the gradients (dq, dk, dv). turn: the cosines and sines of RoPE's backward, for dq and dk; returns whether
    the kernels have applied it."""
    q, k, v, queries, file = problem.q, problem.k, problem.v, problem.queries, problem.file
    dq, dk, dv = gradients
    of_queries: tuple[Array, ...] = ()
    of_keys: tuple[Array, ...] = ()
    if problem.starts is not None:
        bounds = document_bounds(problem.starts, problem.mask.window)
        of_queries, of_keys = (bounds[0],), (bounds[1],)
    padded = -(-queries // OWN) * OWN if file == TMA_FILE else queries
    stats = cp.empty((problem.batch, problem.heads, padded, 2), lse.dtype)
    to_q, to_kv = strides("dq", dq), (*strides("dk", dk), *strides("dv", dv))
    if file == TMA_FILE:
        strides("dy", dy)
        sizes: tuple[Any, ...] = (queries, padded, problem.heads, problem.kv_heads)
        of_q, of_kv = (tma_kernel(part, problem.dim, problem.options) for part in ("BACKWARD_Q", "BACKWARD_KV"))
        maps = [rows_map(x, rows) for x, rows in ((dy, OWN), (q, OWN), (k, of_q.tile), (v, of_q.tile))]
        of_q(k, queries, problem.heads, (*maps, dy, out, lse, stats, dq), (*to_q, *sizes, *of_queries))
        maps = [rows_map(x, rows) for x, rows in ((dy, of_kv.tile), (q, of_kv.tile), (k, OWN), (v, OWN))]
        of_kv(k, queries, problem.heads, (*maps, stats, dk, dv), (*to_kv, *sizes, *of_keys))
        return False
    turn = turn if file == WGMMA_FILE else ()  # which has no CAP kernels
    more = ("TURN",) if turn else ()
    sizes = (queries, problem.heads, problem.kv_heads, *problem.band)
    ends = (*problem.drop, *problem.cap, *turn)
    # The order matters: the first kernel writes the statistics that the second reads.
    q_args = (dy, q, k, v, out, lse, stats, dq, *problem.strides, *to_q, *sizes, *of_queries, *ends)
    problem.launch("BACKWARD_Q", 4, queries, q_args, more)
    kv_args = (dy, q, k, v, stats, dk, dv, *problem.strides, *to_kv, *sizes, *of_keys, *ends)
    problem.launch("BACKWARD_KV", 4, queries, kv_args, more)
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
    scale: float | None = None,
    softcap: float = 0.0,
    *,
    backend: CupyBackend,
) -> None:
    heads = dy.shape[2]
    q, k, v = attention.split(qkv, heads)
    turn = tables(cos, sin, qkv) if rotated == heads + k.shape[2] else ()
    check_lengths(q, k)
    if not out.size:
        return
    problem = Problem(q, k, v, Mask(lengths, starts, causal, window, key, rate, scale, softcap), backend)
    gradients = attention.split(dqkv, heads)
    if not backward(problem, gradients, cp.ascontiguousarray(dy), out, lse, turn):
        rope(dqkv, dqkv, cos, sin, rotated)
