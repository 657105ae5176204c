"""The parts of a block of Llama, built from a config: its norms, its self-attention, its MLP.

The ops that `--precision fp8` and the config's options ask for are chosen here and nowhere else: all of them are called
like the plain ones. In FP8 a norm's value is a `Scaled`, and so are the gradients that reach the MLP's products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.models.llama.config import Config
from tinyforge.op import Op, Param
from tinyforge.ops import (
    AddLayerNorm,
    AddRMSNorm,
    Attention,
    Dropout,
    FP8AddRMSNorm,
    FP8Linear,
    FP8LinearSwiGLU,
    FP8SwiGLULinear,
    GeGLU,
    GELULinear,
    Linear,
    LinearSwiGLU,
    Mix,
    QKNormRoPE,
    ReLU,
    RMSNorm,
    RoPE,
    RopeScaling,
    Scale,
    SiLU,
    SinkAttention,
    SquaredReLU,
    SwiGLU,
    SwiGLULinear,
    ValueEmbedding,
)
from tinyforge.residual import MLP, MixedNorm, NoNorm, PreNorm, SelfAttention

STD = 0.02
"""Standard deviation of all initial matrices but those of `residual_std`."""


IN_FP8 = (
    *("qk_norm", "qk_scale", "qkv_bias", "window", "full_every", "rotary_dim", "attention_scale"),
    *("value_every", "mix_first", "embedding_norm", "logit_softcap", "smear"),
)
"""Options that the layers in FP8 have."""


def residual_std(c: Config) -> float:
    """GPT-2: 2 * layers projections add to the residual stream; this keeps its variance from growing with depth."""
    return 0.0 if c.zero_outputs else STD / (2 * c.layers) ** 0.5


def gain(name: str, width: int, plus_one: bool = False) -> Param:
    return Param(f"{name}.weight", (width,), fill=0.0 if plus_one else 1.0, decay=False)


def bias(name: str, rows: int) -> Param:
    return Param(f"{name}.bias", (rows,), fill=0.0, decay=False)


def projection(name: str, rows: int, columns: int, backend: Backend) -> Linear | None:
    """A map between the stream and a narrower embedding; None if there is none."""
    return Linear(Param(f"{name}.weight", (rows, columns), std=STD), backend, name) if rows and columns else None


def rms_norm(name: str, width: int, c: Config, backend: Backend) -> RMSNorm:
    return RMSNorm(gain(name, width, c.norm_plus_one), backend, c.norm_eps, name, plus_one=c.norm_plus_one)


def pre_norm(
    name: str, c: Config, backend: Backend, *, fp8: bool, scaled: bool = True, scaled_backward: bool = True
) -> PreNorm:
    """fp8: of the layer. scaled: the map that follows reads a `Scaled`. scaled_backward: so does the MLP's backward
    before it."""
    known = (gain(name, c.dim, c.norm_plus_one), backend, c.norm_eps, name)
    if c.norm == "layer":
        gains, *_ = known
        return PreNorm(AddLayerNorm(gains, bias(name, c.dim) if c.norm_bias else None, backend, c.norm_eps, name))
    if fp8:
        return PreNorm(FP8AddRMSNorm(*known, scaled=scaled, scaled_backward=scaled_backward))
    return PreNorm(AddRMSNorm(*known, plus_one=c.norm_plus_one))


def norm_before(name: str, c: Config, backend: Backend, *, fp8: bool, scaled_backward: bool) -> PreNorm | NoNorm:
    """What a branch reads the stream through."""
    if fp8 and (more := [option for option in c.options() if option not in IN_FP8]):
        raise UserError(f"--precision fp8: the layers in FP8 have no {', '.join(more)}; use bf16 or fp32")
    if c.norms == "after":
        return NoNorm(backend, name)
    return pre_norm(name, c, backend, fp8=fp8, scaled_backward=scaled_backward)


def first_norm(at: str, c: Config, backend: Backend, *, fp8: bool, scaled_backward: bool) -> Any:
    """The norm that a block begins with."""
    if not c.mix_first:
        return norm_before(f"{at}.norm1", c, backend, fp8=fp8, scaled_backward=scaled_backward)
    a, b = (
        Param(f"{at}.{name}_scale", (1,), fill=fill, decay=False) for name, fill in (("stream", 1.0), ("first", 0.0))
    )
    norm: Any = norm_before(f"{at}.norm1", c, backend, fp8=fp8, scaled_backward=False)
    return MixedNorm(Mix(a, b, backend, f"{at}.mix"), norm, backend)


def after(name: str, c: Config, backend: Backend) -> list[Op]:
    """The ops between a branch's last map and the stream."""
    found: list[Op] = [] if c.norms in ("before", "sum") else [rms_norm(name, c.dim, c, backend)]
    return found if c.residual_scale == 1 else [*found, Scale(c.residual_scale, backend, f"{name}.scale")]


