"""The benchmark runs without PyTorch, counts FLOP as it says, and refuses a peer that computes something else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness import COMPILED, EAGER, GRAPH, GRAPHS_NEED_A_GPU, OURS
from bench.train_step import (
    MASKED,
    MUON,
    NANOCHAT,
    READING,
    Options,
    main,
    make_contenders,
    nanochat_peer,
    ours,
    table,
    torch_peer,
)
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler.config import Config
from tinyforge.registry import find_model
from tinyforge.shards import SEPARATOR
from tinyforge.tokenizers import Tokenizer

TINY = Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=12, vocab=19, mtp_heads=2, hidden=24, mtp_weights=(1.0, 0.5)
)
FLAGS = ["--batch-size", "2", "--seq-len", "16", "--steps", "2", "--workers", "1"]


def test_it_times_our_step_and_writes_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--muon", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.rstrip("\n") == "\n".join(table(found))
    assert found["parameters"] == 1_053_824
    assert found["parity"] is None and list(found["results"]) == [OURS, MUON]
    result = found["results"][OURS]
    assert len(result["step_ms"]) == 2
    assert result["min_ms"] == min(result["step_ms"]) > 0
    assert result["tokens_per_second"] == pytest.approx(2 * 16 / result["median_ms"] * 1e3)
    assert result["of_matmul_peak"] * found["matmul_peak_gflop_per_second"] == pytest.approx(result["gflop_per_second"])
    assert result["peak_memory_mib"] > 20  # NumPy alone takes more


@pytest.mark.slow
def test_another_model_is_timed_beside_with_its_own_flop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--model", "moe", "--beside", "nanoeuler", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["results"]) == [OURS, "nanoeuler small"]
    mine, dense = (r["gflop_per_second"] * r["median_ms"] for r in found["results"].values())
    assert dense < mine < 1.02 * dense  # the gates
    with pytest.raises(UserError, match="'huge' is not a preset"):
        main([*FLAGS, "--beside", "nanoeuler:huge"])


@pytest.mark.slow
def test_reading_shards_is_timed_beside_repeated_batches(
    make_shards: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer([], [SEPARATOR])
    make_shards(tmp_path / "shards", tokenizer, {"books": (9, 2), "web": (5, 2)})
    assert main([*FLAGS, "--json", "--data", str(tmp_path / "shards")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["results"]) == [OURS, READING]
    assert found["results"][READING]["ours_over_this"] == pytest.approx(
        found["results"][OURS]["median_ms"] / found["results"][READING]["median_ms"]
    )


@pytest.mark.slow
def test_the_mask_is_timed_beside_the_plain_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--json", "--documents", "5"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found["results"]) == [OURS, MASKED] and MASKED in err and found["tokens_per_document"] == 5
    with pytest.raises(UserError, match="--document-mask: char_mlp does not keep documents apart"):
        main([*FLAGS, "--model", "char_mlp", "--documents", "5"])


def test_documents_have_the_length_that_was_asked_for() -> None:
    options = Options("nanoeuler", TINY, 16, 512, 1, "numpy", "fp32", 1, 1, documents=64)
    plain, masked = options.batches(), options.masked_batches()
    starts = np.concatenate([batch.documents.starts for batch in masked])
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(plain, masked, strict=True))
    assert 512 / 9.5 < 512 / np.mean([len(np.unique(row)) for row in starts]) < 512 / 8.5  # 8 begin inside of a row


def test_shards_with_more_ids_than_the_model_are_refused(make_shards: Callable[..., None], tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", Tokenizer([], [SEPARATOR]), {"books": (9, 2)})
    (tmp_path / "config.json").write_text('{"vocab": 100}', encoding="utf-8")
    with pytest.raises(UserError, match=r"--data: ids up to 256, the config's vocab is 100; use another --config"):
        main([*FLAGS, "--config", str(tmp_path / "config.json"), "--data", str(tmp_path / "shards")])


def test_json_goes_to_a_file_and_the_table_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    assert main([*FLAGS, "--json", str(target)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == "\n".join(table(json.loads(target.read_text("utf-8"))))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--config", "huge"], "'huge' is not a preset (small, base, fast, large, xl, 2b)"),
        (["--precision", "fp4"], "precision 'fp4' is not available"),
        (["--json", "no/such/folder/result.json"], "folder that does not exist"),
        (["--peer", "torch"], "PyTorch is not installed; pip install torch"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError) as caught:
        main(flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


LLAMA = {"dim": 12, "heads": 2, "kv_heads": 1, "layers": 2, "context": 12, "vocab": 19, "hidden": 10, "head_dim": 6}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("nanoeuler", TINY.to_dict()),
        ("gpt2", {"dim": 16, "heads": 4, "layers": 2, "context": 12, "vocab": 19}),
        ("gpt2", {"dim": 12, "heads": 2, "layers": 1, "context": 12, "vocab": 64, "bias": False}),
        ("llama", LLAMA),
        ("llama", {**LLAMA, "tied": False, "qkv_bias": True}),
        ("moe", {**LLAMA, "experts": 5, "mtp_heads": 2, "balance": 0.3, "router_z": 0.2}),
    ],
)
def test_the_torch_peer_takes_the_same_steps_in_float64(model: str, changes: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    config = find_model(model).config.from_dict(changes)
    options = Options(model, config, 3, 12, steps=1, backend="numpy", precision="fp64", workers=1, threads=1)
    backend = get_backend("numpy", "fp64", 1)
    first = ours(options, backend)
    peer: Any = torch_peer(options, None)
    peer.training.load({p.name: p.value for p in first.model.buffer.params})
    for index in range(5):
        assert peer.step(index) == pytest.approx(float(first.step(index)), abs=1e-9)


@pytest.mark.slow
def test_dropout_is_timed_and_parity_is_checked_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    config = {"dim": 8, "heads": 2, "layers": 1, "context": 16, "vocab": 11, "dropout": 0.5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    flags = ["--model", "gpt2", "--config", str(path), "--peer", "torch-eager", "--backend", "numpy"]
    assert main([*FLAGS, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "gpt2" and found["config"]["dropout"] == 0.5
    assert found["parity"]["worst_difference"] < 1e-5 and list(found["results"]) == [OURS, EAGER]


def test_weights_that_are_not_the_peers_are_refused() -> None:
    pytest.importorskip("torch")
    options = Options("nanoeuler", TINY, 3, 12, steps=1, backend="numpy", precision="fp64", workers=1, threads=1)
    peer: Any = torch_peer(options, None)
    with pytest.raises(KeyError, match="the peer's parameters are not ours: .*unknown"):
        peer.training.load({"unknown": np.zeros(1)})
    windows = find_model("llama").config(**LLAMA, window=4, rope_scaling="linear")
    with pytest.raises(UserError, match="--peer: a plain Llama, or Qwen 2, got a config with window, rope_scaling;"):
        torch_peer(replace(options, model="llama", config=windows), None)
    smeared = TINY.override({"smear": 2, "qk_scale": "fixed"})
    with pytest.raises(UserError, match="--peer: a plain NanoEuler, got a config with qk_scale, smear; leave out"):
        torch_peer(replace(options, config=smeared), None)
    windows = find_model("moe").config.from_dict({**LLAMA, "experts": 5, "window": 4})
    with pytest.raises(UserError, match="--peer: a plain Mixtral, got a config with window; leave out"):
        torch_peer(replace(options, model="moe", config=windows), None)


@pytest.mark.slow
def test_one_compiled_layer_serves_all() -> None:
    torch = pytest.importorskip("torch")
    config = find_model("llama").config(**LLAMA | {"layers": 3})
    options = Options("llama", config, 3, 12, 1, "numpy", "fp64", 1, 1, regional=True)
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    contenders, parity, left_out = make_contenders(options, get_backend("numpy", "fp64", 1), (COMPILED,))
    if COMPILED in left_out:
        pytest.skip(left_out[COMPILED])
    assert parity is not None and parity["worst_difference"] < 1e-9 and len(contenders) == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the layer and the loss


def test_a_model_without_a_peer_is_named() -> None:
    pytest.importorskip("torch")
    options = Options("mamba", TINY, 3, 12, steps=1, backend="numpy", precision="fp64", workers=1, threads=1)
    with pytest.raises(UserError, match="--peer: mamba has no peer in PyTorch; there are nanoeuler, gpt2, llama, moe"):
        torch_peer(options, None)


def test_cuda_graphs_are_left_out_on_a_cpu() -> None:
    pytest.importorskip("torch")
    options = Options("nanoeuler", TINY, 3, 12, steps=1, backend="numpy", precision="fp64", workers=1, threads=1)
    contenders, parity, left_out = make_contenders(options, get_backend("numpy", "fp64", 1), (EAGER, GRAPH))
    assert list(contenders) == [OURS, EAGER] and left_out == {GRAPH: GRAPHS_NEED_A_GPU}
    assert parity is not None and parity["worst_difference"] < 1e-9


FAKE_NANOCHAT = """
from dataclasses import dataclass

