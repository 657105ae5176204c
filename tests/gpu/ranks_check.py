"""What must hold of NCCL's ranks, checked in each of them; `several_gpus.py` runs it among others.

    python tests/gpu/ranks_check.py --gpus 2 --config base --rows 64 --steps 300 --json ranks.json

collectives: against NumPy. losses: on all GPUs and on one with micro-batches, on text seen once. same: two
runs of the same world, ZeRO, and CUDA graphs end with the same bytes. bits: with --reduction-shards the same on one
GPU, on all, and on one after the other. Written down as it is found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.data.world import documents
from tinyforge.files import write_whole
from tinyforge.models.nanoeuler import PRESETS, NanoEuler
from tinyforge.parallel import Alone, part_of
from tinyforge.parallel.group import summed
from tinyforge.parallel.launch import init_process_group, start, started_as_rank
from tinyforge.rng import Stream
from tinyforge.tokenizers import Tokenizer
from tinyforge.train.batches import PackedTokens
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import DataParallel, clip, gradients_of, update
from tinyforge.train.objectives import NextTokens


def collectives(group: Any, xp: Any, counts: Sequence[int] = (1, 7, 64, 1000, 65_536, 1_000_001)) -> int:
    """Every collective next to NumPy: sizes that divide and not, of memory as it comes and of windows, of numbers so
    small that they have few bits; returns how many were compared."""
    compared = 0
    for count in counts:
        for dtype, scale in (("float32", 100), ("float64", 100), ("int32", 100), ("float32", 1e-41)):
            brought = [
                (np.random.default_rng((rank, count)).normal(size=count) * scale).astype(dtype)
                for rank in range(group.size)
            ]
            window = group.alloc_registered(count, np.dtype(dtype))
            trees_in_windows = group.alloc_registered(count, np.dtype(dtype), tree=True) is not None
            total, size = np.empty(count, dtype), np.abs(brought).sum(axis=0)
            summed([part.copy() for part in brought], group.size in (2, 4, 8), total)
            # Without `tree` NCCL adds in an order of its own.
            off = 0 * size if dtype == "int32" or group.size == 2 else group.size * np.finfo(dtype).eps * size
            trees = [("all_reduce_", 1, True), ("reduce_scatter_", 32, True)] if group.size in (2, 4, 8) else []
            for method, unit, tree in [
                ("all_reduce_", 1, False),
                ("reduce_scatter_", 1, False),
                *trees,
                ("all_gather_", 1, False),
                ("broadcast_", 1, False),
                ("reduce_scatter_", 32, False),
                ("all_gather_", 32, False),
            ]:
                if count % unit:
                    continue
                options: dict[str, Any] = ({"unit": unit} if unit > 1 else {}) | ({"tree": True} if tree else {})
                own = part_of(group.rank, group.size, count, unit)
                for array in (xp.empty(count, dtype), window):
                    if array is None or (tree and array is window and not trees_in_windows):
                        continue
                    array[...] = xp.array(brought[group.rank])
                    getattr(group, method)(array, **options)
                    group.join()
                    found, what = xp.asnumpy(array), (method, count, dtype, scale, unit, tree, array is window)
                    if method in ("all_reduce_", "reduce_scatter_"):
                        error = np.abs(found.astype(float) - total)
                        wrong = error > (0 if tree else off)
                        assert not wrong[own if method == "reduce_scatter_" else slice(None)].any(), what
                    elif method == "all_gather_":
                        for rank in range(group.size):
                            part = part_of(rank, group.size, count, unit)
                            assert np.array_equal(found[part], brought[rank][part]), what
                    else:
                        assert np.array_equal(found, brought[0]), what
                    compared += 1
    return compared


class Trial:
    """A run's steps without its loop, the same on every rank."""

    def __init__(
        self,
        args: Any,
        group: Any,
        local: int,
        tokens: np.ndarray,
        zero: int = 0,
        shards: int = 0,
        accumulate: int = 1,
        capture: bool = False,
    ) -> None:
        self.config, self.lr = PRESETS[args.config], args.lr
        self.backend = get_backend("cupy", args.precision, device=local)
        self.backend.group = None if isinstance(group, Alone) else group
        self.model = NanoEuler(self.config, self.backend)
        self.model.initialise(0)
        self.objective = NextTokens(self.config.head_weights)
        data = PackedTokens(tokens, self.config.context, self.config.prediction_heads, seed=0)
        rows = args.rows // accumulate
        self.batches = lambda step: [data.batch(step * accumulate + i, rows) for i in range(accumulate)]
        parallel = DataParallel(self.model, self.backend, self.objective, shards=shards, batches=self.batches)
        self.rank = parallel.rank
        self.optimizer = self.rank.make_optimizer(None, zero, accumulate)
        self.captured = Captured(parallel, self.optimizer, 1.0) if capture else None
        self.done = 0

    def run(self, steps: int) -> list[float]:
        sums, counts = [], []
        for step in range(self.done, self.done + steps):
            batches = self.batches(step)
            counts.append(sum(self.objective.count(batch) for batch in batches))
            noise, lr = Stream(0, f"noise/{step}"), self.lr * min(1.0, (step + 1) / 20)
            if self.captured:
                sums.append(self.captured.of_rank(batches, noise, lr)[0].sums)
                continue
            sums.append(gradients_of(self.rank, step, counts[-1], noise))
            clip(self.rank, 1.0)
            update(self.rank, lr)
        self.done += steps
        pairs = zip(sums, counts, strict=True)
        return [self.objective.figures(self.backend.to_numpy(s), c)["loss"] for s, c in pairs]

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """What this rank's optimizer owns."""
        names = [p.name for p in self.optimizer.owned()]
        return {what: dict(zip(names, self.optimizer.tensors(what), strict=True)) for what in ("masters", "m", "v")}

    def take(self, state: dict[str, dict[str, np.ndarray]], done: int) -> Trial:
        for what, tensors in state.items():
            for p in self.model.buffer.params:
                self.optimizer.take(what, p, self.backend.asarray(tensors[p.name], self.backend.master_dtype))
        if self.model.buffer.masters is not None:
            self.model.buffer.publish()
        self.done = self.optimizer.step_count = done
        return self

    def sha(self) -> str:
        """Of the state of all ranks, on rank 0; all call it."""
        own = {
            f"{what} {name}": hashlib.sha256(tensor.tobytes()).hexdigest()
            for what, tensors in self.state().items()
            for name, tensor in tensors.items()
        }
        found: dict[str, str] = {}
        for of_rank in self.rank.group.gather_objects(own) or ():
            found |= of_rank
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


