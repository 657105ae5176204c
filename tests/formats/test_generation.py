"""generation_config.json: which value wins, what is refused, and that conversions keep the file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.formats.test_lora import make_run
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import convert, load, open_model, save_pretrained
from tinyforge.formats.generation import FILE, NOTHING, read_generation
from tinyforge.infer.sampling import Sampling
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.nanoeuler import SPEC
from tinyforge.tokenizers import Tokenizer

FP32 = get_backend("numpy", "fp32", workers=1)
TOKENIZER = Tokenizer.train(["the cat saw the hat"] * 9, 262, ["<|endoftext|>", "</s>"])
OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 6], "transformers_version": "4.31"}
SHAPE = {"dim": 8, "heads": 2, "layers": 1, "context": 16, "vocab": TOKENIZER.vocab_size}
MODELS = {
    "gpt2": (GPT2, GPT2Config(**SHAPE)),
    "llama": (Llama, LlamaConfig(**SHAPE, kv_heads=1, hidden=8)),
    "qwen2": (Llama, LlamaConfig(**SHAPE, kv_heads=1, hidden=8, qkv_bias=True)),
}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text, encoding="utf-8")
    return folder


def content(folder: Path) -> Any:
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


def save(path: Path, name: str = "llama", **more: Any) -> Path:
    kind, config = MODELS[name]
    model = kind(config, FP32)
    model.initialise(0)
    save_pretrained(model, TOKENIZER, path, **more)
    return path


def test_given_wins_then_the_file_then_the_default(tmp_path: Path) -> None:
    every = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 7}
    found = read_generation(write(tmp_path, every))
    assert found.sampling() == Sampling(1.0, 0, 1.0, 0.05, 1.1, 7) and type(found.sampling().temperature) is float
    some = read_generation(write(tmp_path, {"temperature": 0.6, "min_p": 0.1}))
    assert some.sampling() == Sampling(temperature=0.6, min_p=0.1)
    assert some.sampling(temperature=0.0) == Sampling(temperature=0.0, min_p=0.1)
    assert some.sampling(Sampling(top_k=3, max_tokens=9), min_p=0.0) == Sampling(0.6, top_k=3, max_tokens=9)


def test_greedy_and_what_says_nothing(tmp_path: Path) -> None:
    greedy = read_generation(write(tmp_path, {"do_sample": False, "temperature": 0.6, "top_k": 5}))
    assert greedy.sampling() == Sampling(temperature=0.0, top_k=5)
    assert greedy.sampling(temperature=0.8) == Sampling(temperature=0.8, top_k=5)
    others = {"bos_token_id": 1, "max_length": "20", "top_k": None, "do_sample": None, "_from_model_config": True}
    for said in ({}, others, {"do_sample": True}):
        assert read_generation(write(tmp_path, said)).sampling() == Sampling()
    assert read_generation(tmp_path / "absent") is NOTHING is read_generation(tmp_path / FILE)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number, 0 (greedy) or more"),
        ({"temperature": -1}, "temperature is -1, expected a number, 0 (greedy) or more"),
        ({"temperature": True}, "temperature is True, expected a number"),
        ('{"temperature": NaN}', "temperature is nan, expected a number"),
        ('{"temperature": 1e999}', "temperature is inf, expected a number"),
        ({"top_k": -1}, "top_k is -1, expected a whole number, 0 (no limit) or more"),
        ({"top_k": 5.5}, "top_k is 5.5, expected a whole number, 0 (no limit) or more"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0 and at most 1"),
        ({"top_p": [0.9] * 99}, "top_p is [0.9, 0.9, "),
        ({"min_p": 1.5}, "min_p is 1.5, expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number above 0; 1 for none"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a whole number, at least 1"),
        ({"max_new_tokens": {}}, "max_new_tokens is {}, expected a whole number, at least 1"),
        ({"do_sample": 0}, "do_sample is 0, expected true or false"),
        ({"do_sample": "yes", "temperature": 1}, "do_sample is 'yes', expected true or false"),
        ('{"temperature": 1', "it is not JSON (line 1: "),
        ("[1]", "got a list, expected an object"),
        ('{"top_k": 1' + "0" * 99 + "}", "got a whole number of 100 digits"),
    ],
)
def test_a_fault_is_one_line_that_names_the_file(tmp_path: Path, said: Any, message: str) -> None:
    """Also where the model is opened for something else."""
    model = write(save(tmp_path / "model"), said)
    for opens in (read_generation, open_model):
        with pytest.raises(UserError) as caught:
            opens(model)
        line = str(caught.value)
        assert str(model / FILE) in line and message in line and line.endswith("; correct it, or remove the file")
        assert "\n" not in line and len(line) < 300


@pytest.mark.parametrize("name", MODELS)
def test_conversions_keep_the_file(tmp_path: Path, name: str) -> None:
    write(save(tmp_path / "theirs", name), OWN)
    assert convert.main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--format", "tinyforge"]) == 0
    assert content(tmp_path / "ours") == OWN
    assert load(tmp_path / "ours", FP32).generation.sampling() == Sampling(temperature=0.6, top_p=0.9)
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert content(tmp_path / "back") == OWN


def test_a_model_without_the_file_is_given_none(tmp_path: Path) -> None:
    save(tmp_path / "theirs")
    for source, target, *flags in (("theirs", "ours", "--format", "tinyforge"), ("ours", "back")):
        assert convert.main([str(tmp_path / source), str(tmp_path / target), *flags]) == 0
        assert not (tmp_path / target / FILE).exists() and load(tmp_path / target, FP32).generation == NOTHING


def test_the_file_of_ours_is_edited_freely(tmp_path: Path) -> None:
    """It has no hash, as the card has none."""
    ours = save(tmp_path / "ours", format="tinyforge", generation=OWN)
    write(ours, {"top_k": 3})
    assert load(ours, FP32).generation.sampling() == Sampling(top_k=3)


def test_a_format_without_a_place_for_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "note: left out: generation_config.json, how the model is sampled by default\n"
    save(tmp_path / "m.bin")
    assert said not in capsys.readouterr().err
    save(tmp_path / "own.bin", generation=OWN)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "stored", "expected"),
    [
        (OWN, {"temp": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 3},
            {"temp": 0.0, "top_k": 3},
            {"do_sample": False, "top_k": 3},
        ),
        (
            {"do_sample": True, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1},
            {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05, "penalty_repeat": 1.1},
            {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
        ),
        ({"max_new_tokens": 7, "top_k": None}, {}, None),
    ],
)
def test_a_gguf_file_holds_the_sampling(
    own: dict[str, Any], stored: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Under llama.cpp's names, and Ollama's next to it; back it is the same sampling."""
    gguf = pytest.importorskip("gguf", reason="needs the extra [gguf]")
    path = save(tmp_path / "m.gguf", generation=own)
    fields = gguf.GGUFReader(path).fields
    found = {key: field.contents() for key, field in fields.items() if ".sampling." in key}
    assert found == pytest.approx({f"general.sampling.{key}": value for key, value in stored.items()})
    assert set(found) <= {value for name, value in vars(gguf.Keys.General).items() if name.startswith("SAMPLING_")}
    ollama = {"temp": "temperature", "penalty_repeat": "repeat_penalty"}
    lines = [f"PARAMETER {ollama.get(key, key)} {value}" for key, value in stored.items()]
    assert (tmp_path / "Modelfile").read_text().splitlines()[-len(lines) - 1 :] == ["PARAMETER num_ctx 16", *lines]
    generation = read_generation(path)
    assert generation.content == (expected or {})
    assert generation.sampling() == load(path, FP32).generation.sampling()
    without_length = {key: value for key, value in own.items() if key != "max_new_tokens"}
    assert generation.sampling() == read_generation(write(tmp_path / "theirs", without_length)).sampling()
    assert convert.main([str(path), str(tmp_path / "ours"), "--format", "tinyforge"]) == 0
    assert (content(tmp_path / "ours") if expected else None) == expected


