"""Our matrix products on a GPU: every variant of the Hopper kernel, and the plain one, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import dtype_of, get_backend
from tinyforge.kernel import bind
from tinyforge.ops import Linear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

cp = pytest.importorskip("cupy", reason="needs CuPy")
gemm = pytest.importorskip("tinyforge.backends.gemm", reason="needs CuPy")
gemm_naive = pytest.importorskip("tests.backends.naive_gemm", reason="needs CuPy").gemm_naive

# (m, n, k): less than a tile, tiles that stand out on both sides, a last step that is not whole, many units a block.
SHAPES = ((8, 8, 1), (1, 264, 64), (200, 8, 72), (130, 1096, 200), (777, 520, 328), (2100, 1032, 136), (768, 768, 4104))
BF16 = "bfloat16"


@pytest.fixture
def hopper() -> None:
    from tinyforge.backends.cupy_backend import has_wgmma

    if not has_wgmma():
        pytest.skip("needs a Hopper GPU")


def drawn(rng: np.random.Generator, rows: int, columns: int, dtype: Any, gap: int = 8) -> Any:
    """An array whose rows have a gap after them, of NaN."""
    whole = np.full((rows, -(-columns // 8) * 8 + gap), np.nan)
    whole[:, :columns] = rng.normal(size=(rows, columns))
    return cp.asarray(whole.astype(dtype))[:, :columns]


def wide(x: Any) -> np.ndarray:
    found: np.ndarray = cp.asnumpy(x).astype(np.float64)
    return found


@lru_cache(64)
def factors(product: str, shape: tuple[int, int, int], dtype: Any, seed: int) -> tuple[Any, Any, np.ndarray]:
    """a, b, and their product in float64."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a = drawn(rng, *((k, m) if product == "WEIGHT" else (m, k)), dtype)
    b = drawn(rng, *((n, k) if product == "FORWARD" else (k, n)), dtype)
    left, right = wide(a), wide(b)
    return a, b, (left.T if product == "WEIGHT" else left) @ (right.T if product == "FORWARD" else right)


