"""Time the selective scan on a GPU, next to its bounds and to a chunked implementation in PyTorch.

    python bench/scan.py                                         8 x 2048 positions, 1536 channels, 16 states, bf16
    python bench/scan.py --precision fp32 --peer torch           beside PyTorch, compiled
    python bench/scan.py --precision bf16 --peer torch --json result.json

Two bounds. Memory: u, delta, z, B and C are read once and y is written once; in training, forward also writes the
states that it keeps, and backward reads forward's inputs, dy and those states, and writes five gradients. The bound is
their bytes over the measured bandwidth of a copy. Exponentials: one per state and position, and three per channel and
position (softplus, silu), at 16 per cycle and multiprocessor at the device's highest clock; backward computes each
decay twice.

The peer is written with tensors: chunks of CHUNK positions, in each the recurrence by doubling (log2 CHUNK passes over
arrays of B x CHUNK x E x N), with the state passed from chunk to chunk; gradients by autograd. Its results and ours
must agree before either is timed. Times are device times, the median of rounds (gpu_clock.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.gpu_clock import CACHE_BYTES, copy_bandwidth, timed
from tinyforge.backends import Backend, get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.kernel import bind
from tinyforge.ops import SelectiveScan
from tinyforge.ops.selective_scan import tiles
from tinyforge.report import add_json_flag, check_before, publish

CHUNK = 32  # positions of the peer's chunks
AGREE = {"fp32": 1e-4, "bf16": 5e-2}  # of the relative difference: a few roundings, at worst over a whole text
UP = 1000  # the first seed of upstream gradients
NAMES = ("u", "delta", "b", "c", "z", "a_log", "skip", "bias")
PEERS = {"torch": "torch compiled", "torch-eager": "torch eager"}


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    channels: int
    states: int

    @property
    def wide(self) -> int:
        return self.batch * self.length * self.channels

    @property
    def narrow(self) -> int:
        return self.batch * self.length * self.states

    @property
    def kept(self) -> int:
        return self.batch * tiles(self.length) * self.channels * self.states

    def bytes(self, what: str, size: int, wide: int) -> int:
        """What a kernel must move; size: of a stored number, wide: of a kept state."""
        read = (3 * self.wide + 2 * self.narrow) * size
        return {
            "forward": read + self.wide * size,
            "forward, states kept": read + self.wide * size + self.kept * wide,
            "backward": 2 * read + self.wide * size + self.kept * wide,
        }[what]

    def exponentials(self, what: str) -> int:
        return self.wide * (2 * self.states + 5 if what == "backward" else self.states + 3)


def random_inputs(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """In the order of NAMES, as at the start of training: rates of 1 to N, steps between 0.001 and 0.1."""
    rng = np.random.default_rng(seed)
    wide, narrow = (shape.batch, shape.length, shape.channels), (shape.batch, shape.length, shape.states)
    found = {
        name: rng.standard_normal(size, np.float32)
        for name, size in (("u", wide), ("delta", wide), ("b", narrow), ("c", narrow), ("z", wide))
    }
    found["delta"] *= 0.3
    found["a_log"] = np.log(np.arange(1, shape.states + 1, dtype=np.float32)) * np.ones((shape.channels, 1), np.float32)
    found["skip"] = np.ones(shape.channels, np.float32)
    found["bias"] = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape.channels)))).astype(np.float32)
    return found


class Ours:
    def __init__(self, shape: Shape, backend: Backend) -> None:
        self.k, self.backend = bind(SelectiveScan.kernels, backend, "bench"), backend
        count = max(1, CACHE_BYTES // (5 * shape.wide * backend.dtype.itemsize))
        self.sets = [list(map(backend.asarray, random_inputs(shape, seed).values())) for seed in range(count)]
        self.ups = [backend.asarray(random_inputs(shape, UP + seed)["u"]) for seed in range(count)]
        sizes = (shape.channels, shape.states), (shape.channels,), (shape.channels,)
        self.grads = [backend.zeros(size, backend.master_dtype) for size in sizes]
        self.kept = [self.k.selective_scan_fwd(None, *inputs, True)[1] for inputs in self.sets]
        # Alive while later launches write elsewhere, so that no result stays in the cache.
        self.results: deque[Any] = deque(maxlen=count + 1)

    def forward(self, i: int, keep: bool = False) -> None:
        self.results.append(self.k.selective_scan_fwd(None, *self.sets[i % len(self.sets)], keep))

    def backward(self, i: int) -> None:
        i %= len(self.sets)
        inputs = self.sets[i]
        self.results.append(self.k.selective_scan_bwd(None, *self.grads, self.ups[i], *inputs, self.kept[i]))

    def answers(self) -> dict[str, np.ndarray]:
        for grad in self.grads:
            grad.fill(0)
        self.forward(0)
        y = self.results[-1][0]
        self.backward(0)
        du, ddelta, db, dc, dz = self.results[-1]
        found = {"y": y, "u": du, "delta": ddelta, "b": db, "c": dc, "z": dz}
        found |= dict(zip(("a_log", "skip", "bias"), self.grads, strict=True))
        return {name: self.backend.to_numpy(value).astype(np.float64) for name, value in found.items()}


class Peer:
    """The chunked scan in PyTorch, on the same first set of inputs."""

    def __init__(self, shape: Shape, precision: str, compiled: bool, device: str = "cuda") -> None:
        import torch

        self.torch = torch
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        inputs = random_inputs(shape)
        self.inputs = [torch.tensor(inputs[name], device=device).to(kind).requires_grad_() for name in NAMES]
        self.up = torch.tensor(random_inputs(shape, UP)["u"], device=device).to(kind)
        self.scan = torch.compile(self.chunk) if compiled else self.chunk

    def chunk(self, h: Any, u: Any, dt: Any, b: Any, c: Any, a: Any) -> tuple[Any, Any]:
        """The outputs C . h of a chunk, and the state behind it; float32."""
        functional = self.torch.nn.functional
        decay = self.torch.exp(dt[..., None] * a)  # (B, t, E, N)
        states = (dt * u)[..., None] * b[:, :, None]
        reach = 1
        while reach < u.shape[1]:
            pad = (0, 0, 0, 0, reach, 0)
            states = states + decay * functional.pad(states[:, :-reach], pad)
            decay = decay * functional.pad(decay[:, :-reach], pad, value=1.0)
            reach *= 2
        states = states + decay * h[:, None]
        return (states * c[:, :, None]).sum(-1), states[:, -1]

    def forward(self, i: int = 0) -> Any:
        functional = self.torch.nn.functional
        u, delta, b, c, z, a_log, skip, bias = (x.float() for x in self.inputs)
        dt, a, parts = functional.softplus(delta + bias), -self.torch.exp(a_log), []
        h = u.new_zeros(len(u), *a.shape)
        for at in range(0, u.shape[1], CHUNK):
            now = slice(at, at + CHUNK)
            y, h = self.scan(h, u[:, now], dt[:, now], b[:, now], c[:, now], a)
            parts.append(y)
        y = (self.torch.cat(parts, dim=1) + skip * u) * functional.silu(z)
        return y.to(self.up.dtype)

    def answers(self) -> dict[str, np.ndarray]:
        y = self.forward()
        grads = self.torch.autograd.grad(y, self.inputs, self.up)
        found = {"y": y.detach()} | dict(zip(NAMES, grads, strict=True))
        return {name: value.float().cpu().numpy().astype(np.float64) for name, value in found.items()}

    def milliseconds(self, work: Callable[[], Any], repeats: int = 5) -> float:
        cuda, found = self.torch.cuda, []
        for _ in range(repeats + 1):
            start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            work()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop))
        return median(found[1:])

    def times(self) -> dict[str, float]:
        """Of forward without gradients, of forward with, and of backward."""

        def both() -> None:
            self.torch.autograd.grad(self.forward(), self.inputs, self.up)

        def alone() -> None:
            with self.torch.no_grad():
                self.forward()

        kept = self.milliseconds(self.forward)
        whole = self.milliseconds(both)
        return {"forward": self.milliseconds(alone), "forward, states kept": kept, "backward": whole - kept}


def check_agreement(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> dict[str, float]:
    """The relative difference of each result. Raises UserError for one above the tolerance."""
    found = {name: float(np.linalg.norm(ours[name] - x) / np.linalg.norm(x)) for name, x in theirs.items()}
    worst = max(found, key=lambda name: found[name])
    if not found[worst] <= tolerance:
        raise UserError(f"ours and PyTorch's {worst} differ by {found[worst]:.1e}, wanted {tolerance}; one is wrong")
    return found


def measure(shape: Shape, backend: Any, peer: str | None) -> dict[str, Any]:
    copy, device = copy_bandwidth(backend.xp), backend.device.attributes
    special = 16 * device["MultiProcessorCount"] * device["ClockRate"] * 1e3  # exponentials a second
    ours, size, wide = Ours(shape, backend), backend.dtype.itemsize, backend.master_dtype.itemsize
    launches: dict[str, Callable[[int], None]] = {
        "forward": ours.forward,
        "forward, states kept": lambda i: ours.forward(i, True),
        "backward": ours.backward,
    }
    rows = []
    for name, launch in launches.items():
        ms, _ = timed(backend.xp, launch)
        memory, exponentials = shape.bytes(name, size, wide) / copy, shape.exponentials(name) / special
        rows.append(
            {
                "kernel": name,
                "us": 1e3 * ms,
                "memory_bound_us": 1e6 * memory,
                "exponentials_us": 1e6 * exponentials,
                "of_memory_bound": 1e3 * memory / ms,
                "of_the_larger": 1e3 * max(memory, exponentials) / ms,
            }
        )
    found = {
        "device": backend.describe(),
        "precision": backend.precision.name,
        "copy_gb_per_second": copy / 1e9,
        "shape": [shape.batch, shape.length, shape.channels, shape.states],
        "rows": rows,
    }
    if peer:
        answers = ours.answers()
        other = Peer(shape, backend.precision.name, PEERS[peer] == PEERS["torch"])
        differences = check_agreement(answers, other.answers(), AGREE[backend.precision.name])
        times = other.times()
        found |= {"peer": PEERS[peer], "torch": other.torch.__version__, "differences": differences}
        for row in rows:
            row |= {"peer_us": 1e3 * times[row["kernel"]], "ours_over_peer": row["us"] / (1e3 * times[row["kernel"]])}
    return found


def table(found: dict[str, Any]) -> str:
    batch, length, channels, states = found["shape"]
    lines = [
        f"{found['device']}; {found['precision']}, {batch} x {length:,} positions, {channels:,} channels of {states}",
        f"copy on the device: {found['copy_gb_per_second']:,.0f} GB/s, read and written together",
        "",
        f"{'':<22} {'us':>8} {'memory':>8} {'exps':>8} {'of memory':>10} {'of larger':>10}"
        + (f" {'peer us':>10} {'ours/peer':>10}" if "peer" in found else ""),
    ]
    for r in found["rows"]:
        theirs = f" {r['peer_us']:>10,.0f} {r['ours_over_peer']:>10.3f}" if "peer_us" in r else ""
        lines.append(
            f"{r['kernel']:<22} {r['us']:>8.1f} {r['memory_bound_us']:>8.1f} {r['exponentials_us']:>8.1f} "
            f"{r['of_memory_bound']:>10.0%} {r['of_the_larger']:>10.0%}{theirs}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    for name, default, meaning in (
        ("batch", 8, "rows"),
        ("length", 2048, "positions"),
        ("channels", 1536, "channels"),
        ("states", 16, "states a channel"),
    ):
        p.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    p.add_argument("--precision", default="bf16", choices=tuple(AGREE), help="default: bf16")
    p.add_argument("--peer", choices=tuple(PEERS), help="time PyTorch's too, compiled or eager")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    add_json_flag(p)
    args = p.parse_args(argv)
    for name in ("batch", "length", "channels", "states"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, wants at least 1")
    check_before(args.json, args.peer)
    shape = Shape(args.batch, args.length, args.channels, args.states)
    found = measure(shape, get_backend("cupy", args.precision, device=args.device), args.peer)
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
