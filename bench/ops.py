"""Bandwidth of the elementwise and reduction kernels, compared with that of a copy on the same device.

    python bench/ops.py                       M = 16384 tokens, the sizes of NanoEuler base, bf16
    python bench/ops.py --precision fp32 --json result.json
    python bench/ops.py --residual            products that end half a block, and the norm after them: the residual
                                              stream added by the norm's kernel, and by the product

These kernels are memory-bound: their time is the bytes that they must move (each input read once, each output written
once) over the bandwidth. The ceiling is measured, with a copy of 2 GiB. Filling and draining the device takes a
microsecond or two, which matters for 50 MB, so the last column compares with a copy of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.gpu_clock import CONVENTION, COPY_BYTES, copy_bandwidth, rotating, sets_of, take_turns
from tinyforge import ops
from tinyforge.backends import Backend
from tinyforge.errors import UserError, run_command
from tinyforge.kernel import Kernel, bind
from tinyforge.models.nanoeuler.config import PRESETS
from tinyforge.optim import AdamWConfig
from tinyforge.optim.adamw import adamw_, clip_factor, square_sums, step_rates

KERNELS: tuple[Kernel[..., Any], ...] = (
    *(adamw_, clip_factor, square_sums),
    *{k.name: k for kind in ops.ALL for k in kind.kernels}.values(),
)
BASE = PRESETS["base"]
DIM, HIDDEN, VOCAB, LENGTH, EPS = BASE.dim, BASE.hidden, BASE.vocab, 512, 1e-5
PARAMETERS = 116_417_280


@dataclass(frozen=True)
class Job:
    """A launch, and the bytes that it must move. `launch` takes the number of the array set to use."""

    name: str
    launch: Callable[[int], Any]
    bytes: int


def copy_us(xp: Any, size: int, room: Any) -> float:
    """Microseconds of a copy that reads and writes `size` bytes together, each time at another place in `room`."""
    half = size // 2 // 512 * 512
    source, target = room
    places = max(1, source.nbytes // half)

    def copy(i: int) -> None:
        start = i % places * half
        (target.data + start).copy_from_device_async(source.data + start, half)

    return take_turns(xp, [copy])[0][0]


class Jobs:
    """The kernels at NanoEuler base's sizes, on random numbers."""

    def __init__(self, backend: Backend, tokens: int) -> None:
        self.backend, self.xp, self.tokens = backend, backend.xp, tokens
        self.size, self.wide = backend.dtype.itemsize, backend.master_dtype.itemsize
        self.k, self.rng, self.found = bind(KERNELS, backend, "bench"), backend.xp.random.default_rng(0), list[Job]()

    def normal(self, *shape: int, wide: bool = False) -> Any:
        numbers = self.rng.standard_normal(shape, np.float32)
        return numbers.astype(self.backend.master_dtype if wide else self.backend.dtype)

    def gradient(self, *shape: int) -> Any:
        return self.backend.zeros(shape, self.backend.master_dtype)

    def add(self, name: str, row_bytes: int, widths: Sequence[int], call: Callable[..., Any], extra: int = 0) -> None:
        """call: of arrays (tokens, width), each time of other ones."""
        sets = [[self.normal(self.tokens, w) for w in widths] for _ in range(sets_of(self.tokens * row_bytes))]
        self.found.append(Job(name, rotating(call, sets), self.tokens * row_bytes + extra))

    def norms(self) -> None:
        k, c, wide, one, two, three = self.k, DIM * self.size, self.wide, [DIM], [DIM] * 2, [DIM] * 3
        g, b, dg, db = self.normal(DIM), self.normal(DIM), self.gradient(DIM), self.gradient(DIM)
        r = self.xp.abs(self.normal(self.tokens, wide=True)) + 0.5
        self.add("rmsnorm_fwd", 2 * c + wide, one, lambda x: k.rmsnorm_fwd(x, g, EPS))
        self.add("rmsnorm_bwd", 3 * c + wide, two, lambda dy, y: k.rmsnorm_bwd(dg, dy, g, y, r, None))
        self.add("add_rmsnorm_fwd", 4 * c + wide, two, lambda x, y: k.add_rmsnorm_fwd(x, y, g, EPS))
        residual = 4 * c + wide
        self.add("rmsnorm_bwd (residual)", residual, three, lambda dx, dy, y: k.rmsnorm_bwd(dg, dy, g, y, r, dx))
        back, wide = k.layernorm_bwd, 2 * self.wide
        self.add("layernorm_fwd", 2 * c + wide, one, lambda x: k.layernorm_fwd(x, g, b, EPS))
        self.add("layernorm_bwd", 3 * c + wide, two, lambda dy, x: back(dg, db, dy, g, x, r, r, None))
        self.add("add_layernorm_fwd", 4 * c + wide, two, lambda x, y: k.add_layernorm_fwd(x, y, g, b, EPS))
        residual = 4 * c + wide
        self.add("layernorm_bwd (residual)", residual, three, lambda dx, dy, x: back(dg, db, dy, g, x, r, r, dx))

    def elementwise(self) -> None:
        k, c, h, hidden = self.k, DIM * self.size, HIDDEN * self.size, [HIDDEN]
        b, db = self.normal(HIDDEN), self.gradient(HIDDEN)
        self.add("softmax_fwd", 2 * c, [DIM], k.softmax_fwd)
        self.add("softmax_bwd", 3 * c, [DIM] * 2, k.softmax_bwd)
        self.add("swiglu_fwd", 3 * h, [2 * HIDDEN], k.swiglu_fwd)
        self.add("swiglu_bwd", 5 * h, [HIDDEN, 2 * HIDDEN], lambda dy, gu: k.swiglu_bwd(None, dy, gu))
        self.add("gelu_fwd", 2 * h, hidden, lambda x: k.gelu_fwd(x, None, "tanh"))
        self.add("gelu_fwd (bias)", 2 * h, hidden, lambda x: k.gelu_fwd(x, b, "tanh"))
        self.add("gelu_bwd (bias)", 3 * h, hidden * 2, lambda dy, x: k.gelu_bwd(None, db, dy, x, b, "tanh"))
        self.add("gelu_bwd", 3 * h, hidden * 2, lambda dy, x: k.gelu_bwd(None, None, dy, x, None, "tanh"))
        self.add("dropout", 2 * h, hidden, lambda x: k.dropout(x, (1, 2), 0.1))
        turned, heads, width = BASE.heads + BASE.kv_heads, BASE.heads + 2 * BASE.kv_heads, BASE.head_dim
        angle = self.normal(LENGTH, width // 2, wide=True)

        def rope(x: Any) -> Any:
            packed = x.reshape(-1, LENGTH, heads, width)
            return k.rope(packed, packed, angle, angle, turned)

        self.add("rope (in place)", 2 * turned * width * self.size, [heads * width], rope)

    def tables(self) -> None:
        k, c, host = self.k, DIM * self.size, np.random.default_rng(0)
        table, dtable = self.normal(VOCAB, DIM), self.gradient(VOCAB, DIM)
        chance = 1 / np.arange(1, VOCAB + 1)  # Zipf's law: how often words come in text, by rank
        for kind, weights in (("", None), (" (text)", chance / chance.sum())):
            ids = self.xp.asarray(host.choice(VOCAB, self.tokens, p=weights).astype(np.int32))
            numbers = int(self.xp.unique(ids).size) * DIM  # in the rows of the table that occur at all
            if not kind:
                read = numbers * self.size
                self.add("embedding_fwd", c + 4, [1], lambda _, ids=ids: k.embedding_fwd(ids, table), read)
            back, moved = (lambda dy, ids=ids: k.embedding_bwd(dtable, dy, ids)), 2 * numbers * self.wide
            self.add(f"embedding_bwd{kind}", c + 4, [DIM], back, moved)
        p, dp, shape = self.normal(LENGTH, DIM), self.gradient(LENGTH, DIM), (-1, LENGTH, DIM)
        self.add("positions_fwd", 2 * c, [DIM], lambda x: k.positions_fwd(x.reshape(shape), p, None))
        self.add("positions_bwd", c, [DIM], lambda dy: k.positions_bwd(dp, dy.reshape(shape), None), 2 * dp.nbytes)

    def loss(self) -> None:
        from tinyforge.ops.cross_entropy_cuda import softmax_residual_

        heads = BASE.mtp_heads
        targets = self.xp.random.randint(0, VOCAB, (self.tokens, heads)).astype(np.int32)
        nll = self.xp.empty((self.tokens, heads), self.backend.master_dtype)

        # In place: a residual of the first launch is read as logits by the next, which is as good for timing.
        def residual(z: Any) -> Any:
            return softmax_residual_(nll, z.reshape(-1, VOCAB), targets, True, VOCAB)

        row = 2 * heads * VOCAB * self.size + heads * (4 + self.wide)
        self.add("softmax_residual", row, [heads * VOCAB], residual)

    def optimizer(self) -> None:
        backend, xp, k, config = self.backend, self.xp, self.k, AdamWConfig()
        masters, grads, m, v = (self.normal(PARAMETERS, wide=True) for _ in range(4))
        m, v = xp.abs(m), xp.abs(v)
        own = backend.dtype != backend.master_dtype
        values, factor = self.normal(PARAMETERS) if own else masters, xp.ones((), np.float64)
        rates = backend.asarray(step_rates(3, 1e-3, config), backend.master_dtype)

        def adamw(_: int) -> None:
            k.adamw_(values, masters, m, v, grads, rates[0], factor, config)

        sums = backend.zeros((1, backend.blocks), np.dtype(np.float64))
        ends = backend.asarray(np.array([(0, PARAMETERS)]), np.dtype(np.int64))

        def norm(_: int) -> None:
            k.square_sums(sums, grads, ends)
            k.clip_factor(sums[0], factor, 1.0)

        self.found.append(Job("adamw", adamw, PARAMETERS * (7 * self.wide + own * self.size)))
        self.found.append(Job("gradient norm", norm, PARAMETERS * self.wide))

    def residual(self) -> None:
        """x + f W^T and its norm, for out's W and down's, in the two ways; the bytes: f, x, the sum and its norm."""
        k, gain = self.k, self.normal(DIM)
        for name, width in (("out", DIM), ("down", HIDDEN)):
            w = self.normal(DIM, width)

            def by_norm(f: Any, x: Any, w: Any = w) -> Any:
                return k.add_rmsnorm_fwd(x, k.linear_fwd(f, w, None), gain, EPS)

            def overwrite_grad(f: Any, x: Any, w: Any = w) -> Any:
                x = k.linear_add_fwd(f, w, None, x)
                return x, k.rmsnorm_fwd(x, gain, EPS)

            for how, call in (("norm", by_norm), ("product", overwrite_grad)):
                self.add(f"{name}, by the {how}", (width + 3 * DIM) * self.size, [width, DIM], call)


def measure(backend: Any, tokens: int, residual: bool) -> dict[str, Any]:
    xp, jobs = backend.xp, Jobs(backend, tokens)
    copy = copy_bandwidth(xp)
    room = [xp.random.randint(0, 255, COPY_BYTES, dtype=np.uint8) for _ in range(2)]
    parts = [jobs.norms, jobs.elementwise, jobs.tables, jobs.loss, jobs.optimizer]
    rows = []
    for part in [jobs.residual] if residual else parts:
        part()
        times = take_turns(xp, [job.launch for job in jobs.found])
        for job, (us, host) in zip(jobs.found, times, strict=True):
            bandwidth = job.bytes / us * 1e6
            row = {"kernel": job.name, "us": us, "bytes": job.bytes, "gb_per_second": bandwidth / 1e9}
            row |= {"of_copy": bandwidth / copy, "of_copy_of_this_size": copy_us(xp, job.bytes, room) / us}
            rows.append(row | {"python_us": host})
        jobs.found.clear()
    found = {"device": backend.describe(), "precision": backend.precision.name, "tokens": tokens}
    return found | {"copy_gb_per_second": copy / 1e9, "rows": rows}


def table(found: dict[str, Any]) -> list[str]:
    columns = "us:.1f | bytes:,.0f | gb_per_second:,.0f | of_copy:.0%"
    columns += " | python_us=Python us:.1f | of_copy_of_this_size=same size:.0%"
    return [
        f"{found['device']}; {found['precision']}, {found['tokens']:,} tokens, sizes of NanoEuler base",
        f"copy on the device: {found['copy_gb_per_second']:,.0f} GB/s, read and written together",
        "",
        *harness.rows(columns, ((r["kernel"], r) for r in found["rows"]), "kernel"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, CONVENTION)
    p.number("--tokens", 16384, "rows, a multiple of 512")
    p.shared("device", precision={"default": "bf16", "help": "bf16, fp32 or fp64"})
    p.switch("--residual", "the ways to add the residual stream, and nothing else")
    args = p.parse(argv)
    if args.tokens % LENGTH:
        raise UserError(f"--tokens is {args.tokens}, expected a multiple of {LENGTH}")
    found = measure(harness.backend_of(args), args.tokens, args.residual)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
