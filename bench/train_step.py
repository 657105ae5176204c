"""Time one training step of a model: forward, backward, clipping, AdamW.

    python bench/train_step.py                                                  ours alone
    python bench/train_step.py --peer torch --json result.json                  next to PyTorch, and the figures as JSON
    python bench/train_step.py --config base --backend cupy --precision bf16 --batch-size 32 --steps 100 --peer torch
    python bench/train_step.py --model gpt2 --config 124m --backend cupy --precision bf16 --seq-len 1024 --peer torch
    python bench/train_step.py --model moe --beside nanoeuler:small     compared with another of our models

PyTorch runs eager, compiled, and on a GPU also compiled with CUDA graphs (mode reduce-overhead); with --regional one
layer of it is compiled, where compiling a deep model takes minutes. All contenders see the
same random tokens, and must agree on the loss of the first steps. With dropout each contender samples its own masks, so
that check uses models without dropout. Peak memory is measured in a child process that runs only the steps of one
contender.

On a GPU a turn is timed as a whole and its mean is one measurement: steps follow each other without synchronisation, as
in training. PyTorch's batches are on the device from the start, ours are uploaded in the step. Peak memory is that of
arrays on the device, without the libraries' own.

Each of these flags adds a contender:
    --data        our step with batches read from token shards, as in training, where the others repeat a few batches
    --documents N our step as with --document-mask restart, on the same tokens in documents of N tokens on average
    --capture     our step as a CUDA graph; its losses must equal those of our plain step bit for bit
    --muon        our step with Muon in place of AdamW
    --nanochat F  the compiled step of nanochat, whose repository lies in F, at our width and number of layers
With --precision fp8 PyTorch computes in bf16, and on a GPU our step is timed in bf16 too.

With --gpus N the contenders are those of bench/ranks.py: one GPU, N GPUs, N with sharded optimizer states (ZeRO 1), and
with sharded gradients too (ZeRO 2), and with --peer torch compiled DistributedDataParallel, with --batch-size sequences
per GPU.

FLOP are counted by the model's flop_per_token, for all contenders but the model of --beside and nanochat, which count
their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness, training
from bench.harness import COMPILED, EAGER, GRAPH, OURS, Flags, LeftOut, Parity
from bench.training import repeated
from tinyforge.backends import Backend, get_backend, gpu_count
from tinyforge.backends.workers import cores
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError, run_command
from tinyforge.op import Recompute
from tinyforge.ops.attention import Documents
from tinyforge.optim import MuonConfig
from tinyforge.parallel.launch import start, started_as_rank
from tinyforge.params import named
from tinyforge.registry import default_model, find_model, models
from tinyforge.shards import Shards
from tinyforge.train.batches import MixedTokens, PackedTokens, starts_of
from tinyforge.train.compiled import CHOICES, choose_kernels
from tinyforge.train.corpus import mix_weights
from tinyforge.train.objectives import Batch
from tinyforge.train.plan import plan_step
from tinyforge.train.run import FLOP_CONVENTION
from tinyforge.train.settings import PretrainSettings, config_of, restarts

READING, MASKED, CAPTURED, MUON = "tinyforge, data", "tinyforge, mask", "tinyforge, graph", "tinyforge, Muon"
IN_BF16, NANOCHAT = "tinyforge, bf16", "nanochat"
PEERS = {"torch": (EAGER, COMPILED, GRAPH), "torch-eager": (EAGER,), "torch-compiled": (COMPILED,)}
BATCHES = 8  # distinct ones, visited in turn
PARITY_STEPS = 3  # the second and third loss depend on the gradients, the clipping and AdamW too
WARM_UP_STEPS = 3
PARITY_TOLERANCE = {"fp64": 1e-4, "fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp8": 5e-2}  # nats
TURN = 5  # counted steps before the next contender's turn
MEMORY_STEPS = 5


@dataclass(frozen=True)
class Options:
    """What is timed. workers: processes of ours. threads: of PyTorch. steps: counted for each contender. documents:
    tokens of one on average, where the mask is timed too. beside: another model of ours and its preset. nanochat: the
    folder of its repository."""

    model: str
    config: ModelConfig
    batch_size: int
    seq_len: int
    steps: int
    backend: str
    precision: str
    workers: int
    threads: int
    cpu_kernels: str = "auto"
    device: int | None = None
    data: str | None = None
    documents: int | None = None
    beside: tuple[str, str] | None = None
    recompute: Recompute = ""
    capture: bool = False
    muon: bool = False
    regional: bool = False
    nanochat: str | None = None

    def make_backend(self) -> Backend:
        backend = get_backend(self.backend, self.precision, self.workers, self.device)
        choose_kernels(backend, self.cpu_kernels)
        return backend

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.device or 0}" if self.backend == "cupy" else "cpu"

    def of_beside(self) -> Options:
        """The same of the other model."""
        model, preset = self.beside or ("", "")
        config = config_of(PretrainSettings(model=model, config=preset))
        return replace(self, model=model, config=config.override({"context": max(self.seq_len, config.context)}))

    def in_bf16(self) -> Options:
        """The same, in bf16 instead of fp8."""
        return replace(self, precision="bf16") if self.precision == "fp8" else self

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


def ours(options: Options, backend: Backend, batch: Callable[[int], Batch] | None = None, **how: Any) -> training.Ours:
    """Our contender; batch: None for repeated ones."""
    model = find_model(options.model).build(options.config, backend, recompute=options.recompute)
    model.initialise(seed=0)
    return training.Ours(model, backend, batch or repeated(options.batches()), **how)


def reading(options: Options, backend: Backend) -> training.Ours:
    """The same with a new batch of the shards at each step."""
    found, config = Shards([Path(options.data or "")]), options.config
    last = found.tokenizer.vocab_size - 1
    if last >= config.vocab:
        raise UserError(
            f"--data: ids up to {last}, the config's vocab is {config.vocab}; use another --config, or other shards"
        )
    weights = mix_weights((), found)
    sources = {name: found.sequence(name, "train") for name in weights}
    data = MixedTokens(sources, weights, options.seq_len, config.prediction_heads, seed=0)
    return ours(options, backend, lambda index: data.batch(index, options.batch_size))


def check_bits(options: Options, backend: Backend) -> None:
    """Raises UserError unless plain steps and captured ones, the last of them graph replays, have the same losses."""
    made = (ours(options, backend, captured=graph) for graph in (False, True))
    plain, captured = ([float(step(i)) for i in range(PARITY_STEPS + 3)] for step in (m.step for m in made))  # type: ignore[arg-type]
    if plain != captured:
        raise UserError(f"--capture: losses of plain steps {plain}, of captured ones {captured}; expected the same")


def variants(options: Options) -> dict[str, Callable[[Backend], training.Ours]]:
    """What makes each contender of ours, by name."""
    bf16 = options.in_bf16()
    asked: dict[str, tuple[Any, Callable[[Backend], training.Ours]]] = {
        OURS: (True, partial(ours, options)),
        CAPTURED: (options.capture, partial(ours, options, captured=True)),
        MUON: (options.muon, partial(ours, options, optimizer=MuonConfig())),
        IN_BF16: (bf16 != options and options.backend == "cupy", lambda _: ours(bf16, bf16.make_backend())),
        READING: (options.data, partial(reading, options)),
        MASKED: (options.documents, lambda b: ours(options, b, repeated(options.masked_batches()))),
    }
    if options.beside:
        asked[" ".join(options.beside)] = True, partial(ours, options.of_beside())
    return {name: make for name, (asked_for, make) in asked.items() if asked_for}


def torch_peer(options: Options, mode: str | None) -> Any:
    """mode: of torch.compile; None for eager."""
    # Here and not at the top: torch is needed, and its memory counted, only when it is the peer.
    from bench.torch_peer import TorchPeer, TorchTraining

    precision, threads, device = options.in_bf16().precision, options.threads, options.torch_device
    config, regional = options.config, options.regional
    peer = TorchTraining(options.model, config, precision, device, threads, mode, regional=regional)
    return TorchPeer(peer, options.batches())


def nanochat_peer(options: Options) -> Any:
    from bench.nanochat_peer import Nanochat

    precision, device, threads = options.precision, options.torch_device, options.threads
    return Nanochat(
        options.nanochat or "", options.config, options.seq_len, precision, device, threads, options.batches()
    )


def peak_memory(name: str, options: Options) -> float:
    """Peak memory in MiB of MEMORY_STEPS steps of one contender; runs in a child process."""
    own, gpu = variants(options).get(name), options.backend == "cupy"
    backend = options.make_backend() if own else None
    with harness.peak_mib(backend) as peak:
        if own and backend:
            contender: Any = own(backend)
        else:
            contender = nanochat_peer(options) if name == NANOCHAT else torch_peer(options, harness.MODES[name])
        for i in range(MEMORY_STEPS):
            contender.step(i)
        # Before the contender goes, and its workers with it.
        return peak() if own or not gpu else sys.modules["torch"].cuda.max_memory_allocated() / 2**20


def make_contenders(
    options: Options, backend: Backend, peers: Sequence[str], agree: bool = True
) -> tuple[dict[str, Any], Parity, LeftOut]:
    """Ours and the peers, all with our weights, after their first steps, whose losses agree unless each samples dropout
    masks of its own; and who was left out."""
    first = ours(options, backend)
    buffer = first.model.buffer
    weights = {name: value.copy() for name, value in named(buffer, buffer.masters, backend).items()}

    def loaded(mode: str | None) -> Any:
        peer = torch_peer(options, mode)
        peer.training.load(weights)
        return peer

    makers: dict[str, Any] = {OURS: lambda: first, **harness.by_mode(backend, loaded, peers)}
    contenders, losses, left_out = harness.soft(makers, lambda c: [float(c.step(i)) for i in range(PARITY_STEPS)])
    if not (peers and agree):
        return contenders, None, left_out
    parity = harness.check_parity(losses, PARITY_TOLERANCE[options.precision], "losses differ by")
    return contenders, {"losses": losses, **parity}, left_out


def measure(options: Options, peer: str | None) -> dict[str, Any]:
    """Everything that is printed, as a JSON object. Times in ms, memory in MiB."""
    config, before, on_gpu = options.config, harness.machine(), options.backend == "cupy"
    # First, while this process is small: Linux counts a parent's peak at the start of a child as the child's own.
    peers = PEERS[peer] if peer else ()
    others = (*peers, NANOCHAT) if options.nanochat else peers
    measured = [name for name in (*variants(options), *others) if on_gpu or name not in (COMPILED, GRAPH, NANOCHAT)]
    makers = {name: partial(str, name) for name in measured}
    _, memory, _ = harness.soft(makers, lambda name: harness.in_child(peak_memory, name, options))
    backend = options.make_backend()
    dropout = getattr(config, "dropout", 0.0) > 0
    without = replace(options, config=config.override({"dropout": 0.0})) if dropout else options
    contenders, parity, left_out = make_contenders(without, backend, peers)
    if dropout:
        contenders, _, _ = make_contenders(options, backend, tuple(contenders)[1:], agree=False)
    if options.capture:
        check_bits(options, backend)
    contenders |= {name: make(backend) for name, make in variants(options).items() if name != OURS}
    if options.nanochat:
        contenders[NANOCHAT] = nanochat_peer(options)
    for contender in contenders.values():
        for i in range(WARM_UP_STEPS):
            contender.step(i)
    peak = backend.matmul_peak()
    steps, tokens = {name: made.step for name, made in contenders.items()}, options.batch_size * options.seq_len
    seconds = harness.take_turns(steps, options.steps, backend.synchronize, turn=TURN, together=on_gpu)
    peak = max(peak, backend.matmul_peak()) / 1e9
    results = harness.figures(seconds, "ms", "step", tokens)
    first = contenders[OURS].model
    for name, found in results.items():
        model = getattr(contenders[name], "model", first)
        rate = model.flop_per_token(options.seq_len) * found["tokens_per_second"] / 1e9
        found |= {"gflop_per_second": rate, "of_matmul_peak": rate / peak, "peak_memory_mib": memory.get(name)}
    shape = options.precision, options.batch_size, options.seq_len, options.recompute
    given = {name: getattr(options, name) for name in ("model", "batch_size", "seq_len", "recompute")}
    given |= {"config": config.to_dict(), "counted_steps": options.steps, "tokens_per_document": options.documents}
    given["cpu_kernels"] = options.cpu_kernels
    given["compiled"] = harness.COMPILED_PARTS[options.regional] if peer else None
    given["threads"] = {"ours": options.workers, "torch": options.threads if others else None}
    known = {"parameters": first.buffer.count, "flop_convention": FLOP_CONVENTION, "matmul_peak_gflop_per_second": peak}
    if options.nanochat:
        known["nanochat_parameters"] = sum(p.numel() for p in contenders[NANOCHAT].model.parameters())
    known["gflop_per_step"] = first.flop_per_token(options.seq_len) * tokens / 1e9
    plan = plan_step(find_model(options.model), config, *shape).peak / 2**20 if on_gpu else None
    found = {**given, **known, "planned_peak_mib": plan, "parity": parity, "left_out": left_out, "results": results}
    return harness.environment(backend, peer or options.nanochat, before) | found


COLUMNS = (
    "median_ms:.1f | min_ms:.1f | tokens_per_second:,.0f | gflop_per_second:.1f | of_matmul_peak=of peak:.0%"
    " | ours_over_this:.2f | peak_memory_mib=peak MiB:.0f"
)


def table(found: dict[str, Any]) -> list[str]:
    """The figures of `measure` for people."""
    threads, results, plan = found["threads"], found["results"], found["planned_peak_mib"]
    tokens = found["batch_size"] * found["seq_len"]
    torch_threads = f", torch {threads['torch']}" if threads["torch"] else ""
    kernels = found.get("cpu_kernels", "auto")
    lines = harness.heading(
        found,
        ("model", f"{found['model']}, {found['parameters']:,} parameters"),
        ("nanochat", f"{own:,} parameters") if (own := found.get("nanochat_parameters")) else None,
        ("threads", f"ours {threads['ours']} (workers, single-threaded BLAS){torch_threads}"),
        None if kernels == "auto" else ("CPU kernels", f"{kernels}'s"),
        ("batch", f"{found['batch_size']} x {found['seq_len']} = {tokens:,} random tokens"),
        ("steps", f"{found['counted_steps']} counted each, in turns of {TURN}, after {WARM_UP_STEPS} to warm up"),
        ("FLOP", f"{found['gflop_per_step']:.2f} GFLOP a step: {found['flop_convention']}"),
        ("matmul peak", f"{found['matmul_peak_gflop_per_second']:.0f} GFLOP/s, measured, by our own backend"),
        ("plan", f"{plan:.0f} MiB at most, by --plan") if plan else None,
        ("torch.compile", found["compiled"]) if found.get("compiled") else None,
    )
    lines += harness.rows(COLUMNS, results, left_out=found["left_out"])
    if graph := results.get(CAPTURED):
        others = {name: graph["median_ms"] / r["median_ms"] for name, r in results.items() if name != CAPTURED}
        lines.append(f"{CAPTURED} over " + ", ".join(f"{name}: {ratio:.2f}" for name, ratio in others.items()))
    return lines


def options_of(args: argparse.Namespace, backend: bool = True) -> Options:
    """backend: try whether it is there."""
    mask = "restart" if args.documents else None
    settings = PretrainSettings(model=args.model, config=args.config, document_mask=mask)
    restarts(settings, find_model(args.model))  # refuses a model that keeps no documents apart
    config = config_of(settings)
    seq_len = args.seq_len or config.context
    workers, name, beside, kernels = args.workers or cores(), args.backend, None, args.cpu_kernels
    if backend:  # refuses an unknown name before a child process starts, and resolves `auto`
        opened = harness.backend_of(args, workers)
        # Here, so that the code is compiled before a child's memory is measured.
        name, workers, kernels = opened.name, opened.workers, choose_kernels(opened, args.cpu_kernels)
    if args.beside is not None:
        model, _, preset = args.beside.partition(":")
        config_of(PretrainSettings(model=model, config=preset))  # refuses an unknown one
        beside = model, preset or next(iter(find_model(model).presets))
    resolved = {"seq_len": seq_len, "backend": name, "workers": workers, "beside": beside, "cpu_kernels": kernels}
    resolved["config"] = config.override({"context": max(seq_len, config.context)})
    resolved["threads"] = args.threads or args.workers or cores()
    return Options(**{f.name: resolved.get(f.name, getattr(args, f.name)) for f in fields(Options)})


def several_gpus(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Start the ranks, or be one of them (bench/ranks.py)."""
    for name in ("data", "documents", "muon", "beside", "nanochat", "regional", "recompute"):
        if getattr(args, name):
            raise UserError(f"--gpus times one GPU and several of the plain step; leave out --{name}")
    options = options_of(args, backend=False)  # refuses what is wrong before anything starts
    if not started_as_rank():
        count = gpu_count()
        if not 1 < args.gpus <= count:
            raise UserError(
                f"--gpus is {args.gpus}, expected 2 to the number of GPUs, here {count}; leave it out for one"
            )
        command = [sys.executable, *sys.orig_argv[1:]] if argv is None else [sys.executable, __file__, *argv]
        return start(command, args.gpus)
    from bench import ranks

    found = ranks.measure(options, args.peer is not None, lambda rows: replace(options, batch_size=rows).batches())
    return harness.publish(found, ranks.table(found), args) if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    p = Flags(__doc__)
    p.text("--model", default_model(), ", ".join(models()))
    p.shared("config")
    p.number("--batch-size", 16, "sequences a step")
    p.number("--seq-len", None, "tokens a sequence (default: the config's context, which a longer one lengthens)")
    p.text("--recompute", "", "in ours, as of recipes/pretrain.py", choices=("norms", "blocks"))
    p.switch("--capture", "on a GPU, time our step as a CUDA graph too")
    p.switch("--muon", "time our step with Muon too")
    p.text("--cpu-kernels", "auto", "as of recipes/pretrain.py", choices=CHOICES)
    p.switch("--verbose", "on a GPU, print which kernel computes each product of bf16")
    p.number("--steps", 30, "counted steps for each contender")
    p.shared(peer={"choices": tuple(PEERS), "help": "time PyTorch too, all it has, or one mode"})
    p.switch("--regional", "compile one layer of PyTorch's, not its model")
    p.text("--beside", metavar="MODEL:PRESET", help="time another of our models too, such as nanoeuler:base")
    p.text("--nanochat", metavar="FOLDER", help="time nanochat's step too, from a clone of its repository")
    p.text("--data", metavar="SHARDS", help="time our step with batches read from token shards too")
    p.number("--documents", None, "time our step with masked documents of N tokens on average too", metavar="N")
    p.shared(
        "backend", "device", "workers", "threads", precision={"help": "fp32, fp64, fp8, and on a GPU tf32 or bf16"}
    )
    p.number("--gpus", None, "time one GPU, N of them, N with ZeRO, and with --peer torch DDP", 0, metavar="N")
    args = p.parse(argv)
    if args.gpus is not None:
        return several_gpus(args, argv)
    options = options_of(args)
    if options.capture and options.backend != "cupy":
        raise UserError(f"--capture makes a CUDA graph of the step, the backend is {options.backend}; drop --capture")
    if args.verbose and options.backend == "cupy":
        from tinyforge.backends import gemm

        gemm.announce(lambda text: print(text, file=sys.stderr))
    find_model(args.model).check_recompute(options.recompute)
    find_model(args.model).check_precision(options.precision)
    found = measure(options, args.peer)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
