"""Time one training step of a model: forward, backward, clipping, AdamW.

    python bench/train_step.py                                                  ours alone
    python bench/train_step.py --batch-size 16 --seq-len 128 --peer torch       next to PyTorch
    python bench/train_step.py --peer torch --json result.json                  and everything as one JSON object
    python bench/train_step.py --config base --backend cupy --precision bf16 --batch-size 32 --steps 100 --peer torch
    python bench/train_step.py --model gpt2 --config 124m --backend cupy --precision bf16 --seq-len 1024 --peer torch
    python bench/train_step.py --model moe --beside nanoeuler:small     next to another of our models, in the same turns

PyTorch runs eager, compiled, and on a GPU also compiled with CUDA graphs (mode reduce-overhead). Modes that fail on
this machine are left out, and the reason is printed. All contenders start from the same weights, see the same random
tokens, and must agree on the loss of the first steps before any is timed. (With dropout each contender samples its own
masks, so the check uses models without dropout.) They then take turns in one process, a few steps each, so that changes
of the machine's speed affect all of them; the first step of each turn is not counted. Use an idle machine all the same:
another busy process slows the contenders unequally. Peak memory is measured in a child process that runs only the steps
of one contender.

On a GPU a turn is timed as a whole, from an idle device to an idle device, and its mean is one measurement: steps
follow each other without synchronisation, as in training. PyTorch's batches are on the device from the start, ours are
uploaded in the step. Peak memory is that of arrays on the device, without the libraries' own.

With --data our step is timed again with batches read from token shards, as in training, where the others repeat a few
batches: the difference is the cost of loading.

With --documents N our step is timed again as with --document-mask restart, on the same tokens in documents of N tokens
on average: the cost, or gain, of masking across documents.

With --capture our step is timed again as a CUDA graph, as with --capture in training; its losses must equal those of
our plain step bit for bit.

With --muon our step is timed again with Muon in place of AdamW.

With --precision fp8 PyTorch computes in bf16, and on a GPU our step is timed in bf16 too.

With --gpus N the contenders are those of bench/ranks.py: one GPU, N GPUs, N with sharded optimizer states (ZeRO 1), and
with sharded gradients too (ZeRO 2), and with --peer torch compiled DistributedDataParallel, with --batch-size sequences
per GPU.

FLOP are counted by the model's flop_per_token, for all contenders but the model of --beside.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.peers import (
    COMPILED,
    EAGER,
    GRAPH,
    GRAPHS_NEED_A_GPU,
    MODES,
    OURS,
    LeftOut,
    Parity,
    check_parity,
    environment,
    heading,
    left_out_table,
    soft,
)
from tinyforge.backends import Backend, get_backend, gpu_count
from tinyforge.backends.workers import cores
from tinyforge.config import ModelConfig
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.op import Recompute
from tinyforge.ops.attention import Documents
from tinyforge.optim import AdamW, Muon
from tinyforge.parallel.launch import start, started_as_rank
from tinyforge.params import named
from tinyforge.registry import default_model, find_model, models
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.rng import Stream
from tinyforge.shards import Shards
from tinyforge.train.batches import MixedTokens, PackedTokens, starts_of
from tinyforge.train.captured import Captured
from tinyforge.train.corpus import mix_weights
from tinyforge.train.data_parallel import Sharded, Totals
from tinyforge.train.metrics import peak_memory_mib
from tinyforge.train.objectives import Batch, NextTokens, with_terms
from tinyforge.train.plan import plan_step
from tinyforge.train.run import FLOP_CONVENTION
from tinyforge.train.settings import PretrainSettings, config_of, restarts

READING, MASKED, CAPTURED, MUON = "tinyforge, data", "tinyforge, mask", "tinyforge, graph", "tinyforge, Muon"
IN_BF16 = "tinyforge, bf16"
PEERS = {"torch": (EAGER, COMPILED, GRAPH), "torch-eager": (EAGER,)}
LR, CLIP = 1e-3, 1.0
BATCHES = 8  # distinct ones, visited in turn
PARITY_STEPS = 3  # the second and third loss depend on the gradients, the clipping and AdamW too
WARM_UP_STEPS = 3
PARITY_TOLERANCE = {"fp64": 1e-4, "fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp8": 5e-2}  # nats
TURN = 5  # counted steps before the next contender's turn
MEMORY_STEPS = 5


@dataclass(frozen=True)
class Options:
    """What is timed. workers: processes of ours. threads: of PyTorch. steps: counted for each contender. documents:
    tokens of one on average, where the mask is timed too. beside: another model of ours and its preset."""

    model: str
    config: ModelConfig
    batch_size: int
    seq_len: int
    steps: int
    backend: str
    precision: str
    workers: int
    threads: int
    device: int | None = None
    data: str | None = None
    documents: int | None = None
    beside: tuple[str, str] | None = None
    recompute: Recompute = ""
    capture: bool = False
    muon: bool = False

    def make_backend(self) -> Backend:
        return get_backend(self.backend, self.precision, self.workers, self.device)

    def of_beside(self) -> Options:
        """The same of the model that is timed beside."""
        model, preset = self.beside or ("", "")
        config = config_of(PretrainSettings(model=model, config=preset))
        return replace(self, model=model, config=config.override({"context": max(self.seq_len, config.context)}))

    def in_bf16(self) -> Options:
        """The same, in bf16 instead of fp8."""
        return replace(self, precision="bf16") if self.precision == "fp8" else self

    def without_dropout(self) -> Options:
        return replace(self, config=self.config.override({"dropout": 0.0}))

    def batches(self) -> list[Batch]:
        """Random tokens, windowed as pretraining does it."""
        windows = BATCHES * self.batch_size + 2
        tokens = np.random.default_rng(0).integers(0, self.config.vocab, windows * self.seq_len)
        data = PackedTokens(tokens, self.seq_len, self.config.prediction_heads, seed=0)
        return [data.batch(i, self.batch_size) for i in range(BATCHES)]

    def masked_batches(self) -> list[Batch]:
        """The same, in documents of random lengths."""
        rng, mean = np.random.default_rng(1), self.documents or 1
        begins = [rng.random((self.batch_size, self.seq_len)) * mean < 1 for _ in range(BATCHES)]
        packed = (Documents(starts_of(at), restart=True) for at in begins)
        return [replace(batch, documents=documents) for batch, documents in zip(self.batches(), packed, strict=True)]


class Contender(Protocol):
    def step(self, index: int) -> Any:
        """One step on batch `index` modulo BATCHES; returns the loss before it, a number that may be on a device."""


class Ours:
    """The step of `tinyforge.train.run`, without its logging."""

    def __init__(
        self, options: Options, backend: Backend, masked: bool = False, optimizer: type[AdamW] = AdamW
    ) -> None:
        batches = options.masked_batches() if masked else options.batches()
        self.batch: Callable[[int], Batch] = lambda index: batches[index % BATCHES]
        self.model = find_model(options.model).build(options.config, backend, recompute=options.recompute)
        self.model.initialise(seed=0)
        self.objective = NextTokens(options.config.head_weights)
        self.sharded = Sharded(self.model, backend, self.objective)
        self.optimizer = optimizer(self.model.buffer, backend)
        self.noise = Stream(0, "dropout")
        self.backend = backend

    def step(self, index: int) -> Loss:
        totals = self.sharded.gradients([self.batch(index)], self.noise.fork(str(index)))
        _, factor = self.optimizer.clip(CLIP)
        self.optimizer.step(LR, factor)
        return Loss(self, totals)


@dataclass(frozen=True)
class Loss:
    """Of a step of ours: asking for the number waits for the device, as a run does every ten steps."""

    of: Ours
    totals: Totals

    def __float__(self) -> float:
        objective, totals = with_terms(self.of.objective, self.of.model.config), self.totals
        return objective.figures(self.of.backend.to_numpy(totals.sums), totals.counts)["loss"]


class Graph(Ours):
    """The same as a CUDA graph, from the third step on."""

    def __init__(self, options: Options, backend: Backend) -> None:
        super().__init__(options, backend)
        self.captured = Captured(self.sharded, self.optimizer, CLIP)

    def step(self, index: int) -> Loss:
        totals, _ = self.captured.step([self.batch(index)], self.noise.fork(str(index)), LR)
        return Loss(self, totals)


def check_bits(options: Options, backend: Backend) -> list[float]:
    """The losses of some steps, replays of a graph the last of them. Raises UserError unless plain steps have the same."""
    losses = []
    for kind in (Ours, Graph):
        contender = kind(options, backend)
        losses.append([float(contender.step(i)) for i in range(PARITY_STEPS + 3)])
    if losses[0] != losses[1]:
        raise UserError(f"--capture: losses of plain steps {losses[0]}, of captured ones {losses[1]}; wanted the same")
    return losses[1]


class Reading(Ours):
    """The same with a new batch of the shards at each step."""

    def __init__(self, options: Options, backend: Backend) -> None:
        super().__init__(options, backend)
        found, config = Shards([Path(options.data or "")]), options.config
        last = found.tokenizer.vocab_size - 1
        if last >= config.vocab:
            raise UserError(
                f"--data: ids up to {last}, the config's vocab is {config.vocab}; use another --config, or other shards"
            )
        weights = mix_weights((), found)
        sources = {name: found.sequence(name, "train") for name in weights}
        data = MixedTokens(sources, weights, options.seq_len, config.prediction_heads, seed=0)
        self.batch = lambda index: data.batch(index, options.batch_size)


def torch_peer(options: Options, mode: str | None) -> Any:
    """mode: of torch.compile; None for eager."""
    # Here and not at the top: torch is needed, and its memory counted, only when it is the peer.
    from bench.torch_peer import TorchPeer, TorchTraining

    device = f"cuda:{options.device or 0}" if options.backend == "cupy" else "cpu"
    training = TorchTraining(
        options.model,
        options.config,
        precision=options.in_bf16().precision,
        device=device,
        threads=options.threads,
        clip=CLIP,
        compiled=mode,
    )
    return TorchPeer(training, options.batches(), LR)


def peak_memory(name: str, options: Options) -> float:
    """Peak memory in MiB of a child process that takes MEMORY_STEPS steps of one contender."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_steps_only, name, options).result()