def self_attention(c: Config, layer: int, backend: Backend, *, fp8: bool) -> SelfAttention:
    at, queries, keys = f"blocks.{layer}", c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv_bias = bias(f"{at}.qkv", queries + 2 * keys) if c.qkv_bias else None
    weight = Param(f"{at}.qkv.weight", (queries + 2 * keys, c.dim), std=STD, matrices=(queries, keys, keys))
    if fp8 and qkv_bias:
        raise UserError("--precision fp8: products in FP8 add no bias, and qkv has one (qkv_bias); use bf16 or fp32")
    out = Param(f"{at}.out.weight", (c.dim, queries), std=residual_std(c), matrices=1)
    # Qwen3: one norm for all query heads, one for all key heads; OLMo 2: of all of them together.
    norms = {"q_norm": (queries, slice(0, c.heads)), "k_norm": (keys, slice(c.heads, c.heads + c.kv_heads))}
    scores: dict[str, Any] = {"scale": c.attention_scale or None, "softcap": c.attention_softcap}
    if c.qk_scale != "none":  # the queries have it
        scores["scale"] = None
    scores["window"] = c.window_of(layer) or None
    if c.sinks:
        sinks = Param(f"{at}.sinks", (c.heads,), fill=0.0, decay=False)
        attention: Attention = SinkAttention(sinks, c.kv_heads, backend, f"{at}.attention", **scores)
    else:
        attention = Attention(c.heads, c.kv_heads, backend, f"{at}.attention", **scores)
    return SelfAttention(
        FP8Linear(weight, backend, f"{at}.qkv") if fp8 else Linear(weight, backend, f"{at}.qkv", bias=qkv_bias),
        attention,
        Linear(out, backend, f"{at}.out", bias=bias(f"{at}.out", c.dim) if c.out_bias else None),
        Dropout(c.dropout, backend, f"{at}.out_dropout"),
        head_dim=c.head_dim,
        rope=rope(c, layer, backend) if c.has_rope(layer) else None,
        head_norms=[
            (rms_norm(f"{at}.{name}", width if c.qk_norm_width else c.head_dim, c, backend), heads)
            for name, (width, heads) in norms.items()
            if c.qk_norm
        ],
        values=value_embedding(c, layer, backend) if c.has_values(layer) else None,
        after=after(f"{at}.attention_norm", c, backend),
    )


def value_embedding(c: Config, layer: int, backend: Backend) -> ValueEmbedding:
    at = f"blocks.{layer}.value"
    table = Param(f"{at}_embedding.weight", (c.vocab, c.kv_heads * c.head_dim), std=STD)
    gate = Param(f"{at}_gate.weight", (c.kv_heads, c.value_gate), fill=0.0)  # rows are added as they are at first
    return ValueEmbedding(table, gate, c.dim, backend, f"{at}_embedding")


