"""Mamba: no attention, a selective state space in its place, and a state of constant size to generate from."""

from tinyforge.models.mamba.config import PRESETS, Config
from tinyforge.models.mamba.model import Mamba
from tinyforge.registry import ModelSpec, gpt3_rate

SPEC = ModelSpec(
    "mamba",
    "Mamba",
    Mamba,
    Config,
    PRESETS,
    "Selective state spaces in place of attention; linear in the length",
    hf=f"{__name__}.hf",
    pretraining={"130m": gpt3_rate(6e-4, "125 million"), "370m": gpt3_rate(3e-4, "350 million")},
    architectures=("MambaForCausalLM",),
    source='Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023)',
    backward="The gradient of the state is a recurrence too, with the same decays, run from the last position to the "
    "first. One state in 32 is stored; those between are recomputed, a tile at a time. The output of "
    "the convolution reaches the loss on three paths: as input, through the selection, and through the step size.",
    trained={
        "Shakespeare's characters, 210 thousand parameters, 44 s of one core: held-out bits per byte, mean of 3 seeds": "cpu-shakespeare-recurrent.json#mean_held_out_bits_per_byte/mamba",
        "a transformer of the same size in the same time": "cpu-shakespeare-recurrent.json#mean_held_out_bits_per_byte/gpt2",
    },
)
__all__ = ["PRESETS", "SPEC", "Config", "Mamba"]
