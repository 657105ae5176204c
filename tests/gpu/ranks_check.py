"""What must hold of NCCL's ranks, checked in each of them; tests/gpu/test_ranks.py starts it.

    python tests/gpu/ranks_check.py --gpus 2 --config base --rows 64 --steps 300

The collectives beside NumPy; losses on all GPUs beside one with accumulation; two runs of the same world; ZeRO; and
with --shards-per-step the same bits on one GPU, on all, and on one after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from data.world import documents
from models.nanoeuler import PRESETS, NanoEuler
from tinyforge.backends import get_backend
from tinyforge.optim import AdamW
from tinyforge.parallel import Alone, part_of
from tinyforge.parallel.launch import joined, start, started_as_rank
from tinyforge.parallel.zero import ShardedAdamW, pieces_of
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import Sharded, _gradients, clip, full, update
from tinyforge.train.objectives import NextTokens


def collectives(group: Any, xp: Any) -> int:
    """Every collective, sizes that divide and not, beside NumPy; returns how many were compared."""
    compared = 0
    for count in (1, 7, 64, 1000, 65_536, 1_000_001):
        for dtype in ("float32", "float64", "int32"):
            brought = [(np.random.default_rng((rank, count)).normal(size=count) * 100).astype(dtype)
                       for rank in range(group.size)]  # fmt: skip
            total = brought[0].copy()
            for other in brought[1:]:
                total = total + other
            for method, unit in (("all_reduce_", 1), ("reduce_scatter_", 1), ("all_gather_", 1), ("broadcast_", 1),
                                 ("reduce_scatter_", 32), ("all_gather_", 32)):  # fmt: skip
                if count % unit:
                    continue
                array = xp.array(brought[group.rank])
                options = {"unit": unit} if unit > 1 else {}
                getattr(group, method)(array, **options)
                group.join()
                found = xp.asnumpy(array)
                own = part_of(group.rank, group.size, count, unit)
                if method == "all_reduce_":
                    assert group.size > 2 or np.array_equal(found, total), (method, count, dtype)
                elif method == "reduce_scatter_":
                    assert group.size > 2 or np.array_equal(found[own], total[own]), (method, count, dtype, unit)
                elif method == "all_gather_":
                    for rank in range(group.size):
                        part = part_of(rank, group.size, count, unit)
                        assert np.array_equal(found[part], brought[rank][part]), (method, count, dtype, unit)
                else:
                    assert np.array_equal(found, brought[0])
                compared += 1
    return compared


class Trial:
    """A run's steps without its loop, the same on every rank."""

    def __init__(self, args: Any, group: Any, local: int, tokens: np.ndarray, zero: bool = False, shards: int = 0,
                 accumulate: int = 1) -> None:  # fmt: skip
        self.config, self.lr = PRESETS[args.config], args.lr
        self.backend = get_backend("cupy", args.precision, device=local)
        self.backend.group = None if isinstance(group, Alone) else group
        self.model = NanoEuler(self.config, self.backend)
        self.model.initialise(0)
        self.objective = NextTokens(self.config.head_weights)
        data = PackedTokens(tokens, self.config.context, self.config.prediction_heads, seed=0)
        rows = args.rows // accumulate
        self.batches = lambda step: [data.batch(step * accumulate + i, rows) for i in range(accumulate)]
        self.sharded = Sharded(self.model, self.backend, self.objective, shards=shards, batches=self.batches)
        from tinyforge.parallel.buckets import Buckets

        rank, buckets = self.sharded.rank, Buckets(self.model.buffer, self.model.ops())
        rank.optimizer = (
            ShardedAdamW(self.model.buffer, self.backend, None, group, buckets, shards) if zero
            else AdamW(self.model.buffer, self.backend, None, pieces_of(buckets, shards) if shards else None)
        )  # fmt: skip
        self.done = 0

    def run(self, steps: int) -> list[float]:
        sums, counts = [], []
        for step in range(self.done, self.done + steps):
            batches = self.batches(step)
            counts.append(sum(self.objective.count(batch) for batch in batches))
            sums.append(_gradients(self.sharded.rank, step, counts[-1], Stream(0, f"noise/{step}")))
            clip(self.sharded.rank, 1.0)
            update(self.sharded.rank, self.lr * min(1.0, (step + 1) / 20))
        self.done += steps
        pairs = zip(sums, counts, strict=True)
        return [self.objective.figures(self.backend.to_numpy(s), c)["loss"] for s, c in pairs]

    def state(self) -> dict[str, np.ndarray]:
        return {what: self.backend.to_numpy(full(self.sharded.rank, what)).copy() for what in ("masters", "m", "v")}

    def take(self, state: dict[str, np.ndarray], done: int) -> Trial:
        optimizer = self.sharded.rank.optimizer
        assert optimizer is not None
        for what, flat in state.items():
            optimizer.take(what, self.backend.asarray(flat, self.backend.master_dtype))
        self.done = optimizer.step_count = done
        return self


