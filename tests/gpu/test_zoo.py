"""GPT-2, Llama, BERT and ViT on the GPU: logits, gradients and caches against NumPy's; stories260K's published text."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import get_backend
from tinyforge.formats import load_pretrained, save_pretrained
from tinyforge.infer import Sampling, generate, make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.models.bert import BERT
from tinyforge.models.bert import Config as BERTConfig
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.lstm import Config as LSTMConfig
from tinyforge.models.lstm import LSTMModel
from tinyforge.models.mamba import Config as MambaConfig
from tinyforge.models.mamba import Mamba
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.vit import Config as ViTConfig
from tinyforge.models.vit import ViT
from tinyforge.op import Stash
from tinyforge.ops.attention import Documents
from tinyforge.rng import Stream
from tinyforge.tokenizers import Tokenizer
from tinyforge.train.batches import starts_of

pytestmark = pytest.mark.gpu

# Odd sizes: hidden widths and vocabularies that fill no whole tile; 77 positions are more than a tile of queries.
LLAMA = LlamaConfig(dim=96, heads=6, kv_heads=2, layers=3, context=96, vocab=301, hidden=154)
# Without the router's losses, which the models' tests have. In bf16 a rounded logit may choose another expert, and a
# token's result with it: there only a mixture of which every expert is chosen is compared.
MOE = MoEConfig(
    dim=96, heads=6, kv_heads=2, layers=3, context=96, vocab=301, hidden=72, experts=5, balance=0.0, router_z=0.0
)
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2, GPT2Config(dim=96, heads=3, layers=3, context=96, vocab=301, dropout=0.2)),
    "gpt2-char": (GPT2, GPT2Config(dim=96, heads=3, layers=3, context=96, vocab=65, dropout=0.2, bias=False)),
    "llama": (Llama, LLAMA),
    "llama-qwen2": (Llama, LLAMA.override({"qkv_bias": True, "tied": False})),
    "llama-qwen3": (Llama, LLAMA.override({"qk_norm": True, "head_dim": 32})),
    "llama-mistral": (Llama, LLAMA.override({"window": 33})),
    "moe": (MoE, MOE),
    "moe-mixtral": (MoE, MOE.override({"experts": 3, "active": 3, "mtp_heads": 1, "window": 33})),
    "lstm": (LSTMModel, LSTMConfig(dim=96, layers=3, context=96, vocab=301, dropout=0.2, reset=5)),
    "mamba": (Mamba, MambaConfig(dim=48, layers=3, state=5, context=96, vocab=301)),
}
LENGTH = 77


def build(name: str, backend: str, precision: str) -> Any:
    """The same weights on either backend, bfloat16's all of them."""
    kind, config = MODELS[name]
    model = kind(config, get_backend(backend, precision, workers=1))
    rng = np.random.default_rng(7)
    for p in model.buffer.params:
        drawn = (p.fill + 0.1 * rng.standard_normal(p.shape)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        model.buffer.set_master(p, drawn.view(np.float32))
    model.buffer.publish()
    return model


Step = tuple[np.ndarray, dict[str, np.ndarray]]


def step(model: Any, documents: Documents | None = None) -> Step:
    """Losses and gradients of a training pass, dropout included."""
    rng, backend = np.random.default_rng(5), model.backend
    ids = rng.integers(0, model.config.vocab, (3, LENGTH), dtype=np.int32)
    heads = model.prediction_heads
    targets = rng.integers(-1, model.config.vocab, (3, LENGTH, heads), dtype=np.int32)
    stash = Stash(Stream(3, "step"))
    options = {} if documents is None else {"documents": documents.on(backend)}
    nll = model.forward(backend.asarray(ids), backend.asarray(targets), stash, **options)
    model.backward(backend.asarray(np.ones(heads), backend.master_dtype), stash)
    return backend.to_numpy(nll), {p.name: backend.to_numpy(p.grad).astype(np.float64) for p in model.buffer.params}


def assert_agree(got: Step, expected: Step, tolerance: float) -> None:
    """Losses, and each gradient as a whole."""
    (nll, grads), (wanted_nll, wanted) = got, expected
    assert np.abs(nll - wanted_nll).max() < tolerance * np.abs(wanted_nll).max()
    errors = {p: np.linalg.norm(grads[p] - g) / np.linalg.norm(g) for p, g in wanted.items()}
    assert {p: error for p, error in errors.items() if not error < tolerance} == {}


def adapted(name: str, backend: str, precision: str) -> Any:
    """The model of `build`, frozen, with adapters that are not 0."""
    kind, config = MODELS[name]
    model = Adapted(partial(kind, config, get_backend(backend, precision, workers=1)), Adapters(4, 8.0, 0.1))
    rng = np.random.default_rng(7)
    for p in (*model.buffer.frozen, *model.buffer.params):
        drawn = (p.fill + 0.1 * rng.standard_normal(p.shape)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        model.buffer.set_master(p, drawn.view(np.float32))
    model.buffer.publish()
    return model


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 1e-1)])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])  # which has no linear maps but its head
def test_adapters_learn_as_on_numpy(name: str, precision: str, tolerance: float) -> None:
    if name == "moe" and precision == "bf16":
        pytest.skip("a rounded logit may choose another expert")
    assert_agree(step(adapted(name, "cupy", precision)), step(adapted(name, "numpy", "fp64")), tolerance)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 1e-1)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_numpy(name: str, precision: str, tolerance: float) -> None:
    """bf16's error is that of 8 bits through three layers; a wrong wire is an error of 1."""
    if name == "moe" and precision == "bf16":
        pytest.skip("a rounded logit may choose another expert")
    assert_agree(step(build(name, "cupy", precision)), step(build(name, "numpy", "fp64")), tolerance)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("tf32", 3e-2), ("bf16", 1e-1)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-mistral"])
