"""Time the matrix products of a training step on a GPU, with all variants of our kernel and cuBLAS, and choose.

    python bench/gemm.py                                               base, GPT-2 124M and large at 16,384 tokens
    python bench/gemm.py --models base --json result.json
    python bench/gemm.py --table tinyforge/backends/gemm_table.json    and write the table that the backend uses
    python bench/gemm.py --epilogues --models base,xl,384x1024 --tokens 1024 4096     only products with an epilogue

A product with SwiGLU or RoPE as its epilogue is compared with cuBLAS's product followed by the op's kernel.

A variant must first be correct: compared with cuBLAS with float32 results, over poisoned memory, bitwise identical
twice. Correct variants are timed briefly. The best of them then take long turns with cuBLAS, alternating, so that clock
changes affect both.

A child process does the measuring. If it dies or is silent for half a minute, it is replaced, and the variant that it
was running is left out and reported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.gpu_clock import CONVENTION, event_us, sets_of, take_turns
from tinyforge.backends.compile import constant
from tinyforge.errors import UserError, run_command
from tinyforge.models.gpt2.config import PRESETS as GPT2
from tinyforge.models.nanoeuler.config import PRESETS as NANOEULER
from tinyforge.models.nanoeuler.config import Config
from tinyforge.ops.cross_entropy import row_pitch
from tinyforge.report import check_before

MODELS = ("base", "124m", "large")  # unless --models names others
CHUNK = 4096  # tokens whose logits are computed at a time (ops/cross_entropy_cuda.py)
SILENCE, STARTING = 30.0, 120.0  # seconds until a silent child is killed; the same while it starts and compiles
ROPE_HEAD = constant("ops/gemm_hopper.cu", "HEAD")  # the width of a head whose product can end with RoPE
FINALISTS, SHORT = 4, 8
# Relative errors, by norms, against sums in float32 by cuBLAS: one rounding to bf16; another order of the sum.
TOLERANCE = {"bfloat16": 4e-3, "float32": 3e-5}


@dataclass(frozen=True)
class Product:
    """One of a step's matrix products: m x n results, each a sum over k; it occurs `count` times in a step."""

    model: str
    name: str
    product: str  # FORWARD, INPUT or WEIGHT, or an epilogue, as of backends/gemm.py
    m: int
    n: int
    k: int
    count: int
    accumulate: bool = False
    instead: str = ""  # name of the product that it replaces, together with a separate pass
    tokens: int = 16384  # of the step

    @property
    def key(self) -> str:
        return f"{self.product} {self.m} {self.n} {self.k}"

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k


def shape_of(model: str) -> Config | None:
    """A preset of NanoEuler, or with "384x1024" one of that width and hidden width and heads of 64; None for others."""
    if found := re.fullmatch(r"(\d+)x(\d+)", model):
        dim, hidden = map(int, found.groups())
        heads = dim // ROPE_HEAD
        if not hidden or not heads or dim % ROPE_HEAD:
            return None
        return Config(dim=dim, hidden=hidden, heads=heads, kv_heads=next(n for n in (3, 2, 1) if heads % n == 0))
    return NANOEULER.get(model)


def linears(model: str) -> tuple[list[tuple[str, int, int]], int, tuple[int, int]]:
    """(name, outs, ins) of a block's linear maps, the number of blocks, and outs and ins of the output heads."""
    if model == "124m":
        g = GPT2[model]
        maps = [("out", g.dim, g.dim), ("up", 4 * g.dim, g.dim), ("down", g.dim, 4 * g.dim)]
        # qkv's forward has a bias, which cuBLASLt adds: it stays there.
        return [("qkv", 3 * g.dim, g.dim), *maps], g.layers, (row_pitch(1, g.vocab, 2), g.dim)
    c = shape_of(model)
    assert c is not None
    qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
    maps = [("qkv", qkv, c.dim), ("out", c.dim, c.dim), ("gate|up", 2 * c.hidden, c.dim), ("down", c.dim, c.hidden)]
    return maps, c.layers, (row_pitch(c.mtp_heads, c.vocab, 2), c.dim)


