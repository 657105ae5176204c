"""How the work of a batch is spread over blocks: nothing lost, nothing twice, and a queue that is never overrun."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.infer.cuda.decode_batched_plan import TEAM_ROWS, BatchPlan
from tinyforge.infer.cuda.plan import TILE

SMALL = BatchPlan(
    dim=64,
    hidden=26,
    heads=4,
    kv_heads=2,
    layers=2,
    vocab=19,
    outputs=3,
    batch=20,
    itemsize=4,
    blocks=11,
    shared=160 << 10,
)
BASE = BatchPlan(
    dim=768,
    hidden=2048,
    heads=12,
    kv_heads=4,
    layers=16,
    vocab=4096,
    outputs=4,
    batch=64,
    itemsize=2,
    blocks=264,
    shared=113 << 10,
    resident=2,
)
ALONE = replace(BASE, blocks=132, shared=227 << 10, resident=1)
PLANS = [
    SMALL,
    BASE,
    *(replace(BASE, batch=batch) for batch in (2, 16, 17, 70, 300)),
    replace(BASE, shared=99 << 10),
    ALONE,
    replace(ALONE, itemsize=4),
    replace(ALONE, itemsize=8),
    replace(ALONE, blocks=4),
    replace(ALONE, depth=16),
    replace(ALONE, dim=1024, heads=16, layers=20, vocab=8192, hidden=2816),
]


def unpacked(plan: BatchPlan, unit: np.ndarray) -> np.ndarray:
    """Units of weights, (..., 32 lanes x piece), as (..., 8 rows, columns): what each lane holds in its pieces."""
    lanes = unit.reshape(*unit.shape[:-1], TILE, 4, plan.piece)
    rows = np.zeros((*unit.shape[:-1], TILE, 4 * plan.piece), unit.dtype)
    for c in range(4):
        for i in range(plan.piece):
            if plan.itemsize == 2:  # m16n8k16: registers of a right operand for two times 16 columns
                step, register, half = i // 4, i // 2 % 2, i % 2
                rows[..., step * 16 + register * 8 + c * 2 + half] = lanes[..., c, i]
            else:
                rows[..., c * plan.piece + i] = lanes[..., c, i]
    return rows


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_each_block_takes_its_rows_in_the_order_of_the_pass(itemsize: int) -> None:
    plan, rng = replace(SMALL, itemsize=itemsize, heads=2, kv_heads=1), np.random.default_rng(0)
    dtype = np.dtype({2: np.int16, 4: np.float32, 8: np.float64}[itemsize])
    width = (plan.heads + 2 * plan.kv_heads) * plan.head_dim

    def matrix(*shape: int) -> np.ndarray:
        return rng.integers(-99, 99, shape).astype(dtype)

    layers = [FusedLayer(matrix(width, 64), matrix(64, 64), matrix(52, 64), matrix(64, 26)) for _ in range(2)]
    heads = matrix(3, 19, 64)
    stream = plan.arrange(layers, heads, np).view(dtype)
    assert plan.team == 5
    assert stream.shape == (5, plan.warps, plan.lengths[-1].max(), 32 * plan.piece)

    # Read as the kernel does: a matrix-vector product of each tile, from what each lane takes.
    x = rng.integers(-99, 99, 64)
    hidden = np.zeros(plan.padded(26), int)
    hidden[: len(plan.hidden_order)] = np.where(plan.hidden_order < 26, x[np.minimum(plan.hidden_order, 25)], 0)
    taken = np.zeros(5, int)
    products = []
    for count, columns in plan.products():
        rows, steps = np.zeros(count * TILE, int), plan.steps(columns)
        padded = np.zeros(plan.padded(columns), int)
        padded[:columns] = x[:columns]
        if columns == 26:
            padded = hidden
        for block in range(5):
            for tile in range(plan.shares(count)[block], plan.shares(count)[block + 1]):
                units = unpacked(plan, stream[block, :, taken[block] : taken[block] + steps]).astype(int)
                rows[tile * TILE :][:TILE] = np.einsum("wsrc,wsc->r", units, padded.reshape(plan.warps, steps, -1))
                taken[block] += steps
        products.append(rows)
    assert taken.tolist() == plan.lengths[-1].tolist()
    for i, layer in enumerate(layers):
        qkv, out, gate_up, down = products[4 * i : 4 * i + 4]
        layer = FusedLayer(*(m.astype(int) for m in layer))
        np.testing.assert_array_equal(qkv, (layer.qkv @ x)[plan.rope_order])
        np.testing.assert_array_equal(out, layer.out @ x)
        np.testing.assert_array_equal(down, layer.down @ x[:26])
        gate, up = gate_up.reshape(-1, 2).T[:, :26]
        np.testing.assert_array_equal(np.concatenate([gate, up]), layer.gate_up @ x)
    np.testing.assert_array_equal(np.stack(products[-3:])[:, :19], heads.astype(int) @ x)


def test_the_pairs_that_rope_turns_are_neighbours() -> None:
    pairs = BASE.rope_order.reshape(-1, 2)
    assert sorted(BASE.rope_order.tolist()) == list(range(1280))
    assert (pairs[:, 1] - pairs[:, 0] == 32).all() and (pairs[:, 0] % 64 < 32).all()


@pytest.mark.parametrize("hidden", [5, 16, 154, 2048])
def test_every_hidden_unit_has_one_column(hidden: int) -> None:
    order = replace(BASE, hidden=hidden).hidden_order
    assert sorted(order.tolist()) == list(range(len(order))) and hidden <= len(order) < hidden + 16
    # Units 2 i and 2 i + 1 of a tile share a word, the four of a tile two words of the same lane.
    assert (order.reshape(-1, 2)[:, 1] - order.reshape(-1, 2)[:, 0] == 1).all()
    assert (order.reshape(-1, 2, 8) // 4 == order.reshape(-1, 2, 8)[:, :1] // 4).all()


@pytest.mark.parametrize("plan", PLANS)
def test_a_queue_holds_at_least_a_tile(plan: BatchPlan) -> None:
    assert plan.shared_bytes <= plan.shared and plan.slots >= max(plan.steps(plan.dim), plan.steps(plan.hidden))
    assert plan.slots & (plan.slots - 1) == 0


@pytest.mark.parametrize("plan", PLANS)
def test_teams_share_the_device_and_blocks_the_tiles(plan: BatchPlan) -> None:
    assert plan.teams * TEAM_ROWS >= plan.batch > (plan.teams - 1) * TEAM_ROWS
    assert plan.blocks - plan.teams < plan.teams * plan.team <= plan.blocks
    for count, _ in plan.products():
        shares = np.diff(plan.shares(count))
        assert shares.sum() == count and shares.max() - shares.min() <= 1
    assert (np.diff(plan.lengths, axis=0) >= 0).all()


def test_shapes_that_the_kernel_cannot_take_are_refused() -> None:
    with pytest.raises(UserError, match="head size 48 at 2 bytes a number, expected one of 32, 64, 128"):
        replace(BASE, dim=576)
    with pytest.raises(UserError, match="head size 8 at 4 bytes a number, expected one of 16, 32, 64, 128"):
        replace(SMALL, heads=8)
    with pytest.raises(UserError, match="head size 16 at 2 bytes a number, expected one of 32, 64, 128"):
        replace(BASE, dim=192)
    with pytest.raises(UserError, match="24 heads share 1 key heads, expected at most 16 to a key head"):
        replace(BASE, heads=24, kv_heads=1)
    with pytest.raises(UserError, match="50 rows, expected at most 48 on this device"):
        replace(ALONE, batch=50, blocks=3)
    with pytest.raises(UserError, match="60000 bytes of shared memory per block do not hold 8 rows of 2048 numbers"):
        replace(BASE, shared=60000)
