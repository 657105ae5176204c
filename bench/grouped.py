"""Time the grouped products of a mixture of experts on a GPU, next to cuBLAS with one product per expert.

    python bench/grouped.py                             MoE base: 16,384 tokens, 8 experts of which 2 are active
    python bench/grouped.py --file ops/grouped_mma.cu   the kernels that every GPU from sm_80 on can run
    python bench/grouped.py --json result.json

Choices are random, so experts have nearly equal numbers of rows. cuBLAS gets gathered rows, and its products are
launched by a host that knows the sizes, for which a step would have to wait. Products in bf16, summed in float32; times
are device times, the median of rounds (gpu_clock.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.gpu_clock import timed
from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.kernel import bind
from tinyforge.models.moe.config import PRESETS
from tinyforge.ops import MixtureOfExperts
from tinyforge.report import add_json_flag, check_before, publish

FILES = ("ops/grouped_hopper.cu", "ops/grouped_mma.cu", "ops/grouped.cu")


def each_group(product: Callable[[int, slice], Any], groups: list[tuple[int, slice]], _: int) -> None:
    for expert, rows in groups:
        product(expert, rows)


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

    x, dy, weight, gathered = normal(rows, ins), normal(rows, outs), normal(len(groups), outs, ins), name == "gate_up"
    few = normal(tokens, ins if gathered else outs)
    dweight, y, dx = backend.zeros(weight.shape, backend.master_dtype), xp.empty_like(dy), xp.empty_like(x)
    ours_x, x_tokens, ours_dy, dy_tokens = (few, of_row, dy, None) if gathered else (x, None, few, of_row)
    products: dict[str, tuple[Callable[[int], Any], Callable[[int, slice], Any]]] = {
        "forward": (
            lambda _: k.grouped_fwd(ours_x, weight, x_tokens, starts),
            lambda e, r: gemm(x[r], weight[e], y[r], transpose_b=True),
        ),
        "dx": (
            lambda _: k.grouped_bwd_input(ours_dy, weight, dy_tokens, starts),
            lambda e, r: gemm(dy[r], weight[e], dx[r]),
        ),
        "dW": (
            lambda _: k.grouped_bwd_weight(dweight, ours_dy, ours_x, dy_tokens, x_tokens, starts),
            lambda e, r: gemm(dy[r], x[r], dweight[e], transpose_a=True, accumulate=True),
        ),
    }
    found = []
    for what, (ours, cublas) in products.items():
        ms, _ = timed(xp, ours)
        peer, _ = timed(xp, partial(each_group, cublas, groups))
        found.append(
            {
                "product": f"{name} {what}",
                "us": 1e3 * ms,
                "cublas_us": 1e3 * peer,
                "tflop_per_second": 2 * rows * outs * ins / ms / 1e9,
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--tokens", type=int, default=16384, help="(default: %(default)s)")
    p.add_argument("--file", choices=FILES, help="whose kernels (default: the fastest that run here)")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    add_json_flag(p)
    args = p.parse_args(argv)
    if args.tokens < 1:
        raise UserError(f"--tokens is {args.tokens}, wants at least 1")
    check_before(args.json)
    backend = get_backend("cupy", "bf16", device=args.device)
    from tinyforge.ops import mixture_cuda

    if args.file:
        mixture_cuda._file = lambda *_: args.file
    rows = measure(backend, args.tokens)
    found = {
        "device": backend.describe(),
        "tokens": args.tokens,
        "file": args.file or "the fastest",
        "tflop_per_second_of_a_large_product": backend.matmul_peak() / 1e12,
        "rows": rows,
    }
    peak = found["tflop_per_second_of_a_large_product"]
    table = [
        f"{found['device']}; a product of 8192 x 8192: {peak:.0f} TFLOP/s",
        "",
        f"{'':<16} {'us':>8} {'TFLOP/s':>8} {'cuBLAS us':>10}",
    ]
    table += [f"{r['product']:<16} {r['us']:>8.1f} {r['tflop_per_second']:>8.0f} {r['cublas_us']:>10.1f}" for r in rows]
    publish(found, "\n".join(table), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
