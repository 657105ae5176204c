"""The table of kernel variants: the macros with which each .cu file of the package is compiled.

A variant is the keyword arguments that `compile.load` gets: the macros of the file, and `arch` where the kernel needs
the instructions of one architecture. Launchers choose among the variants of this table; where a file takes any value of
a macro, such as a head size, the table has examples. `compile.warm_up` compiles the whole table ahead of time, and
tests/backends/test_compile.py compiles it without a GPU and fails if a variant spills registers to memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

Macros = Mapping[str, int | str]
Choices = dict[str, Any]  # of a macro: a value, or a tuple of values


def every(**choices: Any) -> list[Macros]:
    """Every combination of the values of each macro: `every(SCALAR="bf16", VEC=(1, 8))` is two variants."""
    values = (value if isinstance(value, tuple) else (value,) for value in choices.values())
    return [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*values)]


def vectors(**choices: Any) -> list[Macros]:
    """Each precision, with accesses of one element (VEC=1) and of 16 bytes."""
    widths = {"double": 2, "float": 4, "bf16": 8}
    return [macros for scalar, vec in widths.items() for macros in every(SCALAR=scalar, VEC=(1, vec), **choices)]


PRECISIONS = "double", "float", "bf16"
ROWS = [
    *every(SCALAR=PRECISIONS, VEC=1, PER=0),
    *every(SCALAR="double", VEC=2, PER=0),
    *every(SCALAR="float", VEC=4, PER=(0, 1, 3, 6, 8)),
    *every(SCALAR="bf16", VEC=8, PER=(0, 1, 3, 4)),
]
"""A warp takes a row (ops/rows.cuh). PER: vectors of a row in a lane's registers; 0: the row is read from memory."""
FP8_ROWS = [
    *every(arch="sm_90a", SCALAR="bf16", VEC=1, PER=0),
    *every(arch="sm_90a", SCALAR="bf16", VEC=8, PER=(0, 1, 3, 4)),
]


def _cross_entropy() -> Iterator[Macros]:
    """A block takes a row of logits, in its threads' registers (PER > 0), in shared memory (HELD), or in memory."""
    for on in ({}, {"CAP": 1}):
        yield from vectors(PER=0, **on)
        yield from every(SCALAR="float", VEC=4, PER=(1, 4, 8), **on)
        yield from every(SCALAR="bf16", VEC=8, PER=(1, 2, 4), **on)
        for option in ("EDGE", "HELD"):
            for scalar, vec in (("double", 2), ("float", 4), ("bf16", 8)):
                yield from every(SCALAR=scalar, VEC=vec, PER=0, **{option: 1}, **on)


def _attention_plain() -> Iterator[Macros]:
    yield from every(REAL="float", HEAD_DIM=(32, 64), ROWS=64)
    yield from every(REAL="float", HEAD_DIM=128, ROWS=32)
    yield from every(REAL="double", HEAD_DIM=(32, 64, 128), ROWS=32)
    yield from every(REAL="bf16", HEAD_DIM=(8, 48), ROWS=64)
    yield from every(REAL="bf16", HEAD_DIM=80, ROWS=32)
    for mask, dim in (("BAND", 32), ("DROP", 64), ("DOCS", 32)):
        on = {mask: 1}
        yield from every(REAL="bf16", HEAD_DIM=48, ROWS=64, **on)
        yield from every(REAL="float", HEAD_DIM=64, ROWS=64, **on)
        yield from every(REAL="double", HEAD_DIM=dim, ROWS=32, **on)
    for mask in ("BAND", "DOCS"):
        yield from every(REAL="float", HEAD_DIM=64, ROWS=64, **{mask: 1}, DROP=1)
    yield from every(REAL=("float", "bf16"), HEAD_DIM=64, ROWS=64, CAP=1)
    yield from every(REAL="double", HEAD_DIM=64, ROWS=32, CAP=1)


