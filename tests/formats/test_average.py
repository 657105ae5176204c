"""Averages of models: the numbers, what is kept of the models, the commands that open one, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tinyforge import chat, checkpoint
from tinyforge.backends import get_backend
from tinyforge.data.evaluation import read_sets, refuse_if_learned
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.formats import average, convert, open_model
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.params import named
from tinyforge.recipes import evaluate
from tinyforge.tokenizers import Tokenizer

FP32 = get_backend("numpy", "fp32", workers=1)
TOKENIZER = Tokenizer.train(documents("train", 50, 0), 300, ["<|endoftext|>", "</s>"])
CONFIG = Config(dim=16, heads=4, kv_heads=2, layers=2, context=64, vocab=TOKENIZER.vocab_size, hidden=10)


def save_run(out: str, seed: int, config: Config = CONFIG, tokenizer: Tokenizer = TOKENIZER, **meta: Any) -> None:
    model = NanoEuler(config, FP32)
    model.initialise(seed)
    given = {"kind": "pretrain", "model": "nanoeuler", "config": config.to_dict(), "tokenizer_hash": tokenizer.hash()}
    weights = named(model.buffer, model.buffer.masters, FP32)
    checkpoint.save(Path(out), 1, weights, {}, tokenizer, {**given, **meta}, keep=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three models of one shape: a and b, pretrained, and c, fine-tuned from b."""
    monkeypatch.chdir(tmp_path)
    save_run("a", 1, inputs=["aa"])
    save_run("b", 2, inputs=["bb"])
    save_run("c", 3, kind="sft", inputs=["cc"], base={"inputs": ["bb", "dd"]})
    return tmp_path


def mean(flags: str) -> None:
    assert average.main(flags.split()) == 0


def weights(path: str) -> dict[str, np.ndarray]:
    return {name: read() for name, read in open_model(Path(path)).tensors.items()}


@pytest.mark.parametrize("sources", ["a a", "a a a", "a a a a a a a --weights 3 1 4 1 5 9 2", "a a --weights -0.3 1.3"])
def test_the_mean_of_a_model_with_itself_is_the_model(sources: str) -> None:
    names, _, given = sources.partition(" --weights")
    mean(f"{names} out" + (" --weights" + given if given else ""))
    for name, value in weights("out").items():
        assert value.dtype == np.float32 and value.tobytes() == weights("a")[name].tobytes(), name


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        ("", (1 / 3, 1 / 3, 1 / 3)),
        ("--weights 1 1 2", (0.25, 0.25, 0.5)),
        ("--weights 0 0.3 0.9", (0, 0.25, 0.75)),
        ("--weights -0.5 0.5 1", (-0.5, 0.5, 1)),
    ],
)
def test_a_mean_is_numpys(flags: str, shares: tuple[float, ...], capsys: pytest.CaptureFixture[str]) -> None:
    mean(f"a b c out {flags}")
    of_each, got = [weights(name) for name in "abc"], weights("out")
    assert got.keys() == of_each[0].keys()
    for name, value in got.items():
        expected = np.average([each[name].astype(np.float64) for each in of_each], axis=0, weights=shares)
        np.testing.assert_array_max_ulp(value, expected.astype(np.float32), maxulp=1)
    assert any((got[name] != of_each[2][name]).any() for name in got)
    meta = open_model(Path("out")).meta
    assert [one["share"] for one in meta["average"]] == pytest.approx(shares)
    assert f"{shares[0]:g} a + {shares[1]:g} b + {shares[2]:g} c; " in capsys.readouterr().out


def test_what_is_kept_of_the_models() -> None:
    mean("a b c out")
    found, last = open_model(Path("out")), open_model(Path("c"))
    assert found.template.name == "alpaca" and found.meta["kind"] == "sft"
    assert found.tokenizer.hash() == TOKENIZER.hash() and found.config == CONFIG
    fingerprints = [open_model(Path(name)).fingerprint() for name in "abc"]
    assert [one["sha256"] for one in found.meta["average"]] == fingerprints
    assert found.meta["inputs"] == ["aa", "bb", "cc", "dd"] and last.inputs() == ["cc", "bb", "dd"]
    card = Path("out/README.md").read_text()
    assert "weighted mean of those of 3 models" in card
    assert all(f"| {name} | 0.333333 | `{sha[:16]}` |" in card for name, sha in zip("abc", fingerprints, strict=True))
    mean("c b swapped")
    assert open_model(Path("swapped")).template.name == "plain"


@pytest.mark.parametrize("damaged", [{"inputs": 5}, {"base": {"inputs": "aa"}}])
def test_a_damaged_list_of_what_a_model_has_read_is_refused(damaged: dict[str, Any]) -> None:
    save_run("damaged", 1, **damaged)
    with pytest.raises(UserError, match="meta.json is damaged: got inputs .*, expected a list; use another checkpoint"):
        mean("a damaged out")
    save_run("odd", 1, inputs=[{}, 3])
    mean("a odd out")
    assert open_model(Path("out")).inputs() == ["aa", "{}", "3"]


