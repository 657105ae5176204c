"""What `bench/train_step.py --gpus N` runs in each of N processes: one GPU, N, N with ZeRO 1 and 2, and compiled DDP.

Every GPU takes --batch-size sequences. The contenders take turns, a few steps each: ours in the same processes, DDP in
one beside each of them. A turn is timed on rank 0 from idle devices to idle devices. PyTorch's gradients are averaged
over the ranks in buckets under its backward (DistributedDataParallel), as ours are summed.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from tinyforge.backends import Backend, get_backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.parallel.launch import joined
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import Sharded
from tinyforge.train.objectives import Batch, NextTokens
from tinyforge.train.plan import Split, plan_step

ONE, SEVERAL, ZERO, ZERO_2, DDP = "1 GPU", "ranks", "ranks, ZeRO", "ranks, ZeRO-2", "torch DDP, compiled"
GRAPH = ", graph"  # behind a name: its steps are launched as CUDA graphs
MESSAGES = 3  # from rank 0 in a step: gradients, clip, update
LR, CLIP = 1e-3, 1.0
TURN, WARM_UP = 10, 6


class Ours:
    """A model on one rank, or on all of them. Rank 0 leads a step as `Run` does, the others do what it says."""

    def __init__(
        self,
        model: str,
        config: ModelConfig,
        backend: Backend,
        batches: Sequence[Batch],
        ranks: int,
        zero: int,
        like: Ours | None = None,
    ) -> None:
        """like: has the weights to begin with; drawing many takes longer than all steps."""
        self.model = find_model(model).build(config, backend)
        if like is None:
            self.model.initialise(seed=0)
        else:
            self.model.buffer.masters[...] = like.model.buffer.masters
            self.model.buffer.publish()
        self.batches = batches
        self.sharded = Sharded(
            self.model, backend, NextTokens(config.head_weights), batches=lambda step: [batches[step % len(batches)]]
        )
        self.sharded.rank.make_optimizer(None, zero)
        self.spared = self.sharded.group.spares if ranks > 1 else 0  # of the process, which the contenders share
        self.noise = Stream(0, "dropout")

    def step(self, index: int) -> Any:
        group = self.sharded.group
        self.sharded.backend.spare(self.spared)
        if group.rank:
            for _ in range(MESSAGES):
                work, arguments = group.send_object()
                work(self.sharded.rank, *arguments)
            return None
        step = [self.batches[index % len(self.batches)]]
        totals = self.sharded.gradients(step, self.noise.fork(str(index)), index)
        self.sharded.clip(CLIP)
        self.sharded.update(LR)
        return totals


class Graph(Ours):
    """The same as CUDA graphs, from the third step on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        optimizer = self.sharded.rank.optimizer
        assert optimizer is not None
        self.captured = Captured(self.sharded, optimizer, CLIP)

    def step(self, index: int) -> Any:
        group = self.sharded.group
        self.sharded.backend.spare(self.spared)
        if group.rank:
            work, arguments = group.send_object()
            work(self.sharded.rank, *arguments)
            return None
        step = [self.batches[index % len(self.batches)]]
        return self.captured.step(step, self.noise.fork(str(index)), LR, index)[0]


class Apart:
    """DDP's rank in a process of its own, beside this one: NCCL reads its environment once in a process, and DDP's is
    to be NCCL's own choice (see tinyforge/parallel/nccl.py)."""

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
    """Of `Apart`: takes the steps that it is told to, and says when it is ready and when they are done."""
    import torch
    import torch.distributed

    from bench.torch_peer import TorchPeer, TorchTraining

    torch.cuda.set_device(device)
    port = int(os.environ["MASTER_PORT"]) + 1
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    training = TorchTraining(
        model, config, precision=precision, device=f"cuda:{device}", threads=4, clip=CLIP, compiled="default", ddp=True
    )
    backend = get_backend("numpy", "fp32", workers=1)
    ours = find_model(model).build(config, backend)
    ours.initialise(seed=0)
    training.load(named(ours.buffer, ours.buffer.values, backend))
    peer = TorchPeer(training, batches, LR)
    line.send(None)
    with suppress(EOFError):
        while True:
            if (index := line.recv()) is not None:
                peer.step(index)
            else:
                torch.cuda.synchronize()
                line.send(None)
    os._exit(0)  # without NCCL's farewell, in which the ranks wait for each other


