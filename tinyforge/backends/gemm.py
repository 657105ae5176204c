"""Matrix products on the GPU: by a kernel of our own where it was measured to be faster, else by cuBLAS.

Ours (ops/gemm_hopper.cu) takes bf16 on a Hopper. bench/gemm.py measured which of its variants is fastest, or whether
cuBLAS is, at the shapes of real steps; the results are in gemm_table.json by the name of the GPU. A plain product that
is not in the table goes to cuBLAS: another GPU, shape or precision.

Some of our products have an epilogue that replaces another op's pass over memory (EPILOGUES). Where the table does not
have the shape, RULES say at which sizes they pay, on any Hopper. `gemm_swiglu`, `gemm_swiglu_backward` and
`gemm_rope` return None elsewhere, and the op then makes its passes one by one.

The choice depends on the shape and the GPU alone, so a run gives the same bits every time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import cupy
import numpy as np

from tinyforge.backends import cublas
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cublas import FLOAT32, leading
from tinyforge.backends.cupy_backend import blocks, free_processors, has_wgmma, new, or_null, processors, scalar, vector
from tinyforge.backends.tensor_map import distances, encoded
from tinyforge.backends.variants import VARIANTS
from tinyforge.kernel import Array, pointer

FILE, PLAIN, TABLE = "ops/gemm_hopper.cu", "ops/gemm.cu", "gemm_table.json"
DEPTH, THREADS, LINE, BARRIERS, PIECE, PIECES, HEAD = (
    constant(FILE, name) for name in ("DEPTH", "THREADS", "LINE", "BARRIERS", "PIECE", "PIECES", "HEAD")
)
TILE = ("ROWS", "COLUMNS", "STAGES", "PINGPONG", "CLUSTER")  # macros of a variant
BAND = 8  # rows of tiles that blocks work on at a time, unless a variant has another number

# Whether a product transposes its factors, for those that a model and its gradient have: x W^T, dy W, dy^T x.
PRODUCTS = {(False, True): "FORWARD", (False, False): "INPUT", (True, False): "WEIGHT"}

# The epilogues, each with the product that it ends.
EPILOGUES = {"SWIGLU": "FORWARD", "SWIGLU_BACKWARD": "INPUT", "ROPE": "FORWARD"}

# Products in FP8 (ops/fp8.py): x W^T with x in e4m3, the same with x in e5m2, or with an epilogue; and dy^T x from
# transposed arrays, dy in e5m2. Both factors are along.
FP8_PRODUCTS = {
    "FP8": {"FACTORS": "E4M3"},
    "FP8_E5M2": {"FACTORS": "E5M2"},
    "FP8_SWIGLU": {"FACTORS": "E4M3", "EPILOGUE": "SWIGLU"},
    "FP8_WEIGHT": {"FACTORS": "E5M2", "PRODUCT": "WEIGHT"},
}

on_choice: Callable[[str, int, int, int, Variant | None], None] | None = None
"""Called with every bf16 product: (product, m, n, k) and the variant, None for cuBLAS."""


def announce(say: Callable[[str], object]) -> None:
    """From now on report which kernel computes each bf16 product, once for each shape."""
    seen = set()

    def once(product: str, m: int, n: int, k: int, variant: Variant | None) -> None:
        if (product, m, n, k) not in seen:
            seen.add((product, m, n, k))
            say(f"{product} {m} x {n} over {k}: {variant or 'cuBLAS'}")

    global on_choice
    on_choice = once


@dataclass(frozen=True)
class Variant:
    """A way to compute a product with ops/gemm_hopper.cu: macros of the kernel, and arguments of its launch.

    rows, columns: of a tile. stages: of the ring of buffers. pingpong: each of the two multiplying warpgroups has
    tiles of its own. cluster: blocks that share their copies. band: rows of tiles that blocks work on at a time.
    splits: parts of the sum, only for a WEIGHT product.
    """

    rows: int
    columns: int
    stages: int
    pingpong: int
    cluster: int
    band: int = BAND
    splits: int = 1

    def __str__(self) -> str:
        schedule = "ping-pong" if self.pingpong else "cooperative"
        return (
            f"{self.rows} x {self.columns} {schedule}, {self.stages} stages, cluster {self.cluster}, "
            f"band {self.band}, splits {self.splits}"
        )

    def shared_bytes(self, product: str) -> int:
        gates = PIECES * PIECE if product == "SWIGLU_BACKWARD" else 0
        return self.stages * (self.rows + self.columns) * LINE + gates + BARRIERS

    def kernel(self, product: str) -> Any:
        tile = {name: getattr(self, name.lower()) for name in TILE}
        macros = {"SCALAR": "bf16", **macros_of(product), **tile}
        return load(FILE, "gemm_hopper", self.shared_bytes(product), arch="sm_90a", **macros)

    def units(self, rows: int, columns: int, tile_columns: int, splits: int) -> int:
        """Units of work, each for a cluster, of a result of rows x columns."""
        return -(-rows // (self.rows * self.cluster)) * -(-columns // tile_columns) * splits


@dataclass(frozen=True)
class Rule:
    """Where an epilogue pays: at `rows` or more, with a sum of `least` to `most` terms, on GPUs with `gpu` in the name.

    tiles: those to choose from, each with the relative time of one of its columns. The tile that would finish first is
    taken; of equals, the one listed first."""

    rows: int
    least: int
    most: int
    tiles: tuple[tuple[Variant, float], ...]
    gpu: str = ""

    def chosen(self, m: int, n: int, k: int) -> Variant | None:
        if m < self.rows or not self.least <= k <= self.most or self.gpu not in _gpu():
            return None
        turns = [-(-tile.units(m, n, tile.columns, 1) // processors()) for tile, _ in self.tiles]
        times = [t * tile.columns * time for t, (tile, time) in zip(turns, self.tiles, strict=True)]
        return self.tiles[times.index(min(times))][0]


_WIDE, _NARROW = Variant(128, 256, 4, 0, 1, 1), Variant(128, 192, 5, 1, 1, 1)
RULES = {
    "SWIGLU": (
        Rule(2048, 512, 1536, ((_WIDE, 1.0), (_NARROW, 0.94)), gpu="H200"),
        Rule(8192, 1544, 2048, ((Variant(128, 192, 5, 1, 1), 1.0),), gpu="H200"),
        Rule(2048, 320, 1536, ((_WIDE, 1.0), (_NARROW, 1.05))),
    ),
    "SWIGLU_BACKWARD": (Rule(2048, 320, 2048, ((Variant(128, 128, 5, 1, 1, 1), 1.0),)),),
    "ROPE": (Rule(8192, 384, 1024, ((Variant(128, 192, 5, 1, 1), 1.0),)),),
}
"""The first rule that has a choice decides, see `by_rule`. Measured by bench/gemm.py --epilogues on an H100 and an H200
(docs/kernels/gemm.md#which-kernel-makes-a-product). Where sums are short, cuBLAS's product is still in the cache when
the op's pass reads it. Where they are long, the pass is short compared with the product, and cuBLAS's product is
faster. All tiles have 128 rows."""


def by_rule(epilogue: str, m: int, n: int, k: int) -> Variant | None:
    """The variant for a product of m x n over k that ends with `epilogue`; None where cuBLAS and a pass are faster."""
    return next(filter(None, (rule.chosen(m, n, k) for rule in RULES[epilogue])), None)


def compiled(product: str = "FORWARD") -> list[Variant]:
    """The variants that are compiled for a product or an epilogue, with the default band and splits."""
    expected = macros_of(product)
    return [
        Variant(*(int(macros[n]) for n in TILE))
        for macros in VARIANTS[FILE]
        if all(macros.get(name, "NONE") == expected.get(name, "NONE") for name in ("PRODUCT", "EPILOGUE", "FACTORS"))
    ]


def macros_of(product: str) -> dict[str, str]:
    """The kernel's macros for a product or an epilogue."""
    if product in FP8_PRODUCTS:
        return {"PRODUCT": "FORWARD", **FP8_PRODUCTS[product]}
    return {"PRODUCT": EPILOGUES[product], "EPILOGUE": product} if product in EPILOGUES else {"PRODUCT": product}


def gemm(
    a: Array,
    b: Array,
    out: Array | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
    tf32: bool = False,
    scale: float = 1.0,
) -> Array:
    """As cublas.gemm: out = scale a b, or out += scale a b."""
    product = PRODUCTS.get((transpose_a, transpose_b)) if scale == 1.0 and a.dtype.name == "bfloat16" else None
    if product is not None:
        (m, k), n = a.shape[::-1] if transpose_a else a.shape, b.shape[0 if transpose_b else 1]
        variant = _table().get((product, m, n, k))
        made = None if variant is None else hopper(variant, a, b, out, product, accumulate=accumulate)
        if on_choice is not None:
            on_choice(product, m, n, k, None if made is None else variant)
        if made is not None:
            return made
    return cublas.gemm(
        a, b, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate, tf32=tf32, scale=scale
    )


def gemm_swiglu(x: Array, weight: Array) -> tuple[Array, Array] | None:
    """gu = x weight^T and h = swiglu(gu) by one kernel; or None, with nothing done, where that would be slower.

    x: (m, k), weight: (2 n, k), the gate first; gu: (m, 2 n); h: (m, n). The bits are those of our product of the same
    tile followed by the op."""
    variant = _chosen("SWIGLU", x, (len(x), *weight.shape))
    if variant is None:
        return None
    gu, hidden = new((len(x), len(weight)), x.dtype), new((len(x), len(weight) // 2), x.dtype)
    return None if hopper(variant, x, weight, gu, "SWIGLU", hidden=hidden) is None else (gu, hidden)


def gemm_swiglu_backward(dy: Array, weight: Array, gu: Array, *, again: bool) -> tuple[Array, Array | None] | None:
    """dgu = swiglu_bwd(dh, gu) of dh = dy weight, and with `again` h = swiglu(gu), by one kernel; or None, as above.

    dy: (m, k), weight: (k, n), gu and dgu: (m, 2 n), h: (m, n)."""
    n = weight.shape[1]
    variant = _chosen("SWIGLU_BACKWARD", dy, (len(dy), n, len(weight)))
    if variant is None:
        return None
    dgu, hidden = new(gu.shape, gu.dtype), new((len(dy), n), gu.dtype) if again else None
    made = hopper(variant, dy, weight, dgu, "SWIGLU_BACKWARD", hidden=hidden, gu=gu)
    return None if made is None else (dgu, hidden)


@dataclass(frozen=True)
class Turn:
    """How RoPE turns heads: cosines, sines: (T, D/2), float32; the first `heads` of a token's are turned."""

    cosines: Array
    sines: Array
    heads: int


def gemm_rope(x: Array, weight: Array, turn: Turn) -> Array | None:
    """rope(x weight^T), (m, n), by one kernel, or None, as above. Row i is at position i % T."""
    variant = _chosen("ROPE", x, (len(x), *weight.shape)) if turn.cosines.shape[1] == HEAD // 2 else None
    return None if variant is None else hopper(variant, x, weight, None, "ROPE", turn=turn)


def _chosen(epilogue: str, a: Array, size: tuple[int, int, int]) -> Variant | None:
    if a.dtype.name != "bfloat16" or not has_wgmma():
        return None
    variant = _table().get((epilogue, *size)) or by_rule(epilogue, *size)
    if on_choice is not None and variant is not None:
        on_choice(epilogue, *size, variant)
    return variant


def hopper(
    variant: Variant,
    a: Array,
    b: Array,
    out: Array | None,
    product: str,
    *,
    accumulate: bool = False,
    hidden: Array | None = None,
    gu: Array | None = None,
    turn: Turn | None = None,
) -> Array | None:
    """out = a b^T, the factors lying as `product` has them, or None, with nothing done, where the kernel cannot take
    them: it expects bf16, rows that begin at 16 bytes, columns by eights, and adds in float32. hidden, gu, turn: of
    the epilogues; these arrays have no gaps, nor has out then."""
    if out is None:
        if product == "WEIGHT":  # it would be in bf16
            return None
        out = new((len(a), b.shape[product == "INPUT"]), a.dtype)
    plan = _plan(variant, product, accumulate, *((x.dtype, x.shape, x.strides) for x in (a, b, out)))
    beside = [*(x for x in (hidden, gu) if x is not None), *([turn.cosines, turn.sines] if turn else [])]
    if plan is None or any(pointer(x) % 16 for x in (a, b, out, *beside)):
        return None
    m, n = out.shape[0], out.shape[1] // 2
    for x, shape in ((hidden, (m, n)), (gu, (m, 2 * n))):
        if x is not None and (x.shape != shape or not x.flags.c_contiguous or x.dtype != a.dtype):
            raise ValueError(
                f"gemm: {x.dtype} {x.shape} next to {out.shape} of {product}, expected {shape} of {a.dtype}"
            )
    maps = [encoded(pointer(x), *known) for x, known in zip((a, b, gu), plan.maps, strict=False)]
    more: tuple[Any, ...] = ()
    if product in ("SWIGLU", "SWIGLU_BACKWARD"):
        more = or_null(hidden), *maps[2:]
    elif turn is not None:
        more = turn.cosines, turn.sines, np.int32(len(turn.cosines)), np.int32(turn.heads * HEAD)
    _launch(variant, plan, product, out, (*maps[:2], *plan.numbers, *more), accumulate)
    return out


def _launch(
    variant: Variant, plan: Plan, product: str, out: Array, arguments: tuple[Any, ...], accumulate: bool
) -> None:
    """arguments: those after `out`."""
    parts = out if plan.splits == 1 else new((plan.splits, *out.shape), FLOAT32)
    grid = (variant.cluster * min(free_processors() // variant.cluster, plan.units),)
    plan.kernel(grid, (THREADS,), (parts, *arguments), shared_mem=variant.shared_bytes(product))
    if parts is not out:
        _add_parts(out, parts, accumulate)


FP8_DEFAULTS = {
    "FP8": Variant(128, 256, 4, 0, 1),
    "FP8_E5M2": Variant(128, 192, 5, 1, 1),
    "FP8_SWIGLU": Variant(128, 256, 4, 0, 1),
    "FP8_WEIGHT": Variant(128, 192, 5, 1, 1, splits=2),
}
"""The variants of FP8 products that the table does not list: the fastest at the shapes of `base` on an H200."""


def gemm_fp8(
    product: str,
    a: Array,
    b: Array,
    scales: Array,
    weight_scale: Array,
    out: Array | np.dtype,
    *,
    accumulate: bool = True,
    variant: Variant | None = None,
) -> tuple[Array, Array | None]:
    """a b^T times the scales of both, for one of FP8_PRODUCTS, by our kernel: (m, n), and for FP8_SWIGLU h, (m, n / 2).

    a: (m, k), b: (n, k), contiguous, k a multiple of 16, n of 8, for FP8_SWIGLU of 16; scales: of a, (m,) or (1,),
    weight_scale: of b, (1,), float32. out: the dtype of the result; for FP8_WEIGHT a float32 array, which the product
    is added to, or with accumulate=False overwrites.
    """
    (m, k), n = a.shape, len(b)
    if b.shape[1] != k:
        raise ValueError(f"gemm_fp8: {product} of {a.shape} and {b.shape}")
    chosen = variant or _table().get((product, m, n, k)) or FP8_DEFAULTS[product]
    if variant is None and on_choice is not None:
        on_choice(product, m, n, k, chosen)
    result = new((m, n), out) if isinstance(out, np.dtype) else out
    hidden = new((m, n // 2), result.dtype) if product == "FP8_SWIGLU" else None
    if not m:
        return result, hidden
    plan = _plan_fp8(chosen, product, m, n, k, leading(result), accumulate)
    maps = (encoded(pointer(x), *known) for x, known in zip((a, b), plan.maps, strict=True))
    more = (*(() if hidden is None else (hidden,)), scales, weight_scale, np.int32(scales.size > 1))
    _launch(chosen, plan, product, result, (*maps, *plan.numbers, *more), accumulate)
    return result, hidden


@lru_cache(1024)
def _plan_fp8(variant: Variant, product: str, m: int, n: int, k: int, stride: int, accumulate: bool) -> Plan:
    halves, adds = 2 if product == "FP8_SWIGLU" else 1, product == "FP8_WEIGHT"
    if k % 16 or n % (8 * halves):
        raise ValueError(f"gemm_fp8: {product} expects k a multiple of 16 and n of {8 * halves}, got {k} and {n}")
    pairs = k // 2  # TMA copies two numbers as one of bf16
    width, columns = n // halves, variant.columns // halves
    splits = min(variant.splits, -(-pairs // DEPTH)) if adds else 1
    numbers = (m, width, pairs, stride if splits == 1 else n, variant.band, splits, adds and accumulate and splits == 1)
    maps = tuple(
        ((1, rows, pairs), (k, k * rows), (1, lines, DEPTH))
        for rows, lines in ((m, variant.rows), (n, columns // variant.cluster))
    )
    units = variant.units(m, width, columns, splits)
    return Plan(variant.kernel(product), units, tuple(map(np.int32, numbers)), maps, splits)


@dataclass(frozen=True)
class Plan:
    """The part of a launch that depends only on shapes and strides; looking it up is faster than computing it."""

    kernel: Any
    units: int  # of work, each of a cluster
    numbers: tuple[np.int32, ...]
    maps: tuple[tuple[Any, ...], ...]  # of a, b and gu: what `encoded` takes after the address
    splits: int


Described = tuple[np.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


@lru_cache(1024)
def _plan(variant: Variant, product: str, accumulate: bool, *arrays: Described) -> Plan | None:
    """None if the kernel cannot take these arrays."""
    (kind, a, a_strides), (b_kind, b, b_strides), (result, out, out_strides) = arrays
    macros = macros_of(product)
    across_a, across_b = macros["PRODUCT"] == "WEIGHT", macros["PRODUCT"] != "FORWARD"
    (m, k), n = a[::-1] if across_a else a, b[1 if across_b else 0]
    wide = 2 * n if product == "SWIGLU_BACKWARD" else n  # columns of out
    if out != (m, wide) or b != ((k, n) if across_b else (n, k)):
        raise ValueError(f"gemm: {product} of {a} and {b} into {out}")
    rows = [distances((1, *shape), (0, *steps), 2) for shape, steps in ((a, a_strides), (b, b_strides))]
    stride = out_strides[0] // result.itemsize if m > 1 else wide
    fits = (
        kind.name == b_kind.name == "bfloat16"
        and result == (FLOAT32 if across_a else kind)
        and min(m, n, k) > 0
        and n % {"SWIGLU": 16, "ROPE": HEAD}.get(product, 8) == 0
        and stride >= wide
        and stride % 8 == 0
        and out_strides[1] == result.itemsize
        and (across_a or not accumulate)
        and None not in rows
        and (product not in EPILOGUES or stride == wide)
    )
    if not fits:
        return None
    splits = min(variant.splits, -(-k // DEPTH)) if across_a else 1
    pairs = 2 if product == "SWIGLU" else 1  # a column of the gate, and one of up
    width, columns = n // pairs, variant.columns // pairs  # of h, or the result; of a tile
    boxes = (DEPTH if across_a else variant.rows), (DEPTH if across_b else columns) // variant.cluster
    units = variant.units(m, width, columns, splits)
    numbers = (m, width, k, stride if splits == 1 else n, variant.band, splits, accumulate and splits == 1)
    maps = [((1, *shape), row, (1, lines, DEPTH)) for shape, row, lines in zip((a, b), rows, boxes, strict=True)]
    if product == "SWIGLU_BACKWARD":
        maps.append(((1, *out), distances((1, *out), (0, *out_strides), 2), (1, 64, 64)))
    return Plan(variant.kernel(product), units, tuple(map(np.int32, numbers)), tuple(maps), splits)


def _add_parts(out: Array, parts: Array, accumulate: bool) -> None:
    """out = the sum over the first axis of parts, or out += it, in order."""
    splits, rows, columns = parts.shape
    vec = vector(columns, parts, out) if leading(out) % 4 == 0 else 1
    launch = load(PLAIN, "gemm_sum", SCALAR=scalar(out.dtype), RESULT=scalar(out.dtype), VEC=vec)
    sizes = map(np.uint32, (rows * columns // vec, columns // vec, leading(out) // vec))
    launch(blocks(rows * columns // vec), (256,), (out, parts, *sizes, np.int32(splits), np.int32(accumulate)))


@cache
def _gpu() -> str:
    """The name of the device."""
    device = cupy.cuda.runtime.getDevice()
    return str(cupy.cuda.runtime.getDeviceProperties(device)["name"].decode())


@cache
def _table() -> dict[tuple[str, int, int, int], Variant]:
    """The measured choices for a GPU of this name."""
    return parsed(json.loads(files("tinyforge.backends").joinpath(TABLE).read_text("utf-8")).get(_gpu(), {}))


def parsed(rows: dict[str, list[int]]) -> dict[tuple[str, int, int, int], Variant]:
    """A table for lookup, from {"FORWARD m n k": the numbers of a Variant}."""
    found = {}
    for name, numbers in rows.items():
        product, m, n, k = name.split()
        found[product, int(m), int(n), int(k)] = Variant(*numbers)
    return found
