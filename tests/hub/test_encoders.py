"""BERT and ViT against transformers, both ways: logits, the gradient of every parameter, files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.vit import PRESETS as VIT_PRESETS
from models.vit import Config as ViTConfig
from models.vit import hf as vit_hf
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.hub.foreign import entries_of, load_weights, weights_of
from tinyforge.hub.huggingface import open_directory, write_directory
from tinyforge.op import Stash

torch = pytest.importorskip("torch", reason="the peer is transformers, on torch")
transformers = pytest.importorskip("transformers", reason="the peer is transformers")

FP64 = get_backend("numpy", "fp64", workers=1)
VIT = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20, "image_size": 15,
       "patch_size": 5, "num_channels": 3, "num_labels": 7}  # fmt: skip
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", VIT),
    "vit-grey": ("ViTForImageClassification", {**VIT, "num_channels": 1, "patch_size": 3, "num_labels": 2}),
}


class Float64Torch:
    """torch, with float64 in the place of float32: transformers computes some things in float32 whatever the dtype."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("vit",):
        monkeypatch.setattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), "torch", Float64Torch())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_peer(name: str) -> Any:
    """A random model of transformers: weights that float32 holds exactly, computed with in float64."""
    architecture, values = PEERS[name]
    kind = getattr(transformers, architecture)
    torch.manual_seed(sum(map(ord, name)))
    model = kind(kind.config_class(**values))
    with torch.no_grad():
        for p in model.parameters():  # gains away from 1 and biases away from 0, so that each counts
            p.add_(0.2 * torch.randn_like(p))
    return model.double().eval()


def inputs_for(name: str) -> tuple[tuple[np.ndarray, ...], np.ndarray, dict[str, Any]]:
    """What our forward reads, targets apart; the targets; and what transformers' forward reads."""
    values, rng = PEERS[name][1], np.random.default_rng(0)
    images = rng.normal(size=(3, values["num_channels"], 15, 15))
    targets = np.array([[[1]], [[-1]], [[0]]])
    return (images,), targets, {"pixel_values": torch.from_numpy(images)}


def our_logits(model: Any, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    return model.classify(*inputs)[:, 0]


def gradients_by_file_name(peer: Any, folder: Path) -> dict[str, np.ndarray]:
    """transformers renames parameters when it saves a model; so the gradients are saved as if they were weights."""
    from safetensors.numpy import load_file

    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(p.grad)
    peer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def worst(got: np.ndarray, wanted: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest number wanted."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), floor))


@pytest.mark.parametrize("name", PEERS)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = make_peer(name)
    peer.float().save_pretrained(tmp_path / "peer")
    peer.double()
    model = load_weights(open_directory(tmp_path / "peer"), FP64)
    inputs, targets, theirs = inputs_for(name)
    logits = peer(**theirs).logits
    assert worst(our_logits(model, inputs), logits.detach().numpy()) < 1e-9

    stash, count = Stash(), (targets >= 0).sum()
    nll = model.forward(inputs[0], targets, *inputs[1:], stash=stash)
    model.backward(np.full(1, 1 / count), stash)
    assert len(stash) == 0
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), torch.from_numpy(targets).flatten(), ignore_index=-1
    )
    loss.backward()
    assert nll.sum() / count == pytest.approx(loss.item(), rel=1e-12)
    wanted = gradients_by_file_name(peer, tmp_path / "gradients")
    ours = {p.name: p.grad for p in model.buffer.params}
    found = {entry.theirs: entry.take(ours[entry.ours]) for entry in entries_of(model)}
    assert found.keys() == wanted.keys()
    # The bias of the keys adds the same to all scores of a query, which softmax does not see: its gradient is 0, and
    # what is computed is rounding. So an error counts beside a thousandth of the largest gradient at least.
    floor = 1e-3 * max(np.abs(g).max() for g in wanted.values())
    assert {name: error for name in found if (error := worst(found[name], wanted[name], floor)) >= 1e-8} == {}


@pytest.mark.parametrize("name", PEERS)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    peer = make_peer(name)
    peer.float().save_pretrained(tmp_path / "theirs")
    model = load_weights(open_directory(tmp_path / "theirs"), FP64)
    write_directory(tmp_path / "ours", weights_of(model), "f32")
    kind = getattr(transformers, PEERS[name][0])
    again, said = kind.from_pretrained(tmp_path / "ours", dtype=torch.float64, output_loading_info=True)
    assert not any(said[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs, _, theirs = inputs_for(name)
    with torch.no_grad():
        assert worst(our_logits(model, inputs), again.eval()(**theirs).logits.numpy()) < 1e-9


@pytest.mark.parametrize("preset", ["base", "large"])
def test_sizes_of_vit_are_transformers_sizes(preset: str) -> None:
    config: ViTConfig = VIT_PRESETS[preset]
    given = {k: v for k, v in vit_hf.write_config(config).items() if k != "architectures"}
    with torch.device("meta"):
        peer = transformers.ViTForImageClassification(transformers.ViTConfig(**given))
    wanted = sum(p.numel() for p in peer.parameters())
    assert sum(int(np.prod(entry.shape)) for entry in vit_hf.entries(config)) == wanted


def test_a_vit_that_is_none_of_ours_is_refused() -> None:
    given = vit_hf.write_config(VIT_PRESETS["digits"])
    with pytest.raises(UserError, match="hidden_act is 'relu'; supported: 'gelu'"):
        vit_hf.read_config({**given, "hidden_act": "relu"})
    with pytest.raises(UserError, match="image 28 is not a whole number of patches of 5; use a patch that divides 28"):
        vit_hf.read_config({**given, "patch_size": 5})
