"""Old names of modules: `import tinyforge.hub` gives tinyforge.formats, with a DeprecationWarning that says so.

A name stays for two minor versions after its change (docs/compatibility.md).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

RENAMED = {
    "tinyforge.data.stories": "examples.storyteller.stories",
    "tinyforge.recipes.own_pairs": "examples.storyteller.own_pairs",
    "tinyforge.hub": "tinyforge.formats",
    "tinyforge.hub.calibrate": "tinyforge.recipes.calibrate",
    "tinyforge.hub.gguf": "tinyforge.formats.gguf_model",
    "tinyforge.hub.teaching": "tinyforge.train.teachers",
    "tinyforge.hub.tuning": "tinyforge.train.tuning",
    "tinyforge.text": "tinyforge.tokenizers",
    "tinyforge.text.gguf": "tinyforge.tokenizers.gguf_vocabulary",
    "tinyforge.text.labels": "tinyforge.formats.labels",
    "tinyforge.text.shards": "tinyforge.shards",
    "tinyforge.commands": "tinyforge.cli",
    "tinyforge.ops.tanh": "tinyforge.ops.activations",
    "tinyforge.backends.phantom": "tinyforge.backends.meta",
}


def new_name(name: str) -> str | None:
    """The name that a module has now; None if `name` is not an old one."""
    old = next((old for old in sorted(RENAMED, reverse=True) if f"{name}.".startswith(f"{old}.")), None)
    return old and RENAMED[old] + name[len(old) :]


class _Renamed(MetaPathFinder, Loader):
    """Finds an old name as the module of the new one: the same object, so that no class exists twice."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(name)
        found = new and find_spec(new)
        if not found:
            return None
        return ModuleSpec(name, self, origin=found.origin, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} is called {new} now; import that", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module ran under its new name already, and keeps what it knows of itself."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m` with an old name."""
        found = find_spec(new_name(name) or "")
        return found.loader.get_code(found.name) if found and found.loader else None  # type: ignore[attr-defined]


sys.meta_path.insert(0, _Renamed())
