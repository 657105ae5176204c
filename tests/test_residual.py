"""The residual stream: what is fused equals the plain ops one after the other, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import get_backend
from tinyforge.kernel import Array, Kernel
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config, Llama
from tinyforge.op import Op, Param, Stash
from tinyforge.params import with_buffer
from tinyforge.residual import Addend, AttentionContext, PreNorm, ResidualStream
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)
LLAMA: dict[str, Any] = {"dim": 12, "heads": 3, "kv_heads": 1, "layers": 1, "context": 9, "vocab": 5, "hidden": 7}
GPT: dict[str, Any] = {"dim": 12, "heads": 3, "layers": 1, "context": 9, "vocab": 5}


def drop(rate: float) -> ops.Dropout:
    return ops.Dropout(rate, FP64, "dropout")


class Calls:
    """Counts the kernels that ops call, by name."""

    def __init__(self, *found: Op) -> None:
        self.names: list[str] = []
        for op in found:
            for attribute in dir(type(op)):
                if isinstance(kernel := getattr(type(op), attribute), Kernel):
                    right = getattr(op, attribute)
                    setattr(op, attribute, lambda *a, _n=kernel.name, _f=right: (self.names.append(_n), _f(*a))[1])


@pytest.mark.parametrize(
    ("rate", "adds", "kernels"),
    [
        (0.0, True, ["linear_add_fwd", "rmsnorm_fwd"]),
        (0.0, False, ["linear_fwd", "add_rmsnorm_fwd"]),
        (0.4, True, ["linear_fwd", "add_rmsnorm_fwd"]),
    ],
)
def test_an_addition_is_part_of_the_product_or_of_the_next_norm(
    rate: float, adds: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x, h = rng.normal(size=(2, 2, 3, 4))
    out = with_buffer(ops.Linear(Param("out", (4, 4), std=1.0), FP64), FP64, rng)
    norm = with_buffer(ops.AddRMSNorm(Param("gain", (4,), fill=1.0), FP64), FP64, rng)
    monkeypatch.setattr(out, "adds", adds)
    stash, calls, dropout = Stash(Stream(1, "noise")), Calls(out, norm), drop(rate)
    stream = ResidualStream(x)
    stream.add(Addend(lambda **add: out.forward(h, stash, **add), out, dropout, stash))
    y = PreNorm(norm).forward(stream, stash)
    assert calls.names == kernels
    expected = x + drop(rate).forward(h @ out.weight.value.T, Stash(Stream(1, "noise")))
    np.testing.assert_allclose(stream.x, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(y, norm.normed(expected), rtol=0, atol=1e-13)
    assert [owner for owner, _ in stash] == [out, dropout, norm]


def test_attention_begins_at_the_first_position_and_a_checkpoint_computes_without_a_stash() -> None:
    model = Llama(Config(**LLAMA), FP64, recompute="blocks")
    model.initialise(seed=0)
    attention, h = model.blocks[0].attention, np.random.default_rng(0).normal(size=(1, 4, 12))
    alone, told, later = (
        attention.forward(h, None, *context).value()
        for context in ((), (AttentionContext(offset=0),), (AttentionContext(offset=3),))
    )
    assert np.array_equal(alone, told)
    # RoPE's scores depend on differences of positions: other bits at most.
    np.testing.assert_allclose(later, alone, rtol=1e-12)
    plain = Llama(Config(**LLAMA), FP64, values=model.buffer.values)
    ids = np.arange(4)[None]
    assert np.array_equal(model.hidden(ids), plain.hidden(ids))


def test_a_norm_must_read_the_stream_between_two_additions() -> None:
    stream, one = ResidualStream(np.zeros((1, 1, 4))), np.ones((1, 1, 4))
    stream.add(one)
    with pytest.raises(RuntimeError, match="owes an addition already"):
        stream.add(one)


def plain_attention(block: Any, rope: bool) -> list[Op]:
    """The branch as single ops. Their parameters are the block's."""
    a = block.attention
    qkv, out = (ops.Linear(op.weight, FP64, bias=op.bias) for op in (a.qkv, a.out))
    return [qkv, *(norm for norm, _ in a.head_norms), *([a.rope] if rope else []), a.attention, out, a.dropout]


