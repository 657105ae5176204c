"""Models of transformers in float64, with random weights: what parity is measured against."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the peer is transformers, on torch")
transformers = pytest.importorskip("transformers", reason="the peer is transformers")


class Float64Torch:
    """torch, with float64 in the place of float32.

    transformers computes norms, rotary angles and softmax in float32 whatever a model's dtype. In the modules that see
    this instead of torch it computes them in float64, so that parity can be asked for to the last digits.
    """

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def in_float64(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """These models of transformers, one thread."""
    for name in names:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, "torch", Float64Torch())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_peer(architecture: str, values: Mapping[str, Any], seed: str) -> Any:
    """A random model of transformers: weights that float32 holds exactly, computed with in float64."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(sum(map(ord, seed)))
    model = kind(kind.config_class(**values))
    with torch.no_grad():
        for p in model.parameters():  # gains away from 1 and biases away from 0, so that each counts
            p.add_(0.2 * torch.randn_like(p))
    return model.double().eval()