def sha(state: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(state[what].tobytes() for what in ("masters", "m", "v"))).hexdigest()[:16]


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--config", default="small")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--exact-steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=6e-4)
    args = p.parse_args()
    if not started_as_rank():
        return start([sys.executable, *sys.orig_argv[1:]], args.gpus)
    text = "\n".join(documents("train", 4000, 0)).encode()
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    began = time.perf_counter()

    def say(line: str) -> None:
        if ranks.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

    with joined() as ranks:
        local = ranks.local_rank or 0
        backend = get_backend("cupy", args.precision, device=local)
        group = ranks.group(backend)
        group.be_patient(300.0)
        alone = Alone()
        say(f"{group.size} ranks, {backend.describe()}")
        say(f"collectives: {collectives(group, backend.xp)} compared")

        make = lambda of, **options: Trial(args, of, local, tokens, **options)  # noqa: E731
        one = make(alone, accumulate=group.size).run(args.steps)
        say(f"one GPU, {group.size} micro-batches: loss {one[0]:.4f} to {one[-1]:.4f}")
        first = make(group)
        many = first.run(args.steps)
        state = sha(first.state())
        say(f"all GPUs: loss {many[0]:.4f} to {many[-1]:.4f}, {state}")
        apart = np.abs(np.subtract(one, many))
        worst = float(apart.max())
        say(f"losses of {args.steps} steps: worst difference {worst:.2e}, at step {int(apart.argmax())}")
        again = make(group)
        losses = again.run(args.steps)
        assert losses == many and sha(again.state()) == state, "two runs of the same world differ"
        say("a second run on all GPUs: the same bytes")
        del first, again
        zero = make(group, zero=True)
        sharded = zero.run(args.steps)
        say(f"ZeRO: worst difference of the losses to all GPUs {np.abs(np.subtract(sharded, many)).max():.2e}")
        del zero

        n = args.exact_steps
        found = {}
        trial = make(alone, shards=group.size)
        trial.run(n // 2)
        half = trial.state()
        trial.run(n - n // 2)
        found["one GPU"] = sha(trial.state())
        moved = make(group, shards=group.size).take(half, n // 2)
        moved.run(n - n // 2)
        found["one, then all"] = sha(moved.state())
        trial = make(group, shards=group.size)
        trial.run(n // 2)
        half = trial.state()
        trial.run(n - n // 2)
        found["all"] = sha(trial.state())
        trial = make(group, shards=group.size, zero=True)
        trial.run(n)
        found["all, ZeRO"] = sha(trial.state())
        moved = make(alone, shards=group.size).take(half, n // 2)
        moved.run(n - n // 2)
        found["all, then one"] = sha(moved.state())
        say(f"--shards-per-step {group.size}, {n} steps: {found}")
        assert len(set(found.values())) == 1, "the bits depend on the world"
        say("everything holds")
    return 0


if __name__ == "__main__":
    from tinyforge.errors import run_command

    run_command(main)
