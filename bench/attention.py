"""Time attention on a GPU, forward and backward, next to PyTorch's fused attention.

    python bench/attention.py                                           ours alone, the shapes of NanoEuler
    python bench/attention.py --peer torch                              next to SDPA's cuDNN and flash kernels
    python bench/attention.py --precision tf32 --peer torch             in TF32, next to SDPA's memory-efficient kernels
    python bench/attention.py --shapes 32x512,4x4096:16/16x128          BATCHxTOKENS, or BATCHxTOKENS:Q/KVxDIM
    python bench/attention.py --documents 300                           and with masked documents
    python bench/attention.py --peer torch --json result.json           and everything as one JSON object

Both get the same random numbers as views of one packed qkv tensor, and their outputs and gradients must agree. Times
are GPU times by CUDA events around each call, the median of --repeats. Calls are queued after work that keeps the GPU
busy, so that the host's launch time does not count. Calls rotate among sets of inputs that together exceed the cache.

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

import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.harness import OURS
from tinyforge.backends import Backend
from tinyforge.errors import UserError, run_command
from tinyforge.kernel import bind
from tinyforge.ops import Attention
from tinyforge.train.batches import starts_of

MASKED = "documents"
PEERS = {  # by precision: names, and PyTorch's names for them
    "bf16": {"torch cuDNN": "CUDNN_ATTENTION", "torch flash": "FLASH_ATTENTION"},
    "tf32": {"torch effic.": "EFFICIENT_ATTENTION"},
}
CACHE_BYTES = 512 << 20  # the sets of inputs together: several times the cache of any GPU
HEADS = (12, 4, 64)  # query heads, key and value heads and their size, where a shape names none
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


@lru_cache(4)  # contenders get the same; sampling them takes longer than all that is timed
def random_set(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A packed qkv and the gradient of the output."""
    rng = np.random.default_rng(seed)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = rng.standard_normal((shape.batch, shape.tokens, heads, shape.dim), np.float32)
    return qkv, rng.standard_normal((shape.batch, shape.tokens, shape.heads, shape.dim), np.float32)


def timed(call: Callable[[int], Any], calls: Sequence[int]) -> list[float]:
    """Microseconds on the GPU of call(i) for each i, ours or PyTorch's: both use the default stream. The calls are
    queued after additions that keep the device occupied meanwhile."""
    import cupy

    events, busy = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in calls], cupy.zeros(BUSY_FLOATS, np.float32)
    for _ in range(BUSY_ROUNDS):
        busy += 1
    for i, (start, stop) in zip(calls, events, strict=True):
        start.record()
        call(i)
        stop.record()
    events[-1][1].synchronize()
    return [1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in events]


class Ours:
    """The two kernels as the op calls them: gradients go into one packed array that is there already."""

    def __init__(self, shape: Shape, backend: Backend, sets: int, documents: int | None = None) -> None:
        """documents: tokens per document on average; None for rows of one document."""
        self.k, self.backend = bind(Attention.kernels, backend, "bench"), backend
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

    def to_numpy(self, x: Any) -> np.ndarray:
        return self.backend.to_numpy(x).astype(np.float32)


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

    def to_numpy(self, x: Any) -> np.ndarray:
        return x.float().cpu().numpy()


def check_parity(contenders: dict[str, Any], tolerance: float) -> float:
    """The largest relative difference of a contender's output and gradients from the first's; raises if that is too
    much."""
    first, *others = ([c.to_numpy(x) for x in (c.forward(0), *c.backward(0))] for c in contenders.values())
    worst = 0.0
    for name, theirs in zip(list(contenders)[1:], others, strict=True):
        differences = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(first, theirs, strict=True)]
        worst = float(np.max([worst, *differences]))  # propagates a NaN, which is then not within the tolerance
        if not worst <= tolerance:
            raise RuntimeError(
                f"parity: out, dq, dk, dv differ by {differences} from {name}'s, expected at most {tolerance:g}"
            )
    return worst


