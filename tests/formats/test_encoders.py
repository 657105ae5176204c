"""BERT and ViT against transformers, both ways: logits, the gradient of every parameter, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.float64 import in_float64, random_peer
from tests.formats.foreign import entries_of, load_weights
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats.foreign import weights_of
from tinyforge.formats.huggingface import open_directory, write_directory
from tinyforge.models.bert import PRESETS as BERT_PRESETS
from tinyforge.models.bert import hf as bert_hf
from tinyforge.models.vit import PRESETS as VIT_PRESETS
from tinyforge.models.vit import Config as ViTConfig
from tinyforge.models.vit import hf as vit_hf
from tinyforge.op import Stash

torch = pytest.importorskip("torch", reason="the peer is transformers, on torch")
transformers = pytest.importorskip("transformers", reason="the peer is transformers")

FP64 = get_backend("numpy", "fp64", workers=1)
VIT = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "image_size": 15,
    "patch_size": 5,
    "num_channels": 3,
    "num_labels": 7,
}
BERT = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "vocab_size": 37,
    "max_position_embeddings": 19,
}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", BERT),
    "bert-classes": ("BertForSequenceClassification", {**BERT, "num_labels": 5, "type_vocab_size": 3}),
    "vit": ("ViTForImageClassification", VIT),
    "vit-grey": ("ViTForImageClassification", {**VIT, "num_channels": 1, "patch_size": 3, "num_labels": 2}),
}


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with in_float64(monkeypatch, "vit", "bert"):
        yield


def make_peer(name: str) -> Any:
    return random_peer(*PEERS[name], seed=name)


def inputs_for(name: str) -> tuple[tuple[np.ndarray, ...], np.ndarray, dict[str, Any]]:
    """What our forward reads, targets apart; the targets; and what transformers' forward reads."""
    values, rng = PEERS[name][1], np.random.default_rng(0)
    if name.startswith("bert"):
        # No word is 0, the padding: their table gives that one no gradient.
        ids, segments, lengths = rng.integers(1, 37, (3, 17)), rng.integers(0, 2, (3, 17)), np.array([17, 9, 1])
        seen = torch.from_numpy(np.arange(17) < lengths[:, None]).long()
        theirs = {
            "input_ids": torch.from_numpy(ids),
            "token_type_ids": torch.from_numpy(segments),
            "attention_mask": seen,
        }
        if name == "bert-classes":
            return (ids, segments, lengths), np.array([[[4]], [[-1]], [[0]]]), theirs
        # A place for each token of a text, in an order of its own; none after its end.
        order = np.stack([rng.permutation(17) for _ in lengths])
        places = np.where(order < lengths[:, None], order, -1)
        targets = np.where(places < 0, -1, rng.integers(-1, 37, places.shape))[..., None]
        return (ids, segments, lengths, places), targets, theirs
    images = rng.normal(size=(3, values["num_channels"], 15, 15))
    targets = np.array([[[1]], [[-1]], [[0]]])
    return (images,), targets, {"pixel_values": torch.from_numpy(images)}


