"""The LSTM against torch.nn.LSTM: outputs, last state, and every gradient, that of the initial state included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.models.lstm import Config, LSTMModel
from tinyforge.op import Stash

torch = pytest.importorskip("torch", reason="the peer is torch")

FP64 = get_backend("numpy", "fp64", workers=1)


def worst(got: np.ndarray, expected: Any) -> float:
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("layers", "width", "batch", "length"), [(1, 7, 3, 1), (2, 5, 2, 33), (3, 9, 1, 11)])
def test_layers_are_torchs(layers: int, width: int, batch: int, length: int, parity: Callable[..., None]) -> None:
    model = LSTMModel(Config(dim=width, layers=layers, vocab=11), FP64)
    rng = np.random.default_rng(layers)
    peer = torch.nn.LSTM(width, width, layers, batch_first=True).double()
    for i, layer in enumerate(model.layers):
        biases = getattr(peer, f"bias_ih_l{i}"), getattr(peer, f"bias_hh_l{i}")
        layer.inputs.value[...] = getattr(peer, f"weight_ih_l{i}").detach().numpy()
        layer.recurrent.value[...] = getattr(peer, f"weight_hh_l{i}").detach().numpy()
        layer.bias.value[...] = sum(b.detach().numpy() for b in biases)
    x, up = rng.normal(size=(2, batch, length, width))
    state, dstate = rng.normal(size=(2, 2, layers, batch, width))  # h and c, and the gradients of the last ones

    stash, y, last = Stash(), x, []
    for i, layer in enumerate(model.layers):
        y, c = layer.forward(y, state[0, i], state[1, i], None, stash)
        last.append((y[:, -1], c))
    dx, dinitial = up.copy(), []
    for i, layer in reversed(list(enumerate(model.layers))):
        dx = dx.copy()
        dx[:, -1] += dstate[0, i]
        dx, dh, dc, _ = layer.backward((dx, dstate[1, i]), stash)
        dinitial.append((dh, dc))

    theirs, initial = (torch.tensor(a, requires_grad=True) for a in (x, state))
    out, ends = peer(theirs, (initial[0], initial[1]))
    ours = [np.stack([pair[k] for pair in last]) for k in range(2)]
    errors = [worst(y, out), *(worst(o, end) for o, end in zip(ours, ends, strict=True))]
    parity(model, "logits", max(errors), 1e-9, "torch")  # what the head gets
    torch.autograd.backward((out, *ends), (torch.tensor(up), *torch.tensor(dstate)))
    errors = [worst(dx, theirs.grad)]
    errors += [worst(np.stack([pair[k] for pair in dinitial[::-1]]), initial.grad[k]) for k in range(2)]
    for i, layer in enumerate(model.layers):
        for name, p in (("weight_ih", layer.inputs), ("weight_hh", layer.recurrent), ("bias_ih", layer.bias)):
            errors.append(worst(p.grad, getattr(peer, f"{name}_l{i}").grad))
    parity(model, "gradients", max(errors), 1e-8, "torch")