def _attention_mma() -> Iterator[Macros]:
    masks: tuple[Choices, ...] = ({}, {"BAND": 1}, {"DROP": 1}, {"DOCS": 1}, {"DOCS": 1, "DROP": 1})
    for on in masks:
        small, large = {"HEAD_DIM": (32, 64), **on}, {"HEAD_DIM": 128, "ROW_TILES": 1, **on}
        backward: Choices = {"WORKERS": 4, "PIECE": 16}
        few = {"HELD": 3} if on == {"DOCS": 1} else {}  # with all four fragments of q in registers, others spill
        tile = 32 if "DROP" in on else 64
        yield from every(PART="FORWARD", ROW_TILES=2, WORKERS=4, TILE=tile, BLOCKS=2, **few, **small)
        yield from every(PART="FORWARD", WORKERS=8, TILE=64, BLOCKS=1, **large)
        yield from every(PART="BACKWARD_Q", ROW_TILES=1, TILE=64, BLOCKS=3 if on else 4, **backward, **small)
        yield from every(PART="BACKWARD_Q", TILE=32, BLOCKS=2, **backward, **large)
        held = {"HELD": 0 if on else 3}
        yield from every(PART="BACKWARD_KV", ROW_TILES=2, TILE=64, BLOCKS=2, **held, **backward, **small)
        yield from every(PART="BACKWARD_KV", TILE=32, BLOCKS=2, HELD=0, **backward, **large)


def _attention_tf32() -> Iterator[Macros]:
    common: Choices = {"WORKERS": 4, "BLOCKS": 2}
    for on in (common, {**common, "DOCS": 1}):
        small, large = {"ROW_TILES": 2, "PIECE": 32, **on}, {"HEAD_DIM": 128, "ROW_TILES": 1, **on}
        yield from every(PART="FORWARD", HEAD_DIM=64, TILE=64, HELD=8, UNROLL=8, **small)
        yield from every(PART="FORWARD", HEAD_DIM=32, TILE=32, HELD=8, UNROLL=8, **small)
        yield from every(PART="FORWARD", TILE=32, PIECE=32, HELD=16, UNROLL=16, **large)
        yield from every(PART="BACKWARD_Q", HEAD_DIM=(32, 64), TILE=32, HELD=4, UNROLL=8, **small)
        yield from every(PART="BACKWARD_KV", HEAD_DIM=(32, 64), TILE=32, HELD=0, UNROLL=4, **small)
        yield from every(PART=("BACKWARD_Q", "BACKWARD_KV"), TILE=16, PIECE=16, HELD=0, UNROLL=4, **large)


def _attention_wgmma() -> Iterator[Macros]:
    common: Choices = {"arch": "sm_90a", "HEAD_DIM": 64, "WORKERS": 1, "TILE": 64}
    for on in (common, {**common, "DOCS": 1}):
        yield from every(PART=("FORWARD", "BACKWARD_Q"), BLOCKS=4, **on)
        yield from every(PART="BACKWARD_KV", BLOCKS=3, **on)
        yield from every(PART="BACKWARD_Q", BLOCKS=4, **on, TURN=1)
        yield from every(PART="BACKWARD_KV", BLOCKS=3, **on, TURN=1)


def _attention_tma() -> Iterator[Macros]:
    common: Choices = {"arch": "sm_90a", "HEAD_DIM": (96, 128), "WORKERS": 2}
    for on in (common, {**common, "DOCS": 1}):
        yield from every(PART="FORWARD", TILE=128, STAGES=3, **on)
        yield from every(PART="BACKWARD_Q", TILE=128, STAGES=2, **on)
        yield from every(PART="BACKWARD_KV", TILE=64, STAGES=4, **on)


