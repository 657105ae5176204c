"""The benchmark of decoding runs without PyTorch, counts bytes as it says, and refuses a peer that computes else."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from datetime import date
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from bench import decode
from bench.decode import Options, Ours, bytes_per_step, contenders_of, main, speculation_table, table
from bench.harness import GRAPHS_NEED_A_GPU, OURS, random_model
from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import load
from tinyforge.frozen_model import quantised_copy
from tinyforge.infer.choose import make_decoder
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.tokenizers import Tokenizer

TINY = Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=40, vocab=19, mtp_heads=2, hidden=24, mtp_weights=(1.0, 0.5)
)
FLAGS = ["--tokens", "4", "--rounds", "2"]


def tiny(precision: str = "fp32", config: Config = TINY) -> NanoEuler:
    model = NanoEuler(config, get_backend("numpy", precision, workers=1))
    model.initialise(0)
    return model


def test_it_times_our_decoding_and_writes_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench/decode.py", "--tokens", "4 5"])
    assert main([*FLAGS, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.rstrip("\n") == "\n".join(table(found))
    assert date.fromisoformat(found["date"]) and found["command"] == "decode.py --tokens '4 5'"
    assert found["parity"]["worst_difference"] < 1e-5 and list(found["results"]) == [OURS] and found["position"] == 64
    result = found["results"][OURS]
    assert len(result["step_us"]) == 2 and result["min_us"] == min(result["step_us"]) > 0
    assert result["tokens_per_second"] == pytest.approx(1e6 / result["median_us"])
    assert result["gb_per_second"] == pytest.approx(found["bytes_per_step"] / result["median_us"] / 1e3)
    assert result["mbu"] * found["copy_gb_per_second"] == pytest.approx(result["gb_per_second"])
    assert found["floor_us"] is None and result["of_the_floor"] is None and "of the floor" not in err  # no GPU's


@pytest.mark.slow
def test_weights_of_one_byte_take_turns_with_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--weights", "int8", "fp8", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert list(results) == [OURS, f"{OURS}, int8 weights", f"{OURS}, fp8 weights"]
    assert len({result["bytes_per_step"] for result in results.values()}) == 1  # on a CPU a step reads numbers


def test_a_model_of_the_zoo_must_agree_with_its_own_ops(capsys: pytest.CaptureFixture[str]) -> None:
    """In every format, and not only by the size of logits that happen to be small."""
    sizes = ["dim=64", "heads=4", "kv_heads=2", "layers=2", "hidden=96", "vocab=50", "context=80"]
    flags = [*FLAGS, "--backend", "numpy", "--model", "llama", "--config", "stories260K", "--set", *sizes]
    assert main([*flags, "--weights", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["results"]) == [OURS, f"{OURS}, int4 weights"] and found["model"] == "llama"
    assert found["parity"]["worst_difference"] <= found["parity"]["tolerance"] == 1e-4


@pytest.mark.slow
def test_the_default_is_the_models_first_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--backend", "numpy", "--model", "llama", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["dim"] == 64  # stories260K


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("nanoeuler", {"smear": 2, "qk_scale": "learned"}, "a plain NanoEuler, got a config with qk_scale, smear;"),
        ("moe", {}, "PyTorch's decoding is of NanoEuler and Llama;"),
    ],
)
def test_a_model_that_the_peer_is_not_is_refused(name: str, changes: dict[str, object], says: str) -> None:
    pytest.importorskip("torch")
    from bench.torch_decode import TorchDecoder

    config = find_model(name).config.from_dict(TINY.to_dict() | changes)
    with pytest.raises(UserError, match=f"--peer: {says} leave out --peer"):
        TorchDecoder(find_model(name).build(config, get_backend("numpy", "fp32", workers=1)), 1, 1, None)


def test_a_wrong_logit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(TINY, 1, position=30, tokens=5, rounds=1, threads=1)
    assert contenders_of(options, tiny(), None)[1] is not None
    logits = Ours.logits
    monkeypatch.setattr(Ours, "logits", lambda self: (found := logits(self)) + 2e-4 * np.abs(found).max())
    with pytest.raises(
        RuntimeError, match="as a share of the largest one, by tinyforge 0.0002: 0.0002, expected at most 0.0001"
    ):
        contenders_of(options, tiny(), None)


def test_a_step_reads_codes_of_four_bits_with_their_scales_in_half_precision() -> None:
    config = TINY.override({"dim": 32, "hidden": 64})
    options = Options(config, batch_size=1, position=30, tokens=4, rounds=1, threads=1)
    model = quantised_copy(tiny(config=config), "int4")
    vars(model)["backend"] = SimpleNamespace(name="cupy", dtype=np.dtype(np.float32))
    numbers = 2 * ((64 + 32 + 128) * 32 + 32 * 64)
    cache = 2 * 2 * 2 * 8 * 31
    assert bytes_per_step(options, model) == numbers * 4.5 / 8 + 19 * (32 + 4) + 4 * (5 * 32 + cache)


def test_on_a_gpu_the_table_has_the_share_of_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    found["floor_us"], found["results"][OURS]["of_the_floor"] = 110.9, 0.333
    lines = table(found)
    assert "floor         111 us a step, those bytes at 4.28 TB/s" in lines
    assert lines[-2].endswith(" of the floor") and lines[-1].endswith(" 33%") and len(lines[-2]) == len(lines[-1])


def test_a_batch_is_timed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    assert main([*FLAGS, "--batch-size", "3", "--position", "30", "--json", str(target)]) == 0
    found = json.loads(target.read_text(encoding="utf-8"))
    assert capsys.readouterr().out.rstrip("\n") == "\n".join(table(found))
    result = found["results"][OURS]
    assert result["tokens_per_second"] == pytest.approx(3e6 / result["median_us"])


def test_the_bytes_are_those_of_the_weights_in_use_and_of_the_cache() -> None:
    weights = sum(p.size for p in tiny().params() if p.name not in ("embedding.weight", "heads.weight")) + 19 * 16
    cache = 3 * 2 * 2 * 2 * 4 * 31  # rows, keys and values, layers, kv heads, head size, positions
    options = Options(TINY, batch_size=3, position=30, tokens=4, rounds=1, threads=1)
    assert bytes_per_step(options, tiny()) == 4 * (weights + cache)
    assert bytes_per_step(options, tiny("fp64")) == 8 * (weights + cache)
    # Of a table of value embeddings a step reads a row, of its gate all numbers.
    with_table = TINY.override({"value_every": 2, "value_gate": 3})
    assert bytes_per_step(options, tiny(config=with_table)) == 4 * (weights + 2 * 3 + cache)
    # One row on a GPU reads codes: of the gains, (2 layers + 1) x 16, numbers; and a scale for each row of a matrix.
    model = quantised_copy(tiny(), "int8")
    vars(model)["backend"] = SimpleNamespace(name="cupy", dtype=np.dtype(np.float32))
    rows = 2 * (32 + 16 + 48 + 16) + 19
    assert bytes_per_step(replace(options, batch_size=1), model) == weights - 80 + 4 * (80 + rows + cache // 3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_tokens_lie_around_the_position(batch_size: int) -> None:
    options = Options(TINY, batch_size, position=30, tokens=5, rounds=1, threads=1)
    ours = contenders_of(options, tiny(), None)[0][OURS]
    for _ in range(2):
        ours.run()
        # Passes ran at positions 28 to 32; the last token's is the next one.
        assert ours.decoder.lengths == [33] * batch_size


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch")
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("tied", [None, True, False])
def test_pytorch_decodes_the_same(tied: bool | None, batch_size: int) -> None:
    options, model = Options(TINY, batch_size, position=30, tokens=5, rounds=1, threads=1), tiny()
    if tied is not None:
        sizes = {
            name: getattr(TINY, name) for name in ("dim", "heads", "kv_heads", "layers", "context", "vocab", "hidden")
        }
        llama = find_model("llama").config(**sizes, tied=tied, qkv_bias=True)
        options = replace(options, config=llama, model="llama")
        model = random_model("llama", llama, model.backend)
    contenders, parity, left_out = contenders_of(options, model, "torch")
    assert len(contenders) == 2 and parity is not None and parity["worst_difference"] < 1e-5
    assert list(left_out.values()) == [GRAPHS_NEED_A_GPU]
    for contender in contenders.values():
        contender.run()


def saved(folder: Path, **changes: int) -> Path:
    """A checkpoint of a model with a context of 200."""
    tokenizer = Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"])
    model = tiny(config=TINY.override({"vocab": tokenizer.vocab_size, "context": 200, **changes}))
    meta = {"kind": "sft", "config": model.config.to_dict(), "tokenizer_hash": tokenizer.hash()}
    weights = named(model.buffer, model.buffer.values, model.backend)
    return checkpoint.save(folder, 1, weights, {"m": np.zeros(1)}, tokenizer, meta, keep=0)


class Peer:
    """Stands for xllamacpp's server; computes with ours. asked: what it received."""

    asked: ClassVar[list[dict[str, Any]]] = []
    says = ""  # more than ours

    def __init__(self, params: Any) -> None:
        assert (params.cpuparams.n_threads, params.cpuparams_batch.n_threads, params.n_parallel) == (1, 1, 1)
        loaded = load(Path(params.model.path), get_backend("numpy", "fp32", workers=1))
        self.complete = decode.completion(loaded, make_decoder(loaded.model))

    def handle_completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        text = self.complete(asked["prompt"], asked["n_predict"], asked["cache_prompt"])
        usage, timings = {"completion_tokens": asked["n_predict"]}, {"prompt_n": len(asked["prompt"])}
        return {"usage": usage, "timings": timings, "choices": [{"text": text + self.says}]}


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> type[Peer]:
    package: Any = ModuleType("xllamacpp")
    package.__spec__, package.__version__, package.Server = ModuleSpec("xllamacpp", None), "1.2", Peer
    package.CommonParams = lambda: SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    monkeypatch.delitem(sys.modules, "bench.llama_cpp", raising=False)
    monkeypatch.setattr(Peer, "asked", [])
    return Peer


