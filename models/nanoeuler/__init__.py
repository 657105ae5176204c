"""NanoEuler: a decoder-only language model whose every gradient is written by hand."""

from pathlib import Path

from tinyforge.models.nanoeuler.config import PRESETS, Config
from tinyforge.models.nanoeuler.model import NanoEuler
from tinyforge.registry import SMALL, Defaults, ModelSpec, gpt3_rate

SPEC = ModelSpec(
    "nanoeuler",
    "NanoEuler",
    NanoEuler,
    Config,
    PRESETS,
    "Llama-like blocks with multi-token prediction heads",
    hf=f"{__name__}.hf",
    pretraining={
        "small": SMALL,
        "base": gpt3_rate(6e-4, "125 million"),
        "fast": Defaults(
            {
                "optimizer": "muon",
                "lr": 24e-4,
                "group_rates": ("embeddings=3", "value_embeddings=3"),
                "decay_timescale": 0.26,
                "warmup": 0.05,
                "decay_fraction": 0.6,
                "batch_size": 32,
                "document_mask": "keep",
            },
            "as measured in docs/results/fast.md",
            other=gpt3_rate(6e-4, "125 million"),
        ),
        "large": gpt3_rate(3e-4, "350 million"),
        "xl": gpt3_rate(2.5e-4, "760 million"),
        "2b": gpt3_rate(2e-4, "1.3 billion"),
    },
    documents=True,
    blocks=True,
    fp8=True,
    bundled=Path(__file__).parent / "small",
    bundled_for_chat=Path(__file__).parent / "storyteller",
    source='this project; several heads as in Gloeckle et al., "Better & Faster Large Language Models via Multi-token '
    'Prediction" (2024)',
    backward="Several heads read one stream: its gradient is the sum over the heads, each weighed by its share of the "
    "loss. Later heads have no target at the end of a row, and no gradient there.",
    trained={
        "base on 546 MB of text: bits per byte of held-out Wikipedia": "gpu-evaluate-base-2.json#text/sources/wikipedia/bits_per_byte/0",
        "the same: BLiMP": "gpu-evaluate-base-2.json#tasks/tasks/blimp/figures/acc",
        "large on the same text: bits per byte of held-out Wikipedia": "gpu-evaluate-large.json#text/sources/wikipedia/bits_per_byte/0",
        "base on books and web pages, fine-tuned: bits per byte of held-out web pages": "gpu-evaluate-base-sft.json#text/sources/web/bits_per_byte/0",
        "the same: share of held-out web sentences whose last word it finds among ten": "gpu-evaluate-base-sft.json#text/sources/web/cloze/right",
    },
)
__all__ = ["PRESETS", "SPEC", "Config", "NanoEuler"]
