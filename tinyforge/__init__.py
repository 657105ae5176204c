"""tinyforge: a minimal tensor framework without autograd. Every op has a backward that is written out and checked.

Start reading at `tinyforge/op.py`, then any file of `tinyforge/ops/`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyforge import requirements
from tinyforge.invocation import IN_CHECKOUT, PACKAGE, ROOT

requirements.check(ROOT)  # before anything imports NumPy

from tinyforge import deprecated  # noqa: F401

if IN_CHECKOUT:  # models/, recipes/ and data/ are subpackages also where git makes no links to them (on Windows)
    __path__.append(str(PACKAGE.parent))

from tinyforge import interrupt  # noqa: F401  early: what follows takes a moment
from tinyforge.backends import get_backend
from tinyforge.op import Op, Param, Stash
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

if TYPE_CHECKING:
    from tinyforge import backends, ops, optim
    from tinyforge.backends import Backend
    from tinyforge.formats import Loaded

__all__ = ["Op", "Param", "ParamBuffer", "Stash", "Stream", "backends", "get_backend", "load", "ops", "optim"]
__version__ = "0.2.0"


def load(path: str | Path, backend: Backend | str = "auto") -> Loaded:
    """A trained model with its tokenizer, for inference.

        model = tinyforge.load("storyteller")
        print(model.generate("Once upon a time"))

    path: of a run, a checkpoint or another program's model, or the name of a model of the repository or on the hub, as
        --checkpoint takes it.
    backend: "auto" takes a GPU if there is one.

    Raises UserError for what is not there, damaged or not supported.
    """
    from tinyforge import formats

    be = get_backend(backend) if isinstance(backend, str) else backend
    return formats.load(formats.resolve_checkpoint(str(path)), be, frozen=True)


def __getattr__(name: str) -> Any:
    """Submodules on first use: `import tinyforge` stays quick, and a chat loads no optimizer."""
    if name in ("ops", "optim"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
