"""Hugging Face directories that are sharded, bare, tied twice, or not what they should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.formats.foreign import load_weights
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import foreign
from tinyforge.formats.foreign import weights_of
from tinyforge.formats.huggingface import open_directory, write_directory
from tinyforge.formats.mxfp4 import dequantise
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config, Llama
from tinyforge.models.llama.families import FAMILIES
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.moe.hf import read_config, write_config
from tinyforge.quantised import quantise

FP32 = get_backend("numpy", "fp32", workers=1)
TINY = Config(dim=8, heads=2, kv_heads=1, layers=2, context=9, vocab=11, hidden=5, tied=False)
GPT2_TINY = GPT2Config(dim=8, heads=2, layers=2, context=9, vocab=11)


def write(path: Path, config: Any = TINY, dtype: str = "f32") -> Any:
    """A random model, written as a Hugging Face directory."""
    model = (GPT2 if isinstance(config, GPT2Config) else Llama)(config, FP32)
    model.initialise(seed=1)
    write_directory(path, weights_of(model), dtype)
    return model


def assert_same(model: Any, again: Any) -> None:
    assert again.config == model.config
    for before, after in zip(model.buffer.params, again.buffer.params, strict=True):
        assert np.array_equal(before.value, after.value), before.name


def edit_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(values)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    stored = load_file(path / "model.safetensors")
    edit(stored)
    save_file(stored, path / "model.safetensors")


def shard(path: Path, places: dict[str, str] | None = None) -> None:
    """Divide the one file among three, with an index that says where each tensor is, or says `places`."""
    stored = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    where = {name: names[i % 3] for i, name in enumerate(sorted(stored))}
    for shard in names:
        save_file({name: value for name, value in stored.items() if where[name] == shard}, path / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": {**where, **(places or {})}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("config", [TINY, GPT2_TINY], ids=["llama", "gpt2"])
def test_a_model_survives_its_directory(config: Any, tmp_path: Path) -> None:
    model = write(tmp_path / "m", config)
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]


def test_bfloat16_weights_are_the_rounded_ones(tmp_path: Path) -> None:
    model = write(tmp_path / "m", TINY, "bf16")
    again = load_weights(open_directory(tmp_path / "m"), FP32)
    for before, after in zip(model.buffer.params, again.buffer.params, strict=True):
        assert np.all(np.abs(after.value - before.value) <= np.abs(before.value) * 2**-8)
        assert not after.value.view(np.uint32).__and__(0xFFFF).any()
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"


def test_shards(tmp_path: Path) -> None:
    model = write(tmp_path / "m")
    shard(tmp_path / "m")
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))


def test_shards_of_codes(tmp_path: Path) -> None:
    """With most scales in another shard than their codes, as where a shard was full between the two."""
    write(tmp_path / "m")

    def coded(stored: dict[str, np.ndarray]) -> None:
        for name in [name for name, value in stored.items() if value.ndim == 2]:
            codes, scales = quantise(stored[name], "int8")
            stored |= {name: codes, f"{name}_scale": scales[:, None]}

    edit_tensors(tmp_path / "m", coded)
    model = load_weights(open_directory(tmp_path / "m"), FP32)
    shard(tmp_path / "m")
    places = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())["weight_map"]
    assert any(places[name] != places.get(f"{name}_scale", places[name]) for name in places)
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))
    shard_of = tmp_path / "m" / places["model.embed_tokens.weight_scale"]
    save_file({k: v for k, v in load_file(shard_of).items() if k != "model.embed_tokens.weight_scale"}, shard_of)
    with pytest.raises(UserError, match=f"{shard_of.name} lacks model.embed_tokens.weight_scale, which"):
        open_directory(tmp_path / "m")


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Names of the bare trunk, and the causal mask among the tensors."""
    model = write(tmp_path / "m", GPT2_TINY)

    def as_published(stored: dict[str, np.ndarray]) -> None:
        for name in list(stored):
            stored[name.removeprefix("transformer.")] = stored.pop(name)
        for i in range(2):
            stored[f"h.{i}.attn.bias"] = np.ones((1, 1, 9, 9), np.uint8)
            stored[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)

    edit_tensors(tmp_path / "m", as_published)
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))


def test_a_tied_head_may_be_written_twice_but_not_differ(tmp_path: Path) -> None:
    model = write(tmp_path / "m", TINY.override({"tied": True}))
    edit_tensors(tmp_path / "m", lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].copy()}))
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))
    edit_tensors(tmp_path / "m", lambda s: s.update({"lm_head.weight": s["lm_head.weight"] + 1}))
    with pytest.raises(UserError, match="tensor lm_head.weight has no place"):
        load_weights(open_directory(tmp_path / "m"), FP32)


