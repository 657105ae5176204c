"""What launchers hand to their kernels, against the signatures in the .cu files, without a GPU.

A launch checks nothing: an argument too few, a float32 array for a bf16 one or a 64-bit number for a 32-bit one is read
as whatever bits are there. Here every launcher runs on arrays of the host that stand for the device's, and each launch
is compared with the entry's parameters: how many, which element type a pointer has, which width a number.
"""

from __future__ import annotations

import gc
import importlib
import json
import re
from bisect import bisect, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import PRECISIONS, Backend, dtype_of, tensor_map, wide
from tinyforge.backends import compile as kernels
from tinyforge.backends.variants import VARIANTS
from tinyforge.errors import UserError
from tinyforge.infer.cuda.prompts import append
from tinyforge.kernel import bind
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.attention import attention_bwd, attention_fwd, attention_rope_bwd, split
from tinyforge.ops.cross_entropy import linear_cross_entropy_fwd, sum_tokens
from tinyforge.ops.mixture import grouped_bwd_input, grouped_bwd_weight, grouped_fwd
from tinyforge.ops.rope import linear_rope_fwd
from tinyforge.ops.swiglu_linear import linear_swiglu_fwd, swiglu_linear_bwd
from tinyforge.optim import AdamW, AdamWConfig, Muon, MuonConfig, Pace
from tinyforge.optim.adamw import adamw_, clip_factor, square_sums, step_rates
from tinyforge.parallel.sums import add_
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, NextTokens

pytest.importorskip("cupy", reason="launchers need CuPy, not a GPU")
pytest.importorskip("ml_dtypes")

LAUNCHERS = (
    "ops.activations",
    "ops.add",
    "ops.add_layernorm",
    "ops.add_rmsnorm",
    "ops.attention",
    "ops.attention_sink",
    "ops.causal_conv",
    "ops.class_token",
    "ops.conv2d",
    "ops.cross_entropy",
    "ops.dropout",
    "ops.embedding",
    "ops.fork",
    "ops.fp8",
    "ops.fp8_linear",
    "ops.fp8_rmsnorm",
    "ops.geglu",
    "ops.gelu",
    "ops.gelu_linear",
    "ops.groupnorm",
    "ops.layernorm",
    "ops.linear",
    "ops.lora",
    "ops.losses",
    "ops.lstm",
    "ops.mix",
    "ops.mix_rmsnorm",
    "ops.mixture",
    "ops.mixture_biased",
    "ops.patches",
    "ops.pooling",
    "ops.positions",
    "ops.qk_norm_rope",
    "ops.rmsnorm",
    "ops.rope",
    "ops.router",
    "ops.router_losses",
    "ops.rows",
    "ops.scale",
    "ops.selective_scan",
    "ops.sigmoid_gate",
    "ops.smear",
    "ops.softmax",
    "ops.swiglu",
    "ops.swiglu_linear",
    "ops.take",
    "ops.value_embedding",
    "optim.adamw",
    "optim.muon",
    "parallel.sums",
    "infer.cuda.prompts",
    "quantised",
    "quantised_groups",
)
NUMBERS = {
    "int": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "double": np.float64,
    "float": np.float32,
    "byte": np.uint8,
    "unsigned char": np.uint8,
    "Weight": np.int64,
}
FREE = {"DROP", "HEAD_DIM", "TAPS"}  # macros with more values than the table has; plain attention has any masks
SCALARS = {"double": "float64", "float": "float32", "bf16": "bfloat16"}


class OnDevice(np.ndarray):
    """An array of the host that a launcher takes for one of the device: it has an address to look at."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data // 512 * 512)


class FakeCupy(Backend):
    """The backend `cupy` on arrays of the host; nothing is computed."""

    name = "cupy"
    xp = np
    tf32 = False
    repeats = False

    def __init__(self, precision: str) -> None:
        super().__init__(precision, workers=1)

    def empty(self, shape: tuple[int, ...]) -> OnDevice:
        return np.zeros(shape, self.dtype).view(OnDevice)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> OnDevice:
        return np.zeros(shape, self.dtype if dtype is None else dtype).view(OnDevice)

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> OnDevice:
        array = np.asarray(array)
        return array.astype(dtype or (self.dtype if array.dtype.kind in "fV" else np.int32)).view(OnDevice)


@cache
def declared(text: str, entry: str, macros: frozenset[str], epilogue: Any, file: str) -> list[str]:
    """The parameters of an entry in the text of a file, compiled with these macros."""
    text = re.sub(r"\bNumber\b", "float" if "#define TF32" in text else "bf16", text)
    if named := re.search(r"#define ENTRY\(name\) name##(\w+)", text):
        text = re.sub(r"ENTRY\((\w+)\)", rf"\1{named[1]}", text)
    if sizes := re.search(r"#define SIZES ((?:.*\\\n)*.*)", text):  # what several entries take
        text = text.replace("SIZES", sizes[1].replace("\\\n", " "))
    of_fp8 = re.search(r"#define FP8_ARGUMENTS (,.*)", text)
    text = re.sub(r"(?<!#define )FP8_ARGUMENTS", of_fp8[1] if of_fp8 and "FACTORS" in macros else "", text)
    for option in ("BAND", "DOCS", "DROP", "CAP", "RESTART", "TURN"):  # #define BAND_ARGUMENTS , i64 back, i64 forth
        defined = re.search(rf"#define {option}_ARGUMENTS (.*)", text)
        added = defined[1] if defined and option in macros else ""
        text = re.sub(rf"(?<!#define ){option}_ARGUMENTS", added, text)
    more = re.search(rf"EPILOGUE == {epilogue}\n#define MORE_ARGUMENTS (.*)", text)
    text = re.sub("(?<!#define) MORE_ARGUMENTS", f" {more[1]}" if more else "", text)
    found = re.search(rf'extern "C" __global__ void\s+(?:__launch_bounds__\(.*\)\s+)?{entry}\(([^)]*)\)', text)
    assert found is not None, f"{file} has no entry {entry}"
    return [" ".join(p.split()) for p in found[1].split(",")]


class Launches:
    """Stands for `compile.load`: each kernel that it gives compares its arguments with the entry's parameters."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.blocks: list[int] = []

    def load(self, file: str, entry: str, shared_bytes: int = 0, **macros: Any) -> Callable[..., None]:
        parameters = self.parameters(file, entry, macros)
        free = FREE | ({"BAND", "DOCS", "CAP"} if "REAL" in macros else set())
        assert set(macros) <= {name for v in VARIANTS[file] for name in v}
        chosen = {name: value for name, value in macros.items() if name not in free}
        listed = ({name: value for name, value in v.items() if name not in free} for v in VARIANTS[file])
        assert chosen in listed, f"{file} is never compiled with {macros}"

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0) -> None:
            self.seen.append(entry)
            self.blocks.append(int(np.prod(grid)))
            assert min(grid) > 0 and 0 < np.prod(block) <= 1024 and shared_mem == shared_bytes, (entry, grid, block)
            assert len(args) == len(parameters), f"{entry} takes {parameters}, got {len(args)}"
            for argument, parameter in zip(args, parameters, strict=True):
                self.compare(entry, parameter, argument, macros)

        return launch

    @staticmethod
    def parameters(file: str, entry: str, macros: dict[str, Any]) -> list[str]:
        return declared(kernels.read(file), entry, frozenset(macros), macros.get("EPILOGUE"), file)

    @staticmethod
    def compare(entry: str, parameter: str, argument: Any, macros: dict[str, Any]) -> None:
        kind = parameter.removeprefix("const ").rsplit(" ", 1)[0]
        kind = str(macros.get(kind, kind))
        scalar = macros.get("SCALAR") or macros.get("REAL") or "bf16"
        if kind == "T":
            kind = scalar
        elif kind == "A":
            kind = "double" if scalar == "double" else "float"
        elif kind == "Result":
            kind = "float" if macros["PRODUCT"] == "WEIGHT" else scalar
        elif kind == "Stored":
            kind = "unsigned char" if macros["DOUBLE"] else "float"
        elif kind in ("REAL", "float2"):
            kind = scalar if kind == "REAL" else "float"
        where = f"{entry}: {parameter}"
        if "*" in parameter:
            if isinstance(argument, np.uintp):
                assert argument == 0, where
                return
            assert isinstance(argument, OnDevice), f"{where}, got {type(argument)}"
            expected = dtype_of(SCALARS[kind]) if kind in SCALARS else np.dtype(NUMBERS[kind])
            assert argument.dtype == expected, f"{where}, got {argument.dtype}"
        elif kind == "__grid_constant__ TensorMap":
            assert argument.size == 1 and argument.nbytes == 128 and argument.ctypes.data % 64 == 0, where
        elif isinstance(argument, int):  # CuPy passes it with 64 bits
            assert kind == "i64", where
        else:
            assert type(argument) is NUMBERS[kind], f"{where}, got {type(argument)}"