def rope(c: Config, layer: int, backend: Backend) -> RoPE:
    theta, scaling = c.rope_theta, None
    if c.local_rope_theta and c.window_of(layer):
        theta = c.local_rope_theta
    elif c.rope_scaling != "none":
        scaling = RopeScaling(
            c.rope_scaling,
            c.rope_factor,
            c.rope_low_freq,
            c.rope_high_freq,
            c.original_context,
            attention=c.rope_attention,
            context=c.context,
            short=c.rope_short,
            long=c.rope_long,
            truncate=c.rope_truncate,
        )
    known = (c.head_dim, c.context, c.heads + c.kv_heads, backend, theta, f"blocks.{layer}.rope")
    how: dict[str, Any] = {"scaling": scaling, "width": c.rotary_dim}
    if c.qk_scale == "none":
        return RoPE(*known, **how)
    factor = c.attention_scale * c.head_dim**0.5 or 1.0  # of the scores' 1 / sqrt(head_dim)
    learned = (
        Param(f"blocks.{layer}.qk_scale", (c.heads,), fill=factor, decay=False) if c.qk_scale == "learned" else None
    )
    return QKNormRoPE(*known, heads=c.heads, scale=learned, factor=factor, eps=c.norm_eps, **how)


FORMULAS = {"gelu_tanh": "tanh", "gelu": "erf"}
"""GELU's formulas by the names of activations."""


def mlp(c: Config, layer: int, backend: Backend, *, fp8: bool) -> MLP:
    at = f"blocks.{layer}"
    if not c.gated:
        return ungated_mlp(c, at, backend)
    up = Param(f"{at}.gate_up.weight", (2 * c.hidden, c.dim), std=STD, matrices=2)
    down = Param(f"{at}.down.weight", (c.dim, c.hidden), std=residual_std(c), matrices=1)
    dropout, ending = Dropout(c.dropout, backend, f"{at}.down_dropout"), after(f"{at}.mlp_norm", c, backend)
    if c.activation != "silu" or c.mlp_bias:
        activation: Op = SwiGLU(backend, f"{at}.swiglu")
        if c.activation in FORMULAS:
            activation = GeGLU(backend, FORMULAS[c.activation], f"{at}.geglu")
        first, last = (
            Linear(p, backend, name, bias=bias(name, p.shape[0]) if c.mlp_bias else None)
            for name, p in ((f"{at}.gate_up", up), (f"{at}.down", down))
        )
        return MLP(first, last, dropout, activation=activation, after=ending)
    swiglu_linear = partial(FP8SwiGLULinear, gives_fp8=True) if fp8 else SwiGLULinear
    return MLP(
        (FP8LinearSwiGLU if fp8 else LinearSwiGLU)(up, backend, f"{at}.gate_up"),
        swiglu_linear(down, backend, f"{at}.down"),
        dropout,
        after=ending,
    )


def ungated_mlp(c: Config, at: str, backend: Backend) -> MLP:
    up = Param(f"{at}.up.weight", (c.hidden, c.dim), std=STD, matrices=1)
    down = Param(f"{at}.down.weight", (c.dim, c.hidden), std=residual_std(c), matrices=1)
    up_bias, down_bias = (
        bias(f"{at}.{name}", rows) if c.mlp_bias else None for name, rows in (("up", c.hidden), ("down", c.dim))
    )
    last: dict[str, Any] = {"dropout": Dropout(c.dropout, backend, f"{at}.down_dropout")}
    last["after"] = after(f"{at}.mlp_norm", c, backend)
    if c.activation in FORMULAS:  # the bias before GELU belongs to the map after it
        known: dict[str, Any] = {"bias": down_bias, "input_bias": up_bias, "approximate": FORMULAS[c.activation]}
        return MLP(Linear(up, backend, f"{at}.up"), GELULinear(down, backend, f"{at}.down", **known), **last)
    activation = {"silu": SiLU, "relu": ReLU, "relu2": SquaredReLU}[c.activation](backend, f"{at}.{c.activation}")
    maps = Linear(up, backend, f"{at}.up", bias=up_bias), Linear(down, backend, f"{at}.down", bias=down_bias)
    return MLP(*maps, activation=activation, **last)
