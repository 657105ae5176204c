"""Models built from tinyforge's ops. `SPECS` registers them, the default first.

Adding a model touches its own folder and this file.
"""

from models.char_mlp.model import CharMLP
from models.nanoeuler import SPEC as NANOEULER
from models.nanoeuler import NanoEuler

SPECS = (NANOEULER,)
ALL = (NanoEuler, CharMLP)