def fake_gemm(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
    tf32: bool = False,
    scale: float = 1.0,
    keep: float = 1.0,
) -> Any:
    m, k = a.shape[::-1] if transpose_a else a.shape
    rows, n = b.shape[::-1] if transpose_b else b.shape
    assert k == rows and a.dtype == b.dtype and (out is not None or not accumulate)
    out = OnDevice((m, n), a.dtype) if out is None else out
    assert out.shape == (m, n) and out.dtype in (a.dtype, wide(a.dtype))
    return out


def no_gemm_plus(*arguments: Any, **options: Any) -> bool:
    """No algorithm of cuBLASLt fits: what is added is written first."""
    return False


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    attributes = {
        "MultiProcessorCount": 132,
        "MaxSharedMemoryPerBlockOptin": 227 << 10,
        "MaxSharedMemoryPerMultiprocessor": 228 << 10,
        "ReservedSharedMemoryPerBlock": 1 << 10,
    }
    device = SimpleNamespace(attributes=attributes, compute_capability="90", id=0)
    cupy = SimpleNamespace(
        ndarray=OnDevice,
        asarray=lambda x: np.asarray(x).view(OnDevice),
        cuda=SimpleNamespace(Device=lambda: device, runtime=SimpleNamespace(getDevice=lambda: 0)),
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(OnDevice),
        empty=OnDevice,
        zeros=OnDevice,
        concatenate=lambda arrays: np.concatenate(arrays).view(OnDevice),
        arange=lambda count, dtype: np.arange(count, dtype=dtype).view(OnDevice),
    )
    from tests.backends import naive_gemm
    from tinyforge import quantised_groups_cuda
    from tinyforge.backends import cupy_backend, gemm
    from tinyforge.ops import attention_cuda

    caches = (
        cupy_backend.has_wgmma,
        cupy_backend.processors,
        cupy_backend.shared_limit,
        attention_cuda.plain,
        attention_cuda.tensor_core,
        attention_cuda.tma_kernel,
        attention_cuda.schedule,
        gemm._plan,
        quantised_groups_cuda._numbers,
    )
    monkeypatch.setattr(tensor_map, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 0))
    launchers = (importlib.import_module(f"tinyforge.{name}_cuda") for name in LAUNCHERS)
    for module in (cupy_backend, gemm, naive_gemm, *launchers):
        stand_ins = {
            "load": found.load,
            "gemm": fake_gemm,
            "gemm_plus": no_gemm_plus,
            "gemm_batched": no_gemm_plus,
            "cupy": cupy,
            "cp": cupy,
            "_table": dict,
            "_gpu": str,
        }
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    for cached in caches:
        cached.cache_clear()
    yield found
    for cached in caches:
        cached.cache_clear()


def test_no_launcher_is_left_out() -> None:
    folder = files("tinyforge")
    there = {
        f"{d.replace('/', '.')}.{f.name[: -len('_cuda.py')]}".lstrip(".")
        for d in ("", "infer/cuda", "ops", "optim", "parallel")
        for f in (folder / d).iterdir()
        if f.name.endswith("_cuda.py")
    }
    assert there == {*LAUNCHERS, "parallel.windows"}  # which calls NCCL and no kernel of ours