def _steps_only(name: str, options: Options) -> float:
    def take_steps(contender: Contender) -> None:
        for i in range(MEMORY_STEPS):
            contender.step(i)

    own: dict[str, Callable[..., Ours]] = {
        OURS: Ours,
        CAPTURED: Graph,
        MUON: partial(Ours, optimizer=Muon),
        IN_BF16: Ours,
    }
    options = options.in_bf16() if name == IN_BF16 else options
    if options.backend != "cupy":
        contender = own[name](options, options.make_backend()) if name in own else torch_peer(options, None)
        take_steps(contender)
        return peak_memory_mib()  # before the contender goes, and its workers with it
    if name in own:
        backend = options.make_backend()
        from tinyforge.backends.cupy_backend import PeakMemory

        with PeakMemory() as peak:
            take_steps(own[name](options, backend))
        return peak.bytes / 2**20
    take_steps(torch_peer(options, MODES[name]))
    return sys.modules["torch"].cuda.max_memory_allocated() / 2**20


def make_contenders(
    options: Options, backend: Backend, peers: Sequence[str], agree: bool = True
) -> tuple[dict[str, Any], Parity, LeftOut]:
    """Ours and the peers, all with our weights, after their first steps, whose losses agree unless each draws dropout
    masks of its own; and who was left out."""
    ours = Ours(options, backend)
    buffer = ours.model.buffer
    weights = {name: value.copy() for name, value in named(buffer, buffer.masters, backend).items()}

    def loaded(mode: str | None) -> Any:
        peer = torch_peer(options, mode)
        peer.training.load(weights)
        return peer

    def first_losses(contender: Contender) -> list[float]:
        return [float(contender.step(i)) for i in range(PARITY_STEPS)]

    makers: dict[str, Any] = {OURS: lambda: ours}
    for name in peers:
        graph_on_cpu = name == GRAPH and backend.name != "cupy"
        makers[name] = GRAPHS_NEED_A_GPU if graph_on_cpu else partial(loaded, MODES[name])
    contenders, losses, left_out = soft(makers, first_losses)
    if not (peers and agree):
        return contenders, None, left_out
    parity = check_parity(losses, OURS, PARITY_TOLERANCE[options.precision], "losses differ by")
    return contenders, {"losses": losses, **parity}, left_out


