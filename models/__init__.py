"""Models built from tinyforge's ops. `ALL` lists them for the gradient-check ledger."""

from models.char_mlp.model import CharMLP
from models.nanoeuler.model import NanoEuler

ALL = (NanoEuler, CharMLP)