@pytest.mark.parametrize("kind", [family.kind for family in FAMILIES])
def test_the_type_of_a_model_says_its_architecture(kind: str) -> None:
    config: dict[str, Any] = {"model_type": kind}
    assert foreign._spec_of(config).name == "llama"
    assert config["architectures"] == [next(f.architecture for f in FAMILIES if f.kind == kind)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture 'FalconForCausalLM'; supported: GPT2LMHead"),
        ({"architectures": None, "model_type": "ll"}, "architectures is None, expected a list of one name"),
        ({"architectures": [["LlamaForCausalLM"]]}, "expected a list of one name"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"attention_bias": True}, "tensor model.layers.0.self_attn.q_proj.bias is missing"),
        ({"mlp_bias": True}, "tensor model.layers.0.mlp.gate_proj.bias is missing"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type is 'ntk'; supported: 'default', 'linear'"),
        ({"rope_scaling": {"type": "dynamic"}}, "has no factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": 2}}, "short_factor is 2, expected a list of numbers"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"partial_rotary_factor": 0.5}, "a LlamaForCausalLM has no rotary_dim"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', expected a whole number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected at least 1"),
        ({"max_position_embeddings": 10**15}, "context is 1,000,000,000,000,000, expected at most 1,048,576"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"num_key_value_heads": 3}, "heads 2 is not divisible by kv_heads 3"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 10**3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 10**9}, "layers is 1,000,000,000, expected at most 1,024"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight and 8 more has no place in the model"),
        ({"vocab_size": 12}, r"model.embed_tokens.weight has shape \(11, 8\), config.json asks for \(12, 8\)"),
        ({"tie_word_embeddings": True}, "tensor lm_head.weight has no place"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "tensor model.layers.0.self_attn.q_proj.bias is missing"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [[]]}, "layer_types is not a list of texts"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 1,
            },
            "layers with and without a sliding window",
        ),
    ],
)
def test_a_config_that_is_not_supported_is_one_line(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m")
    edit_config(tmp_path / "m", **values)
    with pytest.raises(UserError, match=message) as caught:
        load_weights(open_directory(tmp_path / "m"), FP32)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu'; supported: 'gelu_new'"),
        ({"n_inner": 17}, "n_inner is 17; supported: 4 n_embd, 32"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False; supported: True"),
        ({"n_head": 3}, "dim 8 is not divisible by heads 3"),
        ({"resid_pdrop": 1.0}, "dropout is 1.0"),
        ({"n_positions": 10**6}, r"transformer.wpe.weight has shape \(9, 8\), config.json asks for \(10+, 8\)"),
        ({"n_positions": 10**12}, "context is 1,000,000,000,000, expected at most"),
    ],
)
def test_a_gpt2_that_is_not_supported_is_one_line(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m", GPT2_TINY)
    edit_config(tmp_path / "m", **values)
    with pytest.raises(UserError, match=message):
        load_weights(open_directory(tmp_path / "m"), FP32)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sinks": True, "clamp": 7.0}, "swiglu_limit"),
        ({"shared": 6, "qkv_bias": True}, "shared_expert_intermediate_size"),
    ],
)
def test_experts_without_what_their_architecture_has_are_no_other_architecture(
    options: dict[str, Any], key: str
) -> None:
    sizes = {"dim": 8, "heads": 2, "kv_heads": 1, "layers": 2, "context": 20, "vocab": 11, "hidden": 6, "experts": 3}
    config = MoEConfig(**sizes, mtp_heads=1, mtp_weights=(1.0,), router_z=0.0, **options)
    given = write_config(config)
    assert read_config(given) == config
    message = f"config.json: {key} is 0, expected more than 0 for {given['architectures'][0]}"
    with pytest.raises(UserError, match=message):
        read_config({**given, key: 0})


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin is a pickle, which can run code .* supported: model.safe"):
        open_directory(tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="it holds no weights; supported: model.safetensors"):
        open_directory(tmp_path / "m")


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "a\\b", 7])
def test_an_index_does_not_lead_out_of_its_directory(place: Any, tmp_path: Path) -> None:
    write(tmp_path / "m")
    shard(tmp_path / "m", {"model.norm.weight": place})
    save_file({"model.norm.weight": np.ones(8, np.float32)}, tmp_path / "secret.safetensors")
    with pytest.raises(
        UserError, match="model.norm.weight is in .*, expected the name of a file in the same directory"
    ):
        open_directory(tmp_path / "m")


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    write(tmp_path / "m")
    shard(tmp_path / "m", {"model.norm.weight": "model-00009-of-00003.safetensors"})
    with pytest.raises(UserError, match="cannot read .*model-00009-of-00003.safetensors: No such file"):
        open_directory(tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(
        json.dumps(
            {
                "weight_map": {
                    "model.norm.weight": "model-00001-of-00003.safetensors",
                    "more": "model-00001-of-00003.safetensors",
                }
            }
        )
    )
    with pytest.raises(UserError, match="model-00001-of-00003.safetensors lacks"):
        open_directory(tmp_path / "m")
    index.write_text("[]")
    with pytest.raises(UserError, match="got a list, expected an object"):
        open_directory(tmp_path / "m")
    index.write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        open_directory(tmp_path / "m")


def test_an_index_next_to_the_one_file_says_nothing(tmp_path: Path) -> None:
    """Left by an earlier, sharded version of the model."""
    model = write(tmp_path / "m")
    whole = (tmp_path / "m/model.safetensors").read_bytes()
    shard(tmp_path / "m")
    for name in tmp_path.glob("m/*-of-*"):
        name.unlink()
    (tmp_path / "m/model.safetensors").write_bytes(whole)
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))