def _gemm_hopper() -> Iterator[Macros]:
    def tile(rows: int, columns: int, stages: int, pingpong: int, cluster: Any = 1, **product: Any) -> list[Macros]:
        shape = {"ROWS": rows, "COLUMNS": columns, "STAGES": stages, "PINGPONG": pingpong, "CLUSTER": cluster}
        return every(arch="sm_90a", SCALAR="bf16", **product, **shape)

    pingpong, cooperative = (128, 192, 5, 1), (128, 256, 4, 0)
    plain: Choices = {"PRODUCT": ("FORWARD", "INPUT", "WEIGHT")}
    yield from tile(*cooperative, (1, 2), **plain)
    for shape in ((128, 192, 5, 0), (256, 192, 4, 0), (128, 128, 6, 1)):
        yield from tile(*shape, **plain)
    yield from tile(*pingpong, (1, 2), **plain)
    yield from tile(64, 256, 5, 1, **plain)
    for shape in (pingpong, cooperative):
        yield from tile(*shape, PRODUCT="FORWARD", EPILOGUE="SWIGLU")
        yield from tile(*shape, PRODUCT="FORWARD", FACTORS=("E4M3", "E5M2"))
        yield from tile(*shape, PRODUCT="FORWARD", FACTORS="E4M3", EPILOGUE="SWIGLU")
        yield from tile(*shape, PRODUCT="WEIGHT", FACTORS="E5M2")
    yield from tile(128, 128, 6, 1, PRODUCT="WEIGHT", FACTORS="E5M2")
    yield from tile(128, 128, 5, 1, PRODUCT="INPUT", EPILOGUE="SWIGLU_BACKWARD")
    yield from tile(*pingpong, PRODUCT="FORWARD", EPILOGUE="ROPE")


def _conv2d() -> Iterator[Macros]:
    yield from every(PART=0, ROWS=128, COLUMNS=(64, 128), STAGES=3, SPREAD=(0, 1))
    yield from every(PART=1, ROWS=(64, 128), COLUMNS=128, STAGES=3, SPREAD=0)


