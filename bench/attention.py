"""Time attention on a GPU, forward and backward, next to PyTorch's fused attention.

    python bench/attention.py                                           ours alone, the shapes of NanoEuler
    python bench/attention.py --peer torch                              next to SDPA's cuDNN and flash kernels
    python bench/attention.py --precision tf32 --peer torch             in TF32, next to SDPA's memory-efficient kernels
    python bench/attention.py --shapes 8x2048 --heads 16 --peer torch   other shapes: BATCHxTOKENS
    python bench/attention.py --shapes 32x512,4x4096:16/16x128          with own heads: BATCHxTOKENS:Q/KVxDIM
    python bench/attention.py --documents 300                           and with masked documents
    python bench/attention.py --peer torch --json result.json           and everything as one JSON object

Both get the same random numbers as views of one packed qkv tensor, and their outputs and gradients must agree before
either is timed. Times are GPU times by CUDA events around each call, the median of --repeats. Calls are queued behind
work that keeps the GPU busy, so that the host's launch time does not count. Calls rotate among sets of inputs that
together exceed the cache, and the two take turns, a few calls each.

PyTorch's float32 kernels do not support groups of heads: k and v are repeated for them, as a model has to do, and that
is included in the time. Each of their products consists of three in TF32, and so is nearly as exact as in float32. Not
every version of PyTorch supports groups with cuDNN either.

cuDNN's and flash's kernels are timed if PyTorch has them.

With --documents N the same rows are timed again as several documents of N tokens on average, each attending only to
itself. FLOP are counted as without documents, so skipped work shows as more FLOP/s.

FLOP convention: causal, 4 D FLOP per query head and pair of positions s <= t in forward (two products), 2.5 times that
in backward (five products; what a kernel computes twice does not count).
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from statistics import median
from typing import Any, Protocol

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge.backends import Backend, get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.kernel import bind
from tinyforge.ops import Attention
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.train.batches import starts_of

OURS, MASKED = "tinyforge", "documents"
PEERS = {  # by precision: names, and PyTorch's names for them
    "bf16": {"torch cuDNN": "CUDNN_ATTENTION", "torch flash": "FLASH_ATTENTION"},
    "tf32": {"torch effic.": "EFFICIENT_ATTENTION"},
}
CACHE_BYTES = 512 << 20  # the sets of inputs together: several times the cache of any GPU
TURN = 10  # timed calls before the other's turn
WARM_UP = 3
CAUSAL = (True, None, None, 0.0)  # the kernels' last arguments: causal, no window, no dropout
TOLERANCE = {"bf16": 2e-2, "tf32": 2e-3}  # of the relative difference between ours and the peer's: a few roundings
BUSY_FLOATS, BUSY_ROUNDS = 1 << 28, 10  # some milliseconds of additions ahead of each turn


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def forward_flop(self) -> float:
        """See the convention at the top."""
        pairs = self.tokens * (self.tokens + 1) / 2
        return 4.0 * self.dim * self.heads * pairs * self.batch

    @property
    def elements(self) -> int:
        """Of qkv, its gradient, the output and the output's gradient."""
        return self.batch * self.tokens * self.dim * 2 * (2 * self.heads + 2 * self.kv_heads)