def test_long_numbers_that_nobody_reads(tmp_path: Path) -> None:
    model = write(tmp_path / "m")
    edit_config(tmp_path / "m", max_length=1000000000000000019884624838656)
    assert_same(model, load_weights(open_directory(tmp_path / "m"), FP32))
    edit_config(tmp_path / "m", hidden_size=10**30)
    with pytest.raises(UserError, match="expected at most"):
        load_weights(open_directory(tmp_path / "m"), FP32)


@pytest.mark.parametrize(
    ("content", "method"),
    [
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_quantised_weights_are_refused_by_name(content: dict[str, Any], method: str, tmp_path: Path) -> None:
    write(tmp_path / "m")
    edit_config(tmp_path / "m", quantization_config=content)
    with pytest.raises(UserError, match=f"in the format of '{method}', which is not read"):
        open_directory(tmp_path / "m")


def mxfp4(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    *lead, columns = shape
    blocks = rng.integers(0, 256, (*lead, columns // 32, 16)).astype(np.uint8)
    return blocks, rng.integers(120, 130, blocks.shape[:-1]).astype(np.uint8)


def test_mxfp4_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch", reason="the peer is transformers, on torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4", reason="the peer is transformers")
    blocks, scales = mxfp4(np.random.default_rng(0), 3, 10, 96)
    expected = theirs.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    ).numpy()
    assert np.array_equal(dequantise(blocks, scales).swapaxes(-1, -2), expected)


def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4 are those of a directory with the same numbers in float32; one without its scales is refused."""
    config = MoEConfig(
        dim=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        layers=2,
        context=20,
        vocab=11,
        hidden=64,
        experts=3,
        mtp_heads=1,
        mtp_weights=(1.0,),
        router_z=0.0,
        sinks=True,
        clamp=7.0,
        window=5,
        full_every=2,
    )
    model = MoE(config, FP32)
    model.initialise(0)
    rng, tensors = np.random.default_rng(0), {}
    for i, block in enumerate(model.blocks):
        for name, p in (("gate_up", block.mlp.experts.gate_up), ("down", block.mlp.experts.down)):
            blocks, scales = mxfp4(rng, *p.shape)
            p.value[...] = dequantise(blocks, scales)
            at = f"model.layers.{i}.mlp.experts.{name}_proj"
            tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    write_directory(tmp_path / "plain", weights_of(model), "f32")
    for name, value in load_file(tmp_path / "plain/model.safetensors").items():
        if f"{name}_blocks" not in tensors:
            tensors[name] = value
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    edit_config(tmp_path / "packed", quantization_config={"quant_method": "mxfp4"})
    save_file(tensors, tmp_path / "packed/model.safetensors")
    found, expected = (load_weights(open_directory(tmp_path / name), FP32) for name in ("packed", "plain"))
    assert found.config == expected.config == config
    assert np.array_equal(found.buffer.values, expected.buffer.values) and found.buffer.values.any()
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "packed/model.safetensors")
    with pytest.raises(UserError, match="down_proj_blocks has shape .* its scales are missing; expected blocks of 16"):
        open_directory(tmp_path / "packed")


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "m")
    with pytest.raises(UserError, match="m exists already; remove it, or choose another directory"):
        write(tmp_path / "m")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*: Not a directory"):
        write(tmp_path / "file" / "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m"]
