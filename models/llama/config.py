"""Llama's sizes and options, and those of its kin. hf.py says which of them each published architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models.checks import check_rates

CHOICES = {
    "norms": ("before", "both", "after", "sum"),
    "norm": ("rms", "layer"),
    "activation": ("silu", "gelu_tanh", "gelu", "relu", "relu2"),
    "rope_scaling": ("none", "linear", "llama3", "yarn", "dynamic", "longrope"),
    "qk_scale": ("none", "fixed", "learned"),
}
"""The values of the fields that are texts; the first is the default."""


@dataclass(frozen=True)
class Config(ModelConfig):
    """The shape of a Llama.

    dim: width C of the residual stream. heads, kv_heads: query and key/value heads, each of size head_dim; 0 stands for
    dim / heads. layers: blocks. hidden: width of SwiGLU. tied: the output head is the embedding. qkv_bias: Qwen2's
    biases on queries, keys and values. qk_norm: Qwen3's norms on each query and key head. window: positions that a
    token attends to, including itself, as in Mistral; 0 for all. full_every: of that many layers the last has no
    window, as in Gemma; 0 where all layers have it.

    norms: where a branch has its norm: "before" it; "both", another one after it, before the addition, as in Gemma 2;
    "after" it only, as in OLMo 2; "sum", of the stream after the addition, without a final norm, as in OPT-350M.
    embedding_dim: width of the embedding and of the output head, with a map between each and the stream; 0 for dim.
    norm: "rms", or "layer" for LayerNorm, with norm_bias a bias too. parallel: both
    branches of a block read its one norm, as in Cohere; parallel_norms: each has its own, as in GPT-NeoX.
    norm_plus_one: the norms' gain is 1 + w, w from 0. activation: of the gate, "silu", or "gelu_tanh" and "gelu" (by
    erf) for GeGLU. gated: without it the MLP is down(activation(up(h))), with "relu" and its square "relu2" too.
    qk_norm_width: qk_norm is one norm over all query heads together, and one over all key heads, as in OLMo 2.
    out_bias, mlp_bias, head_bias: biases on attention's output, on the MLP's maps, on the logits.

    embedding_scale, residual_scale, logit_scale: factors of the embeddings, of a branch before it is added, and of the
    logits, as in Granite. attention_scale: of the scores, 0 for 1 / sqrt(head_dim). attention_softcap, logit_softcap:
    c, scores and logits z become c tanh(z / c), as in Gemma 2; 0 for none.

    local_rope_theta: rope_theta of the layers with a window, without rope_scaling, as in Gemma 3; 0 for the same in
    all. no_rope_every: of that many layers the last has no RoPE, as in SmolLM3; 0 where all have it, 1 where none has.
    sinks: a score for each head that its probabilities are shared with, as in gpt-oss. learned_positions: a table of
    positions is added to the embeddings, as in OPT; it begins with two rows without use.

    qk_scale: queries and keys are divided by their root mean square, without a gain, and the scores' scale is fixed, or
    learned for each query head from there. zero_outputs: the maps into the stream start at 0.

    mix_first: before each block the stream x becomes a x + b x0, with x0 the stream before the first one, and a and b
    learned, from 1 and 0. embedding_norm: an RMSNorm makes x0 of the embeddings. Both only with norms "before".

    smear: each token's x0 gets that of the token before it, times a learned number, from 0, and a gate, which reads so
    many of its first channels; 0 for none.

    value_every: of that many layers the last adds a row for each token's id to its values, from a table of its own,
    times a gate for each head, which reads the first value_gate channels of the normed stream; 0 for no layer. Counted
    from the model's last layer, which has one.

    rope_scaling stretches the rotary angles to a longer context, see `RopeScaling`, which has rope_factor, the bounds
    rope_low_freq and rope_high_freq, rope_attention, rope_short, rope_long and rope_truncate under names without rope_.
    original_context: of training. rotary_dim: numbers of a head that RoPE turns, 0 for all.

    dropout: rate in training, on the outputs of a block's two halves, before they are added to the stream. family: the
    model_type of config.json where the options alone do not tell it; see families.py.
    """

    dim: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 0
    layers: int = 5
    context: int = 512
    vocab: int = 512
    hidden: int = 172
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    full_every: int = 0
    norms: str = "before"
    embedding_dim: int = 0
    norm: str = "rms"
    norm_bias: bool = False
    parallel: bool = False
    parallel_norms: bool = False
    norm_plus_one: bool = False
    activation: str = "silu"
    gated: bool = True
    qk_norm_width: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    local_rope_theta: float = 0.0
    no_rope_every: int = 0
    learned_positions: bool = False
    sinks: bool = False
    qk_scale: str = "none"
    zero_outputs: bool = False
    mix_first: bool = False
    embedding_norm: bool = False
    smear: int = 0
    value_every: int = 0
    value_gate: int = 32
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq: float = 1.0
    rope_high_freq: float = 4.0
    rope_attention: float = 0.0
    rope_short: tuple[float, ...] = ()
    rope_long: tuple[float, ...] = ()
    rope_truncate: bool = True
    rotary_dim: int = 0
    original_context: int = 8192
    dropout: float = 0.0
    family: str = ""

    NONE_OR_MORE: ClassVar = (
        *("window", "full_every", "attention_scale", "attention_softcap", "logit_softcap"),
        *("local_rope_theta", "no_rope_every", "rope_attention", "rotary_dim", "value_every", "smear", "embedding_dim"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("dim", "heads", "kv_heads", "layers", "hidden", "original_context")
        if self.head_dim == 0:
            if self.dim % self.heads:
                raise UserError(f"config: dim {self.dim} is not divisible by heads {self.heads}; give head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        self.require_positive("head_dim")
        if self.head_dim % 2:
            raise UserError(f"config: head_dim {self.head_dim} is odd; RoPE turns pairs, make it even")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise UserError(f"config: rotary_dim is {self.rotary_dim}, expected an even number up to {self.head_dim}")
        pairs = (self.rotary_dim or self.head_dim) // 2
        if self.rope_scaling == "longrope" and not len(self.rope_short) == len(self.rope_long) == pairs:
            raise UserError(
                f"config: rope_short has {len(self.rope_short)} factors, rope_long {len(self.rope_long)}, expected "
                f"one for each of {pairs} pairs"
            )
        if self.norms != "before" and (self.norm == "layer" and self.norms != "sum" or self.parallel):
            raise UserError(f"config: norms is {self.norms!r} with a LayerNorm or parallel branches; expected 'before'")
        if self.norm_bias and self.norm == "rms" or self.norm_plus_one and self.norm == "layer":
            raise UserError(f"config: norm is {self.norm!r}; norm_bias goes with 'layer', norm_plus_one with 'rms'")
        if self.mix_first and (self.norms in ("after", "sum") or self.parallel):
            raise UserError("config: mix_first is for blocks that begin with a norm, one branch after the other")
        if self.parallel_norms and not self.parallel:
            raise UserError("config: parallel_norms is for parallel branches; set parallel too")
        if self.gated and self.activation in ("relu", "relu2"):
            raise UserError(f"config: a gate with activation {self.activation!r}; set gated=false, or use 'silu'")
        if self.heads % self.kv_heads:
            raise UserError(f"config: heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.value_every and not 0 < self.value_gate <= self.dim:
            raise UserError(f"config: value_gate is {self.value_gate}, expected 1 to dim, {self.dim}")
        if self.smear > self.dim:
            raise UserError(f"config: smear is {self.smear}, expected 0 (none) to dim, {self.dim}")
        stretched = self.rope_scaling in ("yarn", "longrope")
        if self.qk_scale != "none" and (self.qk_norm or self.no_rope_every or stretched):
            raise UserError(
                f"config: qk_scale {self.qk_scale!r} with qk_norm, no_rope_every, rope_scaling 'yarn' or 'longrope'; "
                "it is a norm that is part of RoPE in every layer: leave them out"
            )
        check_rates(self, "dropout")
        for name in self.NONE_OR_MORE:
            if getattr(self, name) < 0:
                raise UserError(f"config: {name} is {getattr(self, name)}, expected 0 (none) or more")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"config: {name} is {getattr(self, name)!r}; supported: {', '.join(known)}")
        if not self.rope_factor >= 1 or not 0 < self.rope_low_freq < self.rope_high_freq:
            raise UserError(
                f"config: rope_factor {self.rope_factor}, rope_low_freq {self.rope_low_freq}, rope_high_freq "
                f"{self.rope_high_freq}; expected a factor of 1 or more, and low below high"
            )

    def override(self, values: Mapping[str, Any]) -> Self:
        """As for every config; a head_dim of dim / heads is updated with the two."""
        follows = self.head_dim * self.heads == self.dim
        return super().override({"head_dim": 0, **values} if follows else values)

    def window_of(self, layer: int) -> int:
        """The window of a layer, 0 for none."""
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim or self.dim

    def has_rope(self, layer: int) -> bool:
        return not self.no_rope_every or (layer + 1) % self.no_rope_every > 0

    def has_values(self, layer: int) -> bool:
        return self.value_every > 0 and (self.layers - 1 - layer) % self.value_every == 0

    def options(self) -> dict[str, Any]:
        """The fields other than sizes that differ from a plain Llama's, without those of subclasses."""
        plain = {f.name: f.default for f in fields(Config) if f.name not in SIZES}
        return {name: getattr(self, name) for name, usual in plain.items() if getattr(self, name) != usual}


