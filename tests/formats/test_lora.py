"""Adapters in files: merged into their base, written for PEFT and read back, and refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint, tensors
from tinyforge.adapters import Adapters
from tinyforge.backends import get_backend
from tinyforge.errors import UserError, run_command
from tinyforge.formats import convert, load, lora, open_model, save_pretrained
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config, Llama
from tinyforge.models.mamba import Config as MambaConfig
from tinyforge.models.mamba import Mamba
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import Config as NanoEulerConfig
from tinyforge.models.nanoeuler import NanoEuler
from tinyforge.params import named
from tinyforge.tokenizers import Tokenizer

FP64 = get_backend("numpy", "fp64", workers=1)
TOKENIZER = Tokenizer([], ["<|endoftext|>", "</s>"])
LLAMA = Config(dim=24, heads=6, kv_heads=2, layers=2, context=40, vocab=258, hidden=20)
NEOX = LLAMA.override({"kv_heads": 6, "norm": "layer", "norm_bias": True, "gated": False, "tied": False})
NEOX = NEOX.override({"qkv_bias": True, "out_bias": True, "mlp_bias": True})
POSITIONS = {"learned_positions": True, "no_rope_every": 1}
MIXTURE: dict[str, Any] = {"experts": 3, "mtp_heads": 1, "mtp_weights": (1.0,), "router_z": 0.0}
MOE = MoEConfig(dim=24, heads=6, kv_heads=2, layers=2, context=40, vocab=258, hidden=20, **MIXTURE)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LLAMA),
    "llama-untied": (Llama, LLAMA.override({"tied": False})),
    "qwen2": (Llama, LLAMA.override({"qkv_bias": True})),
    "gpt-neox": (Llama, NEOX.override({"parallel": True, "parallel_norms": True, "activation": "gelu"})),
    "opt": (Llama, NEOX.override({"activation": "relu", **POSITIONS, "tied": True})),
    "opt-350m": (Llama, NEOX.override({"activation": "relu", **POSITIONS, "norms": "sum", "embedding_dim": 14})),
    "qwen2-moe": (MoE, MOE.override({"qkv_bias": True, "shared": 10, "normalised": False})),
    "gpt-oss": (MoE, MOE.override({"sinks": True, "clamp": 7.0})),
    "gpt2": (GPT2, GPT2Config(dim=24, heads=3, layers=2, context=40, vocab=258)),
    "nanoeuler": (NanoEuler, NanoEulerConfig(dim=24, heads=6, kv_heads=2, layers=2, context=40, vocab=258, hidden=20)),
}
SETTINGS = Adapters(rank=3, alpha=7.0, dropout=0.1)


def make_base(folder: Path, name: str) -> Path:
    """A random model in our format; weights that float32 holds exactly."""
    kind, config = MODELS[name]
    model = kind(config, FP64)
    rng = np.random.default_rng(len(name))
    for p in model.buffer.params:
        model.buffer.set_master(p, (0.3 * rng.normal(size=p.shape) + p.fill).astype(np.float32))
    save_pretrained(model, TOKENIZER, folder / "base", format="tinyforge")
    return folder / "base"


def make_run(folder: Path, name: str, settings: Adapters = SETTINGS) -> tuple[Path, Any]:
    """A run's checkpoint of random adapters on that base, and the model with its adapters next to the base."""
    base = open_model(make_base(folder, name))
    found = base.build(FP64, adapters=settings)
    buffer, rng = found.model.buffer, np.random.default_rng(1)
    for p in buffer.params:
        buffer.set_master(p, (0.2 * rng.normal(size=p.shape)).astype(np.float32))
    meta = {
        "kind": "sft",
        "model": base.spec.name,
        "config": base.config.to_dict(),
        "tokenizer_hash": TOKENIZER.hash(),
        "lora": lora.describe(settings, base, buffer.count, folder / "run"),
    }
    weights = {name: value.astype(np.float32) for name, value in named(buffer, buffer.masters, FP64).items()}
    checkpoint.save(folder / "run", 1, weights, {"m": np.zeros(1)}, TOKENIZER, meta, 0)
    return folder / "run", found.model


def ids() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 258, (2, 33))


def logits(model: Any) -> np.ndarray:
    return model.logits(model.hidden(ids()))


def worst(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_computes_what_it_computed_beside_the_base(name: str, tmp_path: Path) -> None:
    run, beside = make_run(tmp_path, name)
    merged = load(run, FP64).model
    assert type(merged) is MODELS[name][0] and merged.buffer.count == beside.buffer.count - sum(
        p.size for p in beside.buffer.params
    )
    assert worst(logits(merged), logits(beside)) < 1e-12
    assert worst(logits(merged), logits(load(tmp_path / "base", FP64).model)) > 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [(), ("qkv", "down")], ids=["all", "some"])
