"""How a decoder's work is spread over blocks: nothing lost, nothing twice, and a queue that is never overrun."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tinyforge.backends.compile import read
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.infer.cuda.arguments import POINTER, SAMPLER, packed, sampler
from tinyforge.infer.cuda.decode_single_plan import FOUR_BITS, QUEUE_BARRIERS, RowPlan
from tinyforge.infer.cuda.plan import MOST_PLACES, TILE
from tinyforge.infer.sampling import Sampling
from tinyforge.quantised_groups import dequantise_groups, quantise_groups

SMALL = RowPlan(
    dim=64,
    hidden=26,
    heads=4,
    kv_heads=2,
    layers=2,
    vocab=19,
    outputs=3,
    rows=2,
    itemsize=4,
    blocks=5,
    shared=160 << 10,
)
BASE = RowPlan(
    dim=768,
    hidden=2048,
    heads=12,
    kv_heads=4,
    layers=16,
    vocab=4096,
    outputs=4,
    rows=1,
    itemsize=2,
    blocks=132,
    shared=227 << 10,
)
PLANS = [
    SMALL,
    BASE,
    *(replace(BASE, rows=rows) for rows in (2, 3, 4)),
    replace(BASE, itemsize=4, rows=4),
    replace(BASE, shared=99 << 10),
    replace(BASE, blocks=1),
    replace(BASE, depth=16),
    replace(BASE, dim=1024, heads=16, layers=20, vocab=8192, hidden=2816, rows=4),
]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_each_block_takes_its_rows_in_the_order_of_the_pass(itemsize: int) -> None:
    plan, rng = replace(SMALL, itemsize=itemsize, heads=2, kv_heads=1), np.random.default_rng(1)
    width = (plan.heads + 2 * plan.kv_heads) * plan.head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.integers(0, 1 << 16, (rows, columns)).astype(f"u{itemsize}")

    layers = [FusedLayer(matrix(width, 64), matrix(64, 64), matrix(52, 64), matrix(64, 26)) for _ in range(2)]
    heads = np.stack([matrix(19, 64) for _ in range(3)])
    stream = plan.arrange(layers, heads, np)
    assert stream.shape == (5, plan.lengths[-1].max(), plan.warps, 32 * plan.piece)
    if itemsize == 2:  # a tensor core takes columns 0, 1, 4, 5 of a piece before 2, 3, 6, 7
        stream = stream.reshape(*stream.shape[:3], 32, 2, 2, 2).swapaxes(4, 5).reshape(stream.shape)

    # Read as the kernel does: a matrix-vector product of each tile, from what each lane takes.
    x = np.random.default_rng(0).normal(size=64)
    taken, dealt = np.zeros(5, int), 0
    products = []
    for count, columns in plan.deals():
        rows = np.zeros(count * TILE)
        for tile in range(count if columns else 0):
            block, steps = (dealt + tile) % 5, plan.steps(columns)
            padded = np.zeros(plan.warps * steps * 4 * plan.piece)
            padded[:columns] = x[:columns]
            units = stream[block, taken[block] :][:steps].swapaxes(0, 1).reshape(plan.warps, steps, TILE, -1)
            rows[tile * TILE :][:TILE] = np.einsum("wsrc,wsc->r", units, padded.reshape(plan.warps, steps, -1))
            taken[block] += steps
        products.append(rows)
        dealt += count
    assert taken.tolist() == plan.lengths[-1].tolist()
    for i, layer in enumerate(layers):
        qkv, _, out, gate_up, down = products[5 * i : 5 * i + 5]
        np.testing.assert_allclose(qkv, layer.qkv @ x)
        np.testing.assert_allclose(out, layer.out @ x)
        np.testing.assert_allclose(down, layer.down @ x[:26])
        pairs = np.empty((8, 2, 4))
        pairs[plan.hidden_order] = gate_up.reshape(8, 2, 4)
        gate, up = pairs.transpose(1, 0, 2).reshape(2, -1)[:, :26]
        np.testing.assert_allclose(np.concatenate([gate, up]), layer.gate_up @ x)
    np.testing.assert_allclose(np.stack(products[-3:])[:, :19], heads @ x)


def test_codes_and_scales_lie_as_the_weights_do() -> None:
    """A code lies where the number would lie that it stands for, in a piece of fewer bytes, and so does its scale."""
    plan, rng = SMALL, np.random.default_rng(0)
    shapes = [((plan.heads + 2 * plan.kv_heads) * plan.head_dim, 64), (64, 64), (52, 64), (64, 26)]
    codes = [FusedLayer(*(rng.integers(1, 100, shape).astype(np.int8) for shape in shapes)) for _ in range(2)]
    heads = rng.integers(1, 100, (3, 19, 64)).astype(np.int8)
    small = replace(plan, code="int8")
    numbers = [FusedLayer(*(m.astype(np.int32) for m in layer)) for layer in codes]
    wide = plan.arrange(numbers, heads.astype(np.int32), np)
    found = small.arrange(codes, heads, np)
    assert found.dtype == np.uint8 and np.array_equal(found, wide)
    assert small.slots == min(4 * plan.slots, MOST_PLACES) and small.shared_bytes <= plan.shared_bytes

    def across(layer: FusedLayer) -> FusedLayer:
        return FusedLayer(*(np.repeat(rows[:, None], shape[1], 1) for rows, shape in zip(layer, shapes, strict=True)))

    rows = [FusedLayer(*(rng.integers(1, 10**4, shape[0]).astype(np.float32) for shape in shapes)) for _ in range(2)]
    of_heads = rng.integers(1, 10**4, (3, 19)).astype(np.float32)
    scales = plan.arrange_scales([FusedLayer(*(r[:, None] for r in layer)) for layer in rows], of_heads[..., None], np)
    stream = plan.arrange([across(layer) for layer in rows], np.repeat(of_heads[..., None], 64, 2), np)
    taken, dealt, done = np.zeros(5, int), 0, 0
    for count, columns in plan.deals():
        for tile in range(count if columns else 0):
            block = (dealt + tile) % 5
            first = stream[block, taken[block], 0].view(np.float32).reshape(TILE, -1)[:, 0]  # a column of its 8 rows
            assert np.array_equal(first, scales[(done + tile) * TILE :][:TILE])
            taken[block] += plan.steps(columns)
        dealt, done = dealt + count, done + count
    assert len(scales) == done * TILE


@pytest.mark.parametrize("plan", PLANS)
def test_a_queue_holds_the_tiles_that_are_multiplied_at_one_time(plan: RowPlan) -> None:
    assert plan.shared_bytes <= plan.shared
    for count, columns in plan.deals():
        tiles = min(plan.tiles, -(-count // plan.blocks))
        assert 1 <= plan.tiles <= 4 and (not columns or tiles * plan.steps(columns) <= plan.slots)


@pytest.mark.parametrize("plan", PLANS)
def test_blocks_have_about_as_much_to_read(plan: RowPlan) -> None:
    lengths = plan.lengths[-1]
    assert lengths.max() <= 1.1 * lengths.mean() + 4 * max(plan.steps(plan.dim), plan.steps(plan.hidden))
    assert (np.diff(plan.lengths, axis=0) >= 0).all()


@pytest.mark.parametrize("plan", [*PLANS, replace(BASE, blocks=7), replace(BASE, hidden=5)])
def test_the_hidden_units_of_a_block_are_side_by_side(plan: RowPlan) -> None:
    order = plan.hidden_order
    assert sorted(order.tolist()) == list(range(plan.hidden_rows // 4))
    for block in range(min(plan.blocks, len(order))):
        assert (np.diff(order[block :: plan.blocks]) == 1).all()


def test_the_barriers_of_a_queue_have_the_room_that_the_kernel_takes() -> None:
    assert f"constexpr int QUEUE_BARRIERS = {QUEUE_BARRIERS};" in read("infer/cuda/decode.cuh")


def test_a_queue_has_a_power_of_2_of_places() -> None:
    assert BASE.slots == 32 and replace(BASE, depth=31).slots == 16 and replace(BASE, depth=16).slots == 16


def test_a_vocabulary_too_large_to_sort_is_not_drawn_from() -> None:
    large = replace(BASE, vocab=32000)
    assert BASE.draws and not large.draws and large.slots == BASE.slots
    # Half as many places to copy weights to are enough to draw.
    assert replace(BASE, vocab=16384).draws and replace(BASE, vocab=16384).slots == 16


def test_shapes_that_the_kernel_cannot_take_are_refused() -> None:
    with pytest.raises(UserError, match="head size 48 at 2 bytes a number, expected a power of 2"):
        replace(BASE, dim=576)
    with pytest.raises(UserError, match="head size 16 at 2 bytes a number, expected a power of 2 of at least 32"):
        replace(BASE, dim=192)
    with pytest.raises(UserError, match="24 heads share 1 key heads, expected at most 16 to a key head"):
        replace(BASE, heads=24, kv_heads=1)
    with pytest.raises(UserError, match="20000 bytes of shared memory per block do not hold a row of 2048 numbers"):
        replace(BASE, shared=20000)


def test_arguments_are_packed_by_name_and_arrays_by_address() -> None:
    struct = np.dtype([("x", POINTER), ("y", POINTER), ("count", np.int32), ("how", SAMPLER)], align=True)
    array = SimpleNamespace(data=SimpleNamespace(ptr=4096))
    fields = {
        "how": sampler(Sampling(temperature=0.5, top_p=1.0, top_k=10**19), (1, 2)),
        "count": 3,
        "y": None,
        "x": array,
    }
    words = packed(struct, **fields).view(np.uint32).tolist()
    assert words == [4096, 0, 0, 0, 3, *np.array([0.5, 1, 0], np.float32).view(np.uint32), 2**31 - 1, 1, 2, 0]
    with pytest.raises(TypeError, match=r"arguments \['count', 'x'\], expected \['count', 'how', 'x', 'y'\]"):
        packed(struct, x=array, count=3)


GROUPED = replace(SMALL, dim=96, hidden=160, heads=3, kv_heads=1, itemsize=2, code=FOUR_BITS, warps=4, producers=4)


@pytest.mark.parametrize("plan", [GROUPED, replace(GROUPED, dim=512, hidden=1024, heads=16)], ids=["two", "four"])
def test_codes_of_four_bits_lie_as_the_lanes_read_them(plan: RowPlan) -> None:
    """Each lane's words, taken apart by the masks of codes.cuh, are the numbers of its columns; so are the heads'."""
    rng, width = np.random.default_rng(0), (plan.heads + 2 * plan.kv_heads) * plan.head_dim
    shapes = [(width, plan.dim), (plan.dim, plan.dim), (2 * plan.hidden, plan.dim), (plan.dim, plan.hidden)]
    layers = [[quantise_groups(rng.normal(size=shape)) for shape in shapes] for _ in range(plan.layers)]
    heads = rng.integers(-127, 128, (3, plan.vocab, plan.dim)).astype(np.int8)
    pairs = [tuple(FusedLayer(*(m[i] for m in layer)) for i in range(2)) for layer in layers]
    stream = plan.arrange_groups(pairs, heads, np)
    assert stream.shape == (plan.blocks, plan.lengths[-1].max(), plan.place_bytes)
    numbers = [FusedLayer(*(dequantise_groups(*m, np.dtype(np.float32)) for m in layer)) for layer in layers]
    matrices = list(plan._matrices(numbers, heads.astype(np.float32), np))
    taken, dealt, words = np.zeros(plan.blocks, int), 0, plan.warps * 32 * plan.span * 4
    for i, (matrix, (count, columns)) in enumerate(zip(matrices, plan.deals(), strict=True)):
        of_heads = i >= 5 * plan.layers
        for tile in range(count if columns else 0):
            block, units = (dealt + tile) % plan.blocks, plan.units(columns, of_heads=of_heads)
            read = np.ascontiguousarray(stream[block, taken[block] :][:units])
            found = np.zeros((TILE, plan.warps, plan.steps(columns), 4, 8), np.float32)  # row, warp, step, lane, column
            if of_heads:
                pieces = read[:, :words].view(np.int8).reshape(units, plan.warps, TILE, 4, plan.span // 2, 8)
                pieces = pieces.transpose(2, 1, 0, 4, 3, 5).reshape(found.shape)
                found[..., [0, 1, 4, 5, 2, 3, 6, 7]] = pieces
            else:
                codes = read[:, :words].view(np.uint32).reshape(units, plan.warps, TILE, 4, plan.span)
                scales = read[:, words:].view(np.float16).reshape(units, plan.warps, TILE, 1, plan.span)
                for k, (shift, mask) in enumerate([(0, 0xF), (0, 0xF0), (8, 0xF), (8, 0xF0)]):
                    for half in range(2):
                        bits = codes >> shift >> 16 * half & mask
                        value = (bits / (16.0 if mask > 0xF else 1.0) - 8) * scales
                        column = (0, 4, 2, 6)[k] + half
                        found[..., column] = value.transpose(2, 1, 0, 4, 3).reshape(found.shape[:-1])
            rows = found.reshape(TILE, -1)[:, :columns]
            expected = matrix[tile * TILE :][:TILE]
            np.testing.assert_array_equal(rows[: len(expected)], expected)
            taken[block] += units
        dealt += count
    assert taken.tolist() == plan.lengths[-1].tolist()