_SMALL: Choices = {"DIM": 64, "HIDDEN": 152, "HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 32, "VOCAB": 301, "DEPTH": 16}
_BASE: Choices = {"DIM": 768, "HIDDEN": 2048, "HEADS": 12, "KV_HEADS": 4, "HEAD_DIM": 64, "VOCAB": 4096}


def _decode_single() -> Iterator[Macros]:
    for hopper in ({}, {"arch": "sm_90a", "PRODUCERS": 4}):
        base: Choices = {**hopper, "SCALAR": "bf16", "ROWS": (1, 4), **_BASE, "ONCE": 1}
        yield from every(**base, DEPTH=32)
        yield from every(**base, WEIGHT=("int8", "e4m3"), DEPTH=64)
        if hopper:
            yield from every(**base, WEIGHT="four_bits", SPAN=(2, 4), COPIED=4, DEPTH=32)
        yield from every(**hopper, SCALAR=PRECISIONS, ROWS=2, **_SMALL)
        yield from every(**hopper, SCALAR="float", WEIGHT=("int8", "e4m3"), ROWS=2, **_SMALL)


VARIANTS: Mapping[str, list[Macros]] = {
    "infer/cuda/append.cu": vectors(),
    "infer/cuda/decode_batched.cu": [
        *every(SCALAR="bf16", TEAM=(66, 264), **_BASE, DEPTH=16, RESIDENT=2),
        *every(SCALAR=PRECISIONS, TEAM=3, **_SMALL),
    ],
    "infer/cuda/decode_single.cu": list(_decode_single()),
    "infer/cuda/dequantise.cu": vectors(CODE=("int8", "e4m3")),
    "infer/cuda/dequantise_int4.cu": every(SCALAR=PRECISIONS),
    "infer/cuda/dequantise_nf4.cu": every(SCALAR=PRECISIONS, DOUBLE=(0, 1)),
    "infer/cuda/sample_masked.cu": [*every(SCALAR="bf16", **_BASE, DEPTH=16), *every(SCALAR=PRECISIONS, **_SMALL)],
    "ops/activations.cu": vectors(),
    "ops/attention.cu": [*_attention_plain(), *_attention_mma()],
    "ops/attention_documents.cu": every(THREADS=256),
    "ops/attention_hopper.cu": list(_attention_wgmma()),
    "ops/attention_sink.cu": vectors(),
    "ops/attention_tf32.cu": list(_attention_tf32()),
    "ops/attention_tma.cu": list(_attention_tma()),
    "ops/causal_conv.cu": [
        *every(SCALAR="double", VEC=1, TAPS=4),
        *every(SCALAR="float", VEC=(1, 2), TAPS=4),
        *every(SCALAR="bf16", VEC=(1, 4), TAPS=4),
    ],
    "ops/class_token.cu": vectors(),
    "ops/columns.cu": every(SCALAR=("double", "float")),
    "ops/conv2d.cu": every(SCALAR=PRECISIONS),
    "ops/conv2d_mma.cu": list(_conv2d()),
    "ops/cross_entropy.cu": list(_cross_entropy()),
    "ops/dropout.cu": vectors(),
    "ops/embedding.cu": vectors(),
    "ops/fork.cu": vectors(),
    "ops/fp8.cu": FP8_ROWS,
    "ops/geglu.cu": vectors(EXACT=(0, 1)),
    "ops/gelu.cu": vectors(EXACT=(0, 1)),
    "ops/gemm.cu": [
        *every(SCALAR="double", RESULT="double", VEC=(1, 2)),
        *every(SCALAR="float", RESULT="float", VEC=(1, 4)),
        *every(SCALAR="bf16", RESULT=("bf16", "float"), VEC=(1, 4)),
    ],
    "ops/gemm_hopper.cu": list(_gemm_hopper()),
    "ops/grouped.cu": every(SCALAR=PRECISIONS),
    "ops/grouped_hopper.cu": every(arch="sm_90a", SCALAR="bf16"),
    "ops/grouped_mma.cu": every(SCALAR="bf16"),
    "ops/groupnorm.cu": vectors(SILU=(0, 1), SHIFT=(0, 1)),
    "ops/layernorm.cu": ROWS,
    "ops/linear.cu": vectors(),
    "ops/losses.cu": every(SCALAR=PRECISIONS),
    "ops/lstm.cu": every(SCALAR=PRECISIONS),
    "ops/mix.cu": vectors(),
    "ops/mixture.cu": vectors(),
    "ops/mixture_biased.cu": every(SCALAR=PRECISIONS),
    "ops/sigmoid_gate.cu": vectors(),
    "ops/patches.cu": [macros for scalar in PRECISIONS for macros in every(SCALAR=scalar, IN=(scalar, "int"))],
    "ops/pooling.cu": vectors(),
    "ops/positions.cu": [*vectors(), *vectors(RESTART=1)],
    "ops/qk_norm_rope.cu": vectors(),
    "ops/rmsnorm.cu": [
        *ROWS,
        *({**macros, "PLUS_ONE": 1} for macros in ROWS),
        *({**macros, "FP8_ROWS": 1} for macros in FP8_ROWS),
    ],
    "ops/rope.cu": vectors(),
    "ops/router.cu": every(SCALAR=PRECISIONS, NORMALISED=(0, 1)),
    "ops/router_losses.cu": every(SCALAR=("double", "float")),
    "ops/selective_scan.cu": every(SCALAR=PRECISIONS, PER=(1, 2, 4), VEC=(1, 4)),
    "ops/smear.cu": vectors(),
    "ops/softmax.cu": ROWS,
    "ops/swiglu.cu": vectors(),
    "ops/take.cu": vectors(),
    "ops/value_embedding.cu": vectors(),
    "optim/adamw.cu": [*every(SCALAR=PRECISIONS), *every(SCALAR=PRECISIONS, CAUTIOUS=(1,))],
    "optim/muon.cu": [
        *every(SCALAR=PRECISIONS, VEC=(1, 4)),
        *every(SCALAR=PRECISIONS, VEC=(1, 4), NORMUON=(1,)),
        *every(SCALAR=PRECISIONS, VEC=(1, 4), CAUTIOUS=(1,)),
        *every(SCALAR=PRECISIONS, VEC=(1, 4), NORMUON=(1,), CAUTIOUS=(1,)),
    ],
    "parallel/sums.cu": every(SCALAR=("double", "float")),
}
"""The variants of each file, by its path in the package."""

MAY_SPILL = {"infer/cuda/decode_batched.cu"}
"""Files whose variants may spill registers to memory, on sm_80."""


@cache
def smallest(file: str, macro: str, least: int, **macros: int | str) -> int:
    """The smallest value of `macro`, at least `least`, among the variants of `file` that have these macros; 0 if none
    has one."""
    found = (v for v in VARIANTS[file] if all(v.get(name) == value for name, value in macros.items()))
    return min((int(v[macro]) for v in found if int(v[macro]) >= max(least, 1)), default=0)
