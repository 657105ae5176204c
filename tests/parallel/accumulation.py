"""How far two ways of summing one batch's gradient drift apart, by precision: micro-batches on one rank, or two ranks.

    python tests/parallel/accumulation.py --steps 300
    python tests/parallel/accumulation.py --larger bytes tokens      how much of it the text makes; a quarter of an hour

Both see the same rows and take the same sums. What is printed is the largest difference of their losses; and, as a
measure of how training amplifies rounding, of the losses of one rank when a tenth of the weights are moved by their
last bit before it begins. bf16 is emulated: what the ops read and return is rounded to bfloat16; sums, gradients,
masters and the loss are float32, as on a GPU. --larger: the last bits of a larger model in float32, on text as bytes, a
few of which always tell the next, and as tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge.backends import get_backend
from tinyforge.data.world import documents
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.tensors import encoded
from tinyforge.tokenizers import Tokenizer
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import DataParallel, clip, update
from tinyforge.train.objectives import NextTokens

CONFIG = Config(
    dim=64, heads=4, kv_heads=2, layers=2, context=32, vocab=256, mtp_heads=2, hidden=128, mtp_weights=(1, 0.5)
)
ROWS, LR = 16, 6e-4
LARGER = Config(
    dim=192, heads=6, kv_heads=2, layers=6, context=64, vocab=4096, mtp_heads=2, hidden=384, mtp_weights=(1, 0.5)
)
TOKENIZER = Path(__file__).resolve().parents[2] / "models/nanoeuler/storyteller/tokenizer.json"  # of 4,096 ids


def bfloat16(x: Any) -> Any:
    """x rounded to bfloat16, in its own type."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        return x
    return (encoded(x, "bf16").astype(np.uint32) << 16).view(np.float32)


def rounded(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        return tuple(map(bfloat16, found)) if isinstance(found, tuple) else bfloat16(found)

    return run


def stored_low(model: NanoEuler) -> NanoEuler:
    """What the model's ops return is rounded from now on."""
    for op in model.ops():
        if not op.per_head:  # the loss
            vars(op).update(forward=rounded(op.forward), backward=rounded(op.backward))
    return model


def text_as(kind: str, documents_of: int) -> np.ndarray:
    """The built-in world's text as "bytes" or "tokens"."""
    text = "\n".join(documents("train", documents_of, 0))
    found = Tokenizer.load(TOKENIZER).encode(text) if kind == "tokens" else np.frombuffer(text.encode(), np.uint8)
    return np.asarray(found, np.int32)


def losses(
    precision: str,
    workers: int,
    micro_batches: int,
    steps: int,
    lr: float = LR,
    nudge: bool = False,
    seed: int = 0,
    config: Config = CONFIG,
    tokens: np.ndarray | None = None,
) -> np.ndarray:
    """The losses of a run. nudge: every tenth weight is moved by its last bit before it begins."""
    low = precision == "bf16"
    backend = get_backend("numpy", "fp32" if low else precision, workers=workers)
    model = NanoEuler(config, backend)
    model.initialise(seed)
    buffer = model.buffer
    if nudge:
        buffer.values[::10] = np.nextafter(buffer.values[::10], np.inf, dtype=buffer.values.dtype)
    if low:
        buffer.masters = buffer.values.copy()
        buffer.values[...] = bfloat16(buffer.masters)
        of_a_worker = model.replica
        vars(model)["replica"] = lambda: stored_low(of_a_worker())
        stored_low(model)
    data = PackedTokens(
        text_as("bytes", 2000) if tokens is None else tokens, config.context, config.prediction_heads, seed=0
    )
    rows = ROWS // micro_batches
    objective = NextTokens(config.head_weights)
    parallel = DataParallel(model, backend, objective)
    parallel.rank.make_optimizer(None)
    found = []
    for step in range(steps):
        batches = [data.batch(step * micro_batches + i, rows) for i in range(micro_batches)]
        totals = parallel.gradients(batches)
        found.append(objective.figures(totals.sums, totals.counts)["loss"])
        clip(parallel.rank, 1.0)
        update(parallel.rank, lr * min(1.0, (step + 1) / 20))
        if low:
            buffer.values[...] = bfloat16(buffer.masters)
    parallel.group.close()
    return np.array(found)


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--lr", type=float, default=LR)
    p.add_argument("--larger", nargs="+", choices=("bytes", "tokens"))
    args = p.parse_args()
    for kind in args.larger or ():
        text = text_as(kind, 12_000)
        one, moved = (
            losses("fp32", 1, 2, args.steps, args.lr, nudge, config=LARGER, tokens=text) for nudge in (False, True)
        )
        apart = np.abs(one - moved).max()
        print(f"  {kind}: last bits moved {apart:.1e}; loss {one[0]:.3f} to {one[-1]:.3f}", flush=True)
    if args.larger:
        return 0
    print(f"largest difference of the losses of {args.steps} steps, {ROWS} x {CONFIG.context} tokens each:")
    for precision in ("fp64", "fp32", "bf16"):
        one = losses(precision, 1, 2, args.steps, args.lr)
        two = losses(precision, 2, 1, args.steps, args.lr)
        moved = losses(precision, 1, 2, args.steps, args.lr, nudge=True)
        print(
            f"  {precision}: 2 micro-batches and 2 ranks {np.abs(one - two).max():.1e}, last bits moved "
            f"{np.abs(one - moved).max():.1e}; loss {one[0]:.3f} to {one[-1]:.3f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
