"""BERT's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models.checks import DividedHeads, check_rates


@dataclass(frozen=True)
class Config(DividedHeads, ModelConfig):
    """The shape of a BERT.

    dim: width C of the stream. heads: each of size dim / heads. layers: blocks. hidden: width of the MLP. segments:
    kinds of text in a row, 2 for pairs. classes: number of classes; 0 for masked words. trunk: without an
    output for those, as models of text embeddings are. dropout: rate in training,
    after the embedding, on both additions to the stream, and before the classes. attention_dropout: on the attention
    probabilities; on a GPU it requires attention's slow kernels. masked: share of a row's words that is masked in
    pretraining; 15 % in the paper.
    """

    dim: int = 128
    heads: int = 4
    layers: int = 4
    hidden: int = 512
    vocab: int = 8192
    segments: int = 2
    classes: int = 0
    trunk: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    norm_eps: float = 1e-12
    masked: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("dim", "heads", "layers", "hidden", "segments")
        self.check_heads()
        if self.classes < 0:
            raise UserError(f"config: classes is {self.classes}, expected 0 or more")
        check_rates(self, "dropout", "attention_dropout")
        if not 0 < self.masked < 1:
            raise UserError(f"config: masked is {self.masked}, expected a share between 0 and 1")

    def input_shapes(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        if self.classes:
            return (batch, length), (batch, 1, 1), (batch, length), (batch,)
        hidden = self.hidden_words(length)
        return (batch, length), (batch, hidden, 1), (batch, length), (batch,), (batch, hidden)

    def hidden_words(self, length: int) -> int:
        """Number of masked words per row in pretraining."""
        return max(1, round(self.masked * length))


PRESETS = {
    "small": Config(dropout=0.0),  # too small to overfit in minutes
    "medium": Config(dim=384, heads=6, layers=6, hidden=1536, context=512, vocab=16384),
    # Those of the paper: bert-base-uncased and bert-large-uncased.
    "base": Config(dim=768, heads=12, layers=12, hidden=3072, context=512, vocab=30522, attention_dropout=0.1),
    "large": Config(dim=1024, heads=16, layers=24, hidden=4096, context=512, vocab=30522, attention_dropout=0.1),
}
