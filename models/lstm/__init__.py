"""LSTM: layers of long short-term memory, whose state can be carried from batch to batch."""

from tinyforge.models.lstm.config import PRESETS, Config
from tinyforge.models.lstm.model import LSTMModel
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "lstm",
    "LSTM",
    LSTMModel,
    Config,
    PRESETS,
    "Long short-term memory; state carried between batches",
    source='Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997); Gers et al., "Learning to Forget" (2000)',
    backward="Backpropagation through time: a loop from the last position to the first, then the weights' gradients "
    "as products over all positions. It ends at the first position of a window: the state carried into the window is "
    "treated as a constant.",
    trained={
        "Shakespeare's characters, 209 thousand parameters, 39 s of one core: held-out bits per byte, mean of 3 seeds": "cpu-shakespeare-recurrent.json#mean_held_out_bits_per_byte/lstm"
    },
)
__all__ = ["PRESETS", "SPEC", "Config", "LSTMModel"]