def products(model: str, tokens: int) -> Iterator[Product]:
    """The products of a step, as its ops request them."""
    product = partial(Product, model, tokens=tokens)
    maps, layers, (outs, ins) = linears(model)
    for name, o, i in maps:
        if (model, name) != ("124m", "qkv"):
            yield product(f"{name} forward", "FORWARD", tokens, o, i, layers)
        yield product(f"{name} dX", "INPUT", tokens, i, o, layers)
        yield product(f"{name} dW", "WEIGHT", o, i, tokens, layers, accumulate=True)
    if (config := shape_of(model)) is not None:
        h, i = config.hidden, ins
        qkv = next(o for name, o, _ in maps if name == "qkv")
        if config.head_dim == ROPE_HEAD:
            yield product("qkv, RoPE", "ROPE", tokens, qkv, i, layers, instead="qkv forward")
        yield product("gate|up, SwiGLU", "SWIGLU", tokens, 2 * h, i, layers, instead="gate|up forward")
        yield product("down dX, SwiGLU", "SWIGLU_BACKWARD", tokens, h, i, layers, instead="down dX")
    chunk = min(CHUNK, tokens)
    yield product("head forward", "FORWARD", chunk, outs, ins, tokens // chunk)
    yield product("head dX", "INPUT", tokens, ins, outs, 1)
    yield product("head dW", "WEIGHT", outs, ins, tokens, 1)


def busy(product: Product, variant: Any, splits: int, slots: int) -> float:
    """The share of the multiprocessors' time that goes into results, if all tiles take the same time: less than 1 where
    the last round is not full, and where tiles reach beyond the result."""
    down, across = -(-product.m // (variant.rows * variant.cluster)), -(-product.n // variant.columns)
    clusters = slots // variant.cluster
    rounds = -(-down * across * splits // clusters)
    inside = product.m * product.n / (variant.rows * variant.cluster * variant.columns)
    return inside * splits / (rounds * clusters)


def splits_for(product: Product, variant: Any, slots: int) -> list[int]:
    """The two best numbers of parts of a WEIGHT product; each part costs a pass over the result."""
    return sorted(range(1, 13), key=lambda s: busy(product, variant, s, slots) - 0.02 * s, reverse=True)[:2]


def candidates(product: Product, slots: int) -> list[Any]:
    from tinyforge.backends.gemm import compiled

    variants = compiled(product.product)
    if product.product == "WEIGHT":
        return [replace(v, splits=s) for v in variants for s in splits_for(product, v, slots)]
    return [replace(v, band=b) for v in variants for b in (1, 8)]


def tile(product: str, variant: Any) -> tuple[Any, ...]:
    """The key of the compiled kernel of a variant."""
    return (product, *astuple(variant)[:5])


def compile_one(product: str, numbers: tuple[int, ...]) -> tuple[str, str]:
    """Runs in a process of its own, and leaves the cubin in CuPy's disk cache."""
    from tinyforge.backends.gemm import Variant

    v = Variant(*numbers)
    try:
        v.kernel(product)
    except Exception as error:  # one variant fewer
        return f"{product} {v}", str(error)
    return f"{product} {v}", ""


class Bench:
    """One product: its inputs, and its contenders: our kernel, and cuBLAS, which the op's kernel follows where the
    product has an epilogue. A set of arrays is the two factors, the results, and further inputs of the op."""

    results = slice(2, 3)  # of a set

    def __init__(self, backend: Any, product: Product) -> None:
        from tinyforge.backends import cublas, gemm

        self.xp, self.product, self.gemm, self.cublas = backend.xp, product, gemm, cublas.gemm
        self.dtype, self.random = backend.dtype, backend.xp.random.default_rng(0)
        self.weight, self.forward = product.product == "WEIGHT", product.product == "FORWARD"
        self.result = backend.master_dtype if self.weight else backend.dtype
        self.sets: Any = self.make_sets(product.m, product.n, product.k)

    def normal(self, *shape: int) -> Any:
        return self.random.standard_normal(shape, np.float32).astype(self.dtype)

    def make_sets(self, m: int, n: int, k: int) -> list[tuple[Any, ...]]:
        shapes = ((k, m) if self.weight else (m, k)), ((n, k) if self.forward else (k, n))
        count = min(16, sets_of(2 * (m * k + n * k) + m * n * self.result.itemsize, least=2))
        return [(*(self.normal(*s) for s in shapes), self.xp.empty((m, n), self.result)) for _ in range(count)]

    def apart(self, a: Any, b: Any, out: Any) -> tuple[Any, ...]:
        """The results by cuBLAS and the op's kernel."""
        how = {"accumulate": self.product.accumulate, "transpose_a": self.weight, "transpose_b": self.forward}
        return (self.cublas(a, b, out, **how),)

    def keywords(self, *more: Any) -> dict[str, Any]:
        """What the kernel takes besides the factors and the first result; more: the rest of the set."""
        return {"accumulate": self.product.accumulate}

    def reference(self) -> list[Any]:
        """The results in float32."""
        a, b, out = self.sets[0]
        wide = self.xp.empty(out.shape, "float32")
        self.cublas(a, b, wide, transpose_a=self.weight, transpose_b=self.forward)
        return [wide]

    def by_cublas(self, i: int) -> None:
        self.apart(*self.sets[i % len(self.sets)])

    def by_ours(self, variant: Any) -> Callable[[int], None]:
        def launch(i: int) -> None:
            a, b, out, *more = self.sets[i % len(self.sets)]
            if self.gemm.hopper(variant, a, b, out, self.product.product, **self.keywords(*more)) is None:
                raise UserError(f"bench/gemm.py: the kernel refuses {self.product.key}")

        return launch

    def error(self, variant: Any, reference: list[Any]) -> float:
        """Relative, the worst of the results, or infinite where a second run has other bits."""
        found, worst, norm = [], 0.0, self.xp.linalg.norm
        for _ in range(2):
            for x in self.sets[0][self.results]:
                if self.product.accumulate:
                    x.fill(1)
                else:
                    x.view("uint8").fill(0xFF)  # NaN
            self.by_ours(variant)(0)
            found.append([x.copy() for x in self.sets[0][self.results]])
        for one, two, expected in zip(*found, reference, strict=True):
            if not bool((one.view("uint8") == two.view("uint8")).all()):
                return float("inf")
            wide = one.astype("float32")
            wide -= expected
            if self.product.accumulate:
                wide -= 1
            error = float(norm(wide) / norm(expected))
            worst = error if not error <= worst else worst  # NaN stays
        return worst


class Gated(Bench):
    """A product that ends with SwiGLU, forward or backward; results: gate|up and h, or their gradient and h."""

    results = slice(2, 4)

    def make_sets(self, m: int, n: int, k: int) -> list[tuple[Any, ...]]:
        from tinyforge.ops.swiglu_cuda import swiglu_bwd, swiglu_fwd

        self.passes, self.forward = (swiglu_fwd, swiglu_bwd), self.product.product == "SWIGLU"
        half = n // 2 if self.forward else n

        def one() -> tuple[Any, ...]:
            gu = None if self.forward else self.normal(m, 2 * half)
            weight = self.normal(*((n, k) if self.forward else (k, n)))
            gate_up, hidden = (self.xp.empty((m, width), self.dtype) for width in (2 * half, half))
            return self.normal(m, k), weight, gate_up, hidden, gu

        return [one() for _ in range(2)]  # a hundred MiB and more each

    def apart(self, a: Any, b: Any, out: Any, hidden: Any = None, gu: Any = None) -> tuple[Any, ...]:
        """In fresh memory where the op returns such."""
        if self.forward:
            return self.cublas(a, b, out, transpose_b=True), self.passes[0](out)
        self.cublas(a, b, hidden)
        return self.passes[1](hidden, hidden, gu), hidden

    def keywords(self, *more: Any) -> dict[str, Any]:
        return dict(zip(("hidden", "gu"), more, strict=True))

    def reference(self) -> list[Any]:
        return [x.astype("float32") for x in self.apart(*self.sets[0])]


class Roped(Gated):
    """A product that ends with RoPE, four heads of five, of positions 0 to 511 repeatedly."""

    results = slice(2, 3)

    def make_sets(self, m: int, n: int, k: int) -> list[tuple[Any, ...]]:
        self.heads, head = n // self.gemm.HEAD, self.gemm.HEAD // 2
        angles = [self.random.standard_normal((min(m, 512), head), np.float32) for _ in range(2)]
        self.turn = self.gemm.Turn(*angles, self.heads * 4 // 5)
        return [(self.normal(m, k), self.normal(n, k), self.xp.empty((m, n), self.result)) for _ in range(4)]

    def apart(self, a: Any, b: Any, out: Any, hidden: Any = None, gu: Any = None) -> tuple[Any, ...]:
        from tinyforge.ops.rope_cuda import rope

        self.cublas(a, b, out, transpose_b=True)
        heads = out.reshape(-1, len(self.turn.cosines), self.heads, self.gemm.HEAD)
        rope(heads, heads, self.turn.cosines, self.turn.sines, self.turn.heads)
        return (out,)

    def keywords(self, *more: Any) -> dict[str, Any]:
        return {"turn": self.turn}


def child(pipe: Any, device: int | None, todo: list[Product], left_out: set[tuple[Any, ...]], until: float) -> None:
    from tinyforge.backends import get_backend
    from tinyforge.backends.cupy_backend import processors

    backend: Any = get_backend("cupy", "bf16", device=device)
    name = backend.xp.cuda.runtime.getDeviceProperties(backend.device.id)["name"].decode()
    pipe.send(("device", backend.describe(), name, backend.matmul_peak() / 1e12))
    for product in todo:
        if time.time() > until:
            break
        bench = {"ROPE": Roped}.get(product.product, Gated if product.instead else Bench)(backend, product)
        reference = bench.reference()
        times: list[tuple[float, Any]] = []
        wrong = []
        for variant in candidates(product, processors()):
            if tile(product.product, variant) in left_out:
                continue
            pipe.send(("trying", product.product, variant))
            error = bench.error(variant, reference)
            if error <= TOLERANCE[bench.result.name]:
                times.append((event_us(bench.xp, bench.by_ours(variant), SHORT)[0], variant))
            else:  # NaN too
                wrong.append({"variant": astuple(variant), "error": error})
        times.sort(key=lambda found: found[0])
        finalists = [variant for _, variant in times[:FINALISTS]]
        (us, host), *ours = take_turns(bench.xp, [bench.by_cublas, *map(bench.by_ours, finalists)])
        best = sorted(zip(finalists, ours, strict=True), key=lambda x: x[1])
        row = asdict(product) | {
            "cublas_us": us,
            "cublas_host_us": host,
            "wrong": wrong,
            "ours": [{"variant": astuple(v), "name": str(v), "us": u, "host_us": h} for v, (u, h) in best],
            "short": [{"variant": astuple(v), "us": u} for u, v in times],
        }
        pipe.send(("row", product, row))
        del bench, reference
        backend.xp.get_default_memory_pool().free_all_blocks()
    pipe.send(("done",))


def measure(args: argparse.Namespace, todo: list[Product], say: Callable[[str], None]) -> dict[str, Any]:
    context, until = multiprocessing.get_context("spawn"), time.time() + args.seconds
    left_out: set[tuple[Any, ...]] = set()
    found: dict[str, Any] = {"tokens": args.tokens, "rows": [], "left_out": []}
    while todo and time.time() < until:
        pipe, theirs = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(theirs, args.device, todo, left_out, until), daemon=True)
        process.start()
        theirs.close()
        trying: tuple[str, Any] | None = None
        try:
            while True:
                if not pipe.poll(SILENCE if trying else STARTING):
                    raise EOFError
                what, *rest = pipe.recv()
                if what == "done":
                    return found
                if what == "device":
                    found["device"], found["gpu"], found["tflop_per_second_of_a_large_product"] = rest
                elif what == "trying":
                    trying = rest[0], rest[1]
                else:
                    found["rows"].append(rest[1])
                    todo, trying = [p for p in todo if p != rest[0]], None
                    say(line(rest[1]))
        except EOFError:
            process.kill()
            process.join()
            if trying is None:
                raise UserError("bench/gemm.py: the child process ended before any variant ran; see above") from None
            left_out.add(tile(*trying))
            found["left_out"].append(f"{trying[0]} {trying[1]}")
            say(f"left out, it hung or crashed: {trying[0]} {trying[1]}")
    return found


def line(row: dict[str, Any]) -> str:
    tflop = 2e-6 * row["m"] * row["n"] * row["k"]  # over us: TFLOP/s
    text = f"{row['model']:<9}{row['tokens']:>6} {row['name']:<17}{row['cublas_us']:>8.1f} "
    text += f"{tflop / row['cublas_us']:>5.0f} "
    if row["ours"]:
        best = row["ours"][0]
        text += f"{best['us']:>8.1f} {tflop / best['us']:>5.0f} {best['us'] / row['cublas_us']:>6.2f}  {best['name']}"
    return text + (f"  ({len(row['wrong'])} wrong)" if row["wrong"] else "")


def summary(found: dict[str, Any]) -> list[str]:
    """A step's products by cuBLAS, by ours, and by the faster of both, with the passes that epilogues replace."""
    text = []
    for model, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in found["rows"]):
        rows = [r for r in found["rows"] if (r["model"], r["tokens"]) == (model, tokens)]
        replaced = {r["instead"] for r in rows}
        rows = [r for r in rows if r["name"] not in replaced]
        both = [(r["count"], r["cublas_us"], r["ours"][0]["us"] if r["ours"] else r["cublas_us"]) for r in rows]
        cublas, ours, best = (sum(c * f(t, u) for c, t, u in both) / 1e3 for f in (lambda t, _: t, lambda _, u: u, min))
        text.append(
            f"{model}, {tokens} tokens: by cuBLAS {cublas:.2f} ms a step, by ours {ours:.2f} "
            f"({ours / cublas:.2f}), each by the faster {best:.2f} ({best / cublas:.2f})"
        )
        found.setdefault("steps", []).append(
            {"model": model, "tokens": tokens, "cublas_ms": cublas, "ours_ms": ours, "chosen_ms": best}
        )
    return text


MARGIN = 0.97
"""The largest ratio to cuBLAS's time for a product to be chosen. Choosing every faster product, most by 1 or 2 %, made
a step of base no faster on an H200: 26.6 ms, against 26.3 ms with cuBLAS alone."""


def table(found: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """The backend's table: the variants that beat cuBLAS, by name of the GPU and product."""
    faster = [r for r in found["rows"] if r["ours"] and r["ours"][0]["us"] < MARGIN * r["cublas_us"]]
    return {found["gpu"]: {f"{r['product']} {r['m']} {r['n']} {r['k']}": list(r["ours"][0]["variant"]) for r in faster}}


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, CONVENTION)
    known = "presets of NanoEuler, 124m, or as 384x1024 a width and a hidden width"
    p.text("--models", ",".join(MODELS), f"of whose steps: {known}")
    p.number("--tokens", [16384], "of a step", nargs="+")
    p.number("--seconds", 150.0, "start no product after this time")
    p.switch("--epilogues", "only products with an epilogue")
    p.shared("device")
    p.text("--table", metavar="FILE", help="write the table of backends/gemm.py there")
    args = p.parse(argv)
    names = args.models.split(",")
    if unknown := {name for name in names if name != "124m" and shape_of(name) is None}:
        raise UserError(
            f"--models: {', '.join(sorted(unknown))} not among {', '.join((*NANOEULER, '124m'))}, "
            f"nor a width in steps of {ROPE_HEAD} and a hidden width, as 384x1024"
        )
    for tokens in args.tokens:
        if tokens > CHUNK and tokens % CHUNK:
            raise UserError(f"--tokens is {tokens}, expected at most {CHUNK}, or a multiple of it")
    check_before(args.table)
    from tinyforge.backends import gpu_is_there

    if not gpu_is_there():
        raise UserError("bench/gemm.py: CuPy finds no GPU here; run it on a machine with a Hopper")
    from tinyforge.backends.gemm import EPILOGUES, compiled

    log = sys.stderr if args.json == "-" else sys.stdout

    def say(text: str) -> None:
        print(text, file=log, flush=True)

    start = time.perf_counter()
    todo = list(dict.fromkeys(p for name in names for tokens in args.tokens for p in products(name, tokens)))
    todo = [p for p in todo if p.instead or not args.epilogues]
    kinds = [*([] if args.epilogues else ["FORWARD", "INPUT", "WEIGHT"]), *EPILOGUES]
    jobs = [(product, astuple(v)) for product in kinds for v in compiled(product)]
    workers = min(16, os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = {name: error for name, error in pool.map(compile_one, *zip(*jobs, strict=True)) if error}
    say(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.1f} s by {workers} processes")
    for name, error in failed.items():
        say(f"not compiled: {name}: {error}")
    say(f"{'':<33}{'cuBLAS us':>9} {'TFL/s':>5} {'ours us':>7} {'TFL/s':>5} {'ratio':>6}  variant")
    found = measure(args, todo, say)
    found["seconds"] = time.perf_counter() - start
    found["not_compiled"] = failed
    text = [*summary(found), f"{found['seconds']:.0f} s; {found.get('device', 'no device')}"]
    if missing := len(todo) - len(found["rows"]):
        text.append(f"{missing} products were not measured: the time was up (--seconds)")
    if args.table:
        Path(args.table).write_text(written(table(found)), encoding="utf-8")
    return harness.publish(found, text, args)


def written(found: dict[str, dict[str, list[int]]]) -> str:
    """JSON with a line for each product."""
    gpus = []
    for gpu, rows in found.items():
        lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items()))
        gpus.append(f"  {json.dumps(gpu)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(gpus) + "\n}\n"


if __name__ == "__main__":
    run_command(main)