def take_turns(contenders: dict[str, Contender], steps: int, backend: Backend) -> dict[str, list[float]]:
    """Seconds of each of `steps` counted steps, by contender; on a GPU, of a step on average over each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    index = 0
    for done in range(0, steps, TURN):
        counted = min(TURN, steps - done)
        for name, contender in contenders.items():
            # Finds its data in no cache, and the last contender's threads perhaps still spinning: not counted.
            contender.step(index)
            group = counted if backend.name == "cupy" else 1
            for first in range(0, counted, group):
                backend.synchronize()
                start = time.perf_counter()
                for i in range(first, first + group):
                    contender.step(index + 1 + i)
                backend.synchronize()
                seconds[name].append((time.perf_counter() - start) / group)
        index += 1 + counted
    return seconds


def measure(options: Options, peer: str | None) -> dict[str, Any]:
    """Everything that is printed, as a JSON object. Times in ms, memory in MiB."""
    config = options.config
    load_average = os.getloadavg()[0]
    # First, while this process is small: Linux counts a parent's peak at the start of a child as the child's own.
    peers = PEERS[peer] if peer else ()
    in_bf16 = options.precision == "fp8" and options.backend == "cupy"
    own = (OURS, *[CAPTURED] * options.capture, *[MUON] * options.muon, *[IN_BF16] * in_bf16)
    measured = [name for name in (*own, *peers) if options.backend == "cupy" or name not in (COMPILED, GRAPH)]
    _, memory, _ = soft({name: partial(str, name) for name in measured}, lambda name: peak_memory(name, options))
    backend = options.make_backend()
    dropout = getattr(config, "dropout", 0.0) > 0
    contenders, parity, left_out = make_contenders(options.without_dropout() if dropout else options, backend, peers)
    if dropout:
        contenders, _, _ = make_contenders(options, backend, tuple(contenders)[1:], agree=False)
    ours = contenders[OURS]
    if options.capture:
        check_bits(options, backend)
        contenders[CAPTURED] = Graph(options, backend)
    if options.muon:
        contenders[MUON] = Ours(options, backend, optimizer=Muon)
    if in_bf16:
        contenders[IN_BF16] = Ours(options.in_bf16(), options.in_bf16().make_backend())
    if options.data:
        contenders[READING] = Reading(options, backend)
    if options.documents:
        contenders[MASKED] = Ours(options, backend, masked=True)
    if options.beside:
        contenders[" ".join(options.beside)] = Ours(options.of_beside(), backend)
    for contender in contenders.values():
        for i in range(WARM_UP_STEPS):
            contender.step(i)
    peak_before = backend.matmul_peak()
    seconds = take_turns(contenders, options.steps, backend)
    peak = max(peak_before, backend.matmul_peak()) / 1e9
    parameters = ours.model.buffer.count
    tokens = options.batch_size * options.seq_len
    flops = {
        name: getattr(contender, "model", ours.model).flop_per_token(options.seq_len) * tokens
        for name, contender in contenders.items()
    }
    base = median(seconds[OURS])
    results = {
        name: {
            "median_ms": 1e3 * median(times),
            "min_ms": 1e3 * min(times),
            "tokens_per_second": tokens / median(times),
            "gflop_per_second": flops[name] / median(times) / 1e9,
            "of_matmul_peak": flops[name] / median(times) / 1e9 / peak,
            "ours_over_this": base / median(times),
            "peak_memory_mib": memory.get(name),
            "step_ms": [1e3 * t for t in times],
        }
        for name, times in seconds.items()
    }
    return environment(backend, peer, load_average) | {
        "threads": {"ours": options.workers, "torch": options.threads if peer else None},
        "model": options.model,
        "config": config.to_dict(),
        "parameters": parameters,
        "batch_size": options.batch_size,
        "seq_len": options.seq_len,
        "recompute": options.recompute,
        "counted_steps": options.steps,
        "tokens_per_document": options.documents,
        "gflop_per_step": flops[OURS] / 1e9,
        "planned_peak_mib": plan_step(
            find_model(options.model), config, options.precision, options.batch_size, options.seq_len, options.recompute
        ).peak
        / 2**20
        if backend.name == "cupy"
        else None,
        "flop_convention": FLOP_CONVENTION,
        "matmul_peak_gflop_per_second": peak,
        "parity": parity,
        "left_out": left_out,
        "results": results,
    }


def table(found: dict[str, Any]) -> str:
    """The figures of `measure` for people."""
    threads, parity = found["threads"], found["parity"]
    tokens = found["batch_size"] * found["seq_len"]
    torch_threads = f", torch {threads['torch']}" if threads["torch"] else ""
    rows = [
        ("model", found["model"]),
        *heading(found),
        ("threads", f"ours {threads['ours']} (workers, single-threaded BLAS){torch_threads}"),
        ("parameters", f"{found['parameters']:,}"),
        ("batch", f"{found['batch_size']} x {found['seq_len']} = {tokens:,} random tokens"),
        ("steps", f"{found['counted_steps']} counted each, in turns of {TURN}, after {WARM_UP_STEPS} to warm up"),
        ("FLOP", f"{found['gflop_per_step']:.2f} GFLOP a step: {found['flop_convention']}"),
        ("matmul peak", f"{found['matmul_peak_gflop_per_second']:.0f} GFLOP/s, measured, by our own backend"),
    ]
    if found["planned_peak_mib"]:
        rows.append(("plan", f"{found['planned_peak_mib']:.0f} MiB at most, by --plan"))
    if parity:
        worst, wanted = parity["worst_difference"], parity["tolerance"]
        rows.append(
            ("parity", f"losses of the first {PARITY_STEPS} steps agree to {worst:.1e} nats (wanted {wanted:g})")
        )
    lines = [f"{name:<13} {value}" for name, value in rows]
    lines += [
        "",
        f"{'':<27} {'median ms':>9} {'min ms':>8} {'tokens/s':>9} {'GFLOP/s':>8} {'of peak':>8} "
        f"{'ours/this':>9} {'peak MiB':>9}",
    ]
    for name, r in found["results"].items():
        memory = f"{r['peak_memory_mib']:.0f}" if r["peak_memory_mib"] else "-"
        lines.append(
            f"{name:<27} {r['median_ms']:>9.1f} {r['min_ms']:>8.1f} {r['tokens_per_second']:>9,.0f} "
            f"{r['gflop_per_second']:>8.1f} {r['of_matmul_peak']:>8.0%} {r['ours_over_this']:>9.2f} {memory:>9}"
        )
    if graph := found["results"].get(CAPTURED):
        others = {name: graph["median_ms"] / r["median_ms"] for name, r in found["results"].items() if name != CAPTURED}
        lines.append(f"{CAPTURED} over " + ", ".join(f"{name}: {ratio:.2f}" for name, ratio in others.items()))
    lines += left_out_table(found["left_out"])
    return "\n".join(lines)


def options_of(args: argparse.Namespace, backend: bool = True) -> Options:
    """backend: try whether it is there."""
    for name in ("batch_size", "seq_len", "steps", "workers", "threads", "documents"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}, wants a number above 0")
    mask = "restart" if args.documents else None
    settings = PretrainSettings(model=args.model, config=args.config or "", document_mask=mask)
    restarts(settings, find_model(args.model))  # refuses a model that keeps no documents apart
    config = config_of(settings)
    seq_len = args.seq_len or config.context
    config = config.override({"context": max(seq_len, config.context)})
    check_before(args.json, args.peer)
    workers = args.workers or cores()
    name = args.backend
    if backend:  # refuses names it does not know before a child meets them, and says what `auto` is
        opened = get_backend(args.backend, args.precision, workers, args.device)
        name, workers = opened.name, opened.workers
    return Options(
        args.model,
        config,
        args.batch_size,
        seq_len,
        args.steps,
        name,
        args.precision,
        workers,
        args.threads or args.workers or cores(),
        args.device,
        args.data,
        args.documents,
        _beside(args.beside),
    )


def _beside(given: str | None) -> tuple[str, str] | None:
    if given is None:
        return None
    model, _, preset = given.partition(":")
    config_of(PretrainSettings(model=model, config=preset))  # refuses what it does not know
    return model, preset or next(iter(find_model(model).presets))


def several_gpus(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Start the ranks, or be one of them (bench/ranks.py)."""
    if not started_as_rank():
        count = gpu_count()
        if not 1 < args.gpus <= count:
            raise UserError(f"--gpus is {args.gpus}, wants 2 to the number of GPUs, here {count}; leave it out for one")
        options_of(args, backend=False)  # refuses what is wrong before anything starts
        command = [sys.executable, *sys.orig_argv[1:]] if argv is None else [sys.executable, __file__, *argv]
        return start(command, args.gpus)
    from bench import ranks

    options = options_of(args, backend=False)
    found = ranks.measure(
        options.model,
        options.config,
        options.precision,
        options.batch_size,
        options.seq_len,
        options.steps,
        args.peer is not None,
        lambda rows: replace(options, batch_size=rows).batches(),
        args.capture,
    )
    if found:
        publish(found, ranks.table(found), args.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--model", default=default_model(), help=f"{', '.join(models())} (default: {default_model()})")
    p.add_argument("--config", help="preset of the model or a JSON file (default: the model's first preset)")
    p.add_argument("--batch-size", type=int, default=16, help="sequences a step (default: 16)")
    p.add_argument(
        "--seq-len", type=int, help="tokens a sequence (default: the config's context, which a longer one lengthens)"
    )
    p.add_argument("--recompute", default="", choices=("norms", "blocks"), help="in ours, as of recipes/pretrain.py")
    p.add_argument("--capture", action="store_true", help="on a GPU, time our step as a CUDA graph too")
    p.add_argument("--muon", action="store_true", help="time our step with Muon too")
    p.add_argument("--verbose", action="store_true", help="on a GPU, say which kernel makes each product of bf16")
    p.add_argument("--steps", type=int, default=30, help="counted steps for each contender (default: 30)")
    p.add_argument("--peer", choices=tuple(PEERS), help="time PyTorch too, all it has, or eager alone")
    p.add_argument("--beside", metavar="MODEL:PRESET", help="time another of our models too, such as nanoeuler:base")
    p.add_argument("--data", metavar="SHARDS", help="time our step with batches read from token shards too")
    p.add_argument(
        "--documents", type=int, metavar="N", help="time our step with documents of N tokens on average kept apart too"
    )
    p.add_argument("--backend", default="auto", help="ours: auto, numpy, cupy (default: auto)")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    p.add_argument("--precision", default="fp32", help="fp32, fp64, fp8, and on a GPU tf32 or bf16 (default: fp32)")
    p.add_argument("--workers", type=int, help="processes of ours, one BLAS thread each (default: one a core)")
    p.add_argument("--threads", type=int, help="threads of PyTorch (default: as many as --workers)")
    p.add_argument(
        "--gpus", type=int, metavar="N", help="time one GPU, N of them, N with ZeRO, and with --peer torch DDP"
    )
    add_json_flag(p)
    args = p.parse_args(argv)
    if args.gpus is not None:
        return several_gpus(args, argv)
    options = replace(options_of(args), recompute=args.recompute, capture=args.capture, muon=args.muon)
    if options.capture and options.backend != "cupy":
        raise UserError(f"--capture makes a CUDA graph of the step, the backend is {options.backend}; drop --capture")
    if args.verbose and options.backend == "cupy":
        from tinyforge.backends import gemm

        gemm.announce(lambda text: print(text, file=sys.stderr))
    find_model(args.model).check_recompute(options.recompute)
    find_model(args.model).check_precision(options.precision)
    found = measure(options, args.peer)
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