def test_numbers_below_zero_are_llama_cpps_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"general.sampling.temp": -1.0, "general.sampling.top_k": -1, "general.sampling.xtc_threshold": 0.5}
    monkeypatch.setattr("tinyforge.formats.generation.gguf_file.read", lambda _: SimpleNamespace(metadata=stored))
    found = read_generation(Path("theirs.gguf"))
    assert found.sampling() == Sampling(temperature=0.0, top_k=0) and found.content == {"do_sample": False, "top_k": 0}


def test_a_wrong_setting_of_a_gguf_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="needs the extra [gguf]")
    monkeypatch.setattr("tinyforge.formats.pretrained.renamed", lambda *_: {"general.sampling.top_p": 1.5})
    monkeypatch.setattr("tinyforge.formats.tokenizers.write_modelfile", lambda *_: None)
    path = save(tmp_path / "m.gguf")
    with pytest.raises(
        UserError, match=r"m\.gguf: general\.sampling\.top_p is 1\.5, expected .*; write the file anew$"
    ):
        load(path, FP32)


def test_an_adapter_is_sampled_as_its_base(tmp_path: Path) -> None:
    """Unless it has a file of its own."""
    run, _ = make_run(tmp_path, "llama")
    assert open_model(run).generation == NOTHING
    write(tmp_path / "base", {"top_k": 3})
    assert open_model(run).generation.sampling() == Sampling(top_k=3)
    write(next(run.glob("step-*")), {"top_p": 0.5})
    assert open_model(run).generation.sampling() == Sampling(top_p=0.5)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    """The storyteller's, with the ids that end its replies: transformers looks for them in this file alone."""
    transformers = pytest.importorskip("transformers", reason="the peer is transformers")
    assert SPEC.bundled_for_chat is not None
    own = content(SPEC.bundled_for_chat)
    found = transformers.GenerationConfig.from_pretrained(save(tmp_path / "theirs", generation=own))
    assert {key: getattr(found, key) for key in own} == own
    assert found.eos_token_id == list(TOKENIZER.specials.values()) and found.bos_token_id is None