BESIDE = ["--peer", "llamacpp", "--backend", "numpy", "--tokens", "3", "--prompt", "20", "--rounds", "2"]


def test_a_trained_model_takes_turns_with_llama_cpp(
    llama_cpp: type[Peer], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(saved(tmp_path, dim=32, hidden=64))
    assert main(["--checkpoint", path, *BESIDE, "--weights", "int8", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.endswith("\n".join(decode.llama_cpp_table(found)) + "\n") and found["versions"]["xllamacpp"] == "1.2"
    names = ["a token, f32", "a prompt, f32", "a token, q8_0", "a prompt, q8_0"]
    assert list(found["results"]) == names and all(
        row.keys() >= {OURS, "llama.cpp"} for row in found["results"].values()
    )
    assert len(found["results"]["a prompt, q8_0"]["llama.cpp"]["run_ms"]) == 2
    # Of both types: what must agree, a token, more of them, and the prompt, the latter three by two turns of two runs.
    work = [(asked["n_predict"], asked["cache_prompt"]) for asked in llama_cpp.asked]
    assert work == 2 * [(8, True), *4 * [(1, True)], *4 * [(4, True)], *4 * [(1, False)]]
    assert {len(asked["prompt"]) for asked in llama_cpp.asked if not asked["cache_prompt"]} == {20}
    monkeypatch.setattr(llama_cpp, "says", "!")
    with pytest.raises(RuntimeError, match="parity: greedy texts differ"):
        main(["--checkpoint", path, *BESIDE])


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "llamacpp"], "--peer llamacpp: with --checkpoint the peer is llamacpp, without it torch"),
        (["--checkpoint", "small", "--peer", "llamacpp", "--weights", "fp8"], "with --weights int8 and int4"),
    ],
)
def test_what_llama_cpp_is_no_peer_of(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main([*flags, "--backend", "numpy"])


def test_the_real_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the peer is llama.cpp: pip install xllamacpp")
    target = tmp_path / "found.json"
    assert main(["--checkpoint", str(saved(tmp_path, dim=32, hidden=64)), *BESIDE, "--json", str(target)]) == 0
    assert json.loads(target.read_text(encoding="utf-8"))["results"]["a token, f32"]["llama.cpp"]["min_ms"] > 0


def test_a_trained_model_is_timed_with_and_without_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path)
    assert main(["--checkpoint", str(path), "--prompts", "3", "--rounds", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.rstrip("\n") == "\n".join(speculation_table(found))
    for kind in ("greedy", "sampled"):
        plain, one = found["results"][kind]
        assert (plain["drafts"], one["drafts"]) == (0, 1) and plain["over_plain"] == 1.0
        assert plain["acceptance"] == [] and 0 <= one["acceptance"][0] <= 1
        assert plain["tokens_per_pass"] <= 1.0 and one["tokens_per_pass"] >= plain["tokens_per_pass"]
        assert plain["tokens"] == one["tokens"] or not one["same_text_as_plain"]  # the prefill's are not counted
    assert all(case["same_text_as_plain"] for case in found["results"]["greedy"])
    records = [{"instruction": f"Say {i}.", "input": "", "output": "yes"} for i in range(40)]
    (tmp_path / "records.json").write_text(json.dumps(records), encoding="utf-8")
    asked = ["--checkpoint", str(path), "--instructions", str(tmp_path / "records.json"), "--rounds", "1", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 2  # the last 20th


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--config", "huge"], "'huge' is not a preset"),
        (["--model", "gpt2"], "--model gpt2: the bytes of its step are not known"),
        (["--precision", "fp4"], "precision 'fp4' is not available"),
        (["--position", "127"], "--position 127: 16 tokens around it are not within the context of 128"),
        (["--position", "3"], "--position 3: 16 tokens around it"),
        (["--json", "no/such/folder/result.json"], "folder that does not exist"),
        (["--checkpoint", "no/such/run"], "no/such/run"),
        (["--peer", "torch"], "PyTorch is not installed; pip install torch"),
        (["--peer", "llamacpp"], "llama.cpp is not installed; pip install xllamacpp"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "xllamacpp"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        main(flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)
