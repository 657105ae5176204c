"""tinyforge: a minimal tensor framework without autograd. Every op has a backward that is written out and checked.

Start reading at `tinyforge/op.py`, then any file of `tinyforge/ops/`.
"""

from tinyforge import interrupt  # noqa: F401  first: what follows takes a moment
from tinyforge.backends import get_backend
from tinyforge.op import Op, Param, Stash
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

__all__ = ["Op", "Param", "ParamBuffer", "Stash", "Stream", "get_backend"]
__version__ = "0.1.0"