def our_logits(model: Any, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    if len(inputs) < 4:
        return model.classify(*inputs)[:, 0]
    ids, segments, lengths, _ = inputs
    return model.predict(model.hidden(ids, segments, lengths), np.tile(np.arange(17), (3, 1)))


def unpadded(logits: np.ndarray, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """Without the logits at padding, which mean nothing."""
    return logits[np.arange(17) < inputs[2][:, None]] if len(inputs) == 4 else logits


def at_places(logits: Any, inputs: tuple[np.ndarray, ...]) -> Any:
    """transformers' logits where ours are predicted."""
    return logits[np.arange(3)[:, None], np.maximum(inputs[3], 0)] if len(inputs) == 4 else logits


def gradients_by_file_name(peer: Any, folder: Path) -> dict[str, np.ndarray]:
    """transformers renames parameters when it saves a model; so the gradients are saved as if they were weights."""
    from safetensors.numpy import load_file

    with torch.no_grad():
        for p in peer.parameters():
            p.copy_(p.grad)
    peer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def worst(got: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest number expected."""
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), floor))


@pytest.mark.parametrize("name", PEERS)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path, parity: Callable[..., None]) -> None:
    peer = make_peer(name)
    peer.float().save_pretrained(tmp_path / "peer")
    peer.double()
    model = load_weights(open_directory(tmp_path / "peer"), FP64)
    inputs, targets, theirs = inputs_for(name)
    logits = peer(**theirs).logits
    found_and_wanted = (unpadded(z, inputs) for z in (our_logits(model, inputs), logits.detach().numpy()))
    parity(model, "logits", worst(*found_and_wanted), 1e-9)

    stash, count = Stash(), (targets >= 0).sum()
    nll = model.forward(inputs[0], targets, *inputs[1:], stash=stash)
    model.backward(np.full(1, 1 / count), stash)
    assert len(stash) == 0
    loss = torch.nn.functional.cross_entropy(
        at_places(logits, inputs).flatten(0, -2), torch.from_numpy(targets).flatten(), ignore_index=-1
    )
    loss.backward()
    assert nll.sum() / count == pytest.approx(loss.item(), rel=1e-12)
    expected = gradients_by_file_name(peer, tmp_path / "gradients")
    ours = {p.name: p.grad for p in model.buffer.params}
    found = {entry.theirs: entry.take(ours[entry.ours]) for entry in entries_of(model)}
    assert found.keys() == expected.keys()
    # The bias of the keys adds the same to all scores of a query, which softmax does not see: its gradient is 0, and
    # what is computed is rounding. So an error counts next to a thousandth of the largest gradient at least.
    floor = 1e-3 * max(np.abs(g).max() for g in expected.values())
    parity(model, "gradients", max(worst(found[name], expected[name], floor) for name in found), 1e-8)


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
        expected = again.eval()(**theirs).logits.numpy()
    assert worst(*(unpadded(z, inputs) for z in (our_logits(model, inputs), expected))) < 1e-9


def test_a_bert_without_an_output_comes_back(tmp_path: Path) -> None:
    """BertModel, as models of text embeddings are: tensors without a prefix, a pooler that nothing reads."""
    peer = random_peer("BertModel", BERT, seed="trunk")
    peer.float().save_pretrained(tmp_path / "theirs")
    model = load_weights(open_directory(tmp_path / "theirs"), FP64)
    assert model.config.trunk and model.head == []
    write_directory(tmp_path / "ours", weights_of(model), "f32")
    again = transformers.BertModel.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    ids = np.random.default_rng(0).integers(1, 37, (2, 17))
    with torch.no_grad():
        for each in (peer.double().eval(), again):
            expected = each(torch.from_numpy(ids)).last_hidden_state.numpy()
            assert worst(model.encode(ids.astype(np.int32)), expected) < 1e-9
    with pytest.raises(UserError, match="no output layer"):
        model.forward(ids, ids[..., None], ids, np.array([17, 17]))


@pytest.mark.parametrize("preset", ["base", "large"])
def test_sizes_of_vit_are_transformers_sizes(preset: str) -> None:
    config: ViTConfig = VIT_PRESETS[preset]
    given = {k: v for k, v in vit_hf.write_config(config).items() if k != "architectures"}
    with torch.device("meta"):
        peer = transformers.ViTForImageClassification(transformers.ViTConfig(**given))
    expected = sum(p.numel() for p in peer.parameters())
    assert sum(int(np.prod(entry.shape)) for entry in vit_hf.entries(config)) == expected


def test_a_vit_that_is_none_of_ours_is_refused() -> None:
    given = vit_hf.write_config(VIT_PRESETS["digits"])
    with pytest.raises(UserError, match="hidden_act is 'relu'; supported: 'gelu'"):
        vit_hf.read_config({**given, "hidden_act": "relu"})
    with pytest.raises(UserError, match="image 28 is not a whole number of patches of 5; use a patch that divides 28"):
        vit_hf.read_config({**given, "patch_size": 5})


@pytest.mark.parametrize("preset", ["base", "large"])
@pytest.mark.parametrize("classes", [0, 3])
def test_sizes_of_bert_are_transformers_sizes(preset: str, classes: int) -> None:
    given = bert_hf.write_config(BERT_PRESETS[preset].override({"classes": classes}))
    kind = getattr(transformers, given.pop("architectures")[0])
    with torch.device("meta"):
        peer = kind(transformers.BertConfig(**given))
    found = bert_hf.entries(BERT_PRESETS[preset].override({"classes": classes}))
    assert sum(int(np.prod(entry.shape)) for entry in found) == sum(p.numel() for p in peer.parameters())


def test_the_names_and_extras_of_published_files_are_read(tmp_path: Path) -> None:
    """bert-base-uncased: gamma and beta, a pooler, a second head, the tied matrix twice."""
    from safetensors.numpy import load_file, save_file

    peer = make_peer("bert")
    peer.float().save_pretrained(tmp_path)
    model = load_weights(open_directory(tmp_path), FP64)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    for name in ("bert.pooler.dense.weight", "cls.seq_relationship.bias", "cls.predictions.decoder.weight"):
        tensors[name] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    again = load_weights(open_directory(tmp_path), FP64)
    assert np.array_equal(again.buffer.values, model.buffer.values)


def test_a_bert_that_is_none_of_ours_is_refused() -> None:
    given = bert_hf.write_config(BERT_PRESETS["small"])
    for name, value in (
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("tie_word_embeddings", False),
    ):
        with pytest.raises(UserError, match=f"{name} is {value!r}; supported"):
            bert_hf.read_config({**given, name: value})
    for name in ("BertModel", "BertForSequenceClassification"):  # without words as their output
        bert_hf.read_config({**given, "architectures": [name], "tie_word_embeddings": False})