def test_as_an_adapter_of_peft_and_back(
    name: str, targets: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if targets and "experts" in vars(MODELS[name][1]):
        targets = ("qkv", "out")
    run, _ = make_run(tmp_path, name, Adapters(3, 7.0, 0.0, targets))
    assert convert.main([str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    expected = load(run, FP64).model
    assert worst(logits(load(tmp_path / "adapter", FP64).model), logits(expected)) < 1e-12
    if name == "nanoeuler":  # as a Llama it has lost the later heads: another model, by its weights
        return
    # On the base as another program has it, from a place of its own.
    assert convert.main([str(tmp_path / "base"), str(tmp_path / "hf")]) == 0
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="which is not here; merge the two with .* --base PATH"):
        load(tmp_path / "adapter", FP64)
    found = load(tmp_path / "adapter", FP64, base=tmp_path / "hf").model
    assert worst(logits(found), logits(expected)) < 1e-12


def test_the_adapter_of_a_router_is_merged(tmp_path: Path) -> None:
    run, beside = make_run(tmp_path, "qwen2-moe", Adapters(2, 7.0, 0.0, ("gate",)))
    merged, base = load(run, FP64).model, load(tmp_path / "base", FP64).model
    assert list(beside.adapters) == [f"blocks.{i}.experts.gate" for i in range(2)]
    assert worst(logits(merged), logits(beside)) < 1e-12 and worst(logits(merged), logits(base)) > 0.01


def peers() -> tuple[Any, Any, Any]:
    reason = "the peer is PEFT, on torch"
    return tuple(pytest.importorskip(name, reason=reason) for name in ("torch", "transformers", "peft"))  # type: ignore[return-value]


def peer_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids())).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_what_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, transformers, peft = peers()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run, beside = make_run(tmp_path, name)
    convert.main([str(run), str(tmp_path / "adapter"), "--adapter"])
    convert.main([str(tmp_path / "base"), str(tmp_path / "hf")])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    if hasattr(base.config, "num_experts_per_tok"):
        base.set_experts_implementation("eager")  # the grouped products take no float64
    assert worst(peer_logits(base.eval()), logits(beside)) > 0.1
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    learned = {n for n, _ in adapted.named_parameters() if "lora_" in n}
    sizes = {"gpt2": 8, "gpt-neox": 8, "opt": 12, "qwen2-moe": 16, "gpt-oss": 8}
    assert len(learned) == 2 * sizes.get(name, 14)
    # transformers computes norms and angles in float32 whatever the model's type.
    assert np.abs(peer_logits(adapted) - logits(beside)).max() < 1e-5


def test_an_adapter_of_mamba_without_what_peft_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, transformers, peft = peers()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(MODELS, "mamba", (Mamba, MambaConfig(dim=24, layers=2, state=3, context=40, vocab=258)))
    for target in ("out", "step"):
        run, _ = make_run(tmp_path / target, "mamba", Adapters(2, 7.0, 0.0, (target,)))
        with pytest.raises(UserError, match="PEFT refuses adapters of Mamba's out and skips those of step"):
            convert.main([str(run), str(tmp_path / "adapter"), "--adapter"])
    run, trained = make_run(tmp_path / "some", "mamba", Adapters(2, 7.0, 0.0, ("input", "select")))
    convert.main([str(run), str(tmp_path / "adapter"), "--adapter"])
    convert.main([str(tmp_path / "some/base"), str(tmp_path / "hf")])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert np.abs(peer_logits(adapted) - logits(trained)).max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_what_peft_has_made_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values have an A each, which no adapter of ours has: merged, it does not matter."""
    torch, transformers, peft = peers()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    convert.main([str(make_base(tmp_path, name)), str(tmp_path / "hf")])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "v_proj", "up_proj", "down_proj"]
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        fan_in_fan_out=name == "gpt2",
        use_rslora=name == "qwen2",
    )
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    found = load(tmp_path / "adapter", FP64, base=tmp_path / "hf")
    assert np.abs(peer_logits(adapted) - logits(found.model)).max() < 1e-5
    assert worst(logits(found.model), logits(load(tmp_path / "hf", FP64).model)) > 0.01


def test_the_fingerprint_is_of_the_weights_not_of_their_files(tmp_path: Path) -> None:
    base = make_base(tmp_path, "llama")
    convert.main([str(base), str(tmp_path / "hf")])
    convert.main([str(base), str(tmp_path / "model.bin")])
    convert.main([str(base), str(tmp_path / "rounded"), "--dtype", "bf16"])
    prints = [open_model(tmp_path / name).fingerprint() for name in ("base", "hf", "model.bin", "rounded")]
    assert prints[0] == prints[1] == prints[2] != prints[3]


def test_adapters_of_ours_that_make_no_pair_or_do_not_fit(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "llama")
    found = checkpoint.load(run)
    a, b = "blocks.0.down.lora_a", "blocks.0.down.lora_b"

    def merged(name: str, change: dict[str, np.ndarray | None]) -> None:
        weights = {key: value for key, value in (dict(found.weights) | change).items() if value is not None}
        checkpoint.save(tmp_path / name, 1, weights, {"m": np.zeros(1)}, TOKENIZER, found.meta, 0)
        open_model(tmp_path / name).build(FP64)

    with pytest.raises(UserError, match=r"A and B of blocks.0.down have the shapes \(3, 20\) and None, expected"):
        merged("one", {b: None})
    with pytest.raises(UserError, match=r"shapes None and \(24, 3\)"):
        merged("other", {a: None})
    with pytest.raises(UserError, match=r"shapes \(20, 3\) and \(24, 3\)"):
        merged("turned", {a: found.weights[a].T.copy()})
    with pytest.raises(UserError, match=r"an adapter of 23 x 20 on a weight of \(24, 20\)"):
        merged("short", {b: found.weights[b][1:].copy()})


def another_base(folder: Path) -> None:
    """The base's weights, one of them changed in its last bit."""
    found = load(folder / "base", FP64)
    value = found.model.blocks[1].attention.out.weight.value
    value[0, 0] = np.nextafter(np.float32(value[0, 0]), np.float32(np.inf))
    shutil.rmtree(folder / "base")
    save_pretrained(found.model, found.tokenizer, folder / "base", format="tinyforge")


