"""The cost of a training step on many GPUs: a model of compute, memory and communication.

    python -m tinyforge.scaling --gpus 1024 --config 2b --recompute blocks
    python -m tinyforge.scaling --compare                      the model compared with what was measured

Its inputs are the measurements in docs/results. Whatever has not been measured is a flag with a stated default, and the
table says so. docs/scaling.md has the formulas. Nothing here runs on a GPU.

Seconds of a step on one GPU, for its own part of the batch:

    products    F / (e P)            F: FLOP outside attention, P: of a large matrix product, e: the share reached
    attention   A / R(T)             A: its FLOP, R: measured for rows of T tokens
    passes      k S / B              S: bytes saved for backward, k: how often they are read and written, B: of a copy
    optimizer   34 N / B             N parameters: gradients, masters, moments, weights, and the gradient's norm

For n GPUs, add the part of the gradient's all-reduce that backward does not hide, and how much it slows backward down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge import ops
from tinyforge.backends.meta import MetaBackend
from tinyforge.config import ModelConfig
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json
from tinyforge.memory import OUTSIDE, gib
from tinyforge.op import Op, Recompute
from tinyforge.parallel.buckets import Buckets
from tinyforge.registry import ModelSpec, default_model, find_model, models
from tinyforge.report import count_of
from tinyforge.train.plan import Plan, plan_step

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
BOUND = 0.05  # on a forecast's error
CALIBRATION = "gpu-train-16x1024.json"  # the one step that `reached` is taken from
PASSES = 5.05  # k: the elementwise kernels of that step take 5.0 ms, one pass over the saved bytes 0.99 ms
OPTIMIZER = 34  # bytes of memory traffic per parameter: 30 in AdamW, 4 in the norm
BACKWARD = 2 / 3  # backward's share of the time of a step's passes
TOLL = 0.1  # how much an all-reduce within a host slows the work that it overlaps; fitted to one step
MICRO = 8  # micro-batches per stage of a pipeline
MOST = 1 << 20  # of a number that is asked for
# The ops of the steps that the model was compared with: large products, attention, and passes over memory.
COUNTED: tuple[type[Op], ...] = (
    *(ops.Linear, ops.LinearSwiGLU, ops.SwiGLULinear, ops.GELULinear, ops.LinearCrossEntropy),
    *(ops.AddLayerNorm, ops.AddRMSNorm, ops.LayerNorm, ops.RMSNorm, ops.Attention, ops.RoPE),
    *(ops.Embedding, ops.LearnedPositions, ops.Dropout),
)


@dataclass(frozen=True)
class Machine:
    """Rates in FLOP/s and bytes/s, times in seconds, memory in bytes. link, hop: between GPUs of a host, fitted to two
    measured all-reduces. windows: the rate of a link when NCCL has few blocks and uses windows, which needs a single
    host; few: without windows. crowded: how much slower each is under backward. network, far_hop: of one GPU's share of
    the network between hosts; not measured here. name: of the GPU."""

    peak: float
    copy: float
    memory: float
    attention: tuple[tuple[int, float], ...]  # tokens of a row, FLOP a second
    reached: float
    link: float
    hop: float
    windows: float
    few: float
    crowded: tuple[float, float]
    per_host: int = 8
    network: float = 50e9
    far_hop: float = 5e-6
    name: str = ""

    def attention_rate(self, tokens: int) -> float:
        """Interpolated between the measured row lengths on a logarithmic scale; constant outside of them."""
        lengths, rates = zip(*self.attention, strict=True)
        return float(np.interp(math.log(tokens), np.log(lengths), rates))


@dataclass(frozen=True)
class Job:
    """The work of every GPU in a step. rows: sequences per GPU; below 1 if several GPUs hold a model together. tensor,
    stages: the GPUs that a model is split over, within its layers and between them. zero: the optimizer's state is
    sharded."""

    model: str
    config: ModelConfig
    rows: float
    seq_len: int
    recompute: Recompute = ""
    zero: bool = False
    tensor: int = 1
    stages: int = 1

    @property
    def spec(self) -> ModelSpec:
        return find_model(self.model)

    @property
    def name(self) -> str:
        """The model's, and its preset's, whatever the context."""
        same = (n for n, c in self.spec.presets.items() if replace(c, context=self.config.context) == self.config)
        return f"{self.model} {next(same, '')}".rstrip()

    @property
    def tokens(self) -> float:
        return self.rows * self.seq_len


@dataclass(frozen=True)
class Cost:
    """Seconds of a step by part, and bytes of a GPU's memory. exposed: communication of gradients and weights that is
    not hidden. tensor: all-reduces within the layers. bubble: waiting for the pipeline's stages."""

    products: float
    attention: float
    passes: float
    optimizer: float
    again: float
    exposed: float
    tensor: float
    bubble: float
    memory: float

    @property
    def seconds(self) -> float:
        *parts, _ = astuple(self)
        return sum(parts)