def outputs(product: str, shape: tuple[int, int, int], accumulate: bool) -> Any:
    """Poison, a gap of it after each row; where the product is added, ones."""
    m, n, _ = shape
    whole = np.full((m, -(-n // 8) * 8 + 8), np.nan)
    whole[:, :n] = 1 if accumulate else np.nan
    return cp.asarray(whole.astype(np.float32 if product == "WEIGHT" else dtype_of(BF16)))[:, :n]


def assert_right(out: Any, expected: np.ndarray, factor_size: float) -> None:
    got = wide(out)
    assert np.isfinite(got).all()
    if out.dtype == np.float32:
        assert np.linalg.norm(got - expected) <= 2e-6 * np.sqrt(factor_size) * np.linalg.norm(expected) + 1e-6
    else:  # at most twice the error of sums in float32 that are rounded once
        best = expected.astype(np.float32).astype(dtype_of(BF16)).astype(np.float64)
        assert np.linalg.norm(got - expected) <= 2 * np.linalg.norm(best - expected) + 1e-6
    whole = cp.asnumpy(out.base).astype(np.float64)
    assert np.isnan(whole[:, out.shape[1] :]).all(), "written after the end of a row"


def cases() -> Iterator[Any]:
    for product in gemm.PRODUCTS.values():
        for variant in gemm.compiled(product):
            yield pytest.param(variant, product, id=f"{product}-{variant}".replace(" ", ""))


@pytest.mark.parametrize(("variant", "product"), list(cases()))
def test_every_variant_is_the_product(variant: Any, product: str, hopper: None) -> None:
    for seed, shape in enumerate(SHAPES):
        ways = ((8, 1, False), (1, 1, True), (3, 2, False), (8, 5, True))
        for band, splits, accumulate in ways if product == "WEIGHT" else ((8, 1, False), (1, 1, False)):
            a, b, expected = factors(product, shape, dtype_of(BF16), seed)
            chosen = replace(variant, band=band, splits=splits)
            found = []
            for _ in range(2):
                out = outputs(product, shape, accumulate)
                assert gemm.hopper(chosen, a, b, out, product, accumulate=accumulate) is out
                found.append(out)
            assert_right(found[0], expected + accumulate, shape[2])
            assert np.array_equal(wide(found[0]), wide(found[1])), "not the same bits twice"


@pytest.mark.parametrize("precision", ["float64", "float32", BF16])
@pytest.mark.parametrize("product", ["FORWARD", "INPUT", "WEIGHT"])
def test_the_plain_kernel_is_the_product(product: str, precision: str) -> None:
    tolerance = {"float64": 1e-13, "float32": 1e-5, BF16: 2**-7}[precision]
    for seed, shape in enumerate(((1, 1, 1), (17, 33, 70), (200, 9, 300))):
        for splits, accumulate in ((1, False), (3, True)):
            a, b, expected = factors(product, shape, dtype_of(precision), seed)
            kind = np.dtype(np.float32) if precision == BF16 and product == "WEIGHT" else dtype_of(precision)
            out = cp.asarray(np.ones(shape[:2]).astype(kind))
            gemm_naive(a, b, out, product, accumulate=accumulate, splits=splits)
            assert np.abs(wide(out) - expected - accumulate).max() <= tolerance * np.abs(expected).max() + tolerance


def test_the_fast_kernel_is_its_naive_sibling(hopper: None) -> None:
    """The same parts of the sum in the same order: float32 results differ by the order inside a part alone."""
    for splits in (1, 4):
        a, b, _ = factors("WEIGHT", (264, 136, 1000), dtype_of(BF16), 3)
        fast, plain = (cp.full((264, 136), cp.nan, np.float32) for _ in range(2))
        gemm.hopper(replace(gemm.compiled()[0], splits=splits), a, b, fast, "WEIGHT")
        gemm_naive(a, b, plain, "WEIGHT", splits=splits)
        assert np.abs(wide(fast) - wide(plain)).max() <= 1e-5 * np.abs(wide(plain)).max()


def test_a_table_sends_products_to_the_kernel(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear, forward and backward, by our kernel for all three products and by cuBLAS: the same up to rounding."""
    backend, rows, ins, outs = get_backend("cupy", "bf16"), 512, 256, 384
    k = bind(Linear.kernels, backend, "test")
    rng = np.random.default_rng(0)
    x, dy, weight = (backend.asarray(rng.normal(size=s)) for s in ((rows, ins), (rows, outs), (outs, ins)))
    found, said = [], []
    monkeypatch.setattr(gemm, "on_choice", lambda *what: said.append(what))
    for table in (
        {},
        {
            f"FORWARD {rows} {outs} {ins}": [128, 256, 4, 0, 2],
            f"INPUT {rows} {ins} {outs}": [128, 128, 6, 1, 1],
            f"WEIGHT {outs} {ins} {rows}": [128, 192, 5, 1, 2, 8, 3],
        },
    ):
        monkeypatch.setattr(gemm, "_table", lambda table=table: gemm.parsed(table))
        dweight = backend.zeros(weight.shape, backend.master_dtype)
        y = k.linear_fwd(x, weight, None)
        dx = k.linear_bwd(dweight, None, dy, x, weight)
        found.append([wide(array) for array in (y, dx, dweight)])
    assert [what[4] is None for what in said] == [True] * 3 + [False] * 3
    for ours, cublas in zip(*found, strict=True):
        assert np.linalg.norm(ours - cublas) <= 2**-8 * np.linalg.norm(cublas)


# (rows, columns of h, steps): less than a tile, tiles that stand out on both sides, the gate's last tile reaching into
# what is up's, a last step that is not whole, many units a block, base's own.
GATED = ((8, 8, 8), (1, 136, 64), (200, 8, 72), (130, 552, 200), (777, 264, 328), (2100, 520, 136), (4096, 2048, 768))


def gated_cases() -> Iterator[Any]:
    for epilogue in ("SWIGLU", "SWIGLU_BACKWARD"):
        for variant in gemm.compiled(epilogue):
            for band in (1, 8):
                name = f"{epilogue}-{variant.rows}x{variant.columns}-{variant.pingpong}-{band}"
                yield pytest.param(epilogue, replace(variant, band=band), id=name)


@pytest.mark.parametrize(("epilogue", "variant"), list(gated_cases()))
def test_swiglu_at_the_end_of_a_product_is_the_op_behind_it(epilogue: str, variant: Any, hopper: None) -> None:
    """Bit for bit our own product of the same tile, and the op's kernel on what that has written."""
    from tinyforge.ops.swiglu_cuda import swiglu_bwd, swiglu_fwd

    forward, dtype = epilogue == "SWIGLU", dtype_of(BF16)
    product = gemm.EPILOGUES[epilogue]
    for seed, (m, half, k) in enumerate(GATED):
        n = 2 * half if forward else half
        rng = np.random.default_rng(seed)
        a = drawn(rng, m, k, dtype)
        b = drawn(rng, *((n, k) if forward else (k, n)), dtype)
        gu = None if forward else cp.asarray((2 * rng.normal(size=(m, 2 * half))).astype(dtype))
        plain = cp.empty((m, n), dtype)
        assert gemm.hopper(variant, a, b, plain, product) is plain
        if forward:
            expected = plain, swiglu_fwd(plain)
        else:
            hidden = cp.empty((m, half), dtype)
            expected = swiglu_bwd(hidden, plain, gu), hidden
            assert np.array_equal(wide(swiglu_bwd(plain, plain, gu)), wide(expected[0]))  # h in the place of dh
            assert np.array_equal(wide(plain), wide(hidden))
        for _ in range(2):
            found = cp.empty((m, 2 * half), dtype), cp.empty((m, half), dtype)
            for array in found:
                array.data.memset(0xFF, array.nbytes)  # NaN
            assert gemm.hopper(variant, a, b, found[0], epilogue, hidden=found[1], gu=gu) is found[0]
            for ours, theirs in zip(found, expected, strict=True):
                assert np.array_equal(wide(ours), wide(theirs)), (m, half, k)
        if not forward:  # a frozen weight: h is nobody's
            alone = cp.empty((m, 2 * half), dtype)
            gemm.hopper(variant, a, b, alone, epilogue, gu=gu)
            assert np.array_equal(wide(alone), wide(expected[0]))


# (rows, positions, heads, turned, steps): as above; a tile of positions that begin again, heads that are not turned.
TURNED = (
    (8, 8, 1, 1, 8),
    (200, 25, 3, 2, 72),
    (777, 777, 5, 4, 200),
    (2100, 700, 20, 16, 136),
    (4096, 512, 20, 16, 768),
)


@pytest.mark.parametrize("variant", [replace(v, band=b) for v in gemm.compiled("ROPE") for b in (1, 8)], ids=str)
def test_rope_at_the_end_of_a_product_is_the_op_behind_it(variant: Any, hopper: None) -> None:
    """Bit for bit, as above."""
    from tinyforge.ops.rope_cuda import rope

    dtype = dtype_of(BF16)
    for seed, (rows, positions, heads, turned, k) in enumerate(TURNED):
        rng = np.random.default_rng(seed)
        a, b = drawn(rng, rows, k, dtype), drawn(rng, heads * gemm.HEAD, k, dtype)
        angles = [cp.asarray(rng.normal(size=(positions, gemm.HEAD // 2)).astype(np.float32)) for _ in range(2)]
        plain = cp.empty((rows, heads * gemm.HEAD), dtype)
        assert gemm.hopper(variant, a, b, plain, "FORWARD") is plain
        packed = plain.reshape(-1, positions, heads, gemm.HEAD)
        rope(packed, packed, *angles, turned)
        for _ in range(2):
            found = cp.empty_like(plain)
            found.data.memset(0xFF, found.nbytes)  # NaN
            assert gemm.hopper(variant, a, b, found, "ROPE", turn=gemm.Turn(*angles, turned)) is found
            assert np.array_equal(wide(found), wide(plain)), (rows, positions, heads, k)


@pytest.mark.parametrize(("by_rule", "tokens"), [(False, 512), (True, 2048)], ids=["table", "rule"])
def test_a_block_goes_to_the_fused_kernels(
    by_rule: bool, tokens: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x through gate|up, SwiGLU and down and back, by a table or a rule and by neither: the same up to rounding; a
    shape that the kernel refuses takes its passes."""
    from tinyforge.ops.swiglu_linear import linear_swiglu_fwd, swiglu_linear_bwd, swiglu_linear_fwd

    backend, dim, rules = get_backend("cupy", "bf16"), 320, gemm.RULES
    k = bind((linear_swiglu_fwd, swiglu_linear_fwd, swiglu_linear_bwd), backend, "test")
    rng = np.random.default_rng(0)
    for hidden, fits in ((384, True), (388, False)):
        x, dy = (backend.asarray(rng.normal(size=(2, tokens // 2, dim))) for _ in range(2))
        before = backend.asarray(rng.normal(size=(2 * hidden, dim)) / 16)
        behind = backend.asarray(rng.normal(size=(dim, hidden)) / 16)
        found, said = [], []
        monkeypatch.setattr(gemm, "on_choice", lambda *what, said=said: said.append(what[0]))
        rows = {
            f"SWIGLU {tokens} {2 * hidden} {dim}": [128, 192, 5, 1, 1, 8, 1],
            f"SWIGLU_BACKWARD {tokens} {hidden} {dim}": [128, 128, 5, 1, 1, 8, 1],
        }
        for fused in (False, True):
            table = rows if fused and not by_rule else {}
            monkeypatch.setattr(gemm, "_table", lambda table=table: gemm.parsed(table))
            monkeypatch.setattr(gemm, "RULES", rules if fused and by_rule else dict.fromkeys(rules, ()))
            said.clear()
            gu, h = k.linear_swiglu_fwd(x, before)
            y = k.swiglu_linear_fwd(gu, h, behind, None)
            dbehind = backend.zeros(behind.shape, backend.master_dtype)
            dgu = k.swiglu_linear_bwd(dbehind, dy, gu, behind)
            assert np.array_equal(wide(y), wide(k.swiglu_linear_fwd(gu, None, behind, None)))  # h is what SwiGLU gives
            found.append([wide(array) for array in (gu, h, y, dgu, dbehind)])
            if fits:
                assert ("SWIGLU" in said, "SWIGLU_BACKWARD" in said) == (fused, fused)
        for ours, apart in zip(*found, strict=True):
            assert np.linalg.norm(ours - apart) <= (2**-7 if fits else 0) * np.linalg.norm(apart)
