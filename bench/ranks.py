"""What `bench/train_step.py --gpus N` runs in each of N processes: one GPU, N, N with ZeRO 1 and 2, and compiled DDP.

Every GPU takes --batch-size sequences. The contenders take turns, a few steps each: ours in the same processes, DDP in
one more process per rank. A turn is timed on rank 0 from idle devices to idle devices. PyTorch's gradients are averaged
over the ranks in buckets during its backward (DistributedDataParallel), as ours are summed.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from bench import harness
from bench.training import Ours, repeated
from tinyforge.backends import Backend, get_backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.parallel.launch import init_process_group
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.train.objectives import Batch
from tinyforge.train.plan import Split, plan_step

ONE, SEVERAL, ZERO, ZERO_2, DDP = "1 GPU", "ranks", "ranks, ZeRO", "ranks, ZeRO-2", "torch DDP, compiled"
GRAPH = ", graph"  # appended to a name: its steps are launched as CUDA graphs
TURN, WARM_UP = 10, 6


class Apart:
    """DDP's rank in a process of its own: NCCL reads its environment once in a process, and DDP's is to be NCCL's own
    choice (see tinyforge/parallel/nccl.py)."""

    def __init__(self, *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, theirs = spawn.Pipe()
        ours = {name: os.environ.pop(name) for name in ("NCCL_MAX_CTAS", "NCCL_CTA_POLICY") if name in os.environ}
        # No daemon: torch.compile starts processes of its own. It ends with the line.
        atexit.register(self._line.close)
        spawn.Process(target=_ddp_rank, args=(theirs, *arguments)).start()
        theirs.close()
        os.environ.update(ours)

    def ready(self) -> None:
        """Wait until it is compiled."""
        self._wait()
        for index in range(WARM_UP):
            self.step(index)
        self.synchronize()

    def step(self, index: int) -> None:
        self._line.send(index)

    def synchronize(self) -> None:
        self._line.send(None)
        self._wait()

    def _wait(self) -> None:
        try:
            self._line.recv()
        except EOFError as error:
            raise UserError(
                "--peer torch: the process of DDP has died; mend what it says above, or leave out --peer"
            ) from error


def _ddp_rank(
    line: Connection,
    model: str,
    config: ModelConfig,
    precision: str,
    rank: int,
    size: int,
    device: int,
    batches: Sequence[Batch],
) -> None:
    """Of `Apart`: takes the steps that it receives, and answers when it is ready and when they are done."""
    import torch
    import torch.distributed

    from bench.torch_peer import TorchPeer, TorchTraining

    torch.cuda.set_device(device)
    port = int(os.environ["MASTER_PORT"]) + 1
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    training = TorchTraining(model, config, precision, f"cuda:{device}", 4, "default", ddp=True)
    backend = get_backend("numpy", "fp32", workers=1)
    ours = find_model(model).build(config, backend)
    ours.initialise(seed=0)
    training.load(named(ours.buffer, ours.buffer.values, backend))
    peer = TorchPeer(training, batches)
    line.send(None)
    with suppress(EOFError):
        while True:
            if (index := line.recv()) is not None:
                peer.step(index)
            else:
                torch.cuda.synchronize()
                line.send(None)
    os._exit(0)  # without NCCL's shutdown, in which the ranks wait for each other


def measure(options: Any, peer: bool, batches_of: Callable[[int], list[Batch]]) -> dict[str, Any]:
    """The figures on rank 0; on the other ranks nothing. options: of bench/train_step.py. batches_of(rows): random
    ones, the same everywhere."""
    with init_process_group() as ranks:
        rows, size, rank, local = options.batch_size, ranks.size, ranks.rank, ranks.local_rank
        backend = get_backend("cupy", options.precision, device=local)
        of_all, own = batches_of(rows * size), slice(rows * rank, rows * (rank + 1))
        # First, as it compiles for half a minute, and as a group sets variables of NCCL's for this process.
        ddp = options.model, options.config, options.precision, rank, size, local or 0
        apart = Apart(*ddp, [batch[own] for batch in of_all]) if peer else None
        group = ranks.group(backend)
        group.be_patient(300.0)
        alone, many = get_backend("cupy", options.precision, device=local), backend
        many.group = group
        contenders: dict[str, Any] = {}
        memory: dict[str, dict[str, float]] = {}
        sums: dict[str, list[Any]] = {}
        kinds = {ONE: Split(), SEVERAL: Split(size), ZERO: Split(size, 1), ZERO_2: Split(size, 2)}
        kinds |= {name + GRAPH: kinds[name] for name in (ONE, SEVERAL, ZERO) if options.capture}
        for name, split in kinds.items():
            backend = many if split.ranks > 1 else alone
            batches = of_all if split.ranks > 1 else [batch[:rows] for batch in of_all]
            with harness.peak_mib(backend) as peak:
                before = peak()
                made = contender(options, backend, batches, split, GRAPH in name, contenders.get(ONE))
                totals = [made.step(index) for index in range(WARM_UP)]
                backend.synchronize()
                memory[name] = memory_of(options, split, made, peak() - before)
            contenders[name] = made
            if rank == 0:
                sums[name] = [backend.to_numpy(loss.totals.sums).tolist() for loss in totals if loss]
        if apart:
            contenders[DDP] = apart
            apart.ready()
        gc.collect()
        gc.freeze()  # a run has one model: the garbage collector does not look through the other contenders' objects
        seconds = take_turns(contenders, options.steps, alone, group)
        if rank:
            return {}
        results = harness.figures(seconds, "ms", "turn", rows * options.seq_len)
        for name, found in results.items():
            found["tokens_per_second"] *= _gpus(name, size)
            found |= memory.get(name, {})
        # All but one GPU's own begin with the same weights.
        same = {"graphs_give_the_same_losses": all(sums[name] == sums[name + GRAPH] for name in (SEVERAL, ZERO))}
        found = {"flop_per_token": contenders[ONE].model.flop_per_token(options.seq_len)}
        found |= {"matmul_peak": alone.matmul_peak(), "device": alone.describe(), "ranks": size, "rows_a_gpu": rows}
        found |= {name: getattr(options, name) for name in ("precision", "seq_len", "model", "steps")}
        found |= same if options.capture else {}
        return found | {"config": options.config.to_dict(), "results": results}


def contender(
    options: Any, backend: Backend, batches: Sequence[Batch], split: Split, captured: bool, like: Ours | None
) -> Ours:
    """like: has the weights to begin with; sampling many takes longer than all steps."""
    model = find_model(options.model).build(options.config, backend)
    if like is None:
        model.initialise(seed=0)
    else:
        model.buffer.masters[...] = like.model.buffer.masters
        model.buffer.publish()
    how: dict[str, Any] = {"captured": captured, "zero": split.zero, "ranks": split.ranks}
    return Ours(model, backend, repeated(batches), **how)


def memory_of(options: Any, split: Split, made: Ours, peak: float) -> dict[str, float]:
    """MiB, measured and planned."""
    spec, optimizer = find_model(options.model), made.optimizer
    masters = getattr(optimizer, "own", None)
    masters = made.model.buffer.masters if masters is None else masters
    rows = options.batch_size * split.ranks
    plan = plan_step(spec, options.config, options.precision, rows, options.seq_len, split=split)
    own = (optimizer.m.nbytes + optimizer.v.nbytes + masters.nbytes) / 2**20
    return {"peak_mib": peak, "planned_mib": plan.peak / 2**20, "optimizer_mib": own}


def take_turns(contenders: dict[str, Any], steps: int, backend: Backend, group: Any) -> dict[str, list[float]]:
    """Seconds a step, on average over each turn, by contender. A contender of one GPU runs on rank 0 only."""
    takes_part = {name: not (group.rank and _gpus(name, group.size) == 1) for name in contenders}
    runs = {name: made.step if takes_part[name] else lambda _: None for name, made in contenders.items()}
    waits = {name: getattr(made, "synchronize", backend.synchronize) for name, made in contenders.items()}
    now = [""]

    def between(name: str) -> None:
        now[0] = name
        group.barrier()

    return harness.take_turns(runs, steps, lambda: waits[now[0]](), turn=TURN, together=True, between=between)


COLUMNS = "median_ms:.2f | over_one=over 1 GPU:.3f | of_peak:.2f | peak_mib:.0f | planned_mib=planned:.0f"
COLUMNS += " | optimizer_mib=optimizer MiB:.0f"


def table(found: dict[str, Any]) -> list[str]:
    size, results = found["ranks"], found["results"]
    named = {}
    for name, r in results.items():
        rate = r["tokens_per_second"] * found["flop_per_token"] / found["matmul_peak"] / _gpus(name, size)
        named[name] = r | {"over_one": r["median_ms"] / results[ONE]["median_ms"], "of_peak": rate}
    lines = [
        f"{size} x {found['device']}, {found['precision']}, {found['rows_a_gpu']} x {found['seq_len']} tokens a GPU, "
        f"{found['steps']} steps each in turns of {TURN}",
        "",
        *harness.rows(COLUMNS, named),
    ]
    if DDP in results:
        lines += ["", f"ours over DDP's: {results[SEVERAL]['median_ms'] / results[DDP]['median_ms']:.3f}"]
    return lines


def _gpus(name: str, size: int) -> int:
    return 1 if name in (ONE, ONE + GRAPH) else size