def measure(
    model: str,
    config: ModelConfig,
    precision: str,
    rows: int,
    seq_len: int,
    steps: int,
    peer: bool,
    batches_of: Callable[[int], list[Batch]],
    capture: bool = False,
) -> dict[str, Any]:
    """The figures on rank 0; on the other ranks nothing. batches_of(rows): random ones, the same everywhere. capture:
    time CUDA graphs of the step too."""
    with joined() as ranks:
        size = ranks.size
        backend = get_backend("cupy", precision, device=ranks.local_rank)
        of_all, own = batches_of(rows * size), slice(rows * ranks.rank, rows * (ranks.rank + 1))
        # First, as it compiles for half a minute, and as a group sets variables of NCCL's for this process.
        apart = (
            Apart(model, config, precision, ranks.rank, size, ranks.local_rank or 0, [batch[own] for batch in of_all])
            if peer
            else None
        )
        group = ranks.group(backend)
        group.be_patient(300.0)
        alone, many = get_backend("cupy", precision, device=ranks.local_rank), backend
        many.group = group
        contenders: dict[str, Any] = {}
        memory: dict[str, dict[str, float]] = {}
        spec = find_model(model)
        sums: dict[str, list[Any]] = {}
        for name, split, kind in (
            (ONE, Split(), Ours),
            (SEVERAL, Split(size), Ours),
            (ZERO, Split(size, 1), Ours),
            (ZERO_2, Split(size, 2), Ours),
            *(
                (
                    (ONE + GRAPH, Split(), Graph),
                    (SEVERAL + GRAPH, Split(size), Graph),
                    (ZERO + GRAPH, Split(size, 1), Graph),
                )
                if capture
                else ()
            ),
        ):
            backend = many if split.ranks > 1 else alone
            batches = of_all if split.ranks > 1 else [batch[:rows] for batch in of_all]
            with _peak() as peak:
                before = peak.bytes
                contenders[name] = made = kind(
                    model, config, backend, batches, split.ranks, split.zero, contenders.get(ONE)
                )
                totals = [made.step(index) for index in range(WARM_UP)]
                backend.synchronize()
            if ranks.rank == 0:
                sums[name] = [backend.to_numpy(t.sums).tolist() for t in totals]
            optimizer = made.sharded.rank.optimizer
            assert optimizer is not None
            masters = getattr(optimizer, "own", None)
            masters = made.model.buffer.masters if masters is None else masters
            plan = plan_step(spec, config, precision, rows * split.ranks, seq_len, split=split)
            memory[name] = {
                "peak_mib": (peak.bytes - before) / 2**20,
                "planned_mib": plan.peak / 2**20,
                "optimizer_mib": (optimizer.m.nbytes + optimizer.v.nbytes + masters.nbytes) / 2**20,
            }
        if apart:
            contenders[DDP] = apart
            apart.ready()
        gc.collect()
        gc.freeze()  # a run has one model: what the other contenders made is not looked through again and again
        seconds = take_turns(contenders, steps, alone, group)
        if ranks.rank:
            return {}
        found = {
            name: {
                "median_ms": 1e3 * median(times),
                "turn_ms": [1e3 * t for t in times],
                "tokens_per_second": rows * seq_len * _gpus(name, size) / median(times),
                **memory.get(name, {}),
            }
            for name, times in seconds.items()
        }
        return {
            "flop_per_token": contenders[ONE].model.flop_per_token(seq_len),
            "matmul_peak": alone.matmul_peak(),
            "device": alone.describe(),
            "ranks": size,
            "precision": precision,
            "rows_a_gpu": rows,
            # All but one GPU's own begin with the same weights.
            **(
                {"graphs_give_the_same_losses": all(sums[name] == sums[name + GRAPH] for name in (SEVERAL, ZERO))}
                if capture
                else {}
            ),
            "seq_len": seq_len,
            "model": model,
            "config": config.to_dict(),
            "steps": steps,
            "results": found,
        }


def take_turns(contenders: dict[str, Any], steps: int, backend: Backend, group: Any) -> dict[str, list[float]]:
    """Seconds a step, on average over each turn, by contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    index = WARM_UP
    for _ in range(0, steps, TURN):
        for name, contender in contenders.items():
            if name in (ONE, ONE + GRAPH) and group.rank:
                group.barrier()
                group.barrier()
                continue
            synchronize = getattr(contender, "synchronize", backend.synchronize)
            contender.step(index)
            synchronize()
            group.barrier()
            start = time.perf_counter()
            for i in range(TURN):
                contender.step(index + i)
            synchronize()
            seconds[name].append((time.perf_counter() - start) / TURN)
            group.barrier()
        index += TURN
    return seconds


def table(found: dict[str, Any]) -> str:
    one = found["results"][ONE]["median_ms"]
    size, flop = found["ranks"], found["flop_per_token"]
    lines = [
        f"{found['ranks']} x {found['device']}, {found['precision']}, {found['rows_a_gpu']} x {found['seq_len']} "
        f"tokens a GPU, {found['steps']} steps each in turns of {TURN}",
        "",
        f"{'':<20} {'median ms':>9} {'over 1 GPU':>10} {'of peak':>7} {'peak MiB':>9} {'planned':>8} "
        f"{'optimizer MiB':>13}",
    ]
    for name, r in found["results"].items():
        memory = (
            f"{r['peak_mib']:>9.0f} {r['planned_mib']:>8.0f} {r['optimizer_mib']:>13.0f}" if "peak_mib" in r else ""
        )
        share = r["tokens_per_second"] * flop / found["matmul_peak"] / _gpus(name, size)
        lines.append(f"{name:<20} {r['median_ms']:>9.2f} {r['median_ms'] / one:>10.3f} {share:>7.2f} {memory}")
    if DDP in found["results"]:
        ratio = found["results"][SEVERAL]["median_ms"] / found["results"][DDP]["median_ms"]
        lines += ["", f"ours over DDP's: {ratio:.3f}"]
    return "\n".join(lines)


def _gpus(name: str, size: int) -> int:
    return 1 if name in (ONE, ONE + GRAPH) else size


def _peak() -> Any:
    from tinyforge.backends.cupy_backend import PeakMemory

    return PeakMemory()
