"""Finding and loading trained models: the newest whole run, and plain words for what is wrong with a checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import load, newest_run, resolve_checkpoint
from tinyforge.formats.runs import short_name
from tinyforge.models.nanoeuler import SPEC, Config, NanoEuler
from tinyforge.params import named
from tinyforge.tokenizers import Tokenizer

TOKENIZER = Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"])
CONFIG = Config(
    dim=16,
    heads=4,
    kv_heads=2,
    layers=1,
    context=30,
    vocab=TOKENIZER.vocab_size,
    mtp_heads=1,
    hidden=10,
    mtp_weights=(1,),
)
CPU = get_backend("numpy", "fp32", workers=1)


def save_run(out: Path, kind: str = "sft", step: int = 1, age: int = 0, **meta: Any) -> Path:
    """A run with one checkpoint, `age` seconds old."""
    model = NanoEuler(CONFIG, CPU)
    model.initialise(0)
    weights = named(model.buffer, model.buffer.values, CPU)
    given = {"kind": kind, "config": CONFIG.to_dict(), "tokenizer_hash": TOKENIZER.hash()} | meta
    path = checkpoint.save(out, step, weights, {"m": np.zeros(1)}, TOKENIZER, given, keep=0)
    stamp = (path / "hashes.json").stat().st_mtime_ns - age * 10**9
    os.utime(path / "hashes.json", ns=(stamp, stamp))
    return path


def damage(path: Path, name: str, content: str) -> None:
    (path / name).write_text(content, encoding="utf-8")


# --- which one


def test_a_model_that_generates_no_text_is_not_taken(tmp_path: Path) -> None:
    """Whatever its kind; one that is not registered here is, so that its name is in the refusal."""
    text = save_run(tmp_path / "a", "pretrain", 1, 30)
    save_run(tmp_path / "b", "pretrain", 1, 20, model="bert")
    save_run(tmp_path / "c", "sft", 1, 10, model="vit")
    assert newest_run(("tuned", "pretrain"), tmp_path) == text
    stranger = save_run(tmp_path / "d", "pretrain", 1, 5, model="absent")
    assert newest_run(("tuned", "pretrain"), tmp_path) == stranger


def test_the_newest_fine_tuned_run_comes_first(tmp_path: Path) -> None:
    tuned, base = save_run(tmp_path / "a", "sft", 3, 20), save_run(tmp_path / "c", "pretrain", 1, 10)
    save_run(tmp_path / "b", "sft", 1, 30)
    assert newest_run(("sft", "pretrain"), tmp_path) == tuned
    assert newest_run(("pretrain",), tmp_path) == base
    assert newest_run(("pretrain",), tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("meta.json", '{"kind": "sft"', "cannot read .*meta.json: "),
        ("meta.json", "[1]", "cannot read .*meta.json: got a list, expected an object"),
        ("meta.json", '{"kind": "sft", "format": 99}', "format 99, this program reads 1"),
        ("hashes.json", "", "cannot read .*hashes.json: "),
        ("hashes.json", "[]", "cannot read .*hashes.json: got a list, expected an object"),
        ("model.safetensors", "", "model.safetensors has SHA-256 "),
    ],
)
def test_a_broken_run_is_skipped_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    whole, broken = save_run(tmp_path / "whole", age=60), save_run(tmp_path / "broken")
    stamp = (broken / "hashes.json").stat().st_mtime_ns
    damage(broken, name, content)
    os.utime(broken / "hashes.json", ns=(stamp, stamp))
    assert newest_run(("sft", "pretrain"), tmp_path) == whole
    said = capsys.readouterr().err
    assert re.match(f"skipping {re.escape(str(broken))}: (checkpoint .*: )?{message}", said) and said.count("\n") == 1
    with pytest.raises(UserError):
        load(broken, CPU)


def test_a_file_that_is_missing_makes_a_run_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = save_run(tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    assert newest_run(("sft",), tmp_path) is None
    assert "tokenizer.json is missing" in capsys.readouterr().err


def test_what_is_asked_for_comes_before_runs_and_these_before_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint(None) == SPEC.bundled
    assert resolve_checkpoint(None, for_chat=True) == SPEC.bundled_for_chat == resolve_checkpoint("storyteller")
    assert resolve_checkpoint("small", for_chat=True) == SPEC.bundled
    Path("small").mkdir()
    assert resolve_checkpoint("small") == Path("small")  # a folder of that name comes first
    assert load(resolve_checkpoint(None), CPU).template.name == "alpaca"
    run = save_run(Path("runs") / "mine", "pretrain")
    assert resolve_checkpoint(None) == resolve_checkpoint(None, for_chat=True) == run
    assert resolve_checkpoint("./else/where") == Path("else/where") and resolve_checkpoint("no.gguf") == Path("no.gguf")
    with pytest.raises(UserError, match=r"no checkpoint in smal; train one .* of the repository: small, storyteller$"):
        resolve_checkpoint("smal")


# --- what it holds


def test_a_checkpoint_says_which_model_it_holds(tmp_path: Path) -> None:
    for number, meta in enumerate(({}, {"model": "nanoeuler"}), start=1):
        loaded = load(save_run(tmp_path / "run", step=number, **meta), CPU)
        assert type(loaded.model) is NanoEuler and loaded.model.config == CONFIG
        assert loaded.tokenizer.hash() == TOKENIZER.hash() and loaded.template.name == "alpaca"
    assert load(save_run(tmp_path / "base", "pretrain"), CPU).template.name == "plain"
    assert load(save_run(tmp_path / "other", template="chatml"), CPU).template.name == "chatml"


def test_a_checkpoint_of_another_model_says_which_it_is(tmp_path: Path) -> None:
    path = save_run(tmp_path / "unknown", model="transformer-9000")
    with pytest.raises(UserError, match="holds a model 'transformer-9000', which is not registered; known: nanoeuler"):
        load(path, CPU)
    other = {"n_embd": 4, "n_layer": 2}
    path = save_run(tmp_path / "unnamed", config=other)
    with pytest.raises(UserError) as caught:
        load(path, CPU)
    said = str(caught.value)
    assert "meta.json names no model, which means nanoeuler, but its config is another model's" in said
    assert "unknown key 'n_embd'" in said and "known models: nanoeuler" in said and "\n" not in said
    with pytest.raises(UserError, match="meta.json names the model nanoeuler, but its config is another"):
        load(save_run(tmp_path / "wrong", config=other, model="nanoeuler"), CPU)


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json is not the one it was trained with"):
        load(save_run(tmp_path / "a", tokenizer_hash="0"), CPU)
    with pytest.raises(UserError, match=r"the tokenizer has 259 ids, the model 258"):
        load(save_run(tmp_path / "b", config={**CONFIG.to_dict(), "vocab": 258}), CPU)


def test_meta_is_kept_as_saved(tmp_path: Path) -> None:
    path = save_run(tmp_path / "a")
    assert load(path, CPU).meta == json.loads((path / "meta.json").read_text())
    assert load(tmp_path / "a", CPU).path == path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/sft/step-00000500", "sft"),
        ("runs/v1.5/step-00000500", "v1.5"),
        ("Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("Qwen2.5-0.5B.Q8_0.gguf", "Qwen2.5-0.5B.Q8_0"),
        (f"models--HuggingFaceTB--SmolLM2-1.7B/snapshots/{'0' * 40}", "HuggingFaceTB/SmolLM2-1.7B"),
    ],
)
def test_a_model_is_called_by_its_run_folder_or_file(tmp_path: Path, path: str, name: str) -> None:
    """Not by a step, which the next one changes, nor by what stands before a dot in a folder's name."""
    place = tmp_path / path
    (place.parent if place.suffix == ".gguf" else place).mkdir(parents=True, exist_ok=True)
    if place.suffix == ".gguf":
        place.touch()
    assert short_name(place) == name