import torch


@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    window_pattern: str


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        self.config = config

    def init_weights(self):
        torch.nn.init.zeros_(self.table.weight)

    def setup_optimizer(self):
        print("rates")
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def estimate_flops(self):
        return 10 * self.config.n_layer * self.config.n_head

    def forward(self, ids, targets):
        return torch.nn.functional.cross_entropy(self.table(ids).flatten(0, 1), targets.flatten())
"""


@pytest.mark.slow
def test_nanochat_is_timed_from_a_clone_of_its_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    with pytest.raises(UserError, match="no nanochat/gpt.py there; clone"):
        main([*FLAGS, "--nanochat", str(tmp_path)])
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").write_text(FAKE_NANOCHAT)
    assert main([*FLAGS, "--json", "--nanochat", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)  # and not what nanochat prints
    assert list(found["results"]) == [OURS, NANOCHAT] and found["nanochat_parameters"] == 512 * 512
    theirs = found["results"][NANOCHAT]
    per_token = theirs["gflop_per_second"] * 1e9 / theirs["tokens_per_second"]
    assert per_token == pytest.approx(10 * 4 * 1) and "nanochat      262,144 parameters" in err
    assert sys.modules.pop("nanochat.gpt") and sys.modules.pop("nanochat")  # the next test has its own
    config = replace(TINY, dim=24)
    with pytest.raises(UserError, match="its heads have 128 channels, the config's dim is 24"):
        nanochat_peer(Options("nanoeuler", config, 2, 12, 2, "numpy", "fp32", 1, 1, nanochat=str(tmp_path)))


@pytest.mark.parametrize("flag", ["--muon", "--regional", "--recompute blocks", "--nanochat clone", "--documents 5"])
def test_contenders_that_several_gpus_do_not_have_are_refused(flag: str) -> None:
    with pytest.raises(
        UserError, match=f"--gpus times one GPU and several of the plain step; leave out {flag.split()[0]}"
    ):
        main([*FLAGS, "--gpus", "2", *flag.split()])