def in_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter/adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")

    return change


def in_weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / "adapter/adapter_model.safetensors"
        held = {name: tensor.read() for name, tensor in tensors.read_header(file).items()}
        change(held)
        file.unlink()
        tensors.write(file, {n: (v.shape, lambda v=v: v) for n, v in held.items()}, "f32")

    return changed


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("run", another_base, "is an adapter for another base: "),
        ("adapter", another_base, "is an adapter for another base: "),
        ("run", lambda folder: shutil.rmtree(folder / "base"), "is missing; put it back, or merge the two with python"),
        ("base --base base", lambda folder: None, "base is not an adapter; leave out --base"),
        ("base --adapter", lambda folder: None, "base has no adapter to write"),
        ("adapter --adapter", lambda folder: None, "adapter has no adapter to write"),
        ("run --adapter --dtype bf16", lambda folder: None, "--adapter writes PEFT's format in f32"),
        ("adapter", in_config(peft_type="IA3"), "adapter_config.json: peft_type is 'IA3'"),
        ("adapter", in_config(use_dora=True), "adapter_config.json: use_dora is True"),
        ("adapter", in_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'; supported: True, False"),
        ("adapter", in_config(bias="all"), "adapter_config.json: bias is 'all'"),
        ("adapter", in_config(modules_to_save=["lm_head"]), "modules_to_save is ['lm_head']"),
        ("adapter", in_config(r=0), "r is 0, expected at least 1"),
        ("adapter", in_config(r=4), "lora_A.weight has shape (3, 24), the base "),
        ("adapter", in_config(r="8"), "r is '8', expected a whole number"),
        ("adapter", lambda folder: (folder / "adapter/adapter_model.safetensors").unlink(), "safetensors is missing"),
        ("adapter", lambda folder: (folder / "adapter/adapter_config.json").write_text("{"), "adapter_config.json"),
        ("adapter", in_weights(lambda held: held.pop(f"{Q}A.weight")), "a lora_B without its lora_A"),
        ("adapter", in_weights(lambda held: held.pop(f"{Q}B.weight")), "q_proj.lora_B.weight is missing"),
        ("adapter", in_weights(lambda held: held.update({f"{Q}B.weight": np.zeros((9, 3))})), "has shape (9, 3), the"),
        (
            "adapter",
            in_weights(lambda held: held.update({"base_model.model.lm_head.lora_A.weight": np.zeros((3, 24))})),
            "tensor base_model.model.lm_head.lora_A.weight has no place in the base",
        ),
        ("adapter", in_weights(lambda held: held.update(other=np.zeros(1))), "tensor other has no place in the base"),
    ],
)
def test_one_line_and_nothing_written(
    source: str,
    change: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    assert convert.main(["run", "adapter", "--adapter"]) == 0
    change(tmp_path)
    capsys.readouterr()
    path, *flags = source.split()
    with pytest.raises(SystemExit) as left:
        run_command(lambda: convert.main([path, "out", *flags]))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.startswith("error: ") and shown.count("\n") == 1 and message in shown, shown
    assert not Path("out").exists() and not list(Path().glob(".partial*"))
