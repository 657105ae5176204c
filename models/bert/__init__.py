"""BERT: post-norm blocks that look both ways, hidden words to guess, a classification head."""

from models.bert.config import PRESETS, Config
from models.bert.model import BERT
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "bert", "BERT", BERT, Config, PRESETS, "Post-norm blocks that look both ways, masked words, a classifier",
    hf="models.bert.hf", architectures=("BertForMaskedLM", "BertForSequenceClassification"), learns="masked text",
)  # fmt: skip
__all__ = ["BERT", "PRESETS", "SPEC", "Config"]