def test_every_form_of_a_model_can_be_averaged_and_int8_written() -> None:
    """int8 by its codes times scales; its tensors are in another order in the file."""
    assert convert.main("a a8 --format tinyforge --dtype int8".split()) == 0
    mean("a8 b out")
    for name, value in weights("out").items():
        expected = (weights("a8")[name].astype(np.float64) + weights("b")[name]) / 2
        assert np.array_equal(value, expected.astype(np.float32)), name
    mean("a8 b out8 --dtype int8")
    assert "Weights are int8, with a float32 scale" in Path("out8/README.md").read_text()
    assert convert.main("out8 out16 --format tinyforge --dtype bf16".split()) == 0
    assert "Weights are bfloat16." in Path("out16/README.md").read_text()
    codes = {name for name, stored in load_file("out8/model.safetensors").items() if stored.dtype == np.int8}
    assert codes == {name for name, value in weights("a").items() if value.ndim > 1}
    for name in ("a", "b"):
        assert convert.main([name, f"{name}-hf"]) == convert.main([name, f"{name}.bin"]) == 0
    mean("a-hf b-hf ours")
    mean("a.bin b-hf mixed")
    for name, value in weights("ours").items():
        assert np.array_equal(value, weights("mixed")[name]), name


def test_chat_and_evaluation_open_a_mean(capsys: pytest.CaptureFixture[str]) -> None:
    mean("a b out")
    assert chat.main("--checkpoint out --backend numpy --prompt The --max-tokens 5".split()) == 0
    Path("text.txt").write_text("\n".join(documents("val", 30, 0)))
    capsys.readouterr()
    assert evaluate.main("--checkpoint out --backend numpy --data text.txt --json found.json".split()) == 0
    assert json.loads(Path("found.json").read_text())["text"]["bits_per_byte"]


def test_a_mean_is_not_scored_on_what_one_of_its_models_has_read() -> None:
    Path("blimp").mkdir()
    file = Path("blimp/causative.jsonl")
    file.write_text(json.dumps({"sentence_good": "A b.", "sentence_bad": "B a.", "UID": "causative"}))
    save_run("read-it", 4, inputs=[hashlib.sha256(file.read_bytes()).hexdigest()])
    mean("a b unread")
    mean("read-it b out")
    mean("out a again")
    (found,) = read_sets(["blimp"], ["blimp"], [], "utf-8", 0, any_version=True)
    refuse_if_learned(found, open_model(Path("unread")).inputs())
    for name in ("out", "again"):
        with pytest.raises(UserError, match="--tasks blimp: the model was trained on"):
            refuse_if_learned(found, open_model(Path(name)).inputs())


def test_models_that_do_not_fit_together_are_refused() -> None:
    save_run("wide", 1, CONFIG.override({"hidden": 12}))
    save_run("other", 1, tokenizer=Tokenizer(TOKENIZER.merges, ["<|endoftext|>", "<|stop|>"]))
    assert convert.main("a llama".split()) == 0
    for flags, message in (
        (
            "wide a out",
            "wide/step-00000001 has hidden 12, expected 10 as in a/step-00000001; give models of one config",
        ),
        ("a b wide out", "a/step-00000001 has hidden 10, expected 12 as in wide/step-00000001"),
        ("other a out", "other/step-00000001 has another tokenizer than a/step-00000001; give models with the same"),
        ("llama a out", "llama is a Llama, a/step-00000001 a NanoEuler; expected one model"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            mean(flags)
        assert "\n" not in str(caught.value) and not Path("out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("a out", "got 1 model to average, expected two or more; give them before OUT"),
        ("a", "arguments are required: OUT"),
        ("a b c", "c exists already; remove it, or choose another name"),
        ("a b absent out", "no checkpoint in absent"),
        ("a b out.gguf", "out.gguf is not a name for --format tinyforge"),
        ("a b out --weights 1", "--weights: got 1 for 2 models, expected one for each"),
        ("a b out --weights 1 2 3", "--weights: got 3 for 2 models, expected one for each"),
        ("a b out --weights 1 -1", "--weights: their sum is 0, expected a finite one above 0"),
        ("a b out --weights 1 -2", "--weights: their sum is -1, expected"),
        ("a b out --weights 1 nan", "--weights: their sum is nan, expected"),
        ("a b out --weights 1e308 1e308", "--weights: their sum is inf, expected"),
        ("a b out --weights 1 half", "argument --weights: invalid float value: 'half'"),
        ("a b out --dtype q8_0", "argument --dtype: invalid choice: 'q8_0'"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(flags: str, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        mean(flags)
    assert "\n" not in str(caught.value) and sorted(p.name for p in folder.iterdir()) == ["a", "b", "c"]
