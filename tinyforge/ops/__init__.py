"""The ops: one file each, with its formula, shapes, what it saves, and the kernels for each backend."""

from tinyforge.op import Op
from tinyforge.ops.activations import ReLU, Sigmoid, SiLU, SquaredReLU, Tanh
from tinyforge.ops.add import Add
from tinyforge.ops.add_layernorm import AddLayerNorm
from tinyforge.ops.add_rmsnorm import AddRMSNorm
from tinyforge.ops.attention import Attention
from tinyforge.ops.attention_sink import SinkAttention
from tinyforge.ops.capped_cross_entropy import CappedCrossEntropy
from tinyforge.ops.causal_conv import CausalConv
from tinyforge.ops.class_token import ClassToken
from tinyforge.ops.conv2d import Conv2d
from tinyforge.ops.cross_entropy import CrossEntropy, LinearCrossEntropy
from tinyforge.ops.dropout import Dropout
from tinyforge.ops.embedding import Embedding
from tinyforge.ops.fork import Fork
from tinyforge.ops.fp8_linear import FP8Linear, FP8LinearSwiGLU, FP8SwiGLULinear
from tinyforge.ops.fp8_rmsnorm import FP8AddRMSNorm
from tinyforge.ops.geglu import GeGLU
from tinyforge.ops.gelu import GELU
from tinyforge.ops.gelu_linear import GELULinear
from tinyforge.ops.groupnorm import GroupNorm
from tinyforge.ops.layernorm import LayerNorm
from tinyforge.ops.linear import Linear
from tinyforge.ops.lora import LoRA
from tinyforge.ops.losses import MSE, BinaryCrossEntropy
from tinyforge.ops.lstm import LSTM
from tinyforge.ops.mix import Mix
from tinyforge.ops.mix_rmsnorm import MixRMSNorm
from tinyforge.ops.mixture import MixtureOfExperts
from tinyforge.ops.mixture_biased import BiasedExperts
from tinyforge.ops.patches import Patches
from tinyforge.ops.pooling import AveragePool2d, MaxPool2d, Upsample
from tinyforge.ops.positions import LearnedPositions
from tinyforge.ops.qk_norm_rope import QKNormRoPE
from tinyforge.ops.rmsnorm import RMSNorm
from tinyforge.ops.rope import RoPE, RopeScaling
from tinyforge.ops.router import TopKRouter
from tinyforge.ops.router_losses import RouterLosses
from tinyforge.ops.scale import Scale
from tinyforge.ops.selective_scan import SelectiveScan
from tinyforge.ops.sequential import Sequential
from tinyforge.ops.sigmoid_gate import SigmoidGate
from tinyforge.ops.smear import Smear
from tinyforge.ops.softmax import Softmax
from tinyforge.ops.swiglu import SwiGLU
from tinyforge.ops.swiglu_linear import LinearSwiGLU, SwiGLULinear
from tinyforge.ops.take import Take
from tinyforge.ops.value_embedding import ValueEmbedding

ALL: tuple[type[Op], ...] = (
    *(Embedding, LearnedPositions, Patches, ClassToken, Take, Fork, Add, Scale, Mix, Smear),
    *(Linear, Conv2d, AveragePool2d, MaxPool2d, Upsample),
    *(RMSNorm, AddRMSNorm, MixRMSNorm, LayerNorm, AddLayerNorm, GroupNorm),
    *(RoPE, QKNormRoPE, ValueEmbedding, Attention, SinkAttention),
    *(ReLU, SquaredReLU, Sigmoid, SiLU, GeGLU, SwiGLU, LinearSwiGLU, SwiGLULinear, GELU, GELULinear, LoRA, Tanh),
    *(Softmax, Dropout, SigmoidGate),
    *(CausalConv, SelectiveScan, LSTM),
    *(TopKRouter, RouterLosses, MixtureOfExperts, BiasedExperts),
    *(Sequential, MSE, BinaryCrossEntropy, CrossEntropy, LinearCrossEntropy, CappedCrossEntropy),
)
"""Every op, in the order of the gradient-check ledger."""

IN_FP8: tuple[type[Op], ...] = (FP8Linear, FP8LinearSwiGLU, FP8SwiGLULinear)
"""Those that stand for one of ALL in --precision fp8. In float64, where they round nothing, NumPy alone has them."""

__all__ = [
    "ALL", "Add", "AddLayerNorm", "AddRMSNorm", "Attention", "AveragePool2d", "BiasedExperts",
    "BinaryCrossEntropy",
    "CappedCrossEntropy", "CausalConv", "ClassToken", "Conv2d", "CrossEntropy", "Dropout", "Embedding", "FP8AddRMSNorm",
    "FP8Linear", "FP8LinearSwiGLU", "FP8SwiGLULinear", "Fork", "GELU", "GELULinear", "GeGLU", "GroupNorm", "LSTM",
    "LayerNorm", "LearnedPositions", "Linear", "LinearCrossEntropy", "LinearSwiGLU", "LoRA", "MSE", "MaxPool2d",
    "Mix", "MixRMSNorm", "MixtureOfExperts", "Patches", "QKNormRoPE", "RMSNorm", "ReLU", "RoPE", "RopeScaling",
    "RouterLosses", "Scale", "SelectiveScan", "Sequential", "SiLU", "Sigmoid", "SigmoidGate", "SinkAttention", "Smear",
    "Softmax", "SquaredReLU", "SwiGLU", "SwiGLULinear", "Take", "Tanh", "TopKRouter", "Upsample", "ValueEmbedding",
]  # fmt: skip