PARTS = ("collectives", "losses", "same", "bits")
# Of losses in float64, at most, and in so many steps: training amplifies rounding (docs/parallel.md).
APART, UNTIL = 1e-3, 150
TOKENIZERS = {512: "small", 4096: "storyteller"}  # of the checkpoints that are shipped, by their sizes


def text_of(vocab: int, count: int) -> np.ndarray:
    """So many tokens of the built-in world's text."""
    folder = Path(__file__).resolve().parents[2] / "models/nanoeuler" / TOKENIZERS[vocab]
    tokenizer, ids = Tokenizer.load(folder / "tokenizer.json"), list[int]()
    for document in documents("train", count, 0):
        if len(ids) >= count:
            break
        ids += tokenizer.encode(document + "\n")
    return np.array(ids[:count], np.int32)


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--config", default="small")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--exact-steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=6e-4)
    p.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    p.add_argument("--json")
    args = p.parse_args()
    if not started_as_rank():
        return start([sys.executable, *sys.orig_argv[1:]], args.gpus)
    config = PRESETS[args.config]
    # Of the losses' rows none comes twice: an epoch has one window fewer than the text.
    rows = args.rows * args.steps if "losses" in args.only else 2000
    tokens = text_of(config.vocab, (rows + 2) * config.context)
    began = time.perf_counter()
    found: dict[str, Any] = {"precision": args.precision, "config": args.config, "rows": args.rows, "holds": False}

    def note(**figures: Any) -> None:
        """Say and write down what was found, on rank 0."""
        found.update(figures)
        if ranks.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s  {figures}", flush=True)
            if args.json:
                write_whole(Path(args.json), json.dumps(found, indent=1))

    def same(what: str, shas: dict[str, str]) -> None:
        """Fault where rank 0's differ; the other ranks have none."""
        if ranks.rank == 0 and len(set(shas.values())) > 1:
            raise SystemExit(f"{what}: {shas}")

    with init_process_group() as ranks:
        local = ranks.local_rank or 0
        backend = get_backend("cupy", args.precision, device=local)
        group = ranks.group(backend)
        group.be_patient(300.0)
        alone = Alone()
        note(ranks=group.size, device=backend.describe())
        make = lambda of, **options: Trial(args, of, local, tokens, **options)  # noqa: E731
        if "collectives" in args.only:
            note(collectives_compared=collectives(group, backend.xp))

        if "losses" in args.only:
            many = make(group).run(args.steps)
            note(loss=[many[0], many[-1]])
            one = make(alone, accumulate=group.size).run(args.steps)
            apart = np.abs(np.subtract(one, many))
            note(
                steps=args.steps,
                one_gpu_with_micro_batches_apart=float(apart.max()),
                at_step=int(apart.argmax()),
                apart_of_every_tenth_step=apart[::10].tolist(),
            )
            if (most := apart[:UNTIL].max()) > APART and args.precision == "fp64":
                raise SystemExit(f"the losses are {most:.1e} apart within {UNTIL} steps, expected {APART:g}")

        if "same" in args.only:
            n, shas, expected = args.exact_steps, dict[str, str](), list[float]()
            for name, zero in (
                ("all GPUs", 0),
                ("again", 0),
                ("ZeRO-1", 1),
                ("ZeRO-2", 2),
                ("captured", 0),
                ("ZeRO-1, captured", 1),
            ):
                trial = make(group, zero=zero, capture="captured" in name)
                losses = trial.run(n)
                expected = expected or losses
                shas[name] = trial.sha()
                apart = np.abs(np.subtract(losses, expected))
                note(same=shas, same_steps=n, **{f"{name}, losses apart": float(apart.max())})
                del trial
            # A sum of two numbers has one order. Of more, NCCL's reduce-scatter has another than its all-reduce.
            kinds = [["all GPUs", "again", "captured"], ["ZeRO-1", "ZeRO-1, captured"]]
            for names in [list(shas)] if group.size == 2 else kinds:
                same("two runs of the same world, or ZeRO, differ", {name: shas[name] for name in names})

        if "bits" in args.only:
            n, shards, shas = args.exact_steps, group.size, dict[str, str]()
            of_one = make(alone, shards=shards)
            losses = of_one.run(n // 2)
            half = of_one.state()
            losses += of_one.run(n - n // 2)
            shas["one GPU"] = of_one.sha()
            note(bits=shas)
            del of_one
            of_all = make(group, shards=shards)
            many = of_all.run(n // 2)
            half_of_all = of_all.state()
            many += of_all.run(n - n // 2)
            shas["all"] = of_all.sha()
            note(bits=shas)
            del of_all
            captured = make(group, shards=shards, capture=True)
            captured.run(n)
            shas["all, captured"] = captured.sha()
            del captured
            note(
                exact_steps=n,
                reduction_shards=shards,
                losses_apart=float(np.abs(np.subtract(losses, many)).max()),
                bits=shas,
            )
            for name, of, state, zero in (
                ("one, then all", group, half, 0),
                ("all, then one", alone, half_of_all, 0),
                ("one, then all with ZeRO-2", group, half, 2),
            ):
                moved = make(of, shards=shards, zero=zero).take(state, n // 2)
                moved.run(n - n // 2)
                shas[name] = moved.sha()
                note(bits=shas)
                del moved
            same("the bits depend on the world", shas)
        note(holds=True)
    return 0


if __name__ == "__main__":
    from tinyforge.errors import run_command

    run_command(main)
