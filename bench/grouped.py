"""Time the grouped products of a mixture of experts on a GPU, next to cuBLAS with one product per expert.

    python bench/grouped.py                             MoE base: 16,384 tokens, 8 experts of which 2 are active
    python bench/grouped.py --file ops/grouped_mma.cu   the kernels that every GPU from sm_80 on can run
    python bench/grouped.py --json result.json

Choices are random, so experts have nearly equal numbers of rows. cuBLAS gets gathered rows, and its products are
launched by a host that knows the sizes, for which a step would have to wait. Products in bf16, summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.gpu_clock import CONVENTION, take_turns
from tinyforge.backends import get_backend
from tinyforge.errors import run_command
from tinyforge.kernel import bind
from tinyforge.models.moe.config import PRESETS
from tinyforge.ops import MixtureOfExperts

FILES = ("ops/grouped_hopper.cu", "ops/grouped_mma.cu", "ops/grouped.cu")


def measure(backend: Any, tokens: int) -> list[dict[str, Any]]:
    c, k = PRESETS["base"], bind(MixtureOfExperts.kernels, backend, "bench")
    chosen = np.random.default_rng(0).random((tokens, c.experts)).argpartition(c.active, axis=1)[:, : c.active]
    _, of_row, _, starts = k.sort_by_expert(backend.asarray(chosen.astype(np.int32)), c.experts)
    gate_up = _measure(backend, "gate_up", 2 * c.hidden, c.dim, tokens, of_row, starts)
    return gate_up + _measure(backend, "down", c.dim, c.hidden, tokens, of_row, starts)


def _measure(
    backend: Any, name: str, outs: int, ins: int, tokens: int, of_row: Any, starts: Any
) -> list[dict[str, Any]]:
    """The three products with one of an expert's matrices. For gate_up rows of x are gathered, for down those of dy."""
    from tinyforge.backends.cublas import gemm

    xp, k = backend.xp, bind(MixtureOfExperts.kernels, backend, "bench")
    rng, ends, rows = xp.random.default_rng(0), backend.to_numpy(starts).tolist(), len(of_row)
    groups = [(e, slice(ends[e], ends[e + 1])) for e in range(len(ends) - 1)]

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(backend.dtype)

    def by_cublas(product: Callable[[int, slice], Any]) -> Callable[[int], Any]:
        return lambda _: [product(expert, rows) for expert, rows in groups]

    x, dy, w, gathered = normal(rows, ins), normal(rows, outs), normal(len(groups), outs, ins), name == "gate_up"
    few = normal(tokens, ins if gathered else outs)
    dw, y, dx = backend.zeros(w.shape, backend.master_dtype), xp.empty_like(dy), xp.empty_like(x)
    our_x, x_tokens, our_dy, dy_tokens = (few, of_row, dy, None) if gathered else (x, None, few, of_row)
    products: dict[str, tuple[Callable[[int], Any], Callable[[int, slice], Any]]] = {
        "forward": (
            lambda _: k.grouped_fwd(our_x, w, x_tokens, starts),
            lambda e, r: gemm(x[r], w[e], y[r], transpose_b=True),
        ),
        "dx": (lambda _: k.grouped_bwd_input(our_dy, w, dy_tokens, starts), lambda e, r: gemm(dy[r], w[e], dx[r])),
        "dW": (
            lambda _: k.grouped_bwd_weight(dw, our_dy, our_x, dy_tokens, x_tokens, starts),
            lambda e, r: gemm(dy[r], x[r], dw[e], transpose_a=True, accumulate=True),
        ),
    }
    found = []
    for what, (ours, cublas) in products.items():
        (us, _), (peer, _) = take_turns(xp, [ours, by_cublas(cublas)])
        rate = 2 * rows * outs * ins / us / 1e6
        found.append({"product": f"{name} {what}", "us": us, "cublas_us": peer, "tflop_per_second": rate})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, CONVENTION)
    p.number("--tokens", 16384, "of a step")
    p.text("--file", help="whose kernels (default: the fastest that run here)", choices=FILES)
    p.shared("device")
    args = p.parse(argv)
    backend = get_backend("cupy", "bf16", device=args.device)
    from tinyforge.ops import mixture_cuda

    if args.file:
        mixture_cuda._file = lambda *_: args.file
    rows = measure(backend, args.tokens)
    peak = backend.matmul_peak() / 1e12
    found = {"device": backend.describe(), "tokens": args.tokens, "file": args.file or "the fastest"}
    found |= {"tflop_per_second_of_a_large_product": peak, "rows": rows}
    named, columns = ((r["product"], r) for r in rows), "us:.1f | tflop_per_second:.0f | cublas_us=cuBLAS us:.1f"
    lines = [f"{found['device']}; a product of 8192 x 8192: {peak:.0f} TFLOP/s", "", *harness.rows(columns, named)]
    return harness.publish(found, lines, args)


if __name__ == "__main__":
    run_command(main)