@lru_cache(4)  # contenders get the same; drawing them takes longer than all that is timed
def random_set(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A packed qkv and the gradient of the output."""
    rng = np.random.default_rng(seed)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = rng.standard_normal((shape.batch, shape.tokens, heads, shape.dim), np.float32)
    return qkv, rng.standard_normal((shape.batch, shape.tokens, shape.heads, shape.dim), np.float32)


class Contender(Protocol):
    def forward(self, i: int) -> Any:
        """The output on set i."""

    def backward(self, i: int) -> Any:
        """The gradients of q, k and v on set i."""

    def timed(self, call: Callable[[int], Any], calls: Sequence[int]) -> list[float]:
        """Microseconds on the GPU of call(i) for each i."""

    def to_numpy(self, x: Any) -> np.ndarray: ...


def record(
    event: Callable[[], Any], busy: Any, call: Callable[[int], Any], calls: Sequence[int]
) -> list[tuple[Any, Any]]:
    """Events before and after each call, behind additions to `busy` that keep the device occupied meanwhile."""
    events = [(event(), event()) for _ in calls]
    for _ in range(BUSY_ROUNDS):
        busy += 1
    for i, (start, stop) in zip(calls, events, strict=True):
        start.record()
        call(i)
        stop.record()
    events[-1][1].synchronize()
    return events


class Ours:
    """The two kernels as the op calls them: gradients go into one packed array that is there already."""

    def __init__(self, shape: Shape, backend: Backend, sets: int, documents: int | None = None) -> None:
        """documents: tokens per document on average; None for rows of one document."""
        import cupy

        self.cupy = cupy
        self.k = bind(Attention.kernels, backend, "bench")
        self.saved = []
        for i in range(sets):
            qkv, dy = (backend.asarray(x) for x in random_set(shape, i))
            parts = self._split(qkv, shape)
            dqkv, starts = backend.empty(qkv.shape), None
            if documents:
                begins = np.random.default_rng(i).random((shape.batch, shape.tokens)) * documents < 1
                starts = backend.asarray(starts_of(begins))
            results = self.k.attention_fwd(*parts, None, starts, *CAUSAL)
            self.saved.append((*self._split(dqkv, shape), dy, *parts, None, starts, *results))

    @staticmethod
    def _split(x: Any, shape: Shape) -> tuple[Any, Any, Any]:
        kv = shape.heads + shape.kv_heads
        return x[:, :, : shape.heads], x[:, :, shape.heads : kv], x[:, :, kv:]

    def forward(self, i: int) -> Any:
        return self.k.attention_fwd(*self.saved[i][4:9], *CAUSAL)[0]

    def backward(self, i: int) -> Any:
        self.k.attention_bwd(*self.saved[i], *CAUSAL)
        return self.saved[i][:3]

    def timed(self, call: Callable[[int], Any], calls: Sequence[int]) -> list[float]:
        cuda, busy = self.cupy.cuda, self.cupy.zeros(BUSY_FLOATS, np.float32)
        return [1e3 * cuda.get_elapsed_time(*pair) for pair in record(cuda.Event, busy, call, calls)]

    def to_numpy(self, x: Any) -> np.ndarray:
        return self.cupy.asnumpy(self.cupy.ascontiguousarray(x)).astype(np.float32)


class Torch:
    """torch.nn.functional.scaled_dot_product_attention with the given kernels."""

    def __init__(self, shape: Shape, precision: str, sets: int, kernels: str) -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.torch = torch
        self.groups = precision == "bf16"  # whether these kernels know groups of heads
        self.kernels = lambda: sdpa_kernel(getattr(SDPBackend, kernels))
        torch.backends.cuda.matmul.allow_tf32 = True
        self.group = shape.heads // shape.kv_heads
        self.saved = []
        for i in range(sets):
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            qkv, dy = (torch.from_numpy(x).to("cuda", dtype) for x in random_set(shape, i))
            sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
            parts = [x.transpose(1, 2).detach().requires_grad_() for x in qkv.split(sizes, dim=2)]
            try:
                out = self._attention(parts)
            except RuntimeError:  # these kernels do not support groups: repeat k and v
                if not self.groups:
                    raise
                self.groups = False
                out = self._attention(parts)
            self.saved.append((parts, out, dy.transpose(1, 2)))

    def _attention(self, parts: list[Any]) -> Any:
        q, k, v = parts
        if not self.groups:
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        with self.kernels():
            attend = self.torch.nn.functional.scaled_dot_product_attention
            return attend(q, k, v, is_causal=True, enable_gqa=self.groups)

    def forward(self, i: int) -> Any:
        with self.torch.no_grad():
            return self._attention(self.saved[i][0]).transpose(1, 2)

    def backward(self, i: int) -> Any:
        parts, out, dy = self.saved[i]
        return [x.transpose(1, 2) for x in self.torch.autograd.grad(out, parts, dy, retain_graph=True)]

    def timed(self, call: Callable[[int], Any], calls: Sequence[int]) -> list[float]:
        event = partial(self.torch.cuda.Event, enable_timing=True)
        busy = self.torch.zeros(BUSY_FLOATS, device="cuda")
        return [1e3 * start.elapsed_time(stop) for start, stop in record(event, busy, call, calls)]

    def to_numpy(self, x: Any) -> np.ndarray:
        return x.float().cpu().numpy()


def check_parity(contenders: dict[str, Contender], tolerance: float) -> float:
    """The largest relative difference of a contender's output and gradients from the first's; raises if that is too
    much."""
    (_, first), *others = contenders.items()
    ours = [first.to_numpy(x) for x in (first.forward(0), *first.backward(0))]
    worst = 0.0
    for name, c in others:
        theirs = [c.to_numpy(x) for x in (c.forward(0), *c.backward(0))]
        differences = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(ours, theirs, strict=True)]
        worst = float(np.max([worst, *differences]))  # hands on a NaN, which is then not within the tolerance
        if not worst <= tolerance:
            raise RuntimeError(f"parity: out, dq, dk, dv differ by {differences} from {name}'s, wanted {tolerance:g}")
    return worst


def take_turns(contenders: dict[str, Contender], what: str, sets: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of `repeats` calls of each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for done in range(0, repeats, TURN):
        for name, contender in contenders.items():
            counted = min(TURN, repeats - done)
            calls = [(done + i) % sets for i in range(WARM_UP + counted)]
            times[name] += contender.timed(getattr(contender, what), calls)[WARM_UP:]
    return times


def measure(
    shapes: Sequence[Shape], backend: Backend, peer: str | None, repeats: int, documents: int | None = None
) -> dict[str, Any]:
    """Everything that is printed, as a JSON object. Times in microseconds."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    versions = {"python": platform.python_version(), "cupy": cupy.__version__}
    precision = backend.precision.name
    results = []
    for shape in shapes:
        sets = max(2, -(-CACHE_BYTES // (shape.elements * backend.dtype.itemsize)))
        contenders: dict[str, Contender] = {OURS: Ours(shape, backend, sets)}
        peers = [name for name in PEERS.get(precision, ()) if peer]
        for name in peers:
            contenders[name] = Torch(shape, precision, sets, PEERS[precision][name])
            versions["torch"] = sys.modules["torch"].__version__
        found: dict[str, Any] = {"shape": asdict(shape), "sets": sets}
        found["worst_difference"] = check_parity(contenders, TOLERANCE[precision]) if len(contenders) > 1 else None
        if documents:
            contenders[MASKED] = Ours(shape, backend, sets, documents)
        flop = {"forward": shape.forward_flop, "backward": 2.5 * shape.forward_flop}
        for what in flop:
            for name, times in take_turns(contenders, what, sets, repeats).items():
                middle = median(times)
                found.setdefault(name, {})[what] = {
                    "median_us": middle,
                    "min_us": min(times),
                    "tflop_per_second": flop[what] / middle / 1e6,
                    "us": times,
                }
        for name in contenders:
            total = sum(found[name][what]["median_us"] for what in flop)
            found[name]["both"] = {"median_us": total, "tflop_per_second": sum(flop.values()) / total / 1e6}
        found["ours_over"] = {
            name: {what: found[OURS][what]["median_us"] / found[name][what]["median_us"] for what in (*flop, "both")}
            for name in peers
        }
        results.append(found)
        del contenders
        cupy.get_default_memory_pool().free_all_blocks()
    return {
        "device": properties["name"].decode(),
        "versions": versions,
        "precision": precision,
        "repeats": repeats,
        "tokens_per_document": documents,
        "flop_convention": "causal: 4 D FLOP per query head and visible pair in forward, 2.5 times that in backward",
        "results": results,
    }


def table(found: dict[str, Any]) -> str:
    """The figures of `measure` as text."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"device       {found['device']}",
        f"versions     {versions}",
        f"precision    {found['precision']}",
        f"calls        {found['repeats']} timed each, in turns of {TURN}, medians",
        f"FLOP         {found['flop_convention']}",
        "",
        f"{'batch x tokens, heads':<24} {'':<13} {'forward us':>10} {'TFLOP/s':>8} {'backward us':>12} {'TFLOP/s':>8} "
        f"{'both us':>9} {'TFLOP/s':>8}",
    ]
    for result in found["results"]:
        shape = Shape(**result["shape"])
        label = f"{shape.batch} x {shape.tokens}, {shape.heads}/{shape.kv_heads} of {shape.dim}"
        for name in (n for n in (OURS, MASKED, *PEERS.get(found["precision"], ())) if n in result):
            cells = [
                (result[name][what]["median_us"], result[name][what]["tflop_per_second"])
                for what in ("forward", "backward", "both")
            ]
            (f, f_rate), (b, b_rate), (both, rate) = cells
            lines.append(
                f"{label:<24} {name:<13} {f:>10.1f} {f_rate:>8.0f} {b:>12.1f} {b_rate:>8.0f} {both:>9.1f} {rate:>8.0f}"
            )
        for name, r in result["ours_over"].items():
            ours = f"ours / {name.split()[1]}"
            lines.append(
                f"{'':<24} {ours:<13} {r['forward']:>10.2f} {'':>8} {r['backward']:>12.2f} {'':>8} {r['both']:>9.2f}"
            )
        if result["worst_difference"] is not None:
            lines.append(f"{'':<24} results differ by {result['worst_difference']:.1e}")
    return "\n".join(lines)


SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)(?::([1-9]\d*)/([1-9]\d*)x([1-9]\d*))?")


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    for name in ("heads", "kv_heads", "head_dim", "repeats", "documents"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, wants a number above 0")
    shapes = []
    for text in args.shapes.split(","):
        found = SHAPE.fullmatch(text)
        if found is None:
            raise UserError(
                f"--shapes: {text!r} is no shape, wants BATCHxTOKENS such as 32x512, or with heads of its "
                "own such as 4x4096:16/16x128; several with commas"
            )
        batch, tokens, *own = (int(x) for x in found.groups() if x is not None)
        heads, kv_heads, dim = own or (args.heads, args.kv_heads, args.head_dim)
        if heads % kv_heads:
            raise UserError(f"--shapes, --heads: {heads} heads do not divide among {kv_heads} kv heads; use a multiple")
        shapes.append(Shape(batch, tokens, heads, kv_heads, dim))
    return shapes


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument(
        "--shapes",
        default="32x512,16x1024",
        help="BATCHxTOKENS or BATCHxTOKENS:HEADS/KV_HEADSxHEAD_DIM, with commas (default: %(default)s)",
    )
    p.add_argument("--heads", type=int, default=12, help="query heads (default: %(default)s)")
    p.add_argument("--kv-heads", type=int, default=4, help="key and value heads (default: %(default)s)")
    p.add_argument("--head-dim", type=int, default=64, help="size of a head (default: %(default)s)")
    p.add_argument("--precision", default="bf16", help="bf16, tf32, fp32 or fp64 (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=50, help="timed calls of each (default: %(default)s)")
    p.add_argument("--documents", type=int, metavar="N", help="time rows of documents of N tokens on average too")
    p.add_argument("--peer", choices=("torch",), help="time PyTorch too, in bf16 or tf32")
    add_json_flag(p)
    args = p.parse_args(argv)
    shapes = shapes_of(args)
    if args.peer and args.precision not in PEERS:
        raise UserError(f"--peer torch is for --precision {' or '.join(PEERS)}, not {args.precision}; leave out --peer")
    check_before(args.json, args.peer)
    found = measure(shapes, get_backend("cupy", args.precision), args.peer, args.repeats, args.documents)
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
