"""GGUF: files written and read back, faulty files, and what llama.cpp makes of what is written."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import numpy as np
import pytest

from tests.tokenizers.test_huggingface import byte_level, strings
from tests.tokenizers.test_sentencepiece import train as train_sentencepiece
from tinyforge.backends import get_backend
from tinyforge.chat import conversation_with
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.formats import convert, gguf_file, gguf_model, gguf_quants, load, load_pretrained, mxfp4, save_pretrained
from tinyforge.formats.foreign import weights_of
from tinyforge.infer import Sampling, generate
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import SPEC as NANOEULER
from tinyforge.tokenizers import CharTokenizer, SentencePiece, TextTokenizer, Tokenizer, load_tokenizer
from tinyforge.tokenizers.pieces import PATTERNS

gguf = pytest.importorskip("gguf", reason="GGUF files are read and written through the gguf package")

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared/data/llama2c/stories260K.bin"
SMALL = NANOEULER.bundled
FP32 = get_backend("numpy", "fp32", workers=1)
END = "<|endoftext|>"
TEXT = "Once upon a time, Zoë's cat said 「hi」 12 times.\n\n  Then it slept."
TINY = {"dim": 24, "heads": 4, "kv_heads": 2, "layers": 2, "context": 40, "vocab": 300, "hidden": 20}
GEMMA = {"norm_plus_one": True, "activation": "gelu_tanh", "embedding_scale": float(np.float32(24**0.5))}
GEMMA2: dict[str, Any] = {"norms": "both", "window": 7, "full_every": 2}
GEMMA3: dict[str, Any] = {"norms": "both", "window": 7, "qk_norm": True, "local_rope_theta": 10000.0}
PLAIN: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False}
BIASES: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
PHI2: dict[str, Any] = {**TINY, **PLAIN, **BIASES, "kv_heads": 4, "rotary_dim": 4, "tied": False}
MIXTURE: dict[str, Any] = {**TINY, "experts": 5, "active": 2, "mtp_heads": 1, "mtp_weights": (1.0,), "router_z": 0.0}
MIXTURE |= {"balance": 0.001}
GPT_OSS: dict[str, Any] = {
    "sinks": True,
    "clamp": 7.0,
    "window": 7,
    "full_every": 2,
    "qkv_bias": True,
    "out_bias": True,
}
MODELS: dict[str, tuple[type, Any]] = {
    "llama": (Llama, LlamaConfig(**TINY, tied=False)),
    "llama-tied": (Llama, LlamaConfig(**TINY, norm_eps=1e-6, rope_theta=500.0)),
    "llama-head-dim": (Llama, LlamaConfig(**TINY, head_dim=10)),
    "llama-linear": (Llama, LlamaConfig(**TINY, rope_scaling="linear", rope_factor=4.0)),
    # Wavelengths of 6, 14, 30, ... positions: kept below 16, blended up to 64, stretched above.
    "llama-llama3": (
        Llama,
        LlamaConfig(
            **TINY,
            head_dim=16,
            rope_scaling="llama3",
            rope_factor=8.0,
            rope_theta=500.0,
            rope_high_freq=4.0,
            original_context=64,
        ),
    ),
    "qwen2": (Llama, LlamaConfig(**TINY, qkv_bias=True, tied=False)),
    "qwen2-tied": (Llama, LlamaConfig(**TINY, qkv_bias=True)),
    "qwen3": (Llama, LlamaConfig(**TINY, qk_norm=True, head_dim=8)),
    "gemma": (Llama, LlamaConfig(**TINY, **GEMMA)),
    "gemma2": (
        Llama,
        LlamaConfig(
            **TINY, **GEMMA, **GEMMA2, head_dim=10, attention_scale=10**-0.5, attention_softcap=1.5, logit_softcap=2.5
        ),
    ),
    "gemma3": (
        Llama,
        LlamaConfig(
            **{**TINY, "layers": 7}, **GEMMA, **GEMMA3, attention_scale=6**-0.5, full_every=6, rope_theta=500.0
        ),
    ),
    "gemma3-pattern": (
        Llama,
        LlamaConfig(
            **{**TINY, "layers": 3},
            **GEMMA,
            **{**GEMMA3, "local_rope_theta": 30.0},
            attention_scale=6**-0.5,
            full_every=2,
            rope_scaling="linear",
            rope_factor=4.0,
        ),
    ),
    "llama-biases": (Llama, LlamaConfig(**TINY, qkv_bias=True, out_bias=True, mlp_bias=True)),
    "llama-yarn": (
        Llama,
        LlamaConfig(
            **TINY,
            head_dim=16,
            rope_scaling="yarn",
            rope_factor=4.0,
            rope_attention=1 + 0.1 * math.log(4.0),
            rope_theta=100.0,
            rope_high_freq=32.0,
            original_context=10,
        ),
    ),
    "phi3": (Llama, LlamaConfig(**{**TINY, "dim": 32}, rotary_dim=6)),
    "phi3-plain": (Llama, LlamaConfig(**{**TINY, "dim": 32}, family="phi3")),
    "olmo2": (Llama, LlamaConfig(**TINY, norms="after", qk_norm=True, qk_norm_width=True, tied=False)),
    "smollm3": (Llama, LlamaConfig(**{**TINY, "layers": 5}, no_rope_every=4)),
    "granite": (
        Llama,
        LlamaConfig(**TINY, embedding_scale=3.0, residual_scale=0.25, logit_scale=0.5, attention_scale=0.375),
    ),
    "glm4": (Llama, LlamaConfig(**TINY, norms="both", qkv_bias=True, head_dim=12, rotary_dim=6)),
    "nemotron": (Llama, LlamaConfig(**{**TINY, **PLAIN}, activation="relu2", rotary_dim=4, tied=False)),
    "nemotron-biases": (
        Llama,
        LlamaConfig(**{**TINY, **PLAIN, **BIASES}, activation="relu2", rotary_dim=4, tied=False),
    ),
    "starcoder2": (Llama, LlamaConfig(**{**TINY, **PLAIN, **BIASES}, activation="gelu_tanh")),
    "phi2": (Llama, LlamaConfig(**PHI2, activation="gelu_tanh", parallel=True, head_bias=True)),
    "gptneox": (Llama, LlamaConfig(**PHI2, activation="gelu", parallel=True, parallel_norms=True)),
    "gptneox-plain": (Llama, LlamaConfig(**PHI2, activation="gelu")),
    "qwen2moe": (MoE, MoEConfig(**MIXTURE, qkv_bias=True, normalised=False, shared=12)),
    "qwen3moe": (MoE, MoEConfig(**MIXTURE, qk_norm=True, tied=True)),
    "olmoe": (
        MoE,
        MoEConfig(**MIXTURE | {"kv_heads": 4, "balance": 0.01}, qk_norm=True, qk_norm_width=True, normalised=False),
    ),
    "gpt-oss": (MoE, MoEConfig(**MIXTURE, **GPT_OSS)),
    "gpt2": (GPT2, GPT2Config(dim=24, heads=3, layers=2, context=40, vocab=300)),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(documents("train", 50, 0), 300, [END, "</s>"], progress=False)


def make(name: str) -> Any:
    """One of MODELS."""
    kind, config = MODELS[name]
    return randomised(kind(config, FP32))


def randomised(model: Any) -> Any:
    """Gains away from 1 and biases away from 0, so that each counts."""
    model.initialise(seed=1)
    rng = np.random.default_rng(0)
    for p in model.buffer.params:
        p.value += 0.1 * rng.normal(size=p.shape).astype(np.float32)
    return model


def logits(model: Any, ids: Any = None) -> np.ndarray:
    ids = np.arange(20) if ids is None else np.asarray(ids)
    return model.logits(model.hidden(ids[None]))[0]


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_read_back_it_is_the_same_model_to_the_bit(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make(name)
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    again, same = load_pretrained(tmp_path / "m.gguf", FP32)
    assert again.config == model.config and same.hash() == tokenizer.hash()
    # Gemma's gains are stored with 1 added, which rounds them.
    np.testing.assert_allclose(
        again.buffer.values, model.buffer.values, rtol=0, atol=6e-8 if name[:5] in ("gemma", "nemot") else 0
    )
    changed = [p.name for p in model.buffer.params if (again.buffer.view(again.buffer.values, p) != p.value).any()]
    assert all("norm" in name for name in changed)


@pytest.mark.parametrize("name", ["stories260K", "small"])
def test_trained_models_come_back_to_the_bit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "stories260K" and not STORIES.is_file():
        pytest.skip(f"stories260K.bin of llama2.c is not in {STORIES.parent}")
    source = STORIES if name == "stories260K" else SMALL
    assert source is not None
    assert convert.main([str(source), str(tmp_path / "m.gguf")]) == 0
    assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / "back"), "--format", "tinyforge"]) == 0
    ours, again = load(source, FP32), load(tmp_path / "back", FP32)
    theirs = {n: make() for n, (_, make) in weights_of(again.model).tensors.items()}
    for tensor, (_, expected) in weights_of(ours.model).tensors.items():
        assert theirs[tensor].tobytes() == expected().tobytes(), tensor
    assert again.tokenizer.hash() == ours.tokenizer.hash()
    assert (ours.template.name, again.template.name) == (
        ("alpaca", "alpaca") if name == "small" else ("plain", "plain")
    )
    assert ("left out: the 3 later output heads" in capsys.readouterr().err) == (name == "small")


def test_a_window_is_written_as_the_context(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = randomised(Llama(LlamaConfig(**TINY, window=7), FP32))
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    assert "the context becomes the window, 7 of 40 tokens" in capsys.readouterr().err
    again, _ = load_pretrained(tmp_path / "m.gguf", FP32)
    assert again.config.context == 7 and again.config.window == 0
    assert np.array_equal(logits(again, range(7)), logits(model, range(7)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": "yarn", "rope_high_freq": 9.0}, "YaRN has beta_fast 32 and beta_slow 1"),
        ({"rope_scaling": "dynamic"}, "no RoPE scaling 'dynamic'"),
        ({"no_rope_every": 2}, "smollm3 has no_rope_layers"),
        ({"norms": "after", "qk_norm": True, "qk_norm_width": True}, "olmo2 has an output head of its own"),
        ({**GEMMA, **GEMMA2, "attention_scale": 0.5}, "divides its scores by the root of 4; llama.cpp's gemma2"),
        (
            {**PLAIN, "mlp_bias": True, "kv_heads": 4, "activation": "relu", "family": "gpt_neox", "tied": False},
            "gptneox has hidden_act gelu, the model relu",
        ),
        ({**PHI2, "activation": "gelu", "qkv_bias": False, "out_bias": False}, "gptneox has biases in its attention"),
        ({**MIXTURE, "qk_norm": True, "normalised": False}, "qwen3moe has norm_topk_prob True, the model False"),
        ({**MIXTURE, "qk_norm": True, "sinks": True, "clamp": 7.0}, "no Hugging Face mixture of experts has"),
        ({**MIXTURE, **GPT_OSS, "clamp": 5.0}, "gpt-oss has swiglu_limit 7.0, the model 5.0"),
        ({**MIXTURE, **GPT_OSS, "qkv_bias": False, "out_bias": False}, "gpt-oss has biases in its attention"),
        ({"qk_norm": True, "norms": "after"}, "the model is a Exaone4ForCausalLM; .gguf files can hold"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    values: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kind: Any = (MoE, MoEConfig) if "experts" in values else (Llama, LlamaConfig)
    model = randomised(kind[0](kind[1](**TINY | values), FP32))
    with pytest.raises(UserError, match=message):
        save_pretrained(model, tokenizer, tmp_path / "m.gguf")


def test_gpt_oss_in_mxfp4(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as they are published: numbers that the type holds come back to the bit."""
    model = randomised(MoE(MoEConfig(**{**MIXTURE, "dim": 32, "hidden": 64}, **GPT_OSS), FP32))
    rng = np.random.default_rng(0)
    for block in model.blocks:
        for p in (block.mlp.experts.gate_up, block.mlp.experts.down):
            codes = rng.integers(0, 256, (*p.shape[:2], p.shape[2] // 32, 16)).astype(np.uint8)
            p.value[...] = mxfp4.dequantise(codes, np.full(codes.shape[:3], 125))
    type_of = gguf_model._type_of
    monkeypatch.setattr(gguf_model, "_type_of", lambda own, *a: "mxfp4" if "_exps.w" in own else type_of(own, *a))
    monkeypatch.setitem(gguf_model.BLOCKS, "f32", 1)
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    again, _ = load_pretrained(tmp_path / "m.gguf", FP32)
    assert gguf_file.read(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight"].dtype == 39
    assert again.config == model.config and np.array_equal(again.buffer.values, model.buffer.values)


def test_a_gpt2_without_biases_gets_zeros(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = randomised(GPT2(GPT2Config(dim=24, heads=3, layers=1, context=40, vocab=300, bias=False), FP32))
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    again, _ = load_pretrained(tmp_path / "m.gguf", FP32)
    assert again.config.bias
    np.testing.assert_allclose(logits(again), logits(model), rtol=1e-5, atol=1e-6)


def test_rotary_pairs_are_neighbours_in_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Rows 0, D/2, 1, D/2 + 1, ... of a head, in the llama architecture alone."""
    for name, rows in (("llama", [0, 3, 1, 4, 2, 5]), ("qwen2", [0, 1, 2, 3, 4, 5])):
        model = make(name)
        save_pretrained(model, tokenizer, tmp_path / f"{name}.gguf")
        stored = gguf_file.read(tmp_path / f"{name}.gguf").tensors["blk.1.attn_k.weight"].read()
        keys = model.blocks[1].attention.qkv.weight.value[24:36]  # two heads of size 6
        assert np.array_equal(stored[:6], keys[:6][rows]) and np.array_equal(stored[6:], keys[6:][rows])


# --- types ------------------------------------------------------------------------------------------------------------


def rounding(x: np.ndarray, kind: str) -> np.ndarray:
    """The largest error that a type may make, number by number."""
    if kind in ("f16", "bf16"):
        return np.abs(x) * 2.0 ** (-11 if kind == "f16" else -8) + 2.0**-24
    blocks = x.reshape(-1, 32)
    most = np.abs(blocks).max(axis=1, keepdims=True)
    # Half a step, and the rounding of the scale to float16. q4_0 has 8 steps on one side of 0 and 7 on the other.
    step, steps = (most / 127, 127.5) if kind == "q8_0" else (most / 8, 8.5)
    share = 0.5 if kind == "q8_0" else 1.0
    return np.broadcast_to(share * step + steps * step * 2.0**-11, blocks.shape).reshape(x.shape)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_what_a_type_keeps(kind: str, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 32 are packed, rows of 20 (ffn_down) are not; norms, biases and positions stay as they are."""
    config = LlamaConfig(dim=32, heads=4, kv_heads=2, layers=1, context=40, vocab=300, hidden=20, tied=False)
    gpt2 = GPT2Config(dim=32, heads=4, layers=1, context=40, vocab=300)
    for model in (randomised(Llama(config, FP32)), randomised(GPT2(gpt2, FP32))):
        path = tmp_path / f"{type(model).__name__}.gguf"
        save_pretrained(model, tokenizer, path, dtype=kind)
        again, _ = load_pretrained(path, FP32)
        names = {int(gguf.GGMLQuantizationType[name.upper()]): name for name in gguf_file.TYPES}
        types = {name: names[tensor.dtype] for name, tensor in gguf_file.read(path).tensors.items()}
        for name, stored in types.items():
            exact = name.endswith((".bias", "_norm.weight")) or name == "position_embd.weight"
            head = name == ("output.weight" if type(model) is Llama else "token_embd.weight")
            odd = kind in ("q8_0", "q4_0") and name == "blk.0.ffn_down.weight" and type(model) is Llama
            assert stored == ("f32" if exact else "f16" if odd else "q8_0" if head and kind == "q4_0" else kind), name
        theirs = {name: make() for name, (_, make) in weights_of(again).tensors.items()}
        for name, (_, make_wanted) in weights_of(model).tensors.items():
            expected = make_wanted()
            expected, got = (expected.T, theirs[name].T) if ".c_" in name else (expected, theirs[name])
            if expected.ndim == 1 or "wpe" in name:
                assert np.array_equal(got, expected), name
            else:
                worst = rounding(expected, "f16" if expected.shape[-1] % 32 and kind[0] == "q" else kind)
                assert (np.abs(got - expected) <= worst).all() and (got != expected).any(), name
    noted = "for rows of 20, which are not whole blocks of 32" in capsys.readouterr().err
    assert noted == (kind in ("q8_0", "q4_0"))


@pytest.mark.parametrize(("kind", "most"), [("q4_K", 0.073), ("q6_K", 0.0185)])
def test_super_blocks_are_close(kind: str, most: float) -> None:
    """llama.cpp's own quantiser has an error of 0.0713 and 0.0178 for normal numbers; 99.9% of its bytes are ours."""
    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    x[1, :256], x[2], x[3, ::2] = 0, 1.5, 0
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    back = gguf.quants.dequantize(gguf_quants.quantize(x, kind), type_)
    assert back.shape == x.shape and not back[1, :256].any() and np.allclose(back[2], 1.5, rtol=1e-3)
    assert np.sqrt(np.mean((back[4:] - x[4:]) ** 2)) < most


@pytest.mark.parametrize(
    ("kind", "matrix", "head", "odd"), [("q4_K", "q4_K", "q6_K", "q5_0"), ("q6_K", "q6_K", "q6_K", "q8_0")]
)
def test_types_of_super_blocks(
    kind: str,
    matrix: str,
    head: str,
    odd: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = LlamaConfig(dim=256, heads=4, kv_heads=2, layers=1, context=40, vocab=300, hidden=288, tied=False)
    model, path = randomised(Llama(config, FP32)), tmp_path / "m.gguf"
    save_pretrained(model, tokenizer, path, dtype=kind)
    assert f"note: {odd}, not {matrix}, for rows of 288, which are not whole blocks of 256" in capsys.readouterr().err
    content = gguf_file.read(path)
    types = {name: gguf.GGMLQuantizationType(tensor.dtype).name.lower() for name, tensor in content.tensors.items()}
    assert types["blk.0.attn_q.weight"] == matrix.lower() and types["output.weight"] == head.lower()
    assert types["blk.0.ffn_down.weight"] == odd and types["blk.0.ffn_norm.weight"] == "f32"
    again, _ = load_pretrained(path, FP32)
    z, expected = (logits(one, range(9)) for one in (again, model))
    assert np.corrcoef(z.ravel(), expected.ravel())[0, 1] > 0.97


def test_every_type_is_read_as_the_package_does(tmp_path: Path) -> None:
    """In parts of some rows, of random bytes; and whole numbers and float64, which the package does not read."""
    rng = np.random.default_rng(1)
    for kind in [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = rng.integers(0, 256, (5, 3 * size), np.uint8)
        (tmp_path / "x").write_bytes(bytes(7) + stored.tobytes())
        tensor = gguf_file.Tensor(tmp_path / "x", (5, 3 * block), int(kind), 7, stored.nbytes)
        with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf_file, "DEQUANTISED_AT_ONCE", 6 * block)
            expected = gguf.quants.dequantize(stored, kind)
            assert np.array_equal(tensor.read(), expected, equal_nan=True), kind.name
    for name, dtype in gguf_file.PLAIN.items():
        values = np.arange(-6, 6).astype(dtype)
        (tmp_path / "x").write_bytes(values.tobytes())
        tensor = gguf_file.Tensor(tmp_path / "x", (3, 4), int(gguf.GGMLQuantizationType[name]), 0, values.nbytes)
        assert np.array_equal(tensor.read(), values.reshape(3, 4))
    with pytest.raises(UserError, match="cannot read"):
        replace(tensor, start=1).read()


# --- tokenizers and templates (tests/tokenizers/test_gguf_vocabulary.py has more) -----------------------------------


def test_more_ids_than_the_tokenizer_are_marked_as_unused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = randomised(Llama(LlamaConfig(**{**TINY, "vocab": 320}), FP32))
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    metadata = gguf_file.read(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"][300:302] == ["[PAD300]", "[PAD301]"]
    assert metadata["tokenizer.ggml.token_type"][298:302].tolist() == [3, 3, 5, 5]
    again, same = load_pretrained(tmp_path / "m.gguf", FP32)
    assert again.config.vocab == 320 and same.hash() == tokenizer.hash()


def test_the_modelfile_lies_beside_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_pretrained(make("llama"), tokenizer, tmp_path / f"{name}.gguf", meta={"template": "alpaca"})
    assert {p.name for p in tmp_path.iterdir()} == {"a.gguf", "Modelfile", "b.gguf", "b.Modelfile"}
    assert (tmp_path / "Modelfile").read_text() == (
        'FROM ./a.gguf\nTEMPLATE """{{ if .System }}{{ .System }}\n\n{{ end }}{{ if .Prompt }}### Instruction:\n'
        '{{ .Prompt }}\n\n{{ end }}### Response:\n{{ .Response }}</s>"""\nPARAMETER stop "</s>"\n'
        'PARAMETER stop "<|endoftext|>"\nPARAMETER num_ctx 40\n'
    )
    assert (tmp_path / "b.Modelfile").read_text().startswith("FROM ./b.gguf\n")
    found = load(tmp_path / "a.gguf", FP32)
    assert found.template.name == "alpaca" and found.meta["kind"] == "sft"
    metadata = gguf_file.read(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == tokenizer.specials["</s>"]


def test_a_tokenizer_that_llama_cpp_has_no_kind_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot hold a CharTokenizer"):
        save_pretrained(make("llama"), CharTokenizer("abc"), tmp_path / "m.gguf")
    with pytest.raises(UserError, match="llama.cpp has no tokenizer with 0 merges"):
        save_pretrained(make("llama"), Tokenizer([], [END]), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_other_models_and_types_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tinyforge.models.char_mlp import CharMLP
    from tinyforge.models.char_mlp import Config as CharMLPConfig

    with pytest.raises(UserError, match="other programs have no format for CharMLP"):
        save_pretrained(CharMLP(CharMLPConfig(vocab=300), FP32), tokenizer, tmp_path / "m.gguf")
    with pytest.raises(UserError, match="cannot save as hf in q8_0; supported: hf in f32, bf16; llama2c in f32; gguf"):
        save_pretrained(make("llama"), tokenizer, tmp_path / "m", dtype="q8_0")
    assert list(tmp_path.iterdir()) == []


# --- faulty files -----------------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def file(parts: list[bytes], infos: list[bytes] | None = None, data: bytes = b"", **other: int) -> bytes:
    """A file of these keys and tensors; `other` counts, or another version, where they are to be wrong."""
    infos = infos or []
    n = {"version": 3, "tensors": len(infos), "keys": len(parts), **other}
    head = b"GGUF" + struct.pack("<IQQ", n["version"], n["tensors"], n["keys"]) + b"".join([*parts, *infos])
    return head + bytes(-len(head) % 32) + data


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LLAMA = key("general.architecture", 8, string("llama"))
HUGE = 1 << 60
SIZES = [
    key(f"llama.{name}", 4, struct.pack("<I", value))
    for name, value in (
        ("context_length", 8),
        ("embedding_length", 4),
        ("block_count", 1),
        ("feed_forward_length", 4),
        ("attention.head_count", 2),
    )
]
EPS = key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))
EMBEDDING = tensor("token_embd.weight", (4, 3))
FAULTY = {
    "empty": (b"", "has 0 bytes, a GGUF file at least 24"),
    "another file": (b"PK\x03\x04" + bytes(40), "it does not begin with GGUF"),
    "version 1": (file([], version=1), "version 1, expected 2 or 3"),
    "big-endian": (file([], version=3 << 24), "version 50331648, expected 2 or 3, little-endian"),
    "2^60 keys": (file([], keys=HUGE), r"1,152,921,504,606,846,976 keys, at most 65,536"),
    "2^60 tensors": (file([], tensors=HUGE), r"1,152,921,504,606,846,976 tensors, at most 65,536"),
    "a key of 2^60": (file([struct.pack("<Q", HUGE)]), r"1,152,921,504,606,846,976 bytes expected at byte 32, \d+ are"),
    "a text of 2^60": (
        file([key("general.architecture", 8, struct.pack("<Q", HUGE))]),
        "846,976 bytes expected at byte",
    ),
    "2^60 texts": (file([key("a", 9, struct.pack("<IQ", 8, HUGE))]), "846,976 strings in one array, at most"),
    "2^60 numbers": (file([key("a", 9, struct.pack("<IQ", 10, HUGE))]), "bytes expected at byte 49"),
    "arrays in arrays": (file([key("a", 9, struct.pack("<IQ", 9, 1) * 100)]), "an array of type 9"),
    "a type of value": (file([key("a", 77, b"")]), "a value of type 77"),
    "no UTF-8": (file([struct.pack("<Q", 1) + b"\xff"]), "can't decode byte 0xff"),
    "a key twice": (file([LLAMA, LLAMA]), "the key general.architecture twice"),
    "cut short": (file([LLAMA, *SIZES])[:80], "bytes expected at byte"),
    "alignment": (file([key("general.alignment", 4, struct.pack("<I", 3))]), "general.alignment is 3"),
    "alignment 0": (file([key("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment is 0"),
    "no architecture": (file([]), "its architecture is None; supported: llama, qwen2, qwen3, gemma"),
    "another architecture": (file([key("general.architecture", 8, string("bert"))]), "its architecture is 'bert'"),
    "architectures": (
        file([key("general.architecture", 9, struct.pack("<IQ", 8, 1) + string("llama"))]),
        r"its architecture is \['llama'\]",
    ),
    "parts": (file([LLAMA, key("split.count", 9, struct.pack("<IQHH", 2, 2, 0, 0))]), r"is one of \[0 0\] parts"),
    "a part": (file([LLAMA, key("split.count", 2, struct.pack("<H", 3))]), "is one of 3 parts; join them first"),
    "a tensor twice": (file([LLAMA], [EMBEDDING, EMBEDDING]), "the tensor token_embd.weight twice"),
    "nine dimensions": (file([LLAMA], [tensor("x", (1,) * 9)]), "or of 9 dimensions"),
    "no rows": (file([LLAMA], [tensor("x", (4, 0))]), r"the tensor x of shape \(0, 4\)"),
    "an unread type": (
        file([LLAMA], [tensor("x", (256,), kind=9)]),
        "tensor x is of type Q8_1, which the package gguf",
    ),
    "an unknown type": (
        file([LLAMA], [tensor("x", (256,), kind=999)]),
        "tensor x is of type number 999, which the pac",
    ),
    "rows that do not fill blocks": (file([LLAMA], [tensor("x", (33,), kind=8)]), "rows of 33, Q8_0 has blocks of 32"),
    "half a super-block": (file([LLAMA], [tensor("x", (128,), kind=12)]), "rows of 128, Q4_K has blocks of 256"),
    "beyond the end": (file([LLAMA], [EMBEDDING], bytes(47)), r"lies at bytes 128 to 176, the file has 175"),
    "far beyond the end": (file([LLAMA], [tensor("x", (HUGE, HUGE))], bytes(64)), r"tensor x lies at bytes 128 to \d"),
    "an offset of 2^63": (file([LLAMA], [tensor("x", (4,), offset=1 << 63)], bytes(64)), "tensor x lies at bytes 9,22"),
    "between two alignments": (file([LLAMA], [tensor("x", (4,), offset=8)], bytes(64)), "tensor x lies at bytes 1"),
    "no sizes": (file([LLAMA], [EMBEDDING], bytes(48)), "llama.attention.head_count is None, expected a number"),
    "a size that is a text": (
        file([LLAMA, key("llama.attention.head_count", 8, string("4"))]),
        "is '4', expected a num",
    ),
    "a size that is no number": (
        file([LLAMA, *SIZES, key("llama.rope.freq_base", 6, struct.pack("<f", np.nan)), EPS], [EMBEDDING], bytes(48)),
        "llama.rope.freq_base is nan, expected a number",
    ),
    "missing tensors": (file([LLAMA, *SIZES, EPS], [EMBEDDING], bytes(48)), "attn_q|q_proj.weight is missing"),
    "yarn": (
        file([LLAMA, *SIZES, EPS, key("llama.rope.scaling.type", 8, string("ntk"))], [EMBEDDING], bytes(48)),
        "llama.rope.scaling.type is 'ntk'; supported: 'none', 'linear', 'yarn'",
    ),
    "other values than keys": (
        file([LLAMA, *SIZES, key("llama.attention.value_length", 4, b"\6\0\0\0"), EPS], [EMBEDDING], bytes(48)),
        "attention.value_length is 6, expected 2",
    ),
    "other factors": (
        file(
            [LLAMA, *SIZES, EPS],
            [EMBEDDING, tensor("rope_freqs.weight", (1,), offset=64)],
            bytes(64) + struct.pack("<f", 3.0),
        ),
        "the factors in rope_freqs.weight are not Llama 3's",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_file_is_one_line(fault: str, tmp_path: Path) -> None:
    content, message = FAULTY[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=message) as caught:
        load(path, FP32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert peak < 4 << 20  # no memory is taken for what is only claimed


def test_no_changed_byte_gives_anything_but_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Bytes of the header, changed and cut off at random: the model loads, or a UserError says why not."""
    save_pretrained(make("llama-llama3"), tokenizer, tmp_path / "m.gguf", meta={"template": "alpaca"})
    whole = (tmp_path / "m.gguf").read_bytes()
    header = min(tensor.start for tensor in gguf_file.read(tmp_path / "m.gguf").tensors.values())
    rng, refused = np.random.default_rng(0), 0
    for number in range(120):
        changed = bytearray(whole if number % 3 else whole[: rng.integers(header)])
        for place in rng.integers(len(changed) if number % 3 == 0 else header, size=1 + number % 2):
            changed[place] = rng.integers(256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(changed)
        try:
            load(path, FP32)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 60 < refused < 120


def test_a_fault_exits_with_status_2_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(FAULTY["a text of 2^60"][0])
    for target in ("out.gguf", "out"):
        done = subprocess.run(
            [sys.executable, "-m", "tinyforge.formats", "convert", str(tmp_path / "m.gguf"), str(tmp_path / target)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_that_is_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*absent.gguf: No such file"):
        load(tmp_path / "absent.gguf", FP32)
    with pytest.raises(UserError, match="cannot write .*m.gguf: No such file"):
        save_pretrained(make("llama"), tokenizer, tmp_path / "absent" / "m.gguf")


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(file([LLAMA]))
    with pytest.raises(UserError, match=r'needs the package gguf; run pip install -e ".*\[gguf\]"'):
        load(tmp_path / "m.gguf", FP32)


# --- llama.cpp --------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """A model in llama.cpp on one core, keys and values in float32."""

    def __init__(self, path: Path, context: int) -> None:
        self.package = pytest.importorskip("llama_cpp", reason="the peer is llama.cpp: pip install llama-cpp-python")
        self.model = self.package.Llama(
            str(path),
            n_ctx=context,
            n_batch=context,
            n_threads=1,
            logits_all=True,
            verbose=False,
            type_k=0,
            type_v=0,
            flash_attn=False,
        )

    def logits(self, ids: list[int]) -> np.ndarray:
        self.model.reset()
        self.model.eval(ids)
        return np.array(self.model.scores[: len(ids)])

    def greedy(self, ids: list[int], count: int) -> list[int]:
        found: list[int] = []
        self.logits(ids)
        while len(found) < count:
            found.append(int(np.argmax(self.model.scores[self.model.n_tokens - 1])))
            self.model.eval(found[-1:])
        return found

    def encode(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=True, special=False)


def start(tokenizer: TextTokenizer) -> list[int]:
    return [tokenizer.bos] if tokenizer.bos is not None else []


PUBLISHED = {"stories260K": STORIES, "small": SMALL}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_llama_cpp_computes_and_says_the_same(name: str, tmp_path: Path) -> None:
    if not PUBLISHED[name].is_file() and not PUBLISHED[name].is_dir():
        pytest.skip(f"{PUBLISHED[name]} is not there")
    ours = load(PUBLISHED[name], FP32)
    save_pretrained(ours.model, ours.tokenizer, tmp_path / "m.gguf", meta=ours.meta)
    peer = LlamaCpp(tmp_path / "m.gguf", ours.model.config.context)
    ids = start(ours.tokenizer) + ours.tokenizer.encode(TEXT)
    assert peer.encode(TEXT) == ids
    error = np.abs(peer.logits(ids) - logits(ours.model, ids)).max()
    print(f"{name}: largest difference of a logit {error:.1e}")
    assert error < 1e-3
    prompt = start(ours.tokenizer) + ours.tokenizer.encode("Once upon a time")
    expected = generate(ours.model, prompt, Sampling(temperature=0, max_tokens=100))
    assert peer.greedy(prompt, 100) == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("question", ["How much is 13 plus 2?", "What is the opposite of cold?"])
def test_llama_cpp_answers_by_the_chat_template(question: str, tmp_path: Path) -> None:
    assert SMALL is not None
    assert convert.main([str(SMALL), str(tmp_path / "m.gguf")]) == 0
    peer = LlamaCpp(tmp_path / "m.gguf", 128)
    answer = peer.model.create_chat_completion(
        messages=[{"role": "user", "content": question}], temperature=0, max_tokens=40, repeat_penalty=1.0
    )
    expected = "".join(conversation_with(load(tmp_path / "m.gguf", FP32)).ask(question, Sampling(temperature=0)))
    choice = answer["choices"][0]
    print(f"{question} {choice['message']['content']}")
    assert choice["message"]["content"] == expected and choice["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_blocks_are_those_that_llama_cpp_makes(name: str, kind: str, tmp_path: Path) -> None:
    """Every tensor of the same type and bytes as in llama.cpp's own conversion of the f32 file: so the same error."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="the peer is llama.cpp: pip install llama-cpp-python")
    if not PUBLISHED[name].is_file() and not PUBLISHED[name].is_dir():
        pytest.skip(f"{PUBLISHED[name]} is not there")
    ours = load(PUBLISHED[name], FP32)
    for dtype in ("f32", kind):
        save_pretrained(ours.model, ours.tokenizer, tmp_path / f"{dtype}.gguf", dtype=dtype)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = {"f16": 1, "q8_0": 7, "q4_0": 2}[kind], 1
    names = (str(tmp_path / "f32.gguf").encode(), str(tmp_path / "theirs.gguf").encode())
    assert llama_cpp.llama_model_quantize(*names, settings) == 0
    mine, theirs = (gguf_file.read(tmp_path / f"{file}.gguf").tensors for file in (kind, "theirs"))
    assert mine.keys() == theirs.keys()
    assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
    for name in mine:
        assert np.array_equal(mine[name].read(), theirs[name].read()), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PATTERNS, "scores", "merges"])
def test_llama_cpp_cuts_text_alike(kind: str, tmp_path: Path) -> None:
    if kind in PATTERNS:
        byte_level(kind).save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path / "tokenizer.json")
    else:
        train_sentencepiece(tmp_path / "tokenizer.model")
        ours = load_tokenizer(tmp_path / "tokenizer.model")
        if kind == "merges":
            ours = SentencePiece(ours.pieces, ours.specials, ours.bos, merges=ours.pairs(), spaces=ours.spaces)
    config = LlamaConfig(dim=4, heads=1, kv_heads=1, layers=1, context=8, vocab=ours.vocab_size, hidden=4)
    save_pretrained(randomised(Llama(config, FP32)), ours, tmp_path / "m.gguf")
    peer = LlamaCpp(tmp_path / "m.gguf", 8)
    # llama.cpp does not bring text into normal form C.
    texts = [text for text in strings(1000) if "\0" not in text and (kind != "qwen2" or is_normalized("NFC", text))]
    different = [text for text in texts if text and peer.encode(text) != start(ours) + ours.encode(text)]
    print(f"{kind}: {len(different)} of {len(texts)} texts differ")
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_agrees_on_every_architecture(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make(name)
    save_pretrained(model, tokenizer, tmp_path / "m.gguf")
    ids = np.random.default_rng(0).integers(0, 300, 33).tolist()
    found, expected = LlamaCpp(tmp_path / "m.gguf", 40).logits(ids), logits(model, ids)
    error = np.abs(found - expected).max()
    print(f"{name}: largest difference of a logit {error:.1e}, largest logit {np.abs(expected).max():.1f}")
    # llama.cpp looks GELU up in a table of float16.
    assert error < (5e-3 if name == "gpt2" else 1e-3)