def take_turns(contenders: dict[str, Any], what: str, sets: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of `repeats` calls of each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for done in range(0, repeats, TURN):
        for name, contender in contenders.items():
            counted = min(TURN, repeats - done)
            calls = [(done + i) % sets for i in range(WARM_UP + counted)]
            times[name] += timed(getattr(contender, what), calls)[WARM_UP:]
    return times


def measure_shape(shape: Shape, backend: Backend, peers: dict[str, str], repeats: int, documents: int | None) -> Any:
    """Of one shape; times in microseconds."""
    precision = backend.precision.name
    sets = max(2, -(-CACHE_BYTES // (shape.elements * backend.dtype.itemsize)))
    contenders: dict[str, Any] = {OURS: Ours(shape, backend, sets)}
    contenders |= {name: Torch(shape, precision, sets, kernels) for name, kernels in peers.items()}
    found: dict[str, Any] = {"shape": asdict(shape), "sets": sets}
    found["worst_difference"] = check_parity(contenders, TOLERANCE[precision]) if peers else None
    if documents:
        contenders[MASKED] = Ours(shape, backend, sets, documents)
    flop = {"forward": shape.forward_flop, "backward": 2.5 * shape.forward_flop}
    for what in flop:
        for name, us in take_turns(contenders, what, sets, repeats).items():
            row = {"median_us": median(us), "min_us": min(us), "tflop_per_second": flop[what] / median(us) / 1e6}
            found.setdefault(name, {})[what] = row | {"us": us}
    for name in contenders:
        total = sum(found[name][what]["median_us"] for what in flop)
        found[name]["both"] = {"median_us": total, "tflop_per_second": sum(flop.values()) / total / 1e6}
    ours = found[OURS]
    found["ours_over"] = {
        name: {what: ours[what]["median_us"] / found[name][what]["median_us"] for what in (*flop, "both")}
        for name in peers
    }
    return found


def measure(
    shapes: Sequence[Shape], backend: Backend, peer: str | None, repeats: int, documents: int | None = None
) -> dict[str, Any]:
    """Everything that is printed, as a JSON object."""
    import cupy

    precision, results = backend.precision.name, []
    for shape in shapes:
        results.append(measure_shape(shape, backend, PEERS.get(precision, {}) if peer else {}, repeats, documents))
        cupy.get_default_memory_pool().free_all_blocks()
    versions = {"python": platform.python_version(), "cupy": cupy.__version__}
    versions |= {"torch": sys.modules["torch"].__version__} if peer else {}
    convention = "causal: 4 D FLOP per query head and visible pair in forward, 2.5 times that in backward"
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    found = {"device": device, "versions": versions, "precision": precision, "repeats": repeats}
    return found | {"tokens_per_document": documents, "flop_convention": convention, "results": results}


COLUMNS = ["name= ", "worst_difference=differ:.1e"]
for _what in ("forward", "backward", "both"):
    COLUMNS += [f"{_what}_us:.1f", f"{_what}=TFLOP/s:.0f", f"{_what}_ours=ours/this:.2f"]


def table(found: dict[str, Any]) -> list[str]:
    """The figures of `measure` as text."""
    named: list[tuple[str, dict[str, Any]]] = []
    for result in found["results"]:
        shape = Shape(**result["shape"])
        label = f"{shape.batch} x {shape.tokens}, {shape.heads}/{shape.kv_heads} of {shape.dim}"
        for name in (n for n in (OURS, MASKED, *PEERS.get(found["precision"], ())) if n in result):
            row = {"name": name, "worst_difference": result["worst_difference"] if name == OURS else None}
            for what, of in result[name].items():
                row |= {f"{what}_us": of["median_us"], what: of["tflop_per_second"]}
                row[f"{what}_ours"] = result["ours_over"].get(name, {}).get(what)
            named.append((label, row))
    lines = {name: found[name] for name in ("device", "precision")}
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines["calls"] = f"{found['repeats']} timed each, in turns of {TURN}, medians"
    lines["FLOP"] = found["flop_convention"]
    table = harness.rows(" | ".join(COLUMNS), named, "shape")
    return [*(f"{name:<13}{value}" for name, value in lines.items()), "", *table]


SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)(?::([1-9]\d*)/([1-9]\d*)x([1-9]\d*))?")


def shapes_of(given: str) -> list[Shape]:
    shapes = []
    for text in given.split(","):
        found = SHAPE.fullmatch(text)
        if found is None:
            raise UserError(
                f"--shapes: {text!r} is no shape, expected BATCHxTOKENS such as 32x512, or with its own heads such as "
                "4x4096:16/16x128; several with commas"
            )
        batch, tokens, *own = (int(x) for x in found.groups() if x is not None)
        heads, kv_heads, dim = own or HEADS
        if heads % kv_heads:
            raise UserError(f"--shapes: {heads} heads do not divide among {kv_heads} kv heads; use a multiple")
        shapes.append(Shape(batch, tokens, heads, kv_heads, dim))
    return shapes


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__)
    p.text("--shapes", "32x512,16x1024", "BATCHxTOKENS or BATCHxTOKENS:HEADS/KV_HEADSxHEAD_DIM, with commas")
    p.shared(precision={"default": "bf16", "help": "bf16, tf32, fp32 or fp64"})
    p.number("--repeats", 50, "timed calls of each")
    p.number("--documents", None, "time rows of documents of N tokens on average too", metavar="N")
    p.shared(peer={"help": "time PyTorch too, in bf16 or tf32"})
    args = p.parse(argv)
    shapes = shapes_of(args.shapes)
    if args.peer and args.precision not in PEERS:
        raise UserError(f"--peer torch is for --precision {' or '.join(PEERS)}, not {args.precision}; leave out --peer")
    found = measure(shapes, harness.backend_of(args), args.peer, args.repeats, args.documents)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