def through(chain: list[Any], block: Any, x: Array, stash: Stash) -> Array:
    """The chain forward: reshapes around attention, and each norm of heads on its own heads."""
    heads = {id(norm): where for norm, where in block.attention.head_norms}
    for op in chain:
        if id(op) in heads:
            y = x.copy()
            y[:, :, heads[id(op)]] = op.forward(np.ascontiguousarray(x[:, :, heads[id(op)]]), stash)
            x = y
        else:
            x = op.forward(x, stash=stash)
            if x.ndim == 4 and isinstance(op, ops.Attention):
                x = x.reshape(*x.shape[:2], -1)
            elif op is chain[0] and any(isinstance(later, ops.Attention) for later in chain):
                x = x.reshape(*x.shape[:2], -1, block.attention.head_dim)
    return x


def back(chain: list[Any], block: Any, dy: Array, stash: Stash) -> Array:
    heads = {id(norm): where for norm, where in block.attention.head_norms}
    for op in reversed(chain):
        if id(op) in heads:
            dx = dy.copy()
            dx[:, :, heads[id(op)]] = op.backward(np.ascontiguousarray(dy[:, :, heads[id(op)]]), stash)
            dy = dx
        else:
            if isinstance(op, ops.Attention):
                dy = dy.reshape(*dy.shape[:2], -1, block.attention.head_dim)
            elif op is chain[0]:
                dy = dy.reshape(*dy.shape[:2], -1)
            dy = op.backward(dy, stash)
    return dy


def reference(block: Any, norms: list[Any], branches: list[list[Any]], x: Array, dy: Array) -> tuple[Array, Array]:
    """x + branch(norm(x)) twice, every addition on its own, and its gradient."""
    stash = Stash(Stream(1, "noise"))
    for norm, branch in zip(norms, branches, strict=True):
        x = x + through(branch, block, norm.forward(x, stash), stash)
    for norm, branch in zip(reversed(norms), reversed(branches), strict=True):
        dy = dy + norm.backward(back(branch, block, dy, stash), stash)
    assert not len(stash)
    return x, dy


def fused(block: Any, x: Array, dy: Array) -> tuple[Array, Array]:
    stash, stream = Stash(Stream(1, "noise")), ResidualStream(x)
    block.forward(stream, stash)
    dx = block.backward(dy, stash)
    assert not len(stash)
    return stream.x if stream.owed is None else stream.x + stream.owed, dx


def check(model: Any, norms: list[Any], branches: list[list[Any]]) -> None:
    """The same results and the same gradients of all parameters."""
    rng, found = np.random.default_rng(2), []
    x, dy = rng.normal(size=(2, 2, 7, 12))
    for run in (lambda: reference(model.blocks[0], norms, branches, x, dy), lambda: fused(model.blocks[0], x, dy)):
        for p in model.params():
            p.grad[...] = 0
        found.append([*run(), model.buffer.grads.copy()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert np.count_nonzero(found[0][2]) > 400


def randomised(model: Any) -> Any:
    model.initialise(0)
    model.buffer.values[...] += 0.3 * np.random.default_rng(1).normal(size=model.buffer.values.shape)
    return model


@pytest.mark.parametrize(
    "values", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"window": 3}, {"dropout": 0.3}], ids=str
)
def test_a_block_of_llama_is_its_plain_ops(values: dict[str, Any]) -> None:
    model = randomised(Llama(Config(**LLAMA, **values), FP64))
    block = model.blocks[0]
    norms = [ops.RMSNorm(norm.op.weight, FP64, norm.op.eps) for norm in (block.norm1, block.norm2)]
    up, down = (ops.Linear(op.weight, FP64) for op in (block.mlp.up, block.mlp.down))
    check(model, norms, [plain_attention(block, True), [up, ops.SwiGLU(FP64), down, block.mlp.dropout]])


@pytest.mark.parametrize("recompute", ["", "norms"])
@pytest.mark.parametrize("values", [{}, {"bias": False}, {"dropout": 0.3}], ids=str)
def test_a_block_of_gpt2_is_its_plain_ops(values: dict[str, Any], recompute: Any) -> None:
    model = randomised(GPT2(GPT2Config(**GPT, **values), FP64, recompute=recompute))
    block = model.blocks[0]
    norms = [ops.LayerNorm(n.op.weight, n.op.bias, FP64, n.op.eps) for n in (block.norm1, block.norm2)]
    up, down = block.mlp.up, block.mlp.down
    gelu, last = ops.GELU(FP64, bias=down.input_bias), ops.Linear(down.weight, FP64, bias=down.bias)
    check(model, norms, [plain_attention(block, False), [up, gelu, last, block.mlp.dropout]])