SIZES = (
    *("dim", "heads", "kv_heads", "head_dim", "layers", "context", "vocab", "hidden", "tied", "norm_eps", "dropout"),
    *("rope_theta", "rope_scaling", "rope_factor", "rope_low_freq", "rope_high_freq", "original_context"),
    *("rope_attention", "rope_short", "rope_long", "rope_truncate", "family", "zero_outputs", "value_gate"),
)
"""Fields that are no options of the architecture: the fused decoders and every architecture have them."""
FUSED = {"rotary_dim"}
"""Options that the fused decoders have too."""
QWEN2: dict[str, Any] = {"qkv_bias": True, "rope_theta": 1000000.0, "norm_eps": 1e-6}
PRESETS = {
    # llama2.c's models, trained on TinyStories.
    "stories260K": Config(),
    "stories15M": Config(dim=288, heads=6, kv_heads=6, layers=6, context=256, vocab=32000, hidden=768),
    "stories42M": Config(dim=512, heads=8, kv_heads=8, layers=8, context=1024, vocab=32000, hidden=1376),
    "stories110M": Config(dim=768, heads=12, kv_heads=12, layers=12, context=1024, vocab=32000, hidden=2048),
    "SmolLM2-135M": Config(
        dim=576, heads=9, kv_heads=3, layers=30, context=8192, vocab=49152, hidden=1536, rope_theta=100000.0
    ),
    "TinyLlama-1.1B": Config(
        dim=2048, heads=32, kv_heads=4, layers=22, context=2048, vocab=32000, hidden=5632, tied=False
    ),
    "Llama-3.1-8B": Config(
        dim=4096,
        heads=32,
        kv_heads=8,
        layers=32,
        context=131072,
        vocab=128256,
        hidden=14336,
        tied=False,
        rope_theta=500000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
    ),
    "Qwen2.5-0.5B": Config(dim=896, heads=14, kv_heads=2, layers=24, context=32768, vocab=151936, hidden=4864, **QWEN2),
}