def not_counted(spec: ModelSpec, config: ModelConfig) -> list[str]:
    """The names of a model's ops that have no forecast, such as a mixture's or a scan's."""
    model = spec.build(config, MetaBackend("bf16"))
    return sorted({type(op).__name__ for op in model.ops() if not isinstance(op, COUNTED)})


# --- one GPU ----------------------------------------------------------------------------------------------------------


@cache
def _work(name: str, config: ModelConfig, seq_len: int) -> tuple[int, float, float]:
    """Parameters, and FLOP per token outside and inside attention, which grows linearly with the row's length."""
    model = find_model(name).build(config, MetaBackend("bf16"))
    one, two = (model.flop_per_token(length) for length in (1, 2))
    inside = 2 * (two - one)  # a token of a row of one sees one pair, of two one and a half on average
    attention = model.flop_per_token(seq_len) - one + inside
    return model.buffer.count, model.flop_per_token(seq_len) - attention, attention


@cache
def _plan(name: str, config: ModelConfig, rows: int, seq_len: int, recompute: Recompute) -> Plan:
    return plan_step(find_model(name), config, "bf16", rows, seq_len, recompute)


@cache
def _last_bucket(name: str, config: ModelConfig) -> int:
    """Elements of the bucket that is summed last."""
    model = find_model(name).build(config, MetaBackend("bf16"))
    return int(Buckets(model.buffer, model.ops()).slices[0].stop)


def _saved(job: Job) -> float:
    """Bytes saved for backward without recomputation; they are proportional to the tokens."""
    rows = max(1, math.ceil(job.rows))
    return _plan(job.model, job.config, rows, job.seq_len, "").saved * job.rows / rows


def one_gpu(job: Job, machine: Machine) -> Cost:
    """A step of the whole model, without communication."""
    parameters, products, attention = _work(job.model, job.config, job.seq_len)
    times = (
        products * job.tokens / (machine.reached * machine.peak),
        attention * job.tokens / machine.attention_rate(job.seq_len),
        PASSES * _saved(job) / machine.copy,
    )
    again = (1 - BACKWARD) * sum(times) if job.recompute == "blocks" else 0.0
    optimizer = OPTIMIZER * parameters / machine.copy
    return Cost(*times, optimizer, again, 0.0, 0.0, 0.0, _memory(job, 1))


# --- between GPUs -----------------------------------------------------------------------------------------------------


def all_reduce(count: float, gpus: int, machine: Machine) -> float:
    """Seconds to all-reduce `count` bytes over `gpus` GPUs, in the faster of two ways.

    Within a host a ring: 2 (g - 1) / g of the bytes through each link. Between hosts every GPU sums its g-th part with
    its peers: as a ring of m, 2 (m - 1) / m of it and 2 (m - 1) hops; or as a tree, all of it twice and 2 log2 m hops.
    """
    return sum(_near_and_far(count, gpus, machine))