def test_packed_documents_give_the_losses_and_gradients_of_numpy(
    name: str, precision: str, tolerance: float, restart: bool
) -> None:
    begins = np.random.default_rng(6).random((3, LENGTH)) < 1 / 15
    documents = Documents(starts_of(begins), restart)
    wanted = step(build(name, "numpy", "fp64"), documents)
    assert_agree(step(build(name, "cupy", precision), documents), wanted, tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_the_same_as_the_whole_text(name: str) -> None:
    model = build(name, "cupy", "fp64")
    ids = model.backend.asarray(np.random.default_rng(1).integers(0, 65, (2, LENGTH), dtype=np.int32))
    wanted = model.backend.to_numpy(model.hidden(ids))
    cache = model.make_cache(2, LENGTH)
    parts = [model.hidden(ids[:, start:stop], cache=cache) for start, stop in ((0, 40), (40, 41), (41, LENGTH))]
    got = np.concatenate([model.backend.to_numpy(part) for part in parts], axis=1)
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)


# Bytes are the tokens. The LSTM has no form of others, and Mixtral's holds one head.
@pytest.mark.parametrize("name", [n for n, (_, c) in MODELS.items() if c.vocab >= 256 and n not in ("lstm", "moe")])
def test_files_hold_the_same_weights_on_both_backends(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer([], [])
    model = build(name, "cupy", "bf16")
    save_pretrained(model, tokenizer, tmp_path / name, dtype="bf16")
    again, _ = load_pretrained(tmp_path / name, get_backend("cupy", "bf16"))
    on_cpu, _ = load_pretrained(tmp_path / name, get_backend("numpy", "fp32", workers=1))
    for p, q, r in zip(model.buffer.params, again.buffer.params, on_cpu.buffer.params, strict=True):
        values = [model.backend.to_numpy(x.value).astype(np.float32) for x in (p, q)]
        assert np.array_equal(values[0], values[1]) and np.array_equal(values[0], r.value), p.name


FOLDER = Path(__file__).resolve().parents[3] / "shared/data/llama2c"


@pytest.mark.skipif(not (FOLDER / "stories260K.bin").is_file(), reason=f"stories260K.bin is not in {FOLDER}")
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "chosen"])
def test_stories260k_tells_the_published_story(reference: bool) -> None:
    page = (FOLDER / "stories260K.md").read_text(encoding="utf-8")
    published = re.search(r"-t 0\.0\n(.*?)```", page, re.DOTALL)
    assert published is not None
    model, tokenizer = load_pretrained(FOLDER / "stories260K.bin", get_backend("cupy", "fp32"))
    decoder = ReferenceDecoder(model) if reference else make_decoder(model)
    ids = generate(model, [1], Sampling(temperature=0, max_tokens=256), decoder=decoder)
    assert tokenizer.decode(ids).strip() == published[1].strip()


ENCODERS: dict[str, tuple[Any, Any]] = {
    "bert": (BERT, BERTConfig(dim=96, heads=3, layers=3, context=96, vocab=301, hidden=154, dropout=0.0)),
    "bert-dropout": (
        BERT,
        BERTConfig(dim=96, heads=3, layers=2, context=96, vocab=301, hidden=154, dropout=0.2, attention_dropout=0.2),
    ),
    "bert-classes": (BERT, BERTConfig(dim=96, heads=3, layers=2, context=96, vocab=301, hidden=154, classes=5)),
    "vit": (ViT, ViTConfig(image=28, patch=4, channels=3, dim=96, heads=3, layers=3, hidden=154)),
}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 1e-1)])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_compute_what_numpy_computes(name: str, precision: str, tolerance: float) -> None:
    """Padding to one token, to a tile and to none; segments; hidden words; pixels."""

    def step(backend_name: str, precision: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        kind, config = ENCODERS[name]
        backend = get_backend(backend_name, precision, workers=1)
        model, rng = kind(config, backend), np.random.default_rng(7)
        for p in model.buffer.params:
            drawn = (p.fill + 0.1 * rng.standard_normal(p.shape)).astype(np.float32).view(np.uint32)
            model.buffer.set_master(p, (drawn & np.uint32(0xFFFF0000)).view(np.float32))
        model.buffer.publish()
        if kind is ViT:
            inputs = rng.integers(0, 256, (3, 3, 28, 28)), rng.integers(0, 10, (3, 1, 1))
        else:
            lengths = np.array([LENGTH, 64, 1])
            places = np.where(np.arange(9) * 8 < lengths[:, None], np.arange(9) * 8, -1)
            words = np.where(places < 0, -1, rng.integers(0, 301, places.shape))[..., None]
            targets = rng.integers(0, 5, (3, 1, 1)) if config.classes else words
            inputs = rng.integers(0, 301, (3, LENGTH)), targets, rng.integers(0, 2, (3, LENGTH)), lengths, places
        stash = Stash(Stream(3, "step"))
        nll = model.forward(*map(backend.asarray, inputs), stash=stash)
        model.backward(backend.asarray(np.ones(1), backend.master_dtype), stash)
        grads = {p.name: backend.to_numpy(p.grad).astype(np.float64) for p in model.buffer.params}
        return backend.to_numpy(nll), grads

    nll, grads = step("cupy", precision)
    wanted_nll, wanted = step("numpy", "fp64")
    assert np.abs(nll - wanted_nll).max() < tolerance * np.abs(wanted_nll).max()
    largest = max(np.linalg.norm(g) for g in wanted.values())
    errors = {p: np.linalg.norm(grads[p] - g) / max(np.linalg.norm(g), 1e-3 * largest) for p, g in wanted.items()}
    assert {p: error for p, error in errors.items() if not error < tolerance} == {}
