"""Time the selective scan on a GPU, next to its bounds and to a chunked implementation in PyTorch.

    python bench/scan.py                                         8 x 2048 positions, 1536 channels, 16 states, bf16
    python bench/scan.py --precision fp32 --peer torch           next to PyTorch, compiled
    python bench/scan.py --precision bf16 --peer torch --json result.json

Two bounds. Memory: u, delta, z, B and C are read once and y is written once; in training, forward also writes the
states that it keeps, and backward reads forward's inputs, dy and those states, and writes five gradients. The bound is
their bytes over the measured bandwidth of a copy. Exponentials: one per state and position, and three per channel and
position (softplus, silu), at 16 per cycle and multiprocessor at the device's highest clock; backward computes each
decay twice.

The peer is written with tensors: chunks of CHUNK positions, in each the recurrence by doubling (log2 CHUNK passes over
arrays of B x CHUNK x E x N), with the state passed from chunk to chunk; gradients by autograd. Its results and ours
must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.gpu_clock import CONVENTION, copy_bandwidth, rotating, sets_of, take_turns
from bench.harness import COMPILED
from tinyforge.backends import Backend
from tinyforge.errors import UserError, run_command
from tinyforge.kernel import bind
from tinyforge.ops import SelectiveScan
from tinyforge.ops.selective_scan import tiles

CHUNK = 32  # positions of the peer's chunks
AGREE = {"fp32": 1e-4, "bf16": 5e-2}  # of the relative difference: a few roundings, at worst over a whole text
UP = 1000  # the first seed of upstream gradients
NAMES = ("u", "delta", "b", "c", "z", "a_log", "skip", "bias")


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
        k, self.backend = bind(SelectiveScan.kernels, backend, "bench"), backend
        seeds = range(sets_of(5 * shape.wide * backend.dtype.itemsize))
        sets = [list(map(backend.asarray, random_inputs(shape, seed).values())) for seed in seeds]
        ups = [backend.asarray(random_inputs(shape, UP + seed)["u"]) for seed in seeds]
        sizes = (shape.channels, shape.states), (shape.channels,), (shape.channels,)
        self.grads = [backend.zeros(size, backend.master_dtype) for size in sizes]
        kept = [k.selective_scan_fwd(None, *inputs, True)[1] for inputs in sets]
        back = [[up, *inputs, states] for up, inputs, states in zip(ups, sets, kept, strict=True)]
        forward, backward = partial(k.selective_scan_fwd, None), partial(k.selective_scan_bwd, None, *self.grads)
        self.launches = {
            "forward": rotating(forward, [[*inputs, False] for inputs in sets]),
            "forward, states kept": rotating(forward, [[*inputs, True] for inputs in sets]),
            "backward": rotating(backward, back),
        }
        self.first = lambda: (forward(*sets[0], False)[0], *backward(*back[0]))

    def answers(self) -> dict[str, np.ndarray]:
        for grad in self.grads:
            grad.fill(0)
        found = dict(zip(("y", "u", "delta", "b", "c", "z"), self.first(), strict=True))
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
        """The outputs C . h of a chunk, and the state after it; float32."""
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

    def launches(self) -> list[Callable[[int], Any]]:
        """Forward without gradients, forward with, and both passes."""

        def alone(_: int) -> None:
            with self.torch.no_grad():
                self.forward()

        return [alone, self.forward, lambda _: self.torch.autograd.grad(self.forward(), self.inputs, self.up)]


def check_agreement(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> dict[str, float]:
    """The relative difference of each result. Raises UserError for one above the tolerance."""
    found = {name: float(np.linalg.norm(ours[name] - x) / np.linalg.norm(x)) for name, x in theirs.items()}
    worst = max(found, key=lambda name: found[name])
    if not found[worst] <= tolerance:
        raise UserError(
            f"ours and PyTorch's {worst} differ by {found[worst]:.1e}, expected at most {tolerance}; one is wrong"
        )
    return found


def measure(shape: Shape, backend: Any, peer: str | None) -> dict[str, Any]:
    copy, device, precision = copy_bandwidth(backend.xp), backend.device.attributes, backend.precision.name
    special = 16 * device["MultiProcessorCount"] * device["ClockRate"] * 1e3  # exponentials a second
    ours, size, wide = Ours(shape, backend), backend.dtype.itemsize, backend.master_dtype.itemsize
    other = Peer(shape, precision, compiled=True) if peer else None
    differences = other and check_agreement(ours.answers(), other.answers(), AGREE[precision])
    launches = [*ours.launches.values(), *(other.launches() if other else ())]
    times, rows = [us for us, _ in take_turns(backend.xp, launches)], []
    for name, us in zip(ours.launches, times[:3], strict=True):
        memory, exponentials = 1e6 * shape.bytes(name, size, wide) / copy, 1e6 * shape.exponentials(name) / special
        row = {"kernel": name, "us": us, "memory_bound_us": memory, "exponentials_us": exponentials}
        rows.append(row | {"of_memory_bound": memory / us, "of_the_larger": max(memory, exponentials) / us})
    found = {"device": backend.describe(), "precision": precision, "copy_gb_per_second": copy / 1e9}
    found |= {"shape": [*astuple(shape)], "rows": rows}
    if other:
        found |= {"peer": COMPILED, "torch": other.torch.__version__, "differences": differences}
        alone, kept, both = times[3:]
        for row, us in zip(rows, (alone, kept, both - kept), strict=True):
            row |= {"peer_us": us, "ours_over_peer": row["us"] / us}
    return found


def table(found: dict[str, Any]) -> list[str]:
    batch, length, channels, states = found["shape"]
    columns = "us:.1f | memory_bound_us=memory:.1f | exponentials_us=exps:.1f | of_memory_bound=of memory:.0%"
    columns += " | of_the_larger=of larger:.0%" + " | peer_us:,.0f | ours_over_peer:.3f" * ("peer" in found)
    return [
        f"{found['device']}; {found['precision']}, {batch} x {length:,} positions, {channels:,} channels of {states}",
        f"copy on the device: {found['copy_gb_per_second']:,.0f} GB/s, read and written together",
        "",
        *harness.rows(columns, ((r["kernel"], r) for r in found["rows"])),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, CONVENTION)
    p.number("--batch", 8, "rows")
    p.number("--length", 2048, "positions")
    p.number("--channels", 1536, "channels")
    p.number("--states", 16, "states a channel")
    p.shared("device", precision={"default": "bf16", "choices": tuple(AGREE), "help": "of the inputs"})
    p.shared(peer={"help": "time PyTorch's too, compiled"})
    args = p.parse(argv)
    shape = Shape(args.batch, args.length, args.channels, args.states)
    found = measure(shape, harness.backend_of(args), args.peer)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