@pytest.mark.parametrize("kind", ops.ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("frozen", [False, True], ids=["learned", "frozen"])
def test_launchers_pass_what_their_kernels_declare(
    kind: type[Op], frozen: bool, precision: str, launches: Launches
) -> None:
    if kind is ops.Attention and precision == "bf16":
        pytest.skip("the cases' head sizes have no kernel in bf16; the next test has some that do")
    backend = FakeCupy(precision)
    for op, inputs in kind.cases(backend, np.random.default_rng(0)):
        if frozen:
            for p in op.params():
                p.frozen = True
            ParamBuffer(op.params(), backend)
        for per_head in (False, True)[: 1 + kind.per_head]:
            stash = Stash(Stream(7, "test"))
            y = op.forward(*inputs, stash=stash)
            op.backward(y[0, :].reshape(-1)[: y.shape[-1]] if per_head else y, stash)
            assert not len(stash)
    assert launches.seen or kind is ops.LinearSwiGLU  # whose products launch nothing here; see below


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize(
    ("seen", "documents"),
    [((True, None), False), ((True, 40), False), ((False, None), False), ((True, None), True), ((True, 40), True)],
)
@pytest.mark.parametrize("dropped", [(None, 0.0), ((1, 2), 0.3)], ids=["kept", "dropped"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp8"])  # attention computes in bf16 then
def test_every_attention_kernel_gets_what_it_declares(
    precision: str,
    dim: int,
    dropped: Any,
    documents: bool,
    seen: Any,
    hopper: bool,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinyforge.ops import attention_cuda

    causal, window = seen

    monkeypatch.setattr(attention_cuda, "has_wgmma", lambda: hopper)
    backend = FakeCupy(precision)
    monkeypatch.setattr(backend, "tf32", precision == "tf32", raising=False)
    k = bind((attention_fwd, attention_bwd), backend, "test")
    lengths = None if seen[0] else backend.asarray(np.array([130, 40]))
    qkv, dqkv = (backend.zeros((2, 130, 8, dim)) for _ in range(2))
    parts, dparts = ((x[:, :, :4], x[:, :, 4:6], x[:, :, 6:]) for x in (qkv, dqkv))
    q, key, v = parts
    starts = backend.asarray(np.zeros((2, 130), np.int32)) if documents else None
    out, lse = k.attention_fwd(q, key, v, lengths, starts, *seen, *dropped)
    k.attention_bwd(*dparts, out, q, key, v, lengths, starts, out, lse, *seen, *dropped)
    # The bounds of documents have the window in them, and Hopper's kernels have windows as documents.
    documents = documents or (window is not None and precision == "bf16" and hopper and dim >= 64 and not dropped[0])
    band = not causal or (window is not None and not documents)
    instructions, options = "plain", band + (dropped[0] is not None)
    if precision == "bf16" and hopper and dim >= 64 and not options:
        instructions = "wgmma" if dim == 64 else "tma"
    elif precision == "bf16" and options < 2 and dim != 96:
        instructions = "mma"
    elif precision == "tf32" and not options and dim != 96:
        instructions = "tf32"
    expected = [f"attention_{part}_{instructions}" for part in ("fwd", "bwd_q", "bwd_kv")]
    if documents:
        expected[1:1] = ["document_bounds"]
        expected[:0] = ["document_bounds"] if window else []
    assert launches.seen == expected


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_keys_and_values_of_any_layout_are_appended(
    precision: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has one stride for both, so parts of different rows are copied first."""
    from tinyforge.infer.cuda import prompts_cuda

    given: list[tuple[Any, ...]] = []

    def load(*arguments: Any, **macros: Any) -> Callable[..., None]:
        launch = launches.load(*arguments, **macros)
        return lambda grid, block, args: (given.append(args), launch(grid, block, args))[1]

    monkeypatch.setattr(prompts_cuda, "load", load)
    backend = FakeCupy(precision)
    put = append.bind(backend)
    keys, values = (backend.zeros((2, 9, 8)) for _ in range(2))
    packed, alone = backend.zeros((1, 5, 6, 8)), backend.zeros((1, 5, 2, 8))
    across = backend.zeros((1, 2, 5, 8)).swapaxes(1, 2)
    k, v = packed[:, :, 2:4], packed[:, :, 4:]
    for new, copied, stride in (((k, v), False, 48), ((alone, v), True, 16), ((across, across), True, 16)):
        put(keys, values, *new, 3)
        assert [x.flags.c_contiguous for x in given[-1][2:4]] == [copied] * 2
        assert given[-1][7] == stride and given[-1][8] == 9


def test_no_upload_goes_into_a_graph() -> None:
    from tinyforge.backends.cupy_backend import CupyBackend

    backend = CupyBackend.__new__(CupyBackend)
    backend.repeats = True
    for upload in (backend.asarray, partial(backend.put, None)):
        with pytest.raises(
            UserError, match=r"--cuda-graph: the step uploads int64 of shape \(3,\), which a graph cannot"
        ):
            upload(np.arange(3))


def test_attention_refuses_starts_that_its_kernels_cannot_read(launches: Launches) -> None:
    backend = FakeCupy("fp32")
    k = bind((attention_fwd,), backend, "test")
    x = backend.zeros((2, 130, 2, 32))
    for wrong in (np.zeros((2, 130), np.int64), np.zeros((2, 129), np.int32), np.zeros((1, 130), np.int32)):
        with pytest.raises(ValueError, match="attention: starts are int.. of shape .*expected int32 of shape .2, 130."):
            k.attention_fwd(x, x, x, None, wrong.view(OnDevice), True, None, None, 0.0)


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize(("precision", "width"), [("bf16", 24), ("bf16", 20), ("fp32", 24)])
def test_grouped_products_take_tensor_cores_where_they_can(
    precision: str, width: int, hopper: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyforge.ops import mixture_cuda

    files: list[str] = []

    def load(file: str, entry: str, shared_bytes: int = 0, **macros: Any) -> Callable[..., None]:
        files.append(file)
        return launches.load(file, entry, shared_bytes, **macros)

    monkeypatch.setattr(mixture_cuda, "load", load)
    monkeypatch.setattr(mixture_cuda, "has_wgmma", lambda: hopper)
    backend = FakeCupy(precision)
    k = bind((grouped_fwd, grouped_bwd_input, grouped_bwd_weight), backend, "test")
    x, y, weight = backend.zeros((5, 16)), backend.zeros((5, width)), backend.zeros((3, width, 16))
    rows, starts = (backend.asarray(np.array(a)) for a in ([4, 0, 1, 2, 3, 1], [0, 2, 2, 6]))
    assert k.grouped_fwd(x, weight, rows, starts).shape == (6, width)
    assert k.grouped_bwd_input(y, weight, None, starts).shape == (5, 16)
    k.grouped_bwd_weight(backend.zeros(weight.shape, backend.master_dtype), y, x, rows, rows, starts)
    fast = precision == "bf16" and width % 8 == 0
    assert files == [f"ops/grouped{('_hopper' if hopper else '_mma') if fast else ''}.cu"] * 3


@pytest.fixture
def spared(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Five multiprocessors are left to others; what cuBLAS has been told, each time."""
    from tinyforge.backends import cupy_backend

    told = list[int]()
    monkeypatch.setattr(cupy_backend, "use_processors", told.append)
    cupy_backend.CupyBackend.spare(None, 5)
    yield told
    cupy_backend.CupyBackend.spare(None, 0)


def test_kernels_leave_room(launches: Launches, spared: list[int]) -> None:
    """Those that have a block for each multiprocessor, whole clusters of them; small ones have what they need."""
    from tinyforge.backends import cupy_backend, gemm

    backend = FakeCupy("bf16")
    for rows, blocks in ((64 << 10, {1: 127, 2: 126}), (40, {1: 1, 2: 2})):
        a, b, out = backend.zeros((rows, 64)), backend.zeros((64, 64)), backend.zeros((rows, 64))
        for variant in gemm.compiled("FORWARD"):
            launches.blocks.clear()
            gemm.hopper(variant, a, b, out, "FORWARD")
            assert launches.blocks == [blocks[variant.cluster]], (rows, variant)
    q = backend.zeros((8, 512, 16, 128))
    launches.blocks.clear()
    bind((attention_fwd,), backend, "test").attention_fwd(q, q, q, None, None, True, None, None, 0.0)
    assert launches.blocks == [127]
    assert spared == [127]
    spare = partial(cupy_backend.CupyBackend.spare, None)
    spare(5)
    assert spared == [127]
    spare(0)
    assert spared == [127, 0]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("product", ["FORWARD", "INPUT", "WEIGHT"])
def test_products_of_our_own_get_what_they_declare(product: str, splits: int, launches: Launches) -> None:
    from tests.backends.naive_gemm import gemm_naive
    from tinyforge.backends import gemm

    backend, (m, n, k) = FakeCupy("bf16"), (40, 24, 200)
    for variant in gemm.compiled(product):
        a = backend.zeros((k, m) if product == "WEIGHT" else (m, k))
        b = backend.zeros((n, k) if product == "FORWARD" else (k, n))
        out = backend.zeros((m, n), backend.master_dtype if product == "WEIGHT" else None)
        launches.seen.clear()
        assert gemm.hopper(replace(variant, splits=splits), a, b, out, product) is out
        parts = product == "WEIGHT" and splits > 1
        assert launches.seen == ["gemm_hopper", *["gemm_sum"] * parts]
        gemm_naive(a, b, out, product, splits=splits)
        # Refused: rows that do not begin at 16 bytes, another type of result, bf16 that would be added to.
        launches.seen.clear()
        odd = backend.zeros((n - 1, k) if product == "FORWARD" else (k, n - 1))
        assert gemm.hopper(variant, a, odd, OnDevice((m, n - 1), out.dtype), product) is None
        assert gemm.hopper(variant, a, b, OnDevice((m, n), np.dtype(np.float64)), product) is None
        if product != "WEIGHT":
            assert gemm.hopper(variant, a, b, out, product, accumulate=True) is None
        assert not launches.seen


def test_a_product_goes_where_the_table_says(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape and layout, to our kernel if it can take it; all else, and everything without a table, to cuBLAS."""
    from tinyforge.backends import cublas, gemm

    monkeypatch.undo()
    gemm._plan.cache_clear()
    found = Launches()
    monkeypatch.setattr(gemm, "load", found.load)
    monkeypatch.setattr(gemm, "free_processors", lambda: 132)
    monkeypatch.setattr(tensor_map, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 0))
    monkeypatch.setattr(gemm, "new", OnDevice)
    by_cublas: list[Any] = []
    monkeypatch.setattr(cublas, "gemm", lambda *arrays, **_: by_cublas.append(arrays))
    said: list[str] = []
    monkeypatch.setattr(gemm, "on_choice", None)
    gemm.announce(said.append)
    table: dict[str, list[int]] = {}
    monkeypatch.setattr(gemm, "_table", lambda: gemm.parsed(table))
    backend = FakeCupy("bf16")
    x, weight = backend.zeros((40, 64)), backend.zeros((24, 64))

    def forward(**options: Any) -> tuple[int, int]:
        found.seen.clear(), by_cublas.clear()
        gemm.gemm(x, weight, transpose_b=True, **options)
        return len(found.seen), len(by_cublas)

    assert forward() == (0, 1)
    table["FORWARD 40 24 64"] = [128, 256, 4, 0, 2, 4]
    assert forward() == (1, 0)
    assert forward(scale=0.5) == (0, 1)
    assert forward(accumulate=True, out=backend.zeros((40, 24))) == (0, 1)  # bf16 is not added to
    x = FakeCupy("fp32").zeros((40, 64))
    weight = FakeCupy("fp32").zeros((24, 64))
    assert forward() == (0, 1)
    assert said == ["FORWARD 40 x 24 over 64: cuBLAS"]  # once for each shape
    gemm.announce(said.append)
    backend = FakeCupy("bf16")
    x, weight = backend.zeros((40, 64)), backend.zeros((24, 64))
    assert forward() == (1, 0)
    assert said[1].endswith("64: 128 x 256 cooperative, 4 stages, cluster 2, band 4, splits 1")


def test_fp8_products_and_quantising_kernels_get_what_they_declare(launches: Launches) -> None:
    backend = FakeCupy("fp8")
    for kind in ops.IN_FP8:
        for op, inputs in kind.cases(backend, np.random.default_rng(0)):
            stash = Stash()
            y = op.forward(*inputs, stash=stash)
            op.backward(y, stash)
    assert {"gemm_hopper", "quantise_rows", "largest_of_weights", "quantise_weights"} <= set(launches.seen)
    launches.seen.clear()
    for width in (768, 33):
        gain = Param("gain", (width,), fill=1.0, decay=False)
        norm = ops.FP8AddRMSNorm(gain, backend)
        with_buffer(norm, backend, np.random.default_rng(0))
        stash, x = Stash(), backend.zeros((5, width))
        norm.forward(x, None, stash)
        norm.backward((x, x), stash)
        norm.forward(x, None, stash)
        norm.backward((None, x), stash)
    assert {"rmsnorm_scaled_fwd", "rmsnorm_scaled_bwd", "add_rmsnorm_scaled_bwd"} <= set(launches.seen)


@pytest.mark.parametrize("in_table", [True, False])
def test_swiglu_is_at_the_end_of_a_product_where_the_table_says(
    in_table: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel each way; else, or where the kernel cannot take the arrays, a product and a pass."""
    from tinyforge.backends import gemm

    backend = FakeCupy("bf16")
    k = bind((linear_swiglu_fwd, swiglu_linear_bwd), backend, "test")
    monkeypatch.setattr(gemm, "on_choice", None)

    def both_ways(hidden: int, frozen: bool) -> tuple[list[str], list[str]]:
        rows = {
            f"SWIGLU 40 {2 * hidden} 64": [128, 192, 5, 1, 1, 8, 1],
            f"SWIGLU_BACKWARD 40 {hidden} 64": [128, 128, 5, 1, 1, 8, 1],
        }
        monkeypatch.setattr(gemm, "_table", lambda: gemm.parsed(rows if in_table else {}))
        launches.seen.clear()
        gu, h = k.linear_swiglu_fwd(backend.zeros((2, 20, 64)), backend.zeros((2 * hidden, 64)))
        assert gu.shape == (2, 20, 2 * hidden) and h.shape == (2, 20, hidden)
        forward = list(launches.seen)
        launches.seen.clear()
        dweight = None if frozen else backend.zeros((64, hidden), backend.master_dtype)
        dgu = k.swiglu_linear_bwd(dweight, backend.zeros((2, 20, 64)), gu, backend.zeros((64, hidden)))
        assert dgu.shape == gu.shape
        return forward, list(launches.seen)

    passes = ["swiglu_fwd"], ["swiglu_bwd"]
    for frozen in (False, True):
        assert both_ways(24, frozen) == ((["gemm_hopper"], ["gemm_hopper"]) if in_table else passes)
        assert both_ways(20, frozen) == passes  # not by eights
    if in_table:
        x, out = backend.zeros((40, 64)), backend.zeros((40, 48))
        with pytest.raises(ValueError, match="gemm: bfloat16 .40, 16. next to .40, 48. of SWIGLU, expected .40, 24."):
            gemm.hopper(
                gemm.compiled("SWIGLU")[0], x, backend.zeros((48, 64)), out, "SWIGLU", hidden=backend.zeros((40, 16))
            )


@pytest.mark.parametrize("in_table", [True, False])
def test_rope_is_at_the_end_of_a_product_where_the_table_says(
    in_table: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel; else, or for heads that are not 64 wide, a product and a pass."""
    from tinyforge.backends import gemm

    backend = FakeCupy("bf16")
    k = bind((linear_rope_fwd,), backend, "test")
    monkeypatch.setattr(gemm, "on_choice", None)
    rows = {"ROPE 40 192 64": [128, 192, 5, 1, 1, 8, 1]} if in_table else {}
    monkeypatch.setattr(gemm, "_table", lambda: gemm.parsed(rows))
    for dim in (64, 32):
        launches.seen.clear()
        cos, sin = (backend.zeros((20, dim // 2), backend.master_dtype) for _ in range(2))
        qkv = k.linear_rope_fwd(backend.zeros((2, 20, 64)), backend.zeros((192, 64)), cos, sin, 192 // dim - 1)
        assert qkv.shape == (2, 20, 192 // dim, dim)
        assert launches.seen == (["gemm_hopper"] if in_table and dim == 64 else ["rope"])


@pytest.mark.parametrize(
    ("epilogue", "rows", "least", "most"),
    [("SWIGLU", 2048, 320, 1536), ("SWIGLU_BACKWARD", 2048, 320, 2048), ("ROPE", 8192, 384, 1024)],
)
def test_an_epilogue_is_used_at_the_sizes_where_it_pays(
    epilogue: str, rows: int, least: int, most: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, on a Hopper, without a table."""
    from tinyforge.backends import gemm

    def used(m: int, k: int, precision: str = "bf16") -> bool:
        launches.seen.clear()
        backend = FakeCupy(precision)
        x = backend.zeros((m, k))
        if epilogue == "SWIGLU":
            made: Any = gemm.gemm_swiglu(x, backend.zeros((128, k)))
        elif epilogue == "SWIGLU_BACKWARD":
            made = gemm.gemm_swiglu_backward(x, backend.zeros((k, 64)), backend.zeros((m, 128)), again=True)
        else:
            tables = (backend.zeros((m, 32), backend.master_dtype) for _ in range(2))
            made = gemm.gemm_rope(x, backend.zeros((128, k)), gemm.Turn(*tables, 1))
        assert (made is not None) == (launches.seen == ["gemm_hopper"])
        return made is not None

    monkeypatch.setattr(gemm, "on_choice", None)
    assert used(rows, least) and used(rows, most) and used(10 * rows, least)
    assert not used(rows - 1, least) and not used(rows, least - 8) and not used(rows, most + 8)
    assert not used(rows, least, "fp32")
    monkeypatch.setattr(gemm, "has_wgmma", lambda: False)
    assert not used(rows, least)


def test_a_rule_takes_the_tile_that_would_finish_first(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.backends import gemm

    def columns(*size: int) -> int:
        tile = gemm.by_rule("SWIGLU", *size)
        assert tile is not None
        return tile.columns

    assert columns(16384, 4096, 768) == 256  # 16 turns of 256 columns, 22 of 192
    assert columns(2048, 2880, 512) == 192  # 2 turns each
    assert columns(4096, 2752, 512) == 256  # 3 of 256, 4 of 192: the same
    monkeypatch.setattr(gemm, "_gpu", lambda: "NVIDIA H200")
    assert columns(16384, 4096, 768) == 192  # for 0.94 of the time of a column
    assert columns(2048, 4096, 768) == 256  # 2 turns, 3
    assert columns(16384, 2048, 384) == 256  # a short sum: as elsewhere
    tiles = [tile for rules in gemm.RULES.values() for rule in rules for tile, _ in rule.tiles]
    assert {tile.rows for tile in tiles} == {128}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_turns_its_gradients_back(
    dim: int, documents: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the kernels for heads of 64 on a Hopper; elsewhere by a pass after them."""
    from tinyforge.ops import attention_cuda

    monkeypatch.setattr(attention_cuda, "has_wgmma", lambda: True)
    backend, batch, tokens, heads = FakeCupy("bf16"), 2, 70, 4
    k = bind((attention_fwd, attention_rope_bwd), backend, "test")
    qkv = backend.zeros((batch, tokens, heads + 4, dim))
    starts = backend.asarray(np.zeros((batch, tokens), np.int32)) if documents else None
    out, lse = k.attention_fwd(*split(qkv, heads), None, starts, True, None, None, 0.0)
    cos, sin = (backend.zeros((tokens, dim // 2), backend.master_dtype) for _ in range(2))
    for rotated in (heads + 2, heads):
        launches.seen.clear()
        k.attention_rope_bwd(
            backend.empty(qkv.shape), out, qkv, None, starts, out, lse, cos, sin, rotated, True, None, None, 0.0
        )
        assert ("rope" in launches.seen) == (dim != 64 or rotated == heads)
        assert len(launches.seen) == 2 + documents + ("rope" in launches.seen)


def test_the_measured_table_and_the_rules_name_variants_that_are_compiled() -> None:
    from tinyforge.backends import gemm

    table = json.loads((files("tinyforge.backends") / gemm.TABLE).read_text("utf-8"))
    for gpu in table.values():
        for (product, *_), variant in gemm.parsed(gpu).items():
            assert replace(variant, band=8, splits=1) in gemm.compiled(product), product
    for product, rules in gemm.RULES.items():
        tiles = {replace(tile, band=8) for rule in rules for tile, _ in rule.tiles}
        assert tiles <= set(gemm.compiled(product)), product


@pytest.mark.parametrize(
    ("precision", "vocab", "shared"),
    [
        ("bf16", 50_257, 100_608),
        ("fp32", 50_257, 201_088),
        ("fp32", 60_001, 0),
        ("bf16", 32_000, 64_000),
        ("bf16", 4096, 0),
    ],
)
def test_a_row_of_logits_is_held_where_it_fits(
    precision: str, vocab: int, shared: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyforge.ops import cross_entropy_cuda

    asked: list[tuple[int, dict[str, Any]]] = []

    def load(file: str, entry: str, shared_bytes: int = 0, **macros: Any) -> Callable[..., None]:
        if entry == "softmax_residual":
            asked.append((shared_bytes, macros))
        return launches.load(file, entry, shared_bytes, **macros)

    monkeypatch.setattr(cross_entropy_cuda, "load", load)
    backend = FakeCupy(precision)
    k = bind((linear_cross_entropy_fwd,), backend, "test")
    weight, targets = backend.zeros((1, vocab, 8)), backend.asarray(np.zeros((3, 1), np.int32))
    k.linear_cross_entropy_fwd(backend.zeros((3, 8)), weight, targets, True)
    ((bytes_held, macros),) = asked
    assert bytes_held == shared and ("HELD" in macros) == (shared > 0)
    assert macros in VARIANTS["ops/cross_entropy.cu"]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_optimizers_launches(precision: str, launches: Launches) -> None:
    backend = FakeCupy(precision)
    flat = [backend.zeros((64,), backend.master_dtype) for _ in range(4)]
    values = flat[0] if backend.dtype == backend.master_dtype else backend.zeros((64,))
    squares, clip, update, summed, add = (k.bind(backend) for k in (square_sums, clip_factor, adamw_, sum_tokens, add_))
    sums = backend.zeros((3, 7), np.dtype(np.float64))
    squares(sums, flat[3], backend.zeros((3, 2), np.dtype(np.int64)))
    assert launches.blocks == [21]
    sums = sums.reshape(-1)
    _, factor = clip(sums, 1.0, 1.0)
    clip(sums, np.asarray(factor).view(OnDevice), 1.0)
    add(flat[0], flat[1])
    rates = backend.asarray(step_rates(1, 1e-3, AdamWConfig())[0], backend.master_dtype)
    update(values, *flat, rates, np.asarray(factor).view(OnDevice), AdamWConfig())
    summed(backend.zeros((5, 3), backend.master_dtype))
    assert launches.seen == ["square_sums", "finish_norm", "finish_norm", "add", "adamw", "sum_heads"]


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize(("precision", "shape"), [("fp64", (3, 5)), ("fp32", (8, 4)), ("bf16", (64, 96))])
def test_the_launches_of_muon(precision: str, shape: tuple[int, int], normuon: bool, launches: Launches) -> None:
    backend, (rows, columns) = FakeCupy(precision), shape
    buffer = ParamBuffer(
        [Param("map", (2 * rows, columns), matrices=(rows, rows)), Param("gain", (7,), decay=False)], backend
    )
    optimizer = Muon(buffer, backend, MuonConfig(normuon=normuon, cautious=normuon))
    optimizer.apply(optimizer.next_rates(1e-3), np.ones(()).view(OnDevice))
    by_row = ["normuon_rows", "normuon_factors"] if normuon else []
    assert launches.seen == ["muon_momentum", "muon_scale", *by_row, "muon_update", "adamw"]


def test_a_wrong_argument_shows(launches: Launches) -> None:
    kernel = launches.load("ops/softmax.cu", "softmax_fwd", SCALAR="bf16", VEC=8, PER=1)
    y, x = (FakeCupy("bf16").zeros((2, 64)) for _ in range(2))
    single, rows = FakeCupy("fp32").zeros((2, 64)), np.int32(2)
    kernel((1,), (32, 8), (y, x, rows, np.int32(64)))
    for wrong in ((y, x, rows), (y, single, rows, rows), (y, x, 2, rows), (y, x, rows, 64.0)):
        with pytest.raises(AssertionError, match="softmax_fwd"):
            kernel((1,), (32, 8), wrong)


# --- a step that is captured in a graph: the launches of two steps with other data ------------------------------------


class Recorder:
    """The launches of a step: which kernel, with which numbers and addresses. An array made in the step has the place
    in the order of those made instead of its address: a graph has memory of its own."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, Any]] = []  # address, number, the array
        self.seen: list[tuple[Any, ...]] = []

    def make(self, array: Any) -> None:
        insort(self.made, (array.ctypes.data, len(self.made), array))

    def of(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return type(value).__name__, repr(value)
        if value.dtype.kind == "V" and value.dtype.names is None and not isinstance(value, OnDevice):
            return "map", value.nbytes
        address = value.ctypes.data
        below = bisect(self.made, address, key=lambda made: made[0])
        if below:
            start, place, array = self.made[below - 1]
            if address < start + array.nbytes:
                return "made", place, address - start, value.shape, value.strides
        return "fixed", address, value.shape, value.strides


recorder: Recorder | None = None


class InStep(OnDevice):
    """An array whose arithmetic is recorded too, as launches are; an element is an array without axes, as in CuPy."""

    def __array_finalize__(self, source: Any) -> None:
        if recorder is not None and (self.flags.owndata or not isinstance(source, InStep)) and self.nbytes:
            recorder.make(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if recorder is not None:
            recorder.seen.append((ufunc.__name__, method, *map(recorder.of, inputs)))
        plain = [np.asarray(x) for x in inputs]
        if out is not None:
            options["out"] = tuple(np.asarray(x) for x in out)
        result = getattr(ufunc, method)(*plain, **options)
        return out[0] if out is not None else np.asarray(result).view(InStep)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and self.ndim == 1:
            key = key % len(self)
            return super().__getitem__(slice(key, key + 1)).reshape(())
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if recorder is not None:
            recorder.seen.append(("copy", recorder.of(self), repr(key), recorder.of(value)))
        super().__setitem__(key, value)

    def fill(self, value: Any) -> None:
        if recorder is not None:
            recorder.seen.append(("fill", recorder.of(self), recorder.of(value)))
        super().fill(value)


class Recording(FakeCupy):
    """Refuses uploads while launches are recorded, as the backend does while they are captured."""

    def empty(self, shape: tuple[int, ...]) -> OnDevice:
        return super().empty(shape).view(InStep)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> OnDevice:
        return super().zeros(shape, dtype).view(InStep)

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> OnDevice:
        if isinstance(array, InStep):
            return array.astype(dtype or array.dtype, copy=False)  # type: ignore[return-value]
        assert recorder is None, f"the step uploads {np.asarray(array).dtype} of shape {np.shape(array)}"
        return super().asarray(array, dtype).view(InStep)

    def graphs(self) -> Recording:
        self.products, self.steps = self, cast("list[list[Any]]", [])
        return self

    def in_use(self) -> Any:
        return nullcontext()

    def run(self, work: Callable[[], None]) -> None:
        global recorder
        self.repeats, recorder = True, Recorder()
        try:
            work()
        finally:
            self.repeats, found, recorder = False, recorder, None
        self.steps.append(found.seen)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.run(work)
        return lambda: None


CAPTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "nanoeuler": ("nanoeuler", {"dim": 64, "heads": 2, "kv_heads": 1, "mtp_heads": 2, "hidden": 48}),
    "gpt2": ("gpt2", {"dim": 64, "heads": 2, "dropout": 0.0}),
    "gpt2, dropout": ("gpt2", {"dim": 64, "heads": 2, "dropout": 0.1}),
    # More layers than CuPy concatenates without an upload.
    "moe": ("moe", {"dim": 64, "heads": 2, "kv_heads": 1, "mtp_heads": 2, "hidden": 48, "experts": 4, "layers": 9}),
}


def recorded(
    name: str,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    launches: Launches,
    fault: str = "",
    config: AdamWConfig | None = None,
) -> Any:
    """The launches of two steps of `Captured` with other data."""
    from tinyforge.backends import cupy_backend

    @cache
    def load(file: str, entry: str, shared_bytes: int = 0, **macros: Any) -> Callable[..., None]:
        checked = launches.load(file, entry, shared_bytes, **macros)

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
            checked(grid, block, args, shared_mem=shared_mem)
            if recorder is not None:
                recorder.seen.append((file, entry, sorted(macros.items()), grid, block, *map(recorder.of, args)))

        return launch

    def gemm(a: Any, b: Any, out: Any = None, **options: Any) -> Any:
        if out is None:
            rows, columns = a.shape[bool(options.get("transpose_a"))], b.shape[not options.get("transpose_b")]
            out = InStep((rows, columns), a.dtype)
        fake_gemm(a, b, out, **options)
        if recorder is not None:
            recorder.seen.append(("gemm", sorted(options.items()), *map(recorder.of, (a, b, out))))
        return out

    def joined(arrays: Any) -> Any:
        assert recorder is None or len(arrays) <= 8, "CuPy uploads the addresses of more than eight arrays"
        result = np.concatenate([np.asarray(a) for a in arrays]).view(InStep)
        if recorder is not None:
            recorder.seen.append(("concatenate", *map(recorder.of, arrays)))
        return result

    device = cupy_backend.cupy.cuda  # the fixture's
    cupy = SimpleNamespace(
        ndarray=InStep,
        cuda=device,
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(InStep),
        empty=InStep,
        concatenate=joined,
        arange=lambda count, dtype: np.arange(count, dtype=dtype).view(InStep),
        asarray=lambda x: pytest.fail(f"the step uploads {x!r}"),
    )
    for module in (cupy_backend, *(importlib.import_module(f"tinyforge.{name}_cuda") for name in LAUNCHERS)):
        for attribute, stand_in in {"load": load, "gemm": gemm, "cupy": cupy, "cp": cupy}.items():
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, stand_in)
    kind, changes = CAPTURED[name]
    spec, backend = find_model(kind), Recording(precision)
    monkeypatch.setattr(backend, "xp", SimpleNamespace(concatenate=joined, arange=cupy.arange))
    shape = next(iter(spec.presets.values())).override({"layers": 2, "vocab": 64, "context": 16, **changes})
    model = spec.build(shape, backend)
    parallel = DataParallel(model, backend, NextTokens(shape.head_weights))
    optimizer = parallel.rank.make_optimizer(config)
    captured = Captured(parallel, optimizer, 1.0)
    if fault:
        FAULTS[fault](backend, optimizer, monkeypatch)
    rng = np.random.default_rng(0)
    for step in range(3):
        batches = []
        for _ in range(2):
            ids = rng.integers(0, 64, (4, 16), dtype=np.int32)
            targets = rng.integers(-9, 64, (4, 16, shape.prediction_heads), dtype=np.int32).clip(-1)
            batches.append(Batch(ids, targets))
        captured.step(batches, Stream(step, "dropout"), 1e-2 / (step + 1))
    return backend.steps


def rates_from_the_host(backend: Recording, optimizer: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        optimizer, "apply", lambda _, factor: AdamW.apply(optimizer, optimizer.next_rates(1e-3), factor)
    )


def weights_from_the_host(backend: Recording, optimizer: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    right = NextTokens.weigh

    def weigh(*arguments: Any) -> Any:
        sums, scale = right(*arguments)
        return sums * (1.0 + len(backend.steps)), scale

    monkeypatch.setattr(NextTokens, "weigh", weigh)


def factor_elsewhere(backend: Recording, optimizer: AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    places, right = [backend.zeros((), np.dtype(np.float64)) for _ in range(4)], optimizer.clip

    def clip(limit: float) -> Any:
        optimizer.factor = places.pop()
        return right(limit)

    monkeypatch.setattr(optimizer, "clip", clip)


FAULTS = {"uploads": rates_from_the_host, "number": weights_from_the_host, "address": factor_elsewhere}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_launches_the_same_with_other_data(
    name: str, precision: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number and no address of a launch changes from step to step, and nothing is uploaded: else a graph would go
    on with what it was captured with."""
    first, second = recorded(name, precision, monkeypatch, launches)
    assert len(first) > 60 and {"gemm", "copy", "fill"} <= {row[0] for row in first}
    assert ("dropout" in name) == any(row[1] == "dropout" for row in first)
    for one, other in zip(first, second, strict=True):
        assert one == other


@pytest.mark.parametrize("normuon", [False, True])
def test_a_captured_step_of_muon_launches_the_same(
    normuon: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its momentum is another one in every step, as with --momentum-schedule."""
    right = Captured.step

    def scheduled(self: Captured, batches: Any, noise: Any, lr: float) -> Any:
        return right(self, batches, noise, Pace(lr, 0.9 + lr))

    monkeypatch.setattr(Captured, "step", scheduled)
    config = MuonConfig(normuon=normuon, coefficients="polar-express", group_rates=(("heads", 2.0),))
    first, second = recorded("nanoeuler", "bf16", monkeypatch, launches, config=config)
    assert first == second and any(row[1] == "muon_update" for row in first)
    assert any(row[1] == "normuon_rows" for row in first) == normuon


@pytest.mark.parametrize("fault", FAULTS)
def test_a_launch_that_would_be_frozen_shows(fault: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "uploads":
        with pytest.raises(AssertionError, match="the step uploads"):
            recorded("gpt2", "fp32", monkeypatch, launches, fault)
        return
    first, second = recorded("gpt2", "fp32", monkeypatch, launches, fault)
    assert len(first) == len(second) and sum(a != b for a, b in zip(first, second, strict=True)) in (1, 2)


class FakeCuda:
    """Of CuPy, what captures: notes what is asked for, in order."""

    def __init__(self, fault: str = "") -> None:
        self.log: list[str] = []
        self.pinned, self.fault = "pinned pool", fault
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: self,
            MemoryPool=lambda: SimpleNamespace(malloc="graph's pool"),
            using_allocator=self.inside,
            set_pinned_memory_allocator=partial(setattr, self, "pinned"),
        )

    @contextmanager
    def inside(self, what: Any = "products") -> Iterator[None]:
        self.log.append(f"in {what}")
        yield
        self.log.append(f"out of {what}")

    def __enter__(self) -> FakeCuda:
        self.log.append("in stream")
        return self

    def __exit__(self, *exc: object) -> None:
        self.log.append("out of stream")

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: self.log.append("free"))

    def get_default_pinned_memory_pool(self) -> Any:
        return SimpleNamespace(malloc="pinned pool")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def begin_capture(self) -> None:
        self.log.append("begin")

    def end_capture(self) -> Any:
        self.log.append("end")
        if self.fault == "CUDA":
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        return SimpleNamespace(launch=lambda: self.log.append("launch"))


@pytest.mark.parametrize("fault", ["", "CUDA", "work", "upload"])
def test_a_capture_ends_whatever_happens_in_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.backends import graphs

    fake = FakeCuda(fault)
    monkeypatch.setattr(graphs, "cupy", fake)
    monkeypatch.setattr(graphs, "Products", lambda: SimpleNamespace(in_use=fake.inside))
    fake.repeats = False  # type: ignore[attr-defined]
    made: Any = graphs.Graphs(fake)  # type: ignore[arg-type]
    entered, left = ["in stream", "in graph's pool", "in products"], ["out of products", "out of graph's pool"]

    def work() -> None:
        assert fake.repeats and fake.pinned is graphs._refuse
        assert gc.isenabled() == ("begin" not in fake.log)  # what is collected may end a stream, or another graph
        fake.log.append("work")
        if fault == "work":
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        if fault == "upload":
            fake.pinned(8)  # type: ignore[operator]

    if not fault:
        made.run(work)
        assert fake.log == ["synchronize", "free", *entered, "work", *left, "out of stream", "synchronize"]
        fake.log.clear()
        made.capture(work)()
        assert fake.log == ["synchronize", *entered, "begin", "work", "end", *left, "out of stream", "launch"]
    else:
        said = {"CUDA": r"captured \(cudaError", "work": r"captured \(calling cuBLAS", "upload": "uploads 8 bytes"}
        with pytest.raises(UserError, match=f"--cuda-graph: the step .*{said[fault]}.*; use --cuda-graph off"):
            made.capture(work)
        assert "end" in fake.log and "out of stream" in fake.log and "launch" not in fake.log
    assert not fake.repeats and fake.pinned == "pinned pool" and gc.isenabled()
