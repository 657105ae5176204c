"""Bandwidth of the elementwise and reduction kernels, beside that of a copy on the same device.

    python bench/ops.py                       M = 16384 tokens, the sizes of NanoEuler base, bf16
    python bench/ops.py --precision fp32 --json result.json
    python bench/ops.py --residual            products that end half a block, and the norm behind them: the residual
                                              stream added by the norm's kernel, and by the product

These kernels are memory-bound: their time is the bytes that they must move (each input read once, each output written
once) over the bandwidth. The ceiling is measured, with a copy of 2 GiB. Filling and draining the device takes a
microsecond or two, which matters for 50 MB, so the last column compares with a copy of the same size.

Each kernel is timed by CUDA events around `REPEATS` launches in a row, over sets of arrays that together are
larger than the L2 cache, and the median of `ROUNDS` such rounds is taken. Results rotate like inputs: written to the
same memory each time, they would partly stay in the cache. Launches are queued behind a kernel that only waits, so that
the device then runs them back to back; Python's time per launch is shown separately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.gpu_clock import CACHE_BYTES, COPY_BYTES, copy_bandwidth, timed
from tinyforge import ops
from tinyforge.backends import Backend, get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.kernel import Kernel, bind
from tinyforge.models.nanoeuler.config import PRESETS
from tinyforge.optim import AdamWConfig
from tinyforge.optim.adamw import adamw_, clip_factor, square_sums, step_rates
from tinyforge.report import add_json_flag, check_before, publish

KERNELS: tuple[Kernel[..., Any], ...] = (
    adamw_,
    clip_factor,
    square_sums,
    *{k.name: k for kind in ops.ALL for k in kind.kernels}.values(),
)


@dataclass(frozen=True)
class Job:
    """A launch, and the bytes that it must move. `launch` takes the number of the array set to use."""

    name: str
    launch: Callable[[int], Any]
    bytes: int


def copy_ms(xp: Any, size: int, room: Any) -> float:
    """Milliseconds of a copy that reads and writes `size` bytes together, each time at another place in `room`."""
    half = size // 2 // 512 * 512
    source, target = room
    places = max(1, source.nbytes // half)

    def copy(i: int) -> None:
        start = i % places * half
        (target.data + start).copy_from_device_async(source.data + start, half)

    return timed(xp, copy)[0]


def jobs(backend: Backend, tokens: int) -> list[Job]:
    """Each kernel at NanoEuler base's sizes, on random numbers."""
    config, xp, k = PRESETS["base"], backend.xp, bind(KERNELS, backend, "bench")
    dim, hidden, vocab, heads = config.dim, config.hidden, config.vocab, config.mtp_heads
    size, wide = backend.dtype.itemsize, backend.master_dtype.itemsize
    rng = xp.random.default_rng(0)

    def normal(*shape: int, dtype: Any = None) -> Any:
        return rng.standard_normal(shape, np.float32).astype(dtype or backend.dtype)

    def sets(row_bytes: int, *widths: int) -> list[tuple[Any, ...]]:
        """Sets of arrays (tokens, width), enough of them to leave the cache."""
        count = max(1, -(-CACHE_BYTES // (tokens * row_bytes)))
        return [tuple(normal(tokens, w) for w in widths) for _ in range(count)]

    found: list[Job] = []

    def add(name: str, row_bytes: int, widths: tuple[int, ...], call: Callable[..., Any], extra: int = 0) -> None:
        arrays = sets(row_bytes, *widths)
        results: deque[Any] = deque(maxlen=len(arrays))  # alive while later launches write elsewhere
        found.append(Job(name, lambda i: results.append(call(*arrays[i % len(arrays)])), tokens * row_bytes + extra))

    gain, dgain = normal(dim), backend.zeros((dim,), backend.master_dtype)
    bias, dbias = normal(dim), backend.zeros((dim,), backend.master_dtype)
    rstd = xp.abs(normal(tokens, dtype=backend.master_dtype)) + 0.5
    c, h = dim * size, hidden * size
    add("rmsnorm_fwd", 2 * c + wide, (dim,), lambda x: k.rmsnorm_fwd(x, gain, 1e-5))
    add("rmsnorm_bwd", 3 * c + wide, (dim,) * 2, lambda dy, y: k.rmsnorm_bwd(dgain, dy, gain, y, rstd, None))
    add("add_rmsnorm_fwd", 4 * c + wide, (dim,) * 2, lambda a, b: k.add_rmsnorm_fwd(a, b, gain, 1e-5))
    add(
        "rmsnorm_bwd (residual)",
        4 * c + wide,
        (dim,) * 3,
        lambda dx, dy, y: k.rmsnorm_bwd(dgain, dy, gain, y, rstd, dx),
    )
    add("layernorm_fwd", 2 * c + 2 * wide, (dim,), lambda x: k.layernorm_fwd(x, gain, bias, 1e-5))
    add(
        "layernorm_bwd",
        3 * c + 2 * wide,
        (dim,) * 2,
        lambda dy, x: k.layernorm_bwd(dgain, dbias, dy, gain, x, rstd, rstd, None),
    )
    add(
        "add_layernorm_fwd",
        4 * c + 2 * wide,
        (dim,) * 2,
        lambda a, b: k.add_layernorm_fwd(a, b, bias, gain, bias, 1e-5),
    )
    add(
        "layernorm_bwd (residual)",
        4 * c + 2 * wide,
        (dim,) * 3,
        lambda dx, dy, x: k.layernorm_bwd(dgain, dbias, dy, gain, x, rstd, rstd, dx),
    )
    add("softmax_fwd", 2 * c, (dim,), k.softmax_fwd)
    add("softmax_bwd", 3 * c, (dim,) * 2, k.softmax_bwd)
    add("swiglu_fwd", 3 * h, (2 * hidden,), k.swiglu_fwd)
    add("swiglu_bwd", 5 * h, (hidden, 2 * hidden), lambda dy, gu: k.swiglu_bwd(None, dy, gu))
    add("gelu_fwd", 2 * h, (hidden,), lambda x: k.gelu_fwd(x, None, "tanh"))
    ubias, dubias = normal(hidden), backend.zeros((hidden,), backend.master_dtype)
    add("gelu_fwd (bias)", 2 * h, (hidden,), lambda x: k.gelu_fwd(x, ubias, "tanh"))
    add("gelu_bwd (bias)", 3 * h, (hidden,) * 2, lambda dy, x: k.gelu_bwd(None, dubias, dy, x, ubias, "tanh"))
    add("gelu_bwd", 3 * h, (hidden,) * 2, lambda dy, x: k.gelu_bwd(None, None, dy, x, None, "tanh"))
    add("dropout", 2 * h, (hidden,), lambda x: k.dropout(x, (1, 2), 0.1))

    length, turned, all_heads = 512, config.heads + config.kv_heads, config.heads + 2 * config.kv_heads
    angle = normal(length, config.head_dim // 2, dtype=backend.master_dtype)

    def rope(x: Any) -> Any:
        packed = x.reshape(-1, length, all_heads, config.head_dim)
        return k.rope(packed, packed, angle, angle, turned)

    add("rope (in place)", 2 * turned * config.head_dim * size, (all_heads * config.head_dim,), rope)

    table, dtable = normal(vocab, dim), backend.zeros((vocab, dim), backend.master_dtype)
    chance = 1 / np.arange(1, vocab + 1)  # Zipf's law: how often words come in text, by rank
    host = np.random.default_rng(0)
    for kind, weights in (("", None), (" (text)", chance / chance.sum())):
        ids = xp.asarray(host.choice(vocab, tokens, p=weights).astype(np.int32))
        met = int(xp.unique(ids).size) * dim  # numbers in the rows of the table that are met at all
        if not kind:
            add("embedding_fwd", c + 4, (1,), lambda _, ids=ids: k.embedding_fwd(ids, table), met * size)
        add(f"embedding_bwd{kind}", c + 4, (dim,), lambda dy, ids=ids: k.embedding_bwd(dtable, dy, ids), 2 * met * wide)
    positions, dpositions = normal(length, dim), backend.zeros((length, dim), backend.master_dtype)
    add("positions_fwd", 2 * c, (dim,), lambda x: k.positions_fwd(x.reshape(-1, length, dim), positions))
    add(
        "positions_bwd",
        c,
        (dim,),
        lambda dy: k.positions_bwd(dpositions, dy.reshape(-1, length, dim)),
        2 * dpositions.nbytes,
    )

    from tinyforge.ops.cross_entropy_cuda import softmax_residual_

    targets = xp.random.randint(0, vocab, (tokens, heads)).astype(np.int32)
    nll = xp.empty((tokens, heads), backend.master_dtype)
    # In place: what is a residual after the first launch is read as logits by the next, which is as good for timing.
    add(
        "softmax_residual",
        2 * heads * vocab * size + heads * (4 + wide),
        (heads * vocab,),
        lambda z: softmax_residual_(nll, z.reshape(-1, vocab), targets, True, vocab),
    )

    count = 116_417_280
    flat = [normal(count, dtype=backend.master_dtype) for _ in range(2)]
    flat += [xp.abs(normal(count, dtype=backend.master_dtype)) for _ in range(2)]
    values = flat[0] if backend.dtype == backend.master_dtype else normal(count)
    factor, rates = xp.ones((), np.float64), backend.asarray(step_rates(3, 1e-3, AdamWConfig()), backend.master_dtype)
    per = 7 * wide + (size if values is not flat[0] else 0)
    found.append(
        Job(
            "adamw",
            lambda i: k.adamw_(values, *flat[:1], *flat[2:], flat[1], rates[0], factor, AdamWConfig()),
            count * per,
        )
    )
    sums = backend.zeros((1, backend.blocks), np.dtype(np.float64))
    whole = backend.asarray(np.array([(0, count)]), np.dtype(np.int64))

    def norm(_: int) -> None:
        k.square_sums(sums, flat[1], whole)
        k.clip_factor(sums[0], factor, 1.0)

    found.append(Job("gradient norm", norm, count * wide))
    return found


def residual_jobs(backend: Backend, tokens: int) -> list[Job]:
    """x + f W^T and its norm, for out's W and down's, in the two ways; the bytes: f, x, the sum and its norm."""
    config, xp, k = PRESETS["base"], backend.xp, bind(KERNELS, backend, "bench")
    rng, found = xp.random.default_rng(0), list[Job]()

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(backend.dtype)

    gain = normal(config.dim)
    for name, width in (("out", config.dim), ("down", config.hidden)):
        size = tokens * (width + 3 * config.dim) * backend.dtype.itemsize
        count, weight = -(-CACHE_BYTES // size), normal(config.dim, width)
        sets = [(normal(tokens, width), normal(tokens, config.dim)) for _ in range(count)]
        results: deque[Any] = deque(maxlen=2 * count)

        def by_norm(i: int, sets: Any = sets, weight: Any = weight, results: Any = results) -> None:
            f, x = sets[i % len(sets)]
            results.append(k.add_rmsnorm_fwd(x, k.linear_fwd(f, weight, None), gain, 1e-5))

        def by_product(i: int, sets: Any = sets, weight: Any = weight, results: Any = results) -> None:
            f, x = sets[i % len(sets)]
            x = k.linear_add_fwd(f, weight, None, x)
            results.append((x, k.rmsnorm_fwd(x, gain, 1e-5)))

        found += [Job(f"{name}, by the norm", by_norm, size), Job(f"{name}, by the product", by_product, size)]
    return found


def measure(backend: Any, tokens: int, jobs: Callable[[Backend, int], list[Job]] = jobs) -> dict[str, Any]:
    xp = backend.xp
    copy = copy_bandwidth(xp)
    room = [xp.random.randint(0, 255, COPY_BYTES, dtype=np.uint8) for _ in range(2)]
    rows = []
    for job in jobs(backend, tokens):
        ms, host = timed(xp, job.launch)
        bandwidth = job.bytes / ms * 1e3
        row = {"kernel": job.name, "us": 1e3 * ms, "bytes": job.bytes, "gb_per_second": bandwidth / 1e9}
        row |= {"of_copy": bandwidth / copy, "of_copy_of_this_size": copy_ms(xp, job.bytes, room) / ms}
        rows.append(row | {"python_us": 1e3 * host})
    return {
        "device": backend.describe(),
        "precision": backend.precision.name,
        "tokens": tokens,
        "copy_gb_per_second": copy / 1e9,
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['device']}; {found['precision']}, {found['tokens']:,} tokens, sizes of NanoEuler base",
        f"copy on the device: {found['copy_gb_per_second']:,.0f} GB/s, read and written together",
        "",
        f"{'kernel':<20} {'us':>8} {'MB':>8} {'GB/s':>7} {'of copy':>8} {'Python us':>10} {'same size':>10}",
    ]
    for r in found["rows"]:
        lines.append(
            f"{r['kernel']:<20} {r['us']:>8.1f} {r['bytes'] / 1e6:>8.1f} {r['gb_per_second']:>7,.0f} "
            f"{r['of_copy']:>8.0%} {r['python_us']:>10.1f} "
            f"{r['of_copy_of_this_size']:>10.0%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--tokens", type=int, default=16384, help="rows, a multiple of 512 (default: 16384)")
    p.add_argument("--precision", default="bf16", help="bf16, fp32 or fp64 (default: bf16)")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    p.add_argument("--residual", action="store_true", help="the ways to add the residual stream, and nothing else")
    add_json_flag(p)
    args = p.parse_args(argv)
    if args.tokens <= 0 or args.tokens % 512:
        raise UserError(f"--tokens is {args.tokens}, wants a multiple of 512")
    check_before(args.json)
    backend = get_backend("cupy", args.precision, device=args.device)
    found = measure(backend, args.tokens, residual_jobs if args.residual else jobs)
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
