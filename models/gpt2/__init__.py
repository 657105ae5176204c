"""GPT-2: LayerNorm, learned positions, GELU, a tied head; also nanoGPT's character model."""

from tinyforge.models.gpt2.config import PRESETS, Config
from tinyforge.models.gpt2.model import GPT2
from tinyforge.registry import Defaults, ModelSpec, gpt3_rate

SPEC = ModelSpec(
    "gpt2",
    "GPT-2",
    GPT2,
    Config,
    PRESETS,
    "LayerNorm, learned positions, GELU, tied head",
    hf=f"{__name__}.hf",
    pretraining={
        "char": Defaults(
            {"lr": 1e-3, "schedule": "cosine", "batch_size": 64, "steps": 5000, "keep_best": True},
            "as nanoGPT's train_shakespeare_char",
        ),
        "124m": gpt3_rate(6e-4, "125 million"),
        "355m": gpt3_rate(3e-4, "350 million"),
    },
    documents=True,
    blocks=True,
    architectures=("GPT2LMHeadModel",),
    source='Radford et al., "Language Models are Unsupervised Multitask Learners" (2019)',
    backward="The embedding is also the output head: both ops add to one gradient. Dropout's masks are not stored but "
    "drawn again. Each norm where a residual is added sums the gradients of the stream and of the branch.",
    trained={
        "nanoGPT's model of Shakespeare's characters: best held-out loss, nats, seed 0": "gpu-shakespeare-char.json#results/tinyforge/best_val_nats",
        "the same with PyTorch": "gpu-shakespeare-char.json#results/torch compiled/best_val_nats",
        "as nanoGPT published it": "gpu-shakespeare-char.json#published_val_nats",
    },
)
__all__ = ["GPT2", "PRESETS", "SPEC", "Config"]