def _near_and_far(count: float, gpus: int, machine: Machine) -> tuple[float, float]:
    """`all_reduce`: its time within a host, and between hosts."""
    near = min(gpus, machine.per_host)
    hosts = -(-gpus // near)
    within = 2 * (near - 1) / near * count / machine.link + (2 * (near - 1) * machine.hop if near > 1 else 0.0)
    if hosts == 1:
        return within, 0.0
    part = count / near / machine.network
    ring = 2 * (hosts - 1) / hosts * part + 2 * (hosts - 1) * machine.far_hop
    tree = 2 * part + 2 * math.ceil(math.log2(hosts)) * machine.far_hop
    return within, min(ring, tree)


def _not_hidden(count: float, last: float, work: float, gpus: int, machine: Machine) -> float:
    """Seconds that an all-reduce of `count` bytes adds to `work` concurrent seconds; `last`: bytes that nothing hides.

    Within a host the better of two ways: on few multiprocessors, under the work, or on NCCL's usual number of them,
    which hides nothing. Between hosts the network works by itself.
    """
    near, far = _near_and_far(count, gpus, machine)
    single = gpus <= machine.per_host
    used = replace(machine, link=machine.windows if single else machine.few)
    end, far_end = _near_and_far(last, gpus, used)
    slow = _near_and_far(count, gpus, used)[0] * machine.crowded[not single]
    under = end + max(0.0, slow - work) + TOLL * min(slow, work)
    return min(near, under) + max(far_end, far - work)


def cost(job: Job, gpus: int, machine: Machine) -> Cost:
    """A step on each of `gpus` GPUs: data-parallel copies of groups of tensor * stages GPUs that hold one model."""
    split = job.tensor * job.stages
    if gpus % split:
        raise UserError(f"--gpus is {gpus}, and {job.tensor} x {job.stages} of them hold a model; expected a multiple")
    copies = gpus // split
    parameters = _work(job.model, job.config, job.seq_len)[0] / split
    # A group has the rows of all its GPUs: each GPU still does the work of `rows`.
    base = one_gpu(job, machine)
    in_backward = (base.products + base.attention + base.passes) * BACKWARD + base.again
    optimizer = base.optimizer / split / (copies if job.zero else 1)
    # The GPUs of a group are neighbours, so fewer copies of a part are on the same host.
    fewer = replace(machine, per_host=max(1, machine.per_host // split))
    grads, weights = 4 * parameters, 2 * parameters
    last = min(grads, 4 * _last_bucket(job.model, job.config) / split)
    exposed = 0.0
    if copies > 1:
        # Reduce-scatter is half of an all-reduce, and so is the all-gather of the weights, in bf16, under forward.
        half = 2 if job.zero else 1
        exposed = _not_hidden(grads / half, last / half, in_backward, copies, fewer)
        if job.zero:
            exposed += _not_hidden(weights / 2, 0.0, in_backward * (1 - BACKWARD) / BACKWARD, copies, fewer)
    tensor = bubble = 0.0
    layers, dim = job.config.to_dict().get("layers", 1), job.config.to_dict().get("dim", 0)
    if job.tensor > 1:  # Megatron: per layer two all-reduces of the stream in forward, two in backward, none hidden
        stream = 2.0 * job.tokens * job.tensor * dim
        times = 4 + (2 if job.recompute == "blocks" else 0)
        tensor = times * layers / job.stages * all_reduce(stream, job.tensor, machine)
    if job.stages > 1:
        busy = base.products + base.attention + base.passes + base.again + tensor
        bubble = busy * (job.stages - 1) / min(MICRO * job.stages, job.rows * split)
    memory = _memory(job, copies)
    return replace(base, optimizer=optimizer, exposed=exposed, tensor=tensor, bubble=bubble, memory=memory)


def _memory(job: Job, copies: int) -> float:
    """Bytes on a GPU: its part of one model's state, and of what a group's rows save and use."""
    split = job.tensor * job.stages
    plan = _plan(job.model, job.config, max(1, math.ceil(job.rows * split)), job.seq_len, job.recompute)
    masters = 4 * _work(job.model, job.config, job.seq_len)[0]
    sharded = (masters + plan.moments) / (copies if job.zero else 1)
    return OUTSIDE + (plan.peak - masters - plan.moments + sharded) / split


# --- what was measured ------------------------------------------------------------------------------------------------


def read_machine(results: Path = RESULTS) -> Machine:
    """The GPU that was measured in the files of `results`. Raises UserError if one is missing."""
    step = _read(results / CALIBRATION)
    rates = _read(results / "gpu-ops.json")
    rows = _read(results / "gpu-attention.json")["results"]
    attention = tuple(sorted((row["shape"]["tokens"], _attention_rate(row)) for row in rows))
    sums = _read(results / "gpu-all-reduce.json")
    (small, first), (large, second) = ((row["bytes"], row["ms"] / 1e3) for row in sums["rows"])
    link = (large - small) / (second - first)  # two GPUs: 2 (n - 1) / n is 1
    hop = max(0.0, first - small / link) / 2
    ways = [sums[way] for way in ("windows", "few")]
    windows, few = (way["bytes"] / way["ms"] * 1e3 for way in ways)
    in_windows, without = (way["under_backward_ms"] / way["ms"] for way in ways)
    memory = float(step["device"]["gpu"].split(" GiB")[0].split()[-1]) * 2**30
    peak, copy = step["matmul_peak_gflop_per_second"] * 1e9, rates["copy_gb_per_second"] * 1e9
    links = (link, hop, windows, few, (in_windows, without))
    machine = Machine(peak, copy, memory, attention, 1.0, *links, name=_gpu_of(step))
    # The rest of the one measured step counts as products; it includes the gaps between kernels.
    found = one_gpu(job_of(step), machine)
    left = step["results"]["tinyforge"]["median_ms"] / 1e3 - (found.seconds - found.products)
    return replace(machine, reached=found.products / left)


def _attention_rate(row: dict[str, Any]) -> float:
    """By the convention of `flop_per_token`: 12 D FLOP per query head and visible pair, forward and backward."""
    shape = row["shape"]
    pairs = shape["batch"] * shape["heads"] * shape["tokens"] * (shape["tokens"] + 1) / 2
    return 12 * shape["dim"] * pairs / (row["tinyforge"]["both"]["median_us"] / 1e6)


def job_of(measured: dict[str, Any], zero: bool = False) -> Job:
    spec = find_model(measured.get("model") or default_model())
    known = measured.get("config")
    config = spec.config.from_dict(known) if isinstance(known, dict) else spec.presets[known or "base"]
    rows = measured.get("batch_size") or measured["rows_a_gpu"]
    return Job(spec.name, config, rows, measured["seq_len"], measured.get("recompute") or "", zero)


@dataclass(frozen=True)
class Row:
    """A measured step and its forecast, in seconds."""

    file: str
    what: str
    gpus: int
    measured: float
    forecast: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def compared(machine: Machine, results: Path = RESULTS) -> Iterator[Row]:
    """Every bf16 step in `results` on this machine's GPU whose model uses only kernels that the cost model counts: on
    one GPU in the files gpu-train-*, on several in those with `ranks`. A step on several GPUs is forecast from the one
    GPU that was measured in the same run: the comparison tests what the other GPUs add."""
    for path in sorted(results.glob("*.json")):
        found = read_json(path, "the results")
        if not isinstance(found.get("results"), dict):
            continue
        if _gpu_of(found) not in ("", machine.name):
            continue
        if found.get("precision") != "bf16" or found.get("tokens_per_document"):  # attention does less there
            continue
        if "ranks" in found and "1 GPU" in found["results"]:
            yield from _several(path.name, found, machine)
        elif path.name.startswith("gpu-train-") and "matmul_peak_gflop_per_second" in found:
            job = job_of(found)
            if not not_counted(job.spec, job.config):
                ours = found["results"]["tinyforge"]["median_ms"] / 1e3
                what = f"{job.name}, {job.rows} x {job.seq_len}"
                yield Row(path.name, what, 1, ours, one_gpu(job, machine).seconds)


def _several(file: str, found: dict[str, Any], machine: Machine) -> Iterator[Row]:
    gpus, results = found["ranks"], {name: of["median_ms"] / 1e3 for name, of in found["results"].items()}
    for name, zero, kind in (
        ("ranks", False, ""),
        ("ranks, ZeRO", True, ""),
        ("ranks", False, ", graph"),
        ("ranks, ZeRO", True, ", graph"),
    ):
        if name + kind in results:
            job = job_of(found, zero)
            added = cost(job, gpus, machine).seconds - cost(replace(job, zero=False), 1, machine).seconds
            what = f"{job.name}, {job.rows} x {job.seq_len}{', ZeRO' if zero else ''}{kind}"
            yield Row(file, what, gpus, results[name + kind], results["1 GPU" + kind] + added)


def _gpu_of(found: dict[str, Any]) -> str:
    """The name of the GPU that results are of; empty if they do not say."""
    device = found.get("device", "")
    return str(device.get("gpu", "") if isinstance(device, dict) else device).partition(" (")[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path, "the measurements"))
    except UserError:
        if not path.is_file():
            raise UserError(
                "the cost model reads docs/results, which only the repository has; run it there: python -m "
                "tinyforge.scaling"
            ) from None
        raise


# --- the command ------------------------------------------------------------------------------------------------------


def table(job: Job, most: int, machine: Machine, batch: int = 0) -> str:
    """A row for 1, 2, 4, ... GPUs with data-parallel copies, and the fastest split of the model at each.

    batch: tokens of a step on all GPUs together; 0: `job.rows` per GPU, so that a step grows with their number.
    """
    lines = [
        f"{'GPUs':>5} {'split':>9} {'step ms':>9} {'tokens/s':>12} {'of 1 GPU':>8} {'not hidden':>10} "
        f"{'tensor':>7} {'bubble':>7} {'memory':>11}"
    ]
    counts = [2**i for i in range(most.bit_length())]
    rate = 0.0
    for gpus in counts if counts[-1] == most else [*counts, most]:
        job = replace(job, rows=batch / job.seq_len / gpus) if batch else job
        rows = [(job, cost(job, gpus, machine))] if job.rows >= 1 else []
        split = fastest(job, gpus, machine)
        if split and split[0] != job:
            rows.append(split)
        if not rows:
            lines.append(f"{gpus:>5} {'-':>9} more GPUs than rows, and no split that fits and divides the model")
        for shape, c in rows:
            rate = rate or job.tokens / c.seconds
            names = [f"{n} {what}" for n, what in ((shape.tensor, "t"), (shape.stages, "p")) if n > 1]
            fits = "" if c.memory <= machine.memory else ", too much"
            lines.append(
                f"{gpus:>5} {' '.join(names) or 'none':>9} {1e3 * c.seconds:>9.1f} "
                f"{gpus * job.tokens / c.seconds:>12,.0f} {job.tokens / c.seconds / rate:>8.3f} "
                f"{1e3 * c.exposed:>10.2f} {1e3 * c.tensor:>7.1f} {1e3 * c.bubble:>7.1f} {gib(int(c.memory)):>11}{fits}"
            )
    return "\n".join(lines)


def fastest(job: Job, gpus: int, machine: Machine) -> tuple[Job, Cost] | None:
    """The fastest split that fits in memory, over up to a host's GPUs within layers and up to 16 groups of layers; None
    if none fits. No split is preferred if it fits and none is faster by more than BOUND, the forecast's own error."""
    found: list[tuple[float, int, Job, Cost]] = []
    values = job.config.to_dict()
    for tensor in (1, 2, 4, 8):
        for stages in (1, 2, 4, 8, 16):
            whole = values.get("kv_heads", values.get("heads", 1)) % tensor == 0 == values.get("layers", 1) % stages
            if not whole or gpus % (tensor * stages) or tensor > machine.per_host or job.rows * tensor * stages < 1:
                continue
            shape = replace(job, tensor=tensor, stages=stages)
            c = cost(shape, gpus, machine)
            if c.memory <= machine.memory:
                found.append((c.seconds, tensor * stages, shape, c))
    if not found:
        return None
    best = min(found, key=lambda entry: entry[:2])
    unsplit = next((entry for entry in found if entry[1] == 1), None)
    if unsplit and unsplit[0] <= (1 + BOUND) * best[0]:
        best = unsplit
    return best[2:]


def comparison(machine: Machine) -> str:
    lines = [f"{'GPUs':>4} {'what':<38} {'measured ms':>11} {'forecast':>9} {'error':>7}  file"]
    for row in compared(machine):
        of = " (its source)" if row.file == CALIBRATION else ""
        lines.append(
            f"{row.gpus:>4} {row.what:<38} {1e3 * row.measured:>11.2f} {1e3 * row.forecast:>9.2f} "
            f"{100 * row.error:>+6.1f}%  {row.file}{of}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(prog="python -m tinyforge.scaling", description=__doc__)
    p.flag("--gpus", 8, "largest number in the table", 1, MOST, metavar="N")
    p.flag("--model", default_model(), "of the zoo")
    p.add_argument("--config", default="", metavar="PRESET", help="of the model (default: its largest)")
    p.flag("--rows", 8, "sequences per GPU", 1, MOST, metavar="N")
    p.flag("--seq-len", int, "tokens per sequence (default: the config's context)", 1, MOST, metavar="T")
    together = "tokens of a step on all GPUs together, in place of --rows"
    p.add_argument("--batch-tokens", type=int, default=0, metavar="N", help=together)
    p.add_argument("--recompute", default="", choices=("blocks",), help="as in recipes/pretrain.py")
    p.flag("--no-zero", False, "every GPU keeps the whole optimizer state")
    p.flag("--per-host", 8, "GPUs per host", 1, MOST, metavar="N")
    network = "bandwidth per GPU between hosts; not measured here (default: 50, InfiniBand NDR)"
    p.add_argument("--network", type=float, default=50.0, metavar="GB/S", help=network)
    compare = "print the forecasts compared with the measurements, and exit"
    p.flag("--compare", False, compare)
    args = p.parse_args(argv)
    if not 0 < args.network < 1e6:
        raise UserError(f"--network is {args.network}, expected GB/s above 0")
    machine = replace(read_machine(), per_host=args.per_host, network=args.network * 1e9)
    if args.compare:
        print(comparison(machine))
        return 0
    spec = find_model(args.model)
    if spec.learns != "text":
        raise UserError(f"--model {args.model}: the cost model knows rows of tokens; use one of {_able()}")
    name = args.config or max(spec.presets, key=lambda preset: _work(spec.name, spec.presets[preset], 1)[0])
    if name not in spec.presets:
        raise UserError(f"--config {name!r}: {spec.name} has {', '.join(spec.presets)}")
    config = spec.presets[name]
    seq_len = args.seq_len or config.context
    if seq_len > config.context:
        raise UserError(f"--seq-len is {seq_len}, the config's context is {config.context}")
    if args.batch_tokens and args.batch_tokens < seq_len:
        raise UserError(f"--batch-tokens is {args.batch_tokens}, expected a row of {seq_len} tokens or more")
    job = Job(spec.name, config, args.rows, seq_len, args.recompute, not args.no_zero)
    spec.check_recompute(job.recompute)
    if missing := not_counted(spec, config):
        raise UserError(
            f"--model {spec.name}: the cost model does not count {', '.join(missing)}; use one of {_able()}"
        )
    parameters = _work(spec.name, config, seq_len)[0]
    size = f"{args.batch_tokens:,} tokens a step" if args.batch_tokens else f"{args.rows} x {seq_len} tokens a GPU"
    again = f", recomputing {job.recompute}" if job.recompute else ""
    print(f"{spec.name} {name}, {parameters:,} parameters, bf16, {size}{again}{', ZeRO' if job.zero else ''}")
    print(
        f"measured: {machine.peak / 1e12:.0f} TFLOP/s in a large product, {machine.reached:.2f} of it in a step; "
        f"copies {machine.copy / 1e9:,.0f} GB/s; all-reduce on a host {machine.link / 1e9:.0f} GB/s"
    )
    print(
        f"assumed: {count_of(machine.per_host, 'GPU')} a host with that rate for each, {machine.network / 1e9:g} "
        "GB/s a GPU between hosts; t splits layers, p the stack of them"
    )
    print(table(job, args.gpus, machine, args.batch_tokens))
    return 0


def _able() -> str:
    """The names of the models that have a forecast."""
    text = (spec for spec in models().values() if spec.learns == "text")
    return ", ".join(spec.name for spec in text if not not_counted(spec, next(iter(spec.presets.values()))))


if __name__ == "__main__":
    run_command(main)
